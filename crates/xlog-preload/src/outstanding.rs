//! Streams with frees that may not have taken effect.
//!
//! The driver returns memory of pools and graphs at a synchronisation that covers their frees: of the stream, of an event behind the free,
//! or of the context. While any stream is listed here, every synchronisation corrects the charges.
//!
//! A stream is added before the driver frees and again afterwards, because another thread may synchronise in between. It is removed before
//! a synchronisation that covers it, because later frees are not covered. An event does not reveal what it covers, and a stream may be
//! destroyed, so all streams are removed once no pool or graph has memory left to return.

use std::sync::atomic::{AtomicBool, Ordering};

use xlog_base::Mutex;

use crate::log::{per_thread, thread};
use crate::state::State;
use xlog_base::IntSet;

/// A context and a stream in it. Per-thread default streams have numbers that no handle has.
pub(crate) type Stream = (u64, u64);

/// An entry for a pool whose charge could not be corrected because it was locked. Every synchronisation covers it.
pub(crate) const MISSED: Stream = (0, 0);

#[derive(Default)]
pub(crate) struct Outstanding {
    /// True if a stream is listed. Written with the streams locked.
    is_any: AtomicBool,
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    streams: IntSet<Stream>,
    /// The number of additions.
    changes: u64,
}

impl Outstanding {
    pub(crate) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    pub(crate) fn note(&self, streams: impl IntoIterator<Item = Stream>) {
        let mut noted = self.noted.lock();
        noted.streams.extend(streams);
        noted.changes += 1;
        self.is_any.store(!noted.streams.is_empty(), Ordering::Release);
    }

    /// Removes and returns the streams that a synchronisation covers. [`is_any`](Self::is_any) stays set until the charges are corrected.
    pub(crate) fn take(&self, is_covered: impl Fn(&Stream) -> bool) -> Vec<Stream> {
        let is_covered = |stream: &Stream| *stream == MISSED || is_covered(stream);
        let mut noted = self.noted.lock();
        let covered = noted.streams.iter().copied().filter(is_covered).collect();
        noted.streams.retain(|stream| !is_covered(stream));
        covered
    }

    pub(crate) fn changes(&self) -> u64 {
        self.noted.lock().changes
    }

    /// Ends a correction that began after `changes` additions. Removes all streams if nothing `is_left` to return.
    pub(crate) fn settle(&self, changes: u64, is_left: bool) {
        let mut noted = self.noted.lock();
        if !is_left && noted.changes == changes {
            noted.streams.clear();
        }
        self.is_any.store(!noted.streams.is_empty(), Ordering::Release);
    }
}

/// The stream that a handle means in a call of this thread.
pub(crate) fn stream_of(state: &State, handle: u64) -> Stream {
    let stream = if handle == per_thread(0) { !thread() } else { handle };
    (state.driver.current_context().unwrap_or(0), stream)
}
