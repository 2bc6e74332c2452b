//! Decay: returns memory to the device that no request has needed for a while.
//!
//! A check compares the requests so far with those at the last check, and takes the low water of the free memory: what was free
//! all the time in between. The fast path does no work for this.
//!
//! | requests within `idle_decay` | what is returned, down to `release_threshold` |
//! |---|---|
//! | none | all free memory whose work has completed, magazines included |
//! | only from magazines | the same without the magazines |
//! | others | the low water of all checks, if it is at least 1/[`MIN_UNUSED`] of the pool |
//!
//! A busy pool therefore keeps what it needs at its peaks, and a quiet one returns its memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::PoolResource;
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::resource::ResourceResult;

/// Checks within one decay time.
const CHECKS_PER_DECAY: u32 = 4;
/// A smaller low water is kept: it is mostly fragments, and the next peak would take as much again.
const MIN_UNUSED: u64 = 8;

/// What requests needed of the free memory.
#[derive(Debug)]
pub(super) struct Demand {
    counted: Counted,
    /// The last check at which a request had needed memory outside the magazines.
    uncached_at: Instant,
    /// One for each check, or for several close ones. The oldest one is at least a decay time old, once there is such a one.
    low_waters: VecDeque<LowWater>,
}

/// Requests so far: all, and those that needed memory outside the magazines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Counted {
    all: u64,
    uncached: u64,
}

/// The bytes that were free all the time between the entry before and this one.
#[derive(Clone, Copy, Debug)]
struct LowWater {
    at: Instant,
    bytes: u64,
}

impl Demand {
    pub(super) fn new() -> Self {
        Self {
            counted: Counted::default(),
            uncached_at: Instant::now(),
            low_waters: VecDeque::new(),
        }
    }

    /// Adds the low water of a check, and returns that of the last `idle`; 0 before `idle` has passed.
    fn low_water(&mut self, new: LowWater, idle: Duration) -> u64 {
        // Checks may also come from reaps, as often as the caller likes. The last entry therefore covers at least this time.
        let minimum = idle / (2 * CHECKS_PER_DECAY);
        match self.low_waters.make_contiguous() {
            [.., before, last] if last.at.saturating_duration_since(before.at) < minimum => {
                *last = LowWater { at: new.at, bytes: last.bytes.min(new.bytes) };
            }
            _ => self.low_waters.push_back(new),
        }
        let is_old = |low: &LowWater| new.at.saturating_duration_since(low.at) >= idle;
        while self.low_waters.get(1).is_some_and(is_old) {
            self.low_waters.pop_front();
        }
        match self.low_waters.front().is_some_and(is_old) {
            true => self.low_waters.iter().skip(1).map(|low| low.bytes).min().unwrap_or(0),
            false => 0,
        }
    }
}

impl PoolResource {
    /// Returns the decay time; `None` without a decay, and for segments whose return waits for the device.
    fn decay_time(&self) -> Option<Duration> {
        self.config.idle_decay.filter(|_| !self.return_waits())
    }

    /// Returns the interval at which to call [`Self::return_idle_at`]; `None` without a decay.
    pub(super) fn decay_interval(&self) -> Option<Duration> {
        self.decay_time().map(|idle| (idle / CHECKS_PER_DECAY).max(Duration::from_millis(1)))
    }

    /// Returns memory that has been idle for `idle_decay` at `now` to the device. Returns the number of bytes.
    pub(super) fn return_idle_at(&self, now: Instant) -> ResourceResult<usize> {
        let Some(idle) = self.decay_time() else { return Ok(0) };
        let (keep, held) = (self.config.release_threshold, self.reserve.segments.reserved());
        if held <= keep as u64 {
            return Ok(0);
        }
        let sources = self.arenas.counts().0.sources.0;
        let all = sources.iter().sum();
        let counted = Counted { all, uncached: all - sources[ServedBy::Magazine as usize] };
        let low_water = LowWater { at: now, bytes: self.take_low_water() };
        let mut demand = self.demand.lock();
        let is_quiet = demand.counted.all == counted.all;
        if demand.counted.uncached != counted.uncached {
            demand.uncached_at = now;
        }
        demand.counted = counted;
        let is_idle = now.saturating_duration_since(demand.uncached_at) >= idle;
        let unused = demand.low_water(low_water, idle);
        drop(demand);
        if is_idle {
            // A pool that served requests keeps its magazines.
            return self.trim_idle(keep, is_quiet || idle.is_zero());
        }
        if unused < held / MIN_UNUSED {
            return Ok(0);
        }
        self.trim_idle(keep.max((held - unused) as usize), false)
    }

    /// Returns the bytes that were free all the time since the last call, without magazines.
    fn take_low_water(&self) -> u64 {
        let mut bytes = self.reserve.take_low_water();
        self.arenas.scan(|_, arena| bytes += arena.tlsf.take_low_water());
        bytes
    }
}
