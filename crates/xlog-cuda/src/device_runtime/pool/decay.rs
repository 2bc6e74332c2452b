//! Decay: returns memory to the device that no request has needed for a while.
//!
//! The pool counts how each request was served. If the magazines served all requests for `idle_decay`, the free ranges were
//! idle all that time. Those whose work has completed are returned, down to `release_threshold`. Without any request the
//! magazines are flushed first. A busy pool therefore keeps its cache, and a quiet one returns it. The fast path does no
//! work for this.

use std::time::{Duration, Instant};

use super::PoolResource;
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::resource::ResourceResult;

/// Checks within one decay time.
const LOOKS: u32 = 4;

/// The counts at the last check, and since when no request needed memory outside the magazines.
#[derive(Clone, Copy, Debug)]
pub(super) struct LastLook {
    counted: Counted,
    since: Instant,
}

/// Requests so far: all, and those that needed memory outside the magazines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Counted {
    all: u64,
    uncached: u64,
}

impl LastLook {
    pub(super) fn new() -> Self {
        Self { counted: Counted::default(), since: Instant::now() }
    }
}

impl PoolResource {
    /// Returns the decay time; `None` without a decay, and for segments whose return waits for the device.
    fn decay_time(&self) -> Option<Duration> {
        self.config.idle_decay.filter(|_| !self.return_waits())
    }

    /// Returns the interval at which to call [`Self::return_idle_at`]; `None` without a decay.
    pub(super) fn decay_interval(&self) -> Option<Duration> {
        self.decay_time().map(|idle| (idle / LOOKS).max(Duration::from_millis(1)))
    }

    /// Returns memory that has been idle for `idle_decay` at `now` to the device. Returns the number of bytes.
    pub(super) fn return_idle_at(&self, now: Instant) -> ResourceResult<usize> {
        let Some(idle) = self.decay_time() else { return Ok(0) };
        let keep = self.config.release_threshold;
        if self.reserve.segments.reserved() <= keep as u64 {
            return Ok(0);
        }
        let sources = self.arenas.counts().0.sources.0;
        let all = sources.iter().sum();
        let counted = Counted { all, uncached: all - sources[ServedBy::Magazine as usize] };
        let mut last = self.last_look.lock();
        let is_quiet = last.counted.all == counted.all;
        if last.counted.uncached != counted.uncached {
            last.since = now;
        }
        last.counted = counted;
        let since = last.since;
        drop(last);
        if now.saturating_duration_since(since) < idle {
            return Ok(0);
        }
        // A pool that served requests keeps its magazines.
        self.trim_idle(keep, is_quiet || idle.is_zero())
    }
}
