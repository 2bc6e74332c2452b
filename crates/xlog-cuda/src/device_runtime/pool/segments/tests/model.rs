//! The simplest pool: it tracks its ranges, lends parts of them, and checks every byte and every result of its segments.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_driver::StreamHandle;

use super::*;

/// Disjoint ranges; adjacent ones are merged.
#[derive(Clone, Default, Debug)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub(super) fn spans(&self) -> Vec<Span> {
        self.0.iter().map(|(&ptr, &bytes)| Span { ptr, bytes }).collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.values().sum()
    }

    pub(super) fn insert(&mut self, span: Span) {
        assert!(span.ptr.is_multiple_of(UNIT) && span.bytes.is_multiple_of(UNIT), "{span:?}");
        let clash = self.0.range(..span.end()).next_back();
        assert!(clash.is_none_or(|(at, bytes)| at + bytes <= span.ptr), "{span:?} is held already");
        let (mut start, mut end) = (span.ptr, span.end());
        if let Some((&at, &bytes)) = self.0.range(..start).next_back()
            && at + bytes == start
        {
            self.0.remove(&at);
            start = at;
        }
        if let Some(bytes) = self.0.remove(&end) {
            end += bytes;
        }
        self.0.insert(start, end - start);
    }

    /// Removes the parts of the ranges inside a span, and returns their bytes.
    fn remove_in(&mut self, span: Span) -> u64 {
        let before = self.bytes();
        for range in self.spans().into_iter().filter(|range| range.overlaps(span)) {
            let ptr = range.ptr.max(span.ptr);
            self.remove(Span { ptr, bytes: range.end().min(span.end()) - ptr });
        }
        before - self.bytes()
    }

    pub(super) fn remove(&mut self, span: Span) {
        let found = self.0.range(..=span.ptr).next_back().map(|(&ptr, &bytes)| Span { ptr, bytes });
        let Some(range) = found.filter(|range| range.contains(span)) else {
            panic!("{span:?} is not in {self:?}");
        };
        self.0.remove(&range.ptr);
        if range.ptr < span.ptr {
            self.0.insert(range.ptr, span.ptr - range.ptr);
        }
        if span.end() < range.end() {
            self.0.insert(span.end(), range.end() - span.end());
        }
    }
}

pub(super) struct Model<'a> {
    segments: &'a dyn Segments,
    device: &'a Arc<CudaDevice>,
    stream: StreamHandle,
    pub(super) idle: Ranges,
    /// Free, with pending work on the stream.
    pub(super) pending: Ranges,
    pub(super) live: Vec<(Span, u8)>,
}

impl<'a> Model<'a> {
    pub(super) fn new(segments: &'a dyn Segments, device: &'a Arc<CudaDevice>) -> Self {
        let stream = device.driver().stream_create(0).unwrap();
        let [idle, pending] = Default::default();
        Self { segments, device, stream, idle, pending, live: Vec::new() }
    }

    /// All ranges of this pool.
    pub(super) fn bytes(&self) -> u64 {
        self.idle.bytes()
            + self.pending.bytes()
            + self.live.iter().map(|(span, _)| span.bytes).sum::<u64>()
    }

    pub(super) fn grow(&mut self, bytes: u64) -> ResourceResult<Span> {
        let span = self.segments.grow(bytes, ON)?;
        assert!(span.bytes >= bytes);
        self.idle.insert(span);
        Ok(span)
    }

    pub(super) fn release(&mut self, bytes: u64) -> ResourceResult<u64> {
        let (gone, outcome) = self.segments.release(&self.idle.spans(), bytes);
        assert!(gone.is_sorted());
        let sum = gone.iter().map(|span| span.bytes).sum();
        assert!(sum <= bytes);
        gone.into_iter().for_each(|span| self.idle.remove(span));
        outcome.map(|()| sum)
    }

    pub(super) fn defragment(&mut self, bytes: u64) -> ResourceResult<Option<Span>> {
        self.defragment_for(request(bytes))
    }

    pub(super) fn defragment_for(&mut self, request: SpanRequest) -> ResourceResult<Option<Span>> {
        let (idle, pending) = (self.idle.spans(), self.pending.spans());
        let free = FreeMemory { idle: &idle, pending: &pending, last_work: self.last_work() };
        let (span, gone, outcome) = self.segments.defragment(free, request, ON);
        assert!(gone.is_sorted());
        let is_idle = !gone.iter().any(|gone| pending.iter().any(|span| span.overlaps(*gone)));
        for span in gone {
            // A handle may be idle in one part and pending in the other.
            let parts = self.idle.remove_in(span) + self.pending.remove_in(span);
            assert_eq!(parts, span.bytes, "{span:?} was not all free");
        }
        assert!(span.is_none() || outcome.is_ok());
        if let Some(span) = span {
            assert!(span.holds(request.bytes, request.align), "{span:?} for {request:?}");
            match is_idle {
                true => self.idle.insert(span),
                false => self.pending.insert(span),
            }
        }
        outcome.map(|()| span)
    }

    /// The queued work of this model.
    fn last_work(&self) -> LastWork {
        LastWork { slot: self.stream.number() as u32, stamp: 0 }
    }

    /// Holds the work that is queued from now on.
    pub(super) fn hold(&self) -> xlog_driver::Gate {
        self.device.driver().hold(self.stream).unwrap()
    }

    /// Frees a lent part while the work on it is pending.
    pub(super) fn free_pending(&mut self, index: usize) {
        let (span, _) = self.live.swap_remove(index);
        self.pending.insert(span);
    }

    /// Waits for all work, so that all free memory is idle.
    pub(super) fn synchronize(&mut self) {
        self.device.driver().stream_synchronize(self.stream).unwrap();
        std::mem::take(&mut self.pending)
            .spans()
            .into_iter()
            .for_each(|span| self.idle.insert(span));
        let own = self.last_work();
        self.segments.unmap_stale(usize::MAX, &|work| work == own);
    }

    /// Lends a part of a free range out and fills it.
    pub(super) fn lend(&mut self, span: Span, value: u8) {
        match self.pending.remove_in(span) {
            0 => self.idle.remove(span),
            taken => assert_eq!(taken, span.bytes, "{span:?} is not in one range"),
        }
        #[allow(unsafe_code)]
        // SAFETY: the range is ours, idle and mapped.
        let queued = unsafe {
            self.device.driver().memset(span.ptr, value, span.bytes as usize, self.stream)
        };
        queued.unwrap_or_else(|error| panic!("{span:?}: {error}"));
        self.live.push((span, value));
    }

    /// Returns a lent part, whose bytes must be intact. The copy waits, so the host has seen all work on it complete.
    pub(super) fn take_back(&mut self, index: usize) {
        let (span, value) = self.live.swap_remove(index);
        let mut bytes = vec![!value; span.bytes as usize];
        #[allow(unsafe_code)]
        // SAFETY: the range was lent out, so it is mapped.
        unsafe { self.device.driver().copy_dtoh(&mut bytes, span.ptr, self.stream) }.unwrap();
        assert!(bytes.iter().all(|&byte| byte == value), "{span:?} lost its bytes");
        self.idle.insert(span);
    }

    /// Returns everything, after driver failures have ended.
    pub(super) fn finish(mut self) {
        while !self.live.is_empty() {
            self.take_back(0);
        }
        self.synchronize();
        self.release(u64::MAX).unwrap();
        assert_eq!(self.idle.spans(), []);
        #[allow(unsafe_code)]
        // SAFETY: made with this, and not used any more.
        unsafe { self.device.driver().stream_destroy(self.stream) }.unwrap();
    }
}
