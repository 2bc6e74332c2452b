//! Notifies watchers of segments taken and returned.
//!
//! Watchers are called after the driver's call and without a lock. A ticket is drawn before memory is returned: a watcher
//! can order the return before a later segment at the same addresses.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use xlog_base::Mutex;

use super::super::super::resource::{ResourceResult, SegmentRange, SegmentWatcher, StreamId};
use super::{FreeMemory, Segments, Span, SpanRequest, round_up};

/// Segments of any kind, with watchers.
pub(crate) struct WatchedSegments {
    inner: Box<dyn Segments>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The end of each held range, by its first address.
    held: BTreeMap<u64, u64>,
    watchers: Vec<Weak<dyn SegmentWatcher>>,
}

type Ticket = (Arc<dyn SegmentWatcher>, u64);

impl State {
    fn alive(&mut self) -> Vec<Arc<dyn SegmentWatcher>> {
        self.watchers.retain(|watcher| watcher.strong_count() > 0);
        self.watchers.iter().filter_map(Weak::upgrade).collect()
    }

    /// Removes a range: a part of a held one, a whole one, or several.
    fn remove(&mut self, start: u64, end: u64) {
        while let Some((&first, &last)) =
            self.held.range(..end).next_back().filter(|(_, last)| **last > start)
        {
            self.held.remove(&first);
            if first < start {
                self.held.insert(first, start);
            }
            if last > end {
                self.held.insert(end, last);
            }
        }
    }
}

impl WatchedSegments {
    /// Wraps `inner`, which holds no memory yet.
    pub(crate) fn new(inner: Box<dyn Segments>) -> Self {
        Self { inner, state: Mutex::new(State::default()) }
    }

    /// Returns the memory that the device gave for a span: some kinds do not hand out the last unit.
    fn range(&self, span: Span) -> SegmentRange {
        let bytes = round_up(span.bytes, self.inner.granularity()).unwrap_or(span.bytes);
        SegmentRange { ptr: span.ptr, bytes }
    }

    fn tickets(&self) -> Vec<Ticket> {
        let watchers = self.state.lock().alive();
        let ticket = |watcher: Arc<dyn SegmentWatcher>| {
            let ticket = watcher.ticket();
            (watcher, ticket)
        };
        watchers.into_iter().map(ticket).collect()
    }

    fn taken(&self, span: Span) {
        let range = self.range(span);
        let watchers = {
            let mut state = self.state.lock();
            state.held.insert(range.ptr, range.ptr.saturating_add(range.bytes));
            state.alive()
        };
        for watcher in watchers {
            watcher.taken(range);
        }
    }

    fn returned(&self, spans: &[Span], tickets: &[Ticket]) {
        for &span in spans {
            let range = self.range(span);
            self.state.lock().remove(range.ptr, range.ptr.saturating_add(range.bytes));
            for (watcher, ticket) in tickets {
                watcher.returned(range, *ticket);
            }
        }
    }

    /// [`Segments::grow`], announced to the watchers.
    pub(crate) fn grow(&self, bytes: u64, stream: StreamId) -> ResourceResult<Span> {
        let span = self.inner.grow(bytes, stream)?;
        self.taken(span);
        Ok(span)
    }

    /// [`Segments::release`], announced to the watchers.
    pub(crate) fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>) {
        let tickets = self.tickets();
        let (gone, outcome) = self.inner.release(idle, bytes);
        self.returned(&gone, &tickets);
        (gone, outcome)
    }

    /// [`Segments::defragment`], announced to the watchers.
    pub(crate) fn defragment(
        &self,
        free: FreeMemory<'_>,
        request: SpanRequest,
        stream: StreamId,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        let tickets = self.tickets();
        let (span, taken, outcome) = self.inner.defragment(free, request, stream);
        // Parts that stay mapped are neither taken nor returned.
        let stay: Vec<Span> = span.iter().copied().collect();
        let gone: Vec<Span> = taken.iter().flat_map(|part| part.without(&stay)).collect();
        self.returned(&gone, &tickets);
        for part in span.iter().flat_map(|span| span.without(&taken)) {
            self.taken(part);
        }
        (span, taken, outcome)
    }

    /// Notifies `watcher` of segments, beginning with those held.
    pub(crate) fn watch(&self, watcher: &Weak<dyn SegmentWatcher>) {
        let held: Vec<_> = {
            let mut state = self.state.lock();
            state.watchers.push(watcher.clone());
            state.held.iter().map(|(&ptr, &end)| SegmentRange { ptr, bytes: end - ptr }).collect()
        };
        if let Some(watcher) = watcher.upgrade() {
            for range in held {
                watcher.taken(range);
            }
        }
    }
}

/// The calls that take and return nothing go to the segments themselves.
impl Deref for WatchedSegments {
    type Target = dyn Segments;

    fn deref(&self) -> &Self::Target {
        &*self.inner
    }
}
