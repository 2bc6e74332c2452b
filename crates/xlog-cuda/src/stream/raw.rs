//! A driver stream and its clock: events, waits and completion.
//!
//! Invariants:
//! - A stamp is taken before its event is recorded, so an event covers all work queued under its stamp.
//! - A stamp is marked as covered only after the driver accepted the call.
//! - A stream under capture is refused: its work does not run now, so no stamp can cover it.
//! - A capture of the runtime begins between driver calls: a call under a [`CallGuard`] ends before the capture begins.
//! - Other code may begin a capture at any time on a stream whose handle has escaped. Such a stream is never queried, and an
//!   event recorded on it counts only after the driver has confirmed that no capture took it. Queries of confirmed events
//!   break no capture.
//! - Driver 580 may crash when an event is recorded on such a stream while another thread begins or ends a capture there.
//!   Frees, which name the stream, therefore record events: 256 frees after the handle escapes, and after each poll by
//!   another call ([`RawStream::poll_freed`]).
//! - Before a capture of the runtime begins, an event is recorded at the tail: other streams can wait for earlier work during the capture.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use xlog_driver::sync::scheduling_point;
use xlog_driver::{CaptureStatus, Driver, DriverError, DriverResult, EventHandle, StreamHandle};

use crate::CudaDevice;
use crate::device_runtime::ordering::{
    Begun, ClockHeaderRef, StreamClock, StripedCounters, WaitCounts,
};

/// A pointer to the driver of a device. A call through the `Arc` would compute it each time, from the alignment in the vtable.
#[derive(Debug)]
struct DriverPtr(NonNull<dyn Driver>);

#[allow(unsafe_code)]
// SAFETY: a shared reference to a driver, and every driver is `Send` and `Sync`.
unsafe impl Send for DriverPtr {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for DriverPtr {}

/// A driver stream and its clock. It lives as long as its pool, or its last handle.
///
/// The fields that each use reads come first, next to the first ones of the clock.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct RawStream {
    pub(super) handle: StreamHandle,
    driver: DriverPtr,
    pub(super) clock: StreamClock<EventHandle, ClockHeaderRef>,
    priority: i32,
    /// Whether this object destroys the driver stream.
    is_owned: bool,
    /// The stamp of the last work before the open capture of the runtime.
    captured_tail: AtomicU64,
    /// The stamp of the last freed memory since the handle escaped.
    pub(super) last_free: AtomicU64,
    /// The bytes freed after the last event since the handle escaped.
    pub(super) free_without_event: AtomicU64,
    /// The number of further frees that record events for polls by other calls.
    pub(super) frees_with_events: AtomicU32,
    pub(super) device: Arc<CudaDevice>,
}

/// The tail of a stream whose capture is about to begin.
const UNRECORDED: u64 = u64::MAX;

/// A driver call on a stream, which keeps captures of the runtime from beginning there. It must not wait for the device.
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

    /// Wraps a stream that other code owns.
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
            frees_with_events: AtomicU32::new(0),
            device,
            driver,
        }
    }

    #[inline(always)]
    pub(super) fn driver(&self) -> &dyn Driver {
        #[allow(unsafe_code)]
        // SAFETY: the driver belongs to `device`, which keeps it alive.
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

    /// Marks that other code may capture this stream, before its handle is handed out. The caller has entered no call on it.
    pub(crate) fn mark_handle_escaped(&self) {
        let header = self.clock.header();
        if header.escape_is_settled() {
            return;
        }
        // Earlier frees did not note their stamp, nor do frees that do not see the mark yet.
        self.note_last_free();
        header.mark_handle_escaped();
        fence(Ordering::SeqCst);
        self.note_last_free();
        self.arm_free_events();
        // A query in progress would invalidate the first capture of other code.
        self.wait_for_calls();
        header.settle_escape();
    }

    fn wait_for_calls(&self) {
        while self.clock.header().has_calls() {
            scheduling_point();
            std::thread::yield_now();
        }
    }

    fn note_last_free(&self) {
        self.last_free.fetch_max(self.clock.now(), Ordering::AcqRel);
    }

    /// Refuses a stream under capture: its work does not run now, so no stamp can cover it.
    #[inline]
    pub(crate) fn check_not_capturing(&self, call: &'static str) -> DriverResult<()> {
        if self.handle_escaped() { self.query_capturing(call) } else { Ok(()) }
    }

    /// [`RawStream::check_not_capturing`] for the lifetime of the result.
    #[inline(always)]
    pub(crate) fn enter(&self, call: &'static str) -> DriverResult<CallGuard<'_>> {
        let entered = self.enter_call();
        self.check_not_capturing(call)?;
        Ok(entered)
    }

    /// Keeps captures of the runtime from beginning on this stream; one may already be open.
    #[inline(always)]
    pub(crate) fn enter_call(&self) -> CallGuard<'_> {
        self.clock.header().enter_call();
        CallGuard(self)
    }

    /// Prepares a capture of the runtime on this stream: waits for calls in progress, and records an event at the tail.
    pub(crate) fn begin_capture(&self) -> DriverResult<()> {
        let header = self.clock.header();
        self.captured_tail.store(UNRECORDED, Ordering::SeqCst);
        // Polls of freed memory use the last stamp from now on.
        self.note_last_free();
        header.begin_capture();
        self.wait_for_calls();
        let begun = self.clock.begin();
        let event = self.record_outside(begun, "capture").inspect_err(|_| header.end_capture())?;
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.query_event(covers, event);
        }
        // For reaps during the capture: the event at the tail covers all memory freed so far.
        self.last_free.fetch_max(begun.covers, Ordering::AcqRel);
        self.captured_tail.store(begun.covers, Ordering::Release);
        Ok(())
    }

    pub(crate) fn end_capture(&self) {
        self.clock.header().end_capture();
    }

    #[cold]
    fn query_capturing(&self, call: &'static str) -> DriverResult<()> {
        if self.clock.header().is_captured() {
            return Err(DriverError::invalid(
                call,
                format!("{}, whose capture is {:?}", self.handle, CaptureStatus::Active),
                "a stream that is not being captured into a graph",
            ));
        }
        self.query_capture(call)
    }

    fn query_capture(&self, call: &'static str) -> DriverResult<()> {
        match self.driver().stream_capture(self.handle)? {
            CaptureStatus::None => Ok(()),
            status => Err(DriverError::invalid(
                call,
                format!("{}, whose capture is {status:?}", self.handle),
                "a stream that is not being captured into a graph",
            )),
        }
    }

    /// Whether all work of a stream without other users is complete. False for a stream that cannot be queried.
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
            self.query_event(covers, event);
        }
        Ok(begun.covers)
    }

    /// [`RawStream::record_begun`] on a stream that other code may capture at any time.
    #[inline(always)]
    pub(super) fn record_outside(
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

    /// Confirms that no capture took an event that was just recorded. An event that may be captured is destroyed and never
    /// queried: a query would break the capture. Recording alone does not.
    #[cold]
    pub(super) fn confirm(
        &self,
        event: EventHandle,
        call: &'static str,
    ) -> DriverResult<EventHandle> {
        let driver = self.device.driver();
        // The query detects a capture that began and ended since the first check. It is safe: no open capture can have the event.
        let confirmed = self.query_capture(call).and_then(|()| driver.event_query(event));
        match confirmed {
            Ok(_) => Ok(event),
            Err(error) => {
                #[allow(unsafe_code)]
                // SAFETY: the caller drops the event, and no other thread has found it.
                let _ = unsafe { driver.event_destroy(event) };
                Err(error)
            }
        }
    }

    /// Calls the driver for an event that was begun. Reports only a failure to the clock.
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
    pub(super) fn query_event(&self, covers: u64, event: EventHandle) {
        // An event that cannot be queried counts as pending.
        let complete = matches!(self.device.driver().event_query(event), Ok(true));
        if complete {
            self.clock.completed_up_to(covers);
        }
        self.clock.note_poll(complete);
    }

    /// Orders later work of this stream after all work of `other` up to `stamp`, unless it already is.
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
                // Other threads can find the event only now, so it needed no pin.
                if let Some((covers, event)) = known.recorded(begun.covers, event) {
                    other.query_event(covers, event);
                }
                queued?;
            }
        }
        waits.inserted += 1;
        self.clock.join(known.slot(), cover.covers, &joined_clock);
        Ok(())
    }

    /// Waits for the work that a stream had queued before its capture by the runtime; returns `error` for any other stream.
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
            // The capturing thread is about to record the event, or to give up. A beginning capture of this stream waits for
            // this call, and the other capture may wait for that one.
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
}

/// Whether a call on a stream was refused because the stream is being captured.
pub(crate) fn is_capture_refusal(error: &DriverError) -> bool {
    matches!(error, DriverError::Invalid { .. })
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // Queued work still runs. Failures after the loss of the device are ignored.
        let driver = self.device.driver();
        #[allow(unsafe_code)]
        // SAFETY: this is the only owner of the events, and of a stream that it created.
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
