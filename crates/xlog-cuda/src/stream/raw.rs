//! A driver stream and its clock: events, waits and completion.
//!
//! Invariants:
//! - A stamp is taken before its event is recorded, so an event covers all work queued under its stamp.
//! - The clock learns that a stamp is covered only after the driver accepted the call.
//! - A stream under capture is refused: its work does not run now, so no stamp can stand for it.
//! - A capture of the runtime begins between driver calls: a call under a [`CallGuard`] is over before the capture begins.
//! - A capture of other code may begin at any time on a stream whose handle has escaped. So such a stream is never queried, and an event that is
//!   recorded on it counts only after the driver has confirmed that no capture took it. Queries of confirmed events break no capture.
//! - Driver 580 may crash when an event is recorded on such a stream while another thread begins or ends a capture there. So once other calls ask what
//!   has completed ([`RawStream::poll_freed`]), the frees, which name the stream, record events for them.
//! - Before a capture of the runtime begins, an event is recorded at the tail: other streams can wait for earlier work during the capture.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use xlog_driver::sync::scheduling_point;
use xlog_driver::{CaptureStatus, Driver, DriverError, DriverResult, EventHandle, StreamHandle};

use crate::CudaDevice;
use crate::device_runtime::ordering::clock::clock_headers::ClockHeaderRef;
use crate::device_runtime::ordering::clock::stream_clock::{Begun, StreamClock};
use crate::device_runtime::ordering::tracking::striped_counters::{StripedCounters, WaitCounts};
use crate::device_wait;

/// A pointer to the driver of a device. A call through the `Arc` would compute it each time, from the alignment in the
/// vtable.
#[derive(Debug)]
struct DriverPtr(NonNull<dyn Driver>);

#[allow(unsafe_code)]
// SAFETY: it stands for a shared reference to a driver, and every driver is `Send` and `Sync`.
unsafe impl Send for DriverPtr {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for DriverPtr {}

/// A driver stream and its clock. It lives as long as its pool, or longer if a handle is left.
///
/// A use on two streams reads three cache lines of it: this one, and the first half of the clock.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct RawStream {
    handle: StreamHandle,
    /// The driver of `device`.
    driver: DriverPtr,
    clock: StreamClock<EventHandle, ClockHeaderRef>,
    priority: i32,
    /// Whether this object destroys the driver stream.
    is_owned: bool,
    /// The stamp of the last work before the capture of the runtime that is open.
    captured_tail: AtomicU64,
    /// The stamp of the memory that became free last, since the handle has escaped.
    last_free: AtomicU64,
    /// The bytes that became free after the last event, since the handle has escaped.
    free_without_event: AtomicU64,
    /// How many more frees record events for other calls, which have asked.
    asked_frees: AtomicU32,
    pub(super) device: Arc<CudaDevice>,
}

/// The bytes that become free on a stream whose handle has escaped before an event is recorded for them, and the bytes that a block counts for at least.
const FREE_PER_EVENT: u64 = 1 << 20;
const MIN_FREE: u64 = FREE_PER_EVENT / 64;

/// How many frees record events after another call has asked. Without it each pair of a large block would cost an event.
const FREES_PER_ASK: u32 = 256;

/// The tail of a stream whose capture is about to begin.
const UNRECORDED: u64 = u64::MAX;

/// A driver call on a stream; no capture of the runtime begins there meanwhile. It must not wait for the device.
#[must_use = "captures begin once it is dropped"]
pub(crate) struct CallGuard<'a>(&'a RawStream);

impl Drop for CallGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.clock.header().leave_call();
    }
}

impl RawStream {
    /// Creates the stream of a slot.
    pub(crate) fn create(
        device: Arc<CudaDevice>,
        priority: i32,
        slot: u32,
        header: ClockHeaderRef,
    ) -> DriverResult<Self> {
        let handle = device.driver().stream_create(priority)?;
        let mut stream = Self::enlisted(device, handle, slot, header);
        (stream.priority, stream.is_owned) = (priority, true);
        Ok(stream)
    }

    /// The stream of a slot, which other code owns.
    pub(crate) fn enlisted(
        device: Arc<CudaDevice>,
        handle: StreamHandle,
        slot: u32,
        header: ClockHeaderRef,
    ) -> Self {
        let driver = DriverPtr(NonNull::from(device.driver().as_ref()));
        let clock = StreamClock::new(slot, header);
        let captured_tail = AtomicU64::new(UNRECORDED);
        let [last_free, free_without_event] = std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            clock,
            handle,
            priority: 0,
            is_owned: false,
            captured_tail,
            last_free,
            free_without_event,
            asked_frees: AtomicU32::new(0),
            device,
            driver,
        }
    }

    #[inline(always)]
    fn driver(&self) -> &dyn Driver {
        #[allow(unsafe_code)]
        // SAFETY: it is the driver of `device`, which keeps it alive.
        unsafe {
            self.driver.0.as_ref()
        }
    }

    pub(crate) fn priority(&self) -> i32 {
        self.priority
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    #[inline]
    pub(crate) fn clock(&self) -> &StreamClock<EventHandle, ClockHeaderRef> {
        &self.clock
    }

    #[inline]
    pub(crate) fn handle_escaped(&self) -> bool {
        self.clock.header().handle_escaped()
    }

    /// From now on other code may capture this stream.
    pub(crate) fn mark_handle_escaped(&self) {
        if !self.handle_escaped() {
            self.clock.header().mark_handle_escaped();
            std::sync::atomic::fence(Ordering::SeqCst);
            // What became free before did not note its stamp.
            self.note_free(self.clock.now());
        }
    }

    /// The stamp of memory that becomes free now. Read under the lock of what it becomes free in.
    #[inline]
    pub(crate) fn stamp_free(&self) -> u64 {
        let now = self.clock.now();
        self.note_free(now);
        now
    }

    /// Memory becomes free once the work of this stream up to `stamp` has completed.
    #[inline]
    pub(crate) fn note_free(&self, stamp: u64) {
        if self.handle_escaped() {
            self.last_free.fetch_max(stamp, Ordering::AcqRel);
        }
    }

    /// After a call that names this stream has freed `bytes`. True if other calls ask for what becomes free, and enough did for an event.
    #[inline]
    pub(crate) fn needs_event(&self, bytes: usize) -> bool {
        self.asked_frees.load(Ordering::Relaxed) != 0 && self.count_free(bytes as u64)
    }

    #[cold]
    fn count_free(&self, bytes: u64) -> bool {
        let asked = self.asked_frees.load(Ordering::Relaxed);
        self.asked_frees.store(asked.saturating_sub(1), Ordering::Relaxed);
        let bytes = bytes.max(MIN_FREE);
        let before = self.free_without_event.fetch_add(bytes, Ordering::Relaxed);
        let is_enough = before.saturating_add(bytes) >= FREE_PER_EVENT;
        if is_enough {
            self.free_without_event.store(0, Ordering::Relaxed);
        }
        is_enough
    }

    /// Refuses a stream under capture: its work does not run now, so no stamp can stand for it.
    #[inline]
    pub(crate) fn check_not_capturing(&self, call: &'static str) -> DriverResult<()> {
        if self.handle_escaped() { self.ask_capturing(call) } else { Ok(()) }
    }

    /// [`RawStream::check_not_capturing`] for as long as the result lives.
    #[inline(always)]
    pub(crate) fn enter(&self, call: &'static str) -> DriverResult<CallGuard<'_>> {
        let entered = self.enter_call();
        self.check_not_capturing(call)?;
        Ok(entered)
    }

    /// Keeps captures of the runtime from beginning on this stream; one may be open.
    #[inline(always)]
    pub(crate) fn enter_call(&self) -> CallGuard<'_> {
        self.clock.header().enter_call();
        CallGuard(self)
    }

    /// Before a capture of the runtime begins on this stream, or it joins one: waits for calls under way, and records an event at the tail.
    pub(crate) fn begin_capture(&self) -> DriverResult<()> {
        let header = self.clock.header();
        self.captured_tail.store(UNRECORDED, Ordering::SeqCst);
        header.begin_capture();
        while header.has_calls() {
            scheduling_point();
            std::thread::yield_now();
        }
        let begun = self.clock.begin();
        let event = self.record_outside(begun, "capture").inspect_err(|_| header.end_capture())?;
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.ask(covers, event);
        }
        self.captured_tail.store(begun.covers, Ordering::Release);
        Ok(())
    }

    /// After the capture has ended.
    pub(crate) fn end_capture(&self) {
        self.clock.header().end_capture();
    }

    #[cold]
    fn ask_capturing(&self, call: &'static str) -> DriverResult<()> {
        if self.clock.header().is_captured() {
            return Err(DriverError::invalid(
                call,
                format!("{}, whose capture is {:?}", self.handle, CaptureStatus::Active),
                "a stream that is not being captured into a graph",
            ));
        }
        self.ask_driver(call)
    }

    fn ask_driver(&self, call: &'static str) -> DriverResult<()> {
        match self.device.driver().stream_capture(self.handle)? {
            CaptureStatus::None => Ok(()),
            status => Err(DriverError::invalid(
                call,
                format!("{}, whose capture is {status:?}", self.handle),
                "a stream that is not being captured into a graph",
            )),
        }
    }

    /// Whether all work of a stream that nothing else uses is done. False for one that cannot be queried.
    pub(crate) fn is_unused(&self) -> bool {
        // A query would invalidate a capture.
        let Ok(_entered) = self.enter("stream_query") else { return false };
        matches!(self.device.driver().stream_is_idle(self.handle), Ok(true))
    }

    /// Records an event at the tail of this stream; returns the stamp that it covers.
    #[inline(always)]
    pub(crate) fn record(&self, counters: &StripedCounters) -> DriverResult<u64> {
        let entered = self.enter("event_record")?;
        let begun = self.clock.begin();
        let event = self.record_outside(begun, "event_record")?;
        drop(entered);
        counters.count(|counts| counts.recorded += 1);
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.ask(covers, event);
        }
        Ok(begun.covers)
    }

    /// [`RawStream::record_begun`] on a stream that other code may capture at any time.
    #[inline(always)]
    fn record_outside(
        &self,
        begun: Begun<EventHandle>,
        call: &'static str,
    ) -> DriverResult<EventHandle> {
        let event = self.record_begun(begun)?;
        match self.handle_escaped() {
            true => {
                let confirmed = self.confirm(event, call);
                confirmed.inspect_err(|_| self.clock.failed(begun.covers, None))
            }
            false => Ok(event),
        }
    }

    /// Makes sure that no capture took an event that was just recorded. One that may be captured is destroyed and never queried: that
    /// would break the capture. Recording alone does not.
    #[cold]
    fn confirm(&self, event: EventHandle, call: &'static str) -> DriverResult<EventHandle> {
        let driver = self.device.driver();
        // The query finds out if a capture has begun and ended since the first check. It is safe: no capture is open that could have the event.
        let confirmed = self.ask_driver(call).and_then(|()| driver.event_query(event));
        match confirmed {
            Ok(_) => Ok(event),
            Err(error) => {
                #[allow(unsafe_code)]
                // SAFETY: the caller drops it, and no other thread has found it.
                let _ = unsafe { driver.event_destroy(event) };
                Err(error)
            }
        }
    }

    /// Calls the driver for an event that was begun. Tells the clock only of a failure.
    #[inline(always)]
    fn record_begun(&self, begun: Begun<EventHandle>) -> DriverResult<EventHandle> {
        let event = match begun.recycled {
            Some(event) => event,
            None => self.create_event(begun.covers)?,
        };
        match self.driver().event_record(event, self.handle) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.not_recorded(begun.covers, event);
                Err(error)
            }
        }
    }

    #[cold]
    fn not_recorded(&self, covers: u64, event: EventHandle) {
        self.clock.failed(covers, Some(event));
    }

    #[cold]
    fn create_event(&self, covers: u64) -> DriverResult<EventHandle> {
        let made = self.device.driver().event_create();
        made.inspect_err(|_| self.clock.failed(covers, None))
    }

    #[cold]
    fn ask(&self, covers: u64, event: EventHandle) {
        // An event that cannot be queried counts as pending.
        let complete = matches!(self.device.driver().event_query(event), Ok(true));
        if complete {
            self.clock.completed_up_to(covers);
        }
        self.clock.asked(complete);
    }

    /// Orders later work of this stream after everything of `other` up to `stamp`, unless it already is.
    pub(crate) fn wait_on_clock(
        &self,
        other: &Self,
        stamp: u64,
        counters: &StripedCounters,
    ) -> DriverResult<()> {
        let known = &other.clock;
        if known.slot() == self.clock.slot() {
            return Ok(());
        }
        if known.is_complete(stamp) || self.clock.covers(known.slot(), stamp) {
            counters.count(|counts| counts.elided += 1);
            return Ok(());
        }
        let mut waits = WaitCounts::default();
        let waited = self.wait_on(other, stamp, &mut waits);
        counters.count(|counts| counts.add_waits(waits));
        waited
    }

    /// [`RawStream::wait_on_clock`] for a stamp that is known not to be covered; the caller counts the `waits`.
    #[inline(always)]
    pub(crate) fn wait_on(
        &self,
        other: &Self,
        stamp: u64,
        waits: &mut WaitCounts,
    ) -> DriverResult<()> {
        let _entered = self.enter("stream_wait_event")?;
        let known = &other.clock;
        let mut joined_clock = None;
        let cover = known.find_or_begin(stamp, self.clock.slot(), &mut joined_clock);
        match cover.event {
            Some(event) if cover.recorded => {
                let queued = self.driver().stream_wait_event(self.handle, event);
                known.unpin();
                queued?;
            }
            recycled => {
                let begun = Begun { covers: cover.covers, recycled };
                let other_entered = match other.enter("event_record") {
                    Ok(entered) => entered,
                    Err(error) => {
                        known.failed(begun.covers, begun.recycled);
                        return self.wait_on_captured(other, waits, error);
                    }
                };
                let event = other.record_outside(begun, "event_record")?;
                drop(other_entered);
                waits.recorded += 1;
                let queued = self.driver().stream_wait_event(self.handle, event);
                // Only now can other threads find the event, so it needed no pin.
                if let Some((covers, event)) = known.recorded(begun.covers, event) {
                    other.ask(covers, event);
                }
                queued?;
            }
        }
        waits.inserted += 1;
        self.clock.join(known.slot(), cover.covers, &joined_clock);
        Ok(())
    }

    /// Waits for everything that a stream had queued before the runtime began to capture it; `error` for any other stream.
    #[cold]
    fn wait_on_captured(
        &self,
        other: &Self,
        waits: &mut WaitCounts,
        error: DriverError,
    ) -> DriverResult<()> {
        let known = &other.clock;
        if !known.header().is_captured() {
            return Err(error);
        }
        let mut tail = other.captured_tail.load(Ordering::Acquire);
        while tail == UNRECORDED {
            // The capturing thread is about to record it, or to give up. A capture of this stream that begins waits for this call, and
            // may be what the other one waits for.
            if !known.header().is_captured() || self.clock.header().is_captured() {
                return Err(error);
            }
            scheduling_point();
            std::thread::yield_now();
            tail = other.captured_tail.load(Ordering::Acquire);
        }
        if known.is_complete(tail) {
            return Ok(());
        }
        let Some(recorded) = known.find(tail) else { return Err(error) };
        let queued = self.driver().stream_wait_event(self.handle, recorded.event);
        known.unpin();
        queued?;
        waits.inserted += 1;
        self.clock.join(known.slot(), recorded.covers, &None);
        Ok(())
    }

    /// Asks whether everything up to `stamp` has completed.
    pub(crate) fn poll(&self, stamp: u64) -> Completion {
        self.poll_by(stamp, |driver, event| driver.event_query(event))
    }

    /// [`RawStream::poll`]; the host waits for an event that has completed, as [`RawStream::synchronize_if_complete`] does.
    pub(crate) fn poll_waiting(&self, stamp: u64) -> Completion {
        self.poll_by(stamp, synchronize_complete)
    }

    fn poll_by(
        &self,
        stamp: u64,
        ask: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> Completion {
        if self.clock.is_complete(stamp) {
            return Completion::Complete;
        }
        let Some(recorded) = self.clock.find(stamp) else { return Completion::Unrecorded };
        // An event that cannot be queried counts as pending.
        match self.wait_for_pinned(recorded.covers, recorded.event, ask) {
            Ok(true) => Completion::Complete,
            _ => Completion::Pending,
        }
    }

    /// Asks the recorded events, beginning with the oldest, up to which stamp work has completed. Never waits.
    pub(crate) fn poll_events(&self) {
        while self.poll(self.clock.completed().saturating_add(1)) == Completion::Complete {}
    }

    /// Whether everything queued so far, and so every stamp up to now, has completed. Never waits.
    pub(crate) fn poll_tail(&self) -> bool {
        if self.handle_escaped() {
            return self.poll_escaped_tail();
        }
        let Ok(_entered) = self.enter("stream_query") else { return false };
        // Others rely on the result, so it is more than housekeeping.
        matches!(self.with_tail(|driver| driver.stream_query(self.handle)), Ok(true))
    }

    /// Whether the last work on all memory that became free here has completed. Never waits. For a call that need not name this stream.
    pub(crate) fn poll_freed(&self) -> bool {
        let Some(stamp) = self.ask_freed() else { return self.poll_tail() };
        self.poll_events();
        match self.poll(stamp) {
            Completion::Unrecorded => self.poll_escaped_tail(),
            polled => polled == Completion::Complete,
        }
    }

    /// A stamp, covered by an event, of everything that became free here. For a call that need not name this stream.
    pub(crate) fn stamp_freed(&self, counters: &StripedCounters) -> DriverResult<u64> {
        match self.ask_freed() {
            Some(stamp) if self.poll(stamp) != Completion::Unrecorded => Ok(stamp),
            _ => self.record(counters),
        }
    }

    /// The stamp of the memory that became free last, if the handle has escaped. From now on frees record events for the calls that ask.
    pub(crate) fn ask_freed(&self) -> Option<u64> {
        self.handle_escaped().then(|| {
            self.asked_frees.store(FREES_PER_ASK, Ordering::Relaxed);
            self.last_free.load(Ordering::Acquire)
        })
    }

    /// [`RawStream::poll_tail`] by events. A new one is recorded only if all earlier ones have completed; mostly a later call finds it complete.
    #[cold]
    fn poll_escaped_tail(&self) -> bool {
        self.poll_events();
        if self.clock.has_recorded() {
            return false;
        }
        let Ok(entered) = self.enter("event_record") else { return false };
        let begun = self.clock.begin();
        let Ok(event) = self.record_outside(begun, "event_record") else { return false };
        drop(entered);
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.ask(covers, event);
        }
        self.poll(begun.covers) == Completion::Complete
    }

    /// Whether everything queued so far has completed. For the stream of another thread it only queries the driver: moving the clock would
    /// revoke that thread's bias.
    pub(super) fn query(&self) -> DriverResult<bool> {
        let _entered = self.enter("query")?;
        let ask = |driver: &dyn Driver| driver.stream_query(self.handle);
        match self.clock.is_local() {
            true => self.with_tail(ask),
            false => ask(self.device.driver().as_ref()),
        }
    }

    /// Waits until everything queued so far has completed. A capture of the runtime may begin meanwhile, so it waits for an event. For the
    /// stream of another thread that is not one of the clock: moving the clock would revoke that thread's bias.
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

    /// Asks the driver about everything queued so far. If all has completed, so has every stamp up to now.
    fn with_tail(&self, ask: impl FnOnce(&dyn Driver) -> DriverResult<bool>) -> DriverResult<bool> {
        let stamp = self.clock.step();
        // The stamp moves before the driver is asked, whatever the driver does.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let done = ask(self.device.driver().as_ref())?;
        if done {
            self.clock.completed_up_to(stamp);
        }
        Ok(done)
    }

    /// Waits until everything queued so far, and so every stamp up to now, has completed; returns that stamp.
    pub(crate) fn synchronize(&self, counters: &StripedCounters) -> DriverResult<u64> {
        let covers =
            self.synchronize_by("event_record", synchronize_event).map(|(covers, _)| covers)?;
        counters.count(|counts| counts.recorded += 1);
        Ok(covers)
    }

    /// Waits until the last work on all memory that became free here has completed, for a reap, which leaves a stream under capture to a later one.
    pub(crate) fn synchronize_freed(&self, counters: &StripedCounters) -> DriverResult<()> {
        match self.synchronize_freed_by(counters, synchronize_event) {
            Err(error) if is_capture_refusal(&error) => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// [`RawStream::synchronize_freed`] within the deadline of the running call; false if that was too short.
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

    /// Waits by `wait`, which returns whether an event has completed: for an event at the tail, or for the one that covers what became free.
    fn synchronize_freed_by(
        &self,
        counters: &StripedCounters,
        wait: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        if let Some(stamp) = self.ask_freed() {
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

    /// Waits until everything up to `stamp` has completed, if an event covers it. Waits for no later work.
    pub(crate) fn synchronize_up_to(&self, stamp: u64) -> DriverResult<Completion> {
        if self.clock.is_complete(stamp) {
            return Ok(Completion::Complete);
        }
        let Some(recorded) = self.clock.find(stamp) else { return Ok(Completion::Unrecorded) };
        self.wait_for_pinned(recorded.covers, recorded.event, synchronize_event)?;
        Ok(Completion::Complete)
    }

    /// Records an event at the tail; if it has completed, the host waits for it, which returns at once. Returns whether it has completed.
    ///
    /// A query would tell as much. But the driver's pool keeps memory whose free the host has not waited for.
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
        let ask = self.clock.recorded_pinned(covers, event);
        if let Some((covers, event)) = ask {
            self.ask(covers, event);
        }
        let done = self.wait_for_pinned(covers, event, wait)?;
        Ok((covers, done))
    }
}

/// Waits for an event that has completed; false for any other.
fn synchronize_complete(driver: &dyn Driver, event: EventHandle) -> DriverResult<bool> {
    let is_complete = driver.event_query(event)?;
    if is_complete {
        driver.event_synchronize(event)?;
    }
    Ok(is_complete)
}

/// Waits for an event.
fn synchronize_event(driver: &dyn Driver, event: EventHandle) -> DriverResult<bool> {
    driver.event_synchronize(event).map(|()| true)
}

/// Whether a call on a stream was refused because the stream is being captured.
pub(crate) fn is_capture_refusal(error: &DriverError) -> bool {
    matches!(error, DriverError::Invalid { .. })
}

/// The answer of [`RawStream::poll`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    Complete,
    Pending,
    /// No event covers the stamp yet, so the driver cannot be asked.
    Unrecorded,
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // Queued work still runs. After the loss of the device the calls fail, with no one to report to.
        let driver = self.device.driver();
        #[allow(unsafe_code)]
        // SAFETY: this is the only owner of the events, and of a stream that it made.
        unsafe {
            if self.is_owned {
                let _ = driver.stream_destroy(self.handle);
            }
            for event in self.clock.drain() {
                let _ = driver.event_destroy(event);
            }
        }
    }
}
