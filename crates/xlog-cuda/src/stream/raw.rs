//! A driver stream and its clock: events, waits and completion.
//!
//! Invariants:
//! - A stamp is taken before its event is recorded, so an event covers all work queued under its stamp.
//! - The clock learns that a stamp is covered only after the driver accepted the call.
//! - A stream under capture is refused: its work does not run now, so no stamp can stand for it.

use std::ptr::NonNull;
use std::sync::Arc;

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

/// An owned driver stream and its clock. It lives as long as its pool, or longer if a handle is left.
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
    pub(super) device: Arc<CudaDevice>,
}

impl RawStream {
    /// Creates the stream of a slot.
    pub(crate) fn create(
        device: Arc<CudaDevice>,
        priority: i32,
        slot: u32,
        header: ClockHeaderRef,
    ) -> DriverResult<Self> {
        let driver = DriverPtr(NonNull::from(device.driver().as_ref()));
        let handle = device.driver().stream_create(priority)?;
        Ok(Self { clock: StreamClock::new(slot, header), handle, priority, device, driver })
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

    /// Refuses a stream under capture: its work does not run now, so no stamp can stand for it.
    #[inline]
    pub(crate) fn check_not_capturing(&self, call: &'static str) -> DriverResult<()> {
        if self.clock.header().handle_escaped() { self.ask_capturing(call) } else { Ok(()) }
    }

    #[cold]
    fn ask_capturing(&self, call: &'static str) -> DriverResult<()> {
        match self.device.driver().stream_capture(self.handle)? {
            CaptureStatus::None => Ok(()),
            status => Err(DriverError::invalid(
                call,
                format!("{}, whose capture is {status:?}", self.handle),
                "a stream that is not being captured into a graph",
            )),
        }
    }

    /// Whether all its work is known to be done. False for a stream that cannot be queried.
    pub(crate) fn is_done(&self) -> bool {
        // A query would invalidate a capture.
        if self.check_not_capturing("stream_query").is_err() {
            return false;
        }
        matches!(self.device.driver().stream_is_idle(self.handle), Ok(true))
    }

    /// Records an event at the tail of this stream; returns the stamp that it covers.
    #[inline(always)]
    pub(crate) fn record(&self, counters: &StripedCounters) -> DriverResult<u64> {
        self.check_not_capturing("event_record")?;
        let begun = self.clock.begin();
        let event = self.record_begun(begun)?;
        counters.count(|counts| counts.recorded += 1);
        if let Some((covers, event)) = self.clock.recorded(begun.covers, event) {
            self.ask(covers, event);
        }
        Ok(begun.covers)
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
        self.check_not_capturing("stream_wait_event")?;
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
                if let Err(error) = other.check_not_capturing("event_record") {
                    known.failed(begun.covers, begun.recycled);
                    return Err(error);
                }
                let event = other.record_begun(begun)?;
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

    /// Asks whether everything up to `stamp` has completed.
    pub(crate) fn poll(&self, stamp: u64) -> Completion {
        if self.clock.is_complete(stamp) {
            return Completion::Complete;
        }
        let Some(recorded) = self.clock.find(stamp) else { return Completion::Unrecorded };
        // An event that cannot be queried counts as pending.
        let complete = matches!(self.device.driver().event_query(recorded.event), Ok(true));
        if complete {
            self.clock.completed_up_to(recorded.covers);
        }
        self.clock.unpin();
        if complete { Completion::Complete } else { Completion::Pending }
    }

    /// Whether everything queued so far, and so every stamp up to now, has completed. Never waits.
    pub(crate) fn poll_tail(&self) -> bool {
        if self.check_not_capturing("stream_query").is_err() {
            return false;
        }
        // Others rely on the result, so it is more than housekeeping.
        matches!(self.with_tail(|driver| driver.stream_query(self.handle)), Ok(true))
    }

    /// [`RawStream::with_tail`] if this thread owns the clock. For the stream of another thread it only queries the
    /// driver: moving the clock would revoke that thread's bias.
    pub(super) fn with_own_tail(
        &self,
        ask: impl FnOnce(&dyn Driver) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        match self.clock.is_local() {
            true => self.with_tail(ask),
            false => ask(self.device.driver().as_ref()),
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
        let wait = |driver: &dyn Driver, event| driver.event_synchronize(event).map(|()| true);
        self.synchronize_by(counters, wait).map(|(covers, _)| covers)
    }

    /// [`RawStream::synchronize`] within the deadline of the running call; false if that was too short.
    pub(crate) fn synchronize_in_time(&self, counters: &StripedCounters) -> DriverResult<bool> {
        match device_wait::left() {
            None => self.synchronize(counters).map(|_| true),
            Some(left) if left.is_zero() => Ok(false),
            Some(_) => {
                let wait =
                    |driver: &dyn Driver, event| device_wait::poll(|| driver.event_query(event));
                self.synchronize_by(counters, wait).map(|(_, done)| done)
            }
        }
    }

    /// Records an event at the tail and waits for it by `wait`, which returns whether it has completed.
    fn synchronize_by(
        &self,
        counters: &StripedCounters,
        wait: impl FnOnce(&dyn Driver, EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<(u64, bool)> {
        self.check_not_capturing("event_record")?;
        let begun = self.clock.begin();
        let (covers, event) = (begun.covers, self.record_begun(begun)?);
        let ask = self.clock.recorded_pinned(covers, event);
        counters.count(|counts| counts.recorded += 1);
        if let Some((covers, event)) = ask {
            self.ask(covers, event);
        }
        let waited = wait(self.device.driver().as_ref(), event);
        if matches!(waited, Ok(true)) {
            self.clock.completed_up_to(covers);
        }
        self.clock.unpin();
        waited.map(|done| (covers, done))
    }
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
        // SAFETY: this is the only owner of the stream and its events.
        unsafe {
            let _ = driver.stream_destroy(self.handle);
            for event in self.clock.drain() {
                let _ = driver.event_destroy(event);
            }
        }
    }
}
