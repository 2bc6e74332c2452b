//! The streams of one device, and a wait for all of them.
//!
//! `cuCtxSynchronize` breaks every capture that is open in the process, in any capture mode. The runtime only needs the completion of the
//! work on its own streams, so this list records an event on each stream that is not idle and waits for those events. No event can be
//! recorded on a captured stream: it is left out, and the result reports that its earlier work may still run.
//!
//! Invariants: a stream is in the list from its creation until just before its destruction. An event represents the pending work of a
//! destroyed stream; if none could be recorded, every later wait reports [`Waited::ForSome`]. No lock is held while the host waits. In
//! every call the context is current and the capture mode relaxed.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUstream};

use super::abi::{self, code};
use super::context::Context;
use crate::sync::Mutex;
use crate::{DriverResult, Waited};

#[derive(Default)]
pub(super) struct Streams {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: Vec<Stream>,
    /// Events behind the last work of destroyed streams.
    departed: Vec<Arc<Event>>,
    /// A stream was destroyed with pending work behind which no event was recorded.
    has_untraced: bool,
}

/// The state of the work queued on a stream.
enum Tail {
    Idle,
    Queued(Event),
    /// The stream is being captured: no event can signal the completion of earlier work.
    Captured,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Stream(CUstream);

// SAFETY: a stream handle is a name the driver accepts on every thread.
unsafe impl Send for Stream {}

/// An event that is destroyed on drop, in a bound context.
struct Event {
    event: CUevent,
    destroy: unsafe extern "C" fn(CUevent) -> u32,
}

// SAFETY: an event handle is a name the driver accepts on every thread; the driver does its own locking.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event behind everything queued on `stream`, unless it is idle or captured.
    fn at_tail(context: &Context, stream: CUstream) -> DriverResult<Tail> {
        let calls = &context.api.calls;
        if context.capture_status(stream)? != abi::CAPTURE_NONE {
            return Ok(Tail::Captured);
        }
        // SAFETY: the stream is not destroyed while the caller holds the list.
        let code = unsafe { (calls.stream_query)(stream) };
        if context.check_query("cuStreamQuery", code)? {
            return Ok(Tail::Idle);
        }
        let event = context.create_event()?;
        let tail = Self { event, destroy: calls.event_destroy };
        // SAFETY: the event was just created; the stream is not destroyed while the caller holds the list.
        let code = unsafe { (calls.event_record)(event, stream) };
        context.check("cuEventRecord", code)?;
        Ok(Tail::Queued(tail))
    }

    fn is_complete(&self, context: &Context) -> bool {
        // SAFETY: the event lives as long as this.
        unsafe { (context.api.calls.event_query)(self.event) == code::SUCCESS }
    }

    fn synchronize(&self, context: &Context) -> DriverResult<()> {
        // SAFETY: the event lives as long as this.
        let code = unsafe { (context.api.calls.event_synchronize)(self.event) };
        context.check("cuEventSynchronize", code)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this value created the event, and no other thread has its handle. A pending record completes unobserved.
        unsafe { (self.destroy)(self.event) };
    }
}

impl Streams {
    /// Adds a stream that was just created.
    pub(super) fn add(&self, stream: CUstream) {
        self.state.lock().live.push(Stream(stream));
    }

    /// Removes a stream that is about to be destroyed. Its queued work still runs, and later waits include it.
    ///
    /// If no event can be recorded, every later wait returns [`Waited::ForSome`].
    pub(super) fn depart(&self, context: &Context, stream: CUstream) {
        let mut state = self.state.lock();
        state.live.retain(|live| live.0 != stream);
        state.departed.retain(|event| !event.is_complete(context));
        match Event::at_tail(context, stream) {
            Ok(Tail::Idle) => {}
            Ok(Tail::Queued(tail)) => state.departed.push(Arc::new(tail)),
            Ok(Tail::Captured) | Err(_) => state.has_untraced = true,
        }
    }

    /// Waits until everything queued so far has completed, except what [`Waited::ForSome`] excludes.
    pub(super) fn synchronize(&self, context: &Context) -> DriverResult<Waited> {
        let (events, waited) = {
            let state = self.state.lock();
            let mut events = state.departed.clone();
            let mut waited = if state.has_untraced { Waited::ForSome } else { Waited::ForAll };
            for stream in &state.live {
                match Event::at_tail(context, stream.0)? {
                    Tail::Idle => {}
                    Tail::Queued(tail) => events.push(Arc::new(tail)),
                    Tail::Captured => waited = Waited::ForSome,
                }
            }
            (events, waited)
        };
        events.iter().try_for_each(|event| event.synchronize(context))?;
        self.state.lock().departed.retain(|event| !event.is_complete(context));
        Ok(waited)
    }

    /// Drops all streams and events. The context is current.
    pub(super) fn tear_down(&self) {
        *self.state.lock() = State::default();
    }
}
