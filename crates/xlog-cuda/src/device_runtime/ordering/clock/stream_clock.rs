//! The clock of a stream.
//!
//! The stamp advances when an event is begun, or before the driver is queried about the tail. Finished work gets the
//! current stamp. An event covers every stamp before the one at which it was begun. Three rules ensure that:
//!
//! - a finish reads the stamp *after* its work was queued;
//! - a record advances the stamp and reads the clock of its stream *before* it calls the driver;
//! - a wait is published in the clock *after* the driver has queued it.
//!
//! The work of a covered stamp was therefore queued before its event was begun, and no stream relies on a wait that is
//! not queued yet. The driver orders the calls on one stream.
//!
//! An event belongs to the clock that recorded it. The clock recycles it once it has completed and is not pinned.

use std::ops::Deref;

use super::events::{EventEntry, Events};
use super::primitive::{AtomicU64, Lock, Ordering};
use super::vector_clock::{ENTRIES, Epoch, VectorClock};

/// A recorded event, pinned: it is not recycled before [`StreamClock::unpin`].
#[derive(Debug)]
pub(crate) struct Recorded<E> {
    pub(crate) covers: u64,
    pub(crate) event: E,
}

/// An event that is about to be recorded. Other threads find it only after [`StreamClock::recorded`].
#[derive(Clone, Copy, Debug)]
#[must_use = "it is recorded or failed"]
pub(crate) struct Begun<E> {
    pub(crate) covers: u64,
    /// An event to reuse, if there is one.
    pub(crate) recycled: Option<E>,
}

/// The event by which a stream can wait for a stamp.
#[derive(Debug)]
pub(crate) struct Cover<E> {
    pub(crate) covers: u64,
    /// The event, or an event to reuse if none is recorded.
    pub(crate) event: Option<E>,
    /// Whether the event is recorded and pinned. Otherwise the caller records it, as after [`StreamClock::begin`].
    pub(crate) recorded: bool,
}

/// The raw handle has escaped, also for later leases, so other code may capture the stream.
const ESCAPED: u64 = 1;
/// All calls that began before the handle escaped have ended.
const SETTLED: u64 = 2;
const CAPTURE: u64 = 4;

/// The part of a clock that every use reads, on a cache line of its own, since threads mostly use different streams.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ClockHeader {
    /// Written only under the lock of the clock.
    stamp: AtomicU64,
    /// The id under which the stream is leased, plus one; 0 while it is not leased.
    leased: AtomicU64,
    /// [`ESCAPED`], [`SETTLED`], and [`CAPTURE`] for each open capture of the runtime.
    escaped: AtomicU64,
    /// Driver calls on the stream that must not overlap the beginning of a capture.
    calls: AtomicU64,
}

impl Default for ClockHeader {
    fn default() -> Self {
        Self {
            stamp: AtomicU64::new(1),
            leased: AtomicU64::new(0),
            escaped: AtomicU64::new(0),
            calls: AtomicU64::new(0),
        }
    }
}

impl ClockHeader {
    /// Returns the current stamp, which finished work gets.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.stamp.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_leased_as(&self, id: u32) -> bool {
        self.leased.load(Ordering::Acquire) == u64::from(id) + 1
    }

    #[inline]
    pub(crate) fn handle_escaped(&self) -> bool {
        self.escaped.load(Ordering::Acquire) != 0
    }

    /// Whether the handle may be handed out: [`ClockHeader::settle_escape`] was called.
    pub(crate) fn escape_is_settled(&self) -> bool {
        self.escaped.load(Ordering::Acquire) & SETTLED != 0
    }

    pub(crate) fn mark_handle_escaped(&self) {
        self.escaped.fetch_or(ESCAPED, Ordering::Release);
    }

    /// Notes that no call in progress began before [`ClockHeader::mark_handle_escaped`].
    pub(crate) fn settle_escape(&self) {
        self.escaped.fetch_or(SETTLED, Ordering::Release);
    }

    /// Announces a capture of the runtime, which begins once [`ClockHeader::has_calls`] is false.
    pub(crate) fn begin_capture(&self) {
        self.escaped.fetch_add(CAPTURE, Ordering::SeqCst);
    }

    /// Ends a capture of the runtime.
    pub(crate) fn end_capture(&self) {
        self.escaped.fetch_sub(CAPTURE, Ordering::SeqCst);
    }

    /// Whether a capture of the runtime records the work of the stream, or is about to.
    #[inline]
    pub(crate) fn is_captured(&self) -> bool {
        self.escaped.load(Ordering::SeqCst) >= CAPTURE
    }

    /// Begins a driver call that a capture must not overlap. Sequentially consistent: the call sees the capture, or the
    /// capture sees the call.
    #[inline(always)]
    pub(crate) fn enter_call(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
    }

    #[inline(always)]
    pub(crate) fn leave_call(&self) {
        self.calls.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.calls.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn set_leased(&self, id: Option<u32>) {
        let leased = id.map_or(0, |id| u64::from(id) + 1);
        self.leased.store(leased, Ordering::Release);
    }
}

/// The clock of one stream, over events of type `E`, with its header behind a `C`. It remembers `N` other streams
/// besides the one that was waited on last. The fields read most come first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct StreamClock<E, C, const N: usize = ENTRIES> {
    header: C,
    slot: u32,
    /// Every stamp up to this one is complete.
    completed: AtomicU64,
    /// The stream that this one waited on last, and the stamp: an [`Epoch`]. Plain stores raise it; it changes to
    /// another stream under the lock. A lost update costs a redundant wait, never order.
    last_epoch: AtomicU64,
    inner: Lock<Events<E, N>>,
}

impl<E: Copy, C: Deref<Target = ClockHeader>, const N: usize> StreamClock<E, C, N> {
    pub(crate) fn new(slot: u32, header: C) -> Self {
        let [completed, last_epoch] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { slot, header, completed, last_epoch, inner: Lock::new(Events::new()) }
    }

    #[inline]
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    #[inline]
    pub(crate) fn header(&self) -> &ClockHeader {
        &self.header
    }

    /// Returns the current stamp, which finished work gets.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.header.now()
    }

    /// Whether this stream is ordered after `stamp` of stream `slot`. Also called under the lock of a block.
    #[inline]
    pub(crate) fn covers(&self, slot: u32, stamp: u64) -> bool {
        let last_epoch = self.last_epoch();
        if last_epoch.is_of(slot) {
            return last_epoch.stamp() >= stamp;
        }
        self.vector_covers(slot, stamp)
    }

    /// Acquire: the wait was queued before.
    #[inline(always)]
    fn last_epoch(&self) -> Epoch {
        Epoch::from_word(self.last_epoch.load(Ordering::Acquire))
    }

    #[inline(never)]
    fn vector_covers(&self, slot: u32, stamp: u64) -> bool {
        self.inner.with_nested(|inner| inner.vector.now().stamp(slot) >= stamp)
    }

    #[inline]
    pub(crate) fn is_complete(&self, stamp: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= stamp
    }

    /// Returns the stamp up to which all work is known to have completed.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// Begins an event. [`StreamClock::recorded`] or [`StreamClock::failed`] must follow.
    #[inline(always)]
    pub(crate) fn begin(&self) -> Begun<E> {
        self.inner.with(|inner| self.begin_in(inner))
    }

    /// Whether this thread can use the clock without a process-wide barrier.
    pub(crate) fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    /// Advances the stamp before the driver is queried about the tail. Returns the stamp that the query covers.
    pub(crate) fn step(&self) -> u64 {
        self.inner.with(|_| self.step_in())
    }

    #[inline(always)]
    fn step_in(&self) -> u64 {
        let header: &ClockHeader = &self.header;
        let stamp = header.stamp.load(Ordering::Relaxed);
        header.stamp.store(stamp + 1, Ordering::Release);
        stamp
    }

    #[inline(always)]
    fn begin_in(&self, inner: &mut Events<E, N>) -> Begun<E> {
        let covers = self.step_in();
        // The clock as of now, not as of the recording.
        inner.keep(covers, self.last_epoch());
        let recycled = inner.free_events.pop();
        Begun {
            covers,
            recycled: if recycled.is_some() { recycled } else { self.recycle_one(inner) },
        }
    }

    #[cold]
    fn recycle_one(&self, inner: &mut Events<E, N>) -> Option<E> {
        self.recycle(inner);
        inner.free_events.pop()
    }

    /// Recycles retired events if none is pinned.
    fn recycle(&self, inner: &mut Events<E, N>) {
        if inner.pins == 0 {
            inner.free_events.append(&mut inner.retired_events);
        }
    }

    /// Publishes a recorded event. May return an event to poll, pinned; the caller passes the result to [`StreamClock::asked`].
    #[inline(always)]
    pub(crate) fn recorded(&self, covers: u64, event: E) -> Option<(u64, E)> {
        self.inner.with(|inner| {
            inner.set(covers, event);
            inner.due_poll()
        })
    }

    /// [`StreamClock::recorded`], with the event pinned for the caller.
    pub(crate) fn recorded_pinned(&self, covers: u64, event: E) -> Option<(u64, E)> {
        self.inner.with(|inner| {
            inner.set(covers, event);
            inner.pins += 1;
            inner.due_poll()
        })
    }

    /// Drops an event that was not recorded; `event` is recycled.
    pub(crate) fn failed(&self, covers: u64, event: Option<E>) {
        self.inner.with(|inner| {
            inner.recorded.retain(|entry| entry.covers != covers);
            inner.free_events.extend(event);
        });
    }

    /// Processes the result of a poll, and unpins its event.
    pub(crate) fn note_poll(&self, completed: bool) {
        self.inner.with(|inner| inner.note_poll(completed));
        self.unpin();
    }

    /// Returns the number of recorded events that are not known to be complete.
    pub(crate) fn pending_events(&self) -> usize {
        let completed = self.completed();
        self.inner.with(|inner| {
            let entries = &inner.recorded;
            entries.len() - entries.partition_point(|entry| entry.covers <= completed)
        })
    }

    /// Returns the earliest recorded event that covers `stamp`, pinned.
    pub(crate) fn find(&self, stamp: u64) -> Option<Recorded<E>> {
        self.inner.with(|inner| {
            let (event, EventEntry { covers, .. }) = inner.find(stamp)?;
            let recorded = Recorded { covers: *covers, event };
            inner.pins += 1;
            Some(recorded)
        })
    }

    /// Returns the earliest event that covers `stamp`, pinned, or begins one. `joined_clock` receives the clock that stream
    /// `asker` joins by waiting for it.
    #[inline(always)]
    pub(crate) fn find_or_begin(
        &self,
        stamp: u64,
        asker: u32,
        joined_clock: &mut Option<VectorClock<N>>,
    ) -> Cover<E> {
        self.inner.with(|inner| self.find_or_begin_in(inner, stamp, asker, joined_clock))
    }

    #[inline(always)]
    fn find_or_begin_in(
        &self,
        inner: &mut Events<E, N>,
        stamp: u64,
        asker: u32,
        joined_clock: &mut Option<VectorClock<N>>,
    ) -> Cover<E> {
        match inner.find(stamp) {
            Some((event, entry)) => {
                let covers = entry.covers;
                *joined_clock = inner.joined_clock(entry, asker);
                inner.pins += 1;
                Cover { covers, event: Some(event), recorded: true }
            }
            None => {
                let Begun { covers, recycled } = self.begin_in(inner);
                *joined_clock = inner.newest_joined_clock(asker);
                Cover { covers, event: recycled, recorded: false }
            }
        }
    }

    #[inline(always)]
    fn raise_last_epoch(&self, last_epoch: Epoch, now: Epoch) {
        if last_epoch < now {
            // Release: the wait is queued.
            self.last_epoch.store(now.word(), Ordering::Release);
        }
    }

    /// Unpins an event.
    #[inline(always)]
    pub(crate) fn unpin(&self) {
        self.inner.with(|inner| {
            inner.pins = inner.pins.saturating_sub(1);
            if inner.pins == 0 && !inner.retired_events.is_empty() {
                self.recycle(inner);
            }
        });
    }

    /// Notes that all work up to `stamp` has completed, and retires the events that covered it.
    pub(crate) fn completed_up_to(&self, stamp: u64) {
        self.completed.fetch_max(stamp, Ordering::AcqRel);
        self.inner.with(|inner| {
            let count = inner.recorded.partition_point(|entry| entry.covers <= stamp);
            let complete = inner.recorded.range(..count);
            let before = inner.retired_events.len();
            inner.retired_events.extend(complete.map_while(|entry| entry.event));
            inner.recorded.drain(..inner.retired_events.len() - before);
            self.recycle(inner);
        });
    }

    /// Publishes a wait for an event of stream `slot`, after it was queued on this stream.
    #[inline(always)]
    pub(crate) fn join(&self, slot: u32, covers: u64, joined_clock: &Option<VectorClock<N>>) {
        let last_epoch = self.last_epoch();
        if joined_clock.is_none()
            && let Some(now) = last_epoch.raised(slot, covers)
        {
            // Usually it is the stream that was waited on last: that needs no lock.
            return self.raise_last_epoch(last_epoch, now);
        }
        self.inner.with(|inner| {
            if let Some(joined_clock) = joined_clock {
                self.join_vector(inner, joined_clock);
            }
            self.join_in(inner, slot, covers);
        });
    }

    /// Joins the vector clock of another stream, without the entry for this one.
    #[inline(never)]
    fn join_vector(&self, inner: &mut Events<E, N>, joined_clock: &VectorClock<N>) {
        let last_epoch = self.last_epoch();
        let others = joined_clock.entries().iter().copied().filter(|epoch| !epoch.is_of(self.slot));
        inner.vector.join(others.filter(|epoch| {
            let is_last = last_epoch.is_of(epoch.slot());
            if is_last {
                self.raise_last_epoch(last_epoch, *epoch);
            }
            !is_last
        }));
    }

    #[inline(always)]
    fn join_in(&self, inner: &mut Events<E, N>, slot: u32, covers: u64) {
        let last_epoch = self.last_epoch();
        match Epoch::new(slot, covers) {
            Some(now) if last_epoch.is_of(slot) => self.raise_last_epoch(last_epoch, now),
            Some(now) => self.replace_last_epoch(inner, last_epoch, now),
            // The epoch does not fit and is forgotten.
            None => {}
        }
    }

    /// Moves the last epoch into the vector clock, and replaces it.
    #[inline(never)]
    fn replace_last_epoch(&self, inner: &mut Events<E, N>, last_epoch: Epoch, now: Epoch) {
        let known = inner.vector.exchange(last_epoch, now.slot());
        let now = now.raised(now.slot(), known.max(now.stamp())).unwrap_or(now);
        self.last_epoch.store(now.word(), Ordering::Release);
    }

    /// Removes all events when the stream is dropped.
    pub(crate) fn drain(&self) -> Vec<E> {
        self.inner.with(|inner| {
            let recorded = inner.recorded.drain(..);
            let mut events: Vec<E> = recorded.filter_map(|done| done.event).collect();
            events.append(&mut inner.free_events);
            events.append(&mut inner.retired_events);
            events
        })
    }
}
