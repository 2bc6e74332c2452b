//! A driver stream and its clock: events, waits and completion.
//!
//! Invariants:
//! - A stamp is taken before its event is recorded, so an event covers all work queued under its stamp.
//! - The clock learns that a stamp is covered only after the driver accepted the call.
//! - A stream under capture is refused: its work does not run now, so no stamp can stand for it.
//! - A capture of the runtime begins between driver calls: a call under a [`CallGuard`] is over before the capture begins.
//! - A capture of other code may begin at any time on a stream whose handle has escaped. So such a stream is never queried, and an event that is
//!   recorded on it counts only after the driver has confirmed that no capture took it. Queries of confirmed events break no capture.
//! - Driver 580 may crash when an event is recorded on such a stream while another thread begins or ends a capture there. So frees, which name the
//!   stream, record events: for 256 frees after the handle is taken, and after each poll by another call ([`RawStream::poll_freed`]).
//! - Before a capture of the runtime begins, an event is recorded at the tail: other streams can wait for earlier work during the capture.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use xlog_driver::sync::scheduling_point;
use xlog_driver::{CaptureStatus, Driver, DriverError, DriverResult, EventHandle, StreamHandle};

use crate::CudaDevice;
use crate::device_runtime::ordering::clock::clock_headers::ClockHeaderRef;
use crate::device_runtime::ordering::clock::stream_clock::{Begun, StreamClock};
use crate::device_runtime::ordering::tracking::striped_counters::{StripedCounters, WaitCounts};

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
    pub(super) handle: StreamHandle,
    /// The driver of `device`.
    driver: DriverPtr,
    pub(super) clock: StreamClock<EventHandle, ClockHeaderRef>,
    priority: i32,
    /// Whether this object destroys the driver stream.
    is_owned: bool,
    /// The stamp of the last work before the capture of the runtime that is open.
    captured_tail: AtomicU64,
    /// The stamp of the memory that became free last, since the handle has escaped.
    pub(super) last_free: AtomicU64,
    /// The bytes that became free after the last event, since the handle has escaped.
    pub(super) free_without_event: AtomicU64,
    /// How many more frees record events for polls by other calls.
    pub(super) frees_with_events: AtomicU32,
    pub(super) device: Arc<CudaDevice>,
}

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
            frees_with_events: AtomicU32::new(0),
            device,
            driver,
        }
    }

    #[inline(always)]
    pub(super) fn driver(&self) -> &dyn Driver {
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

    /// From now on other code may capture this stream. The caller has entered no call on it.
    pub(crate) fn mark_handle_escaped(&self) {
        let header = self.clock.header();
        if header.handle_is_known() {
            return;
        }
        // What became free so far did not note its stamp, nor does what becomes free before the mark is seen.
        self.note_last_free();
        header.mark_handle_escaped();
        fence(Ordering::SeqCst);
        self.note_last_free();
        self.arm_free_events();
        // A query under way would invalidate the first capture of other code.
        self.wait_for_calls();
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
        // From now on polls of what became free ask for the last stamp.
        self.note_last_free();
        header.begin_capture();
        self.wait_for_calls();
        let begun = self.clock.begin();
        let event = self.record_outside(begun, "capture").inspect_err(|_| header.end_capture())?;
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.ask(covers, event);
        }
        // For reaps during the capture: the event at the tail covers all memory that is free by now.
        self.last_free.fetch_max(begun.covers, Ordering::AcqRel);
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

    /// Makes sure that no capture took an event that was just recorded. One that may be captured is destroyed and never queried: that
    /// would break the capture. Recording alone does not.
    #[cold]
    pub(super) fn confirm(
        &self,
        event: EventHandle,
        call: &'static str,
    ) -> DriverResult<EventHandle> {
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
    pub(super) fn ask(&self, covers: u64, event: EventHandle) {
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
}

/// Whether a call on a stream was refused because the stream is being captured.
pub(crate) fn is_capture_refusal(error: &DriverError) -> bool {
    matches!(error, DriverError::Invalid { .. })
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
