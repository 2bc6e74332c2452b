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
    pub(super) live: Vec<(Span, u8)>,
}

impl<'a> Model<'a> {
    pub(super) fn new(segments: &'a dyn Segments, device: &'a Arc<CudaDevice>) -> Self {
        let stream = device.driver().stream_create(0).unwrap();
        Self { segments, device, stream, idle: Ranges::default(), live: Vec::new() }
    }

    /// All ranges of this pool.
    pub(super) fn bytes(&self) -> u64 {
        self.idle.bytes() + self.live.iter().map(|(span, _)| span.bytes).sum::<u64>()
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
        let (span, gone, outcome) =
            self.segments.defragment(FreeMemory::idle(&self.idle.spans()), request, ON);
        gone.into_iter().for_each(|span| self.idle.remove(span));
        assert!(span.is_none() || outcome.is_ok());
        if let Some(span) = span {
            assert!(span.holds(request.bytes, request.align), "{span:?} for {request:?}");
            self.idle.insert(span);
        }
        outcome.map(|()| span)
    }

    /// Lends a part of an idle range out and fills it.
    pub(super) fn lend(&mut self, span: Span, value: u8) {
        self.idle.remove(span);
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
        self.release(u64::MAX).unwrap();
        assert_eq!(self.idle.spans(), []);
        #[allow(unsafe_code)]
        // SAFETY: made with this, and not used any more.
        unsafe { self.device.driver().stream_destroy(self.stream) }.unwrap();
    }
}
