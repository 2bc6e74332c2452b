//! Decay: returns memory to the device that no request has needed for a while.
//!
//! A check compares the requests so far with those at the last check, and reads the low water of the free memory: what was free
//! all the time in between, so that no request needed it. For this, each allocation keeps a minimum for its arena.
//!
//! docs/pool.md, "Decay", lists what is returned after which requests.
//!
//! Memory whose work is pending stays, and counts as needed before idle memory of the same arena does.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::PoolResource;
use super::arena::ArenaCounts;
use super::trim::Trim;
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::resource::ResourceResult;

/// Checks within one decay time.
const CHECKS_PER_DECAY: u32 = 4;
/// A smaller low water is kept: it is mostly fragments, and the next peak would take as much again.
const MIN_UNNEEDED: u64 = 8;

/// Demand of requests for free memory.
#[derive(Debug)]
pub(super) struct Demand {
    counted: Counted,
    checked_at: Instant,
    /// The last check at which requests had been served.
    requested_at: Instant,
    /// The last check at which a request had needed memory outside the magazines.
    uncached_at: Instant,
    /// One for each check. The oldest one is at least a decay time old, once there is such a one.
    low_waters: VecDeque<LowWater>,
}

/// Requests so far: all, and those that needed memory outside the magazines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Counted {
    all: u64,
    uncached: u64,
}

/// The bytes that were free all the time between the check before and this one.
#[derive(Clone, Copy, Debug)]
struct LowWater {
    at: Instant,
    bytes: u64,
}

impl Demand {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            counted: Counted::default(),
            checked_at: now,
            requested_at: now,
            uncached_at: now,
            low_waters: VecDeque::new(),
        }
    }

    #[cfg(test)]
    pub(super) fn checks(&self) -> usize {
        self.low_waters.len()
    }

    /// Notes the requests counted so far.
    fn note(&mut self, counted: Counted, now: Instant) {
        if self.counted.all != counted.all {
            self.requested_at = now;
        }
        if self.counted.uncached != counted.uncached {
            self.uncached_at = now;
        }
        self.counted = counted;
    }

    /// Adds the low water of a check, and returns that of the last `idle`; 0 before `idle` has passed.
    fn low_water(&mut self, new: LowWater, idle: Duration) -> u64 {
        self.low_waters.push_back(new);
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

    /// [`Self::return_idle_at`], unless the last check was less than an interval before. For callers that come as often as they like.
    pub(super) fn return_idle_if_due(&self, now: Instant) -> ResourceResult<usize> {
        let Some(idle) = self.decay_time() else { return Ok(0) };
        let since = now.saturating_duration_since(self.demand.lock().checked_at);
        if since < idle / CHECKS_PER_DECAY { Ok(0) } else { self.return_idle_at(now) }
    }

    /// Returns memory that has been idle for `idle_decay` at `now` to the device. Returns the number of bytes.
    pub(super) fn return_idle_at(&self, now: Instant) -> ResourceResult<usize> {
        let Some(idle) = self.decay_time() else { return Ok(0) };
        let keep = self.config.release_threshold;
        let mut demand = self.demand.lock();
        demand.checked_at = now;
        let held = self.reserve.segments.reserved();
        if held <= keep as u64 {
            return Ok(0);
        }
        let (counted, low_water) = self.read_demand();
        demand.note(counted, now);
        let unneeded = demand.low_water(LowWater { at: now, bytes: low_water }, idle);
        let is_old = |at: Instant| now.saturating_duration_since(at) >= idle;
        let trim = if is_old(demand.uncached_at) {
            // A pool that served requests keeps its magazines.
            Trim { keep, flushes: is_old(demand.requested_at), unneeded: None }
        } else if unneeded >= held / MIN_UNNEEDED {
            Trim { keep, flushes: false, unneeded: Some(unneeded) }
        } else {
            self.restart_low_waters();
            return Ok(0);
        };
        drop(demand);
        let returned = self.trim_by(trim);
        self.restart_low_waters();
        if !matches!(returned, Ok(0)) {
            // What was not needed has gone.
            self.demand.lock().low_waters.clear();
        }
        returned
    }

    /// Returns the requests so far, and the bytes that no request has needed since the last check, without magazines.
    fn read_demand(&self) -> (Counted, u64) {
        let mut counts = ArenaCounts::default();
        let mut low_water = self.reserve.with_shared_free(|tlsf| tlsf.low_water());
        self.arenas.visit(|arena| {
            counts.add(&arena.counts);
            low_water += arena.tlsf.low_water();
        });
        let sources = counts.sources;
        let all = sources.iter().sum();
        (Counted { all, uncached: all - sources[ServedBy::Magazine as usize] }, low_water)
    }

    fn restart_low_waters(&self) {
        self.reserve.with_shared_free(|tlsf| tlsf.restart_low_water());
        self.arenas.visit(|arena| arena.tlsf.restart_low_water());
    }
}
