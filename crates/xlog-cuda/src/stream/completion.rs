//! Completion of work on a driver stream: polls, waits of the host, and freed memory.
//!
//! A poll never waits. An event whose query fails counts as pending. On a stream whose handle has escaped, only confirmed
//! events are queried.

use std::sync::atomic::{Ordering, fence};

use xlog_driver::{Driver, DriverResult, EventHandle};

use super::raw::{RawStream, is_capture_refusal};
use crate::device_runtime::ordering::StripedCounters;
use crate::device_wait;

/// Bytes freed between two events on a stream whose handle has escaped; each free counts at least [`MIN_FREE`].
const FREE_PER_EVENT: u64 = 1 << 20;
const MIN_FREE: u64 = FREE_PER_EVENT / 64;

/// After a poll by another call, this many frees record events, one for each [`FREE_PER_EVENT`]. The bound spares a loop of
/// large blocks an event for each free.
const FREES_PER_POLL: u32 = 256;

/// The maximum number of pending events with which polls mark a busy stream. Recorded buffers of four streams, the host 500
/// operations ahead, hold 1.6 to 1.7 with 2 to 32 marks, and 2.3 without.
const MAX_MARKS: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    Complete,
    Pending,
    /// No event covers the stamp yet, so the driver cannot be queried.
    Unrecorded,
}

impl RawStream {
    /// Returns the stamp of memory that is freed now. The caller holds the lock of the arena that gets the memory.
    #[inline]
    pub(crate) fn stamp_free(&self) -> u64 {
        let now = self.clock.now();
        self.note_free(now);
        now
    }

    /// Notes that memory becomes free once the work of this stream up to `stamp` has completed.
    #[inline]
    pub(crate) fn note_free(&self, stamp: u64) {
        if self.handle_escaped() {
            // The stamp moves only when an event is begun, so usually nothing is stored.
            if self.last_free.load(Ordering::Acquire) < stamp {
                self.last_free.fetch_max(stamp, Ordering::AcqRel);
            }
        }
    }

    /// Lets the next frees record events for polls by calls that do not name this stream. Needed only after the handle escaped.
    pub(crate) fn arm_free_events(&self) {
        if self.handle_escaped() {
            self.frees_with_events.store(FREES_PER_POLL, Ordering::Relaxed);
        }
    }

    /// Counts a free of `bytes` by a call that names this stream. Returns true if other calls poll the stream and
    /// [`FREE_PER_EVENT`] bytes were freed since the last event.
    #[inline]
    pub(crate) fn count_free_and_check(&self, bytes: usize) -> bool {
        self.frees_with_events.load(Ordering::Relaxed) != 0 && self.count_free(bytes as u64)
    }

    #[cold]
    fn count_free(&self, bytes: u64) -> bool {
        let left = self.frees_with_events.load(Ordering::Relaxed);
        self.frees_with_events.store(left.saturating_sub(1), Ordering::Relaxed);
        let bytes = bytes.max(MIN_FREE);
        let before = self.free_without_event.fetch_add(bytes, Ordering::Relaxed);
        let is_enough = before.saturating_add(bytes) >= FREE_PER_EVENT;
        if is_enough {
            self.free_without_event.store(0, Ordering::Relaxed);
        }
        is_enough
    }

    /// Polls whether all work up to `stamp` has completed.
    pub(crate) fn poll(&self, stamp: u64) -> Completion {
        self.poll_by(stamp, |driver, event| driver.event_query(event))
    }

    /// Polls, and synchronizes an event that has completed: the driver's pool releases memory only then.
    pub(crate) fn poll_waiting(&self, stamp: u64) -> Completion {
        self.poll_by(stamp, synchronize_complete)
    }

    fn poll_by(
        &self,
        stamp: u64,
        query: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> Completion {
        if self.clock.is_complete(stamp) {
            return Completion::Complete;
        }
        let Some(recorded) = self.clock.find(stamp) else { return Completion::Unrecorded };
        // An event that cannot be queried counts as pending.
        match self.wait_for_pinned(recorded.covers, recorded.event, query) {
            Ok(true) => Completion::Complete,
            _ => Completion::Pending,
        }
    }

    /// Polls the recorded events, oldest first, until one is pending. Never waits.
    pub(crate) fn poll_events(&self) {
        while self.poll(self.clock.completed().saturating_add(1)) == Completion::Complete {}
    }

    /// Whether all work queued so far, and so every stamp up to now, has completed. Never waits.
    pub(crate) fn poll_tail(&self) -> bool {
        if self.handle_escaped() {
            return self.poll_marked_tail();
        }
        let Ok(_entered) = self.enter("stream_query") else { return false };
        // A query, not `stream_is_idle`: other streams rely on the result.
        matches!(self.with_tail(|driver| driver.stream_query(self.handle)), Ok(true))
    }

    /// Whether the last work on all memory freed here has completed. Never waits. For calls that need not name this stream.
    pub(crate) fn poll_freed(&self) -> bool {
        let Some(stamp) = self.begin_poll() else { return self.poll_tail() };
        self.poll_events();
        match self.poll(stamp) {
            Completion::Unrecorded => self.poll_tail(),
            polled => polled == Completion::Complete,
        }
    }

    /// [`RawStream::poll_freed`] that records an event on a busy stream, so that a later poll finds what has completed although
    /// the stream is never idle. At most [`MAX_MARKS`] such events are pending.
    pub(crate) fn poll_or_mark_freed(&self) -> bool {
        self.poll_freed() || !self.handle_escaped() && self.poll_marked_tail()
    }

    /// Returns a stamp, covered by an event, of all memory freed here. For calls that need not name this stream.
    pub(crate) fn stamp_freed(&self, counters: &StripedCounters) -> DriverResult<u64> {
        match self.begin_poll() {
            Some(stamp) if self.poll(stamp) != Completion::Unrecorded => Ok(stamp),
            _ => self.record(counters),
        }
    }

    /// Begins a poll by a call that need not name this stream. If the handle has escaped, returns the stamp of the last free
    /// and lets the next frees record events.
    fn begin_poll(&self) -> Option<u64> {
        self.handle_escaped().then(|| {
            self.arm_free_events();
            self.last_free.load(Ordering::Acquire)
        })
    }

    /// [`RawStream::poll_tail`] by events. Records one unless enough are pending; usually a later poll finds it complete.
    #[cold]
    fn poll_marked_tail(&self) -> bool {
        self.poll_events();
        // One at a time after the handle has escaped, since recording has risks there.
        let maximum = if self.handle_escaped() { 1 } else { MAX_MARKS };
        if self.clock.pending_events() >= maximum {
            return false;
        }
        let Ok(entered) = self.enter("event_record") else { return false };
        let begun = self.clock.begin();
        let Ok(event) = self.record_outside(begun, "event_record") else { return false };
        drop(entered);
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.query_event(covers, event);
        }
        self.poll(begun.covers) == Completion::Complete
    }

    /// Whether all work queued so far has completed. For the stream of another thread it only queries the driver: advancing the
    /// clock would revoke that thread's bias.
    pub(super) fn query(&self) -> DriverResult<bool> {
        let _entered = self.enter("query")?;
        let query = |driver: &dyn Driver| driver.stream_query(self.handle);
        match self.clock.is_local() {
            true => self.with_tail(query),
            false => query(self.device.driver().as_ref()),
        }
    }

    /// Waits until all work queued so far has completed. It waits for an event, because a capture of the runtime may begin
    /// meanwhile. On the stream of another thread that event is not the clock's: advancing the clock would revoke that thread's bias.
    pub(super) fn synchronize_queued(&self) -> DriverResult<()> {
        if self.clock.is_local() {
            return self.synchronize_by("synchronize", synchronize_event).map(drop);
        }
        let event = self.record_apart("synchronize")?;
        let waited = self.driver().event_synchronize(event);
        #[allow(unsafe_code)]
        // SAFETY: made above, and not used any more.
        let destroyed = unsafe { self.driver().event_destroy(event) };
        waited.and(destroyed)
    }

    /// Records an event at the tail that does not belong to the clock; the caller destroys it.
    pub(super) fn record_apart(&self, call: &'static str) -> DriverResult<EventHandle> {
        let _entered = self.enter(call)?;
        let driver = self.driver();
        let event = driver.event_create()?;
        if let Err(error) = driver.event_record(event, self.handle) {
            #[allow(unsafe_code)]
            // SAFETY: made above, and not used any more.
            let _ = unsafe { driver.event_destroy(event) };
            return Err(error);
        }
        match self.handle_escaped() {
            true => self.confirm(event, call),
            false => Ok(event),
        }
    }

    /// Queries the driver about all work queued so far. If it has completed, so has every stamp up to now.
    fn with_tail(
        &self,
        query: impl FnOnce(&dyn Driver) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        let stamp = self.clock.step();
        // The stamp advances before the query.
        fence(Ordering::SeqCst);
        let done = query(self.device.driver().as_ref())?;
        if done {
            self.clock.completed_up_to(stamp);
        }
        Ok(done)
    }

    /// Waits until all work queued so far, and so every stamp up to now, has completed; returns that stamp.
    pub(crate) fn synchronize(&self, counters: &StripedCounters) -> DriverResult<u64> {
        let covers =
            self.synchronize_by("event_record", synchronize_event).map(|(covers, _)| covers)?;
        counters.count(|counts| counts.recorded += 1);
        Ok(covers)
    }

    /// Waits until the last work on all memory freed here has completed. For a reap: a stream under capture is left to a later one.
    pub(crate) fn synchronize_freed(&self, counters: &StripedCounters) -> DriverResult<()> {
        match self.synchronize_freed_by(counters, synchronize_event) {
            Err(error) if is_capture_refusal(&error) => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// [`RawStream::synchronize_freed`] within the deadline of the running call; false if the deadline passed.
    pub(crate) fn synchronize_freed_in_time(
        &self,
        counters: &StripedCounters,
    ) -> DriverResult<bool> {
        match device_wait::left() {
            None => self.synchronize_freed_by(counters, synchronize_event),
            Some(left) if left.is_zero() => Ok(false),
            Some(_) => self.synchronize_freed_by(counters, |driver, event| {
                device_wait::poll(|| driver.event_query(event))
            }),
        }
    }

    /// Waits by `wait`, which returns whether an event has completed: for an event at the tail, or for the one that covers freed memory.
    fn synchronize_freed_by(
        &self,
        counters: &StripedCounters,
        wait: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        if let Some(stamp) = self.begin_poll() {
            if self.clock.is_complete(stamp) {
                return Ok(true);
            }
            if let Some(recorded) = self.clock.find(stamp) {
                return self.wait_for_pinned(recorded.covers, recorded.event, wait);
            }
        }
        let (_, done) = self.synchronize_by("event_record", wait)?;
        counters.count(|counts| counts.recorded += 1);
        Ok(done)
    }

    /// Waits by `wait` for a pinned event, and unpins it.
    fn wait_for_pinned(
        &self,
        covers: u64,
        event: EventHandle,
        wait: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        let waited = wait(self.device.driver().as_ref(), event);
        if matches!(waited, Ok(true)) {
            self.clock.completed_up_to(covers);
        }
        self.clock.unpin();
        waited
    }

    /// Waits until all work up to `stamp` has completed, if an event covers it. Waits for no later work.
    pub(crate) fn synchronize_up_to(&self, stamp: u64) -> DriverResult<Completion> {
        if self.clock.is_complete(stamp) {
            return Ok(Completion::Complete);
        }
        let Some(recorded) = self.clock.find(stamp) else { return Ok(Completion::Unrecorded) };
        self.wait_for_pinned(recorded.covers, recorded.event, synchronize_event)?;
        Ok(Completion::Complete)
    }

    /// Records an event at the tail, and synchronizes it if it has completed, without a wait. Returns whether it has completed.
    ///
    /// A query is not enough: the driver's pool keeps memory until the host has synchronized its free.
    pub(crate) fn synchronize_if_complete(&self, counters: &StripedCounters) -> DriverResult<bool> {
        let (_, is_complete) = self.synchronize_by("event_record", synchronize_complete)?;
        counters.count(|counts| counts.recorded += 1);
        Ok(is_complete)
    }

    /// Records an event at the tail and waits for it by `wait`, which returns whether it has completed.
    fn synchronize_by(
        &self,
        call: &'static str,
        wait: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<(u64, bool)> {
        let entered = self.enter(call)?;
        let begun = self.clock.begin();
        let (covers, event) = (begun.covers, self.record_outside(begun, call)?);
        drop(entered);
        let query = self.clock.recorded_pinned(covers, event);
        if let Some((covers, event)) = query {
            self.query_event(covers, event);
        }
        let done = self.wait_for_pinned(covers, event, wait)?;
        Ok((covers, done))
    }
}

/// Synchronizes an event that has completed; false for a pending one.
fn synchronize_complete(driver: &dyn Driver, event: EventHandle) -> DriverResult<bool> {
    let is_complete = driver.event_query(event)?;
    if is_complete {
        driver.event_synchronize(event)?;
    }
    Ok(is_complete)
}

fn synchronize_event(driver: &dyn Driver, event: EventHandle) -> DriverResult<bool> {
    driver.event_synchronize(event).map(|()| true)
}
