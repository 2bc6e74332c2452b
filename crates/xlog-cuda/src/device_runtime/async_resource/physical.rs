//! Reports the device memory that the driver pool holds to a meter.
//!
//! The driver decides when its pool grows, and by how much. A request that exceeds the free memory of the pool first charges
//! the meter with the step by which drivers grow; afterwards the charge is corrected to the pool's usage. Unforeseen growth,
//! by fragmentation or by memory pending on other streams, is charged right after. If the meter refuses that, the block is
//! freed and the request refused, as is every other request until the excess is trimmed or charged.
//!
//! Invariant: the charged bytes (`announced`) cover the bytes that the pool holds, except for growth in flight and for unforeseen steps
//! that could not be trimmed yet, one for each concurrent thread. No thread waits with the lock held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use xlog_driver::sync::{Mutex, scheduling_point};

use super::driver_pools::DriverPools;
use crate::device_runtime::resource::{PhysicalMeter, ResourceResult};

/// The minimum step by which drivers grow a pool, and its unit.
const GROWTH: usize = 32 << 20;
const GRAIN: usize = 2 << 20;
/// The unit in which driver pools hand out memory.
const CHUNK: usize = 512;

/// Attempts to trim excess bytes, and the pause between them.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_micros(500);

#[derive(Default)]
pub(super) struct PhysicalBytes {
    metered: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    meter: Option<Arc<dyn PhysicalMeter>>,
    announced: usize,
    /// The part of `announced` for requests in flight.
    ahead: usize,
    /// Free memory of the pool that requests in flight are expected to use.
    claimed: usize,
    /// Whether the pool holds bytes that the meter refused.
    is_over: bool,
}

#[derive(Clone, Copy)]
enum Part {
    /// Charged, because the pool must grow.
    Ahead(usize),
    /// Expected to fit into the free memory of the pool.
    Claimed(usize),
}

impl PhysicalBytes {
    /// Installs the meter, and charges the bytes held now.
    pub(super) fn start(
        &self,
        pools: &DriverPools,
        meter: Arc<dyn PhysicalMeter>,
    ) -> ResourceResult<()> {
        let held = pools.usage()?.reserved as usize;
        meter.charge(held)?;
        *self.state.lock() = State { meter: Some(meter), announced: held, ..State::default() };
        self.metered.store(true, Ordering::Release);
        Ok(())
    }

    #[inline]
    pub(super) fn is_metered(&self) -> bool {
        self.metered.load(Ordering::Acquire)
    }

    /// Makes a request of `bytes`, charged first if the pool must grow. `undo` frees a result that the meter refuses.
    #[inline(never)]
    pub(super) fn around<T>(
        &self,
        pools: &DriverPools,
        bytes: usize,
        request: impl FnOnce() -> ResourceResult<T>,
        undo: impl FnOnce(T),
    ) -> ResourceResult<T> {
        if self.state.lock().is_over {
            self.recover(pools)?;
        }
        let part = self.claim(pools, bytes)?;
        if let Part::Ahead(bytes) = part {
            self.announce(bytes)?;
        }
        let outcome = request();
        match (outcome, self.correct(pools, part)) {
            (Ok(given), Err(error)) => {
                undo(given);
                // The next call retries a failed trim.
                let _ = self.recover(pools);
                Err(error)
            }
            (outcome, _) => outcome,
        }
    }

    fn meter(&self) -> Option<Arc<dyn PhysicalMeter>> {
        self.state.lock().meter.clone()
    }

    /// Whether a request fits into the free memory of the pool that no request in flight claims.
    fn claim(&self, pools: &DriverPools, bytes: usize) -> ResourceResult<Part> {
        let mut state = self.state.lock();
        let usage = pools.usage()?;
        let room = usage.reserved.saturating_sub(usage.used) as usize;
        let claimed = bytes.checked_next_multiple_of(CHUNK).unwrap_or(bytes);
        if claimed > room.saturating_sub(state.claimed) {
            return Ok(Part::Ahead(foreseen(bytes)));
        }
        state.claimed += claimed;
        Ok(Part::Claimed(claimed))
    }

    fn announce(&self, ahead: usize) -> ResourceResult<()> {
        if let Some(meter) = self.meter() {
            meter.charge(ahead)?;
            let mut state = self.state.lock();
            state.announced += ahead;
            state.ahead += ahead;
        }
        Ok(())
    }

    /// Trims the excess, or charges it after all. A pending free may delay a trim.
    #[cold]
    fn recover(&self, pools: &DriverPools) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
                scheduling_point();
            }
            let announced = self.state.lock().announced;
            let _ = pools.trim(announced as u64);
            outcome = self.correct(pools, Part::Claimed(0));
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    /// Corrects the charge to the bytes that the pool holds. The next call charges again after a refusal.
    pub(super) fn reconcile(&self, pools: &DriverPools) {
        if self.metered.load(Ordering::Acquire) {
            let _ = self.correct(pools, Part::Claimed(0));
        }
    }

    /// Ends a request in flight. Fails if the pool holds bytes that the meter refuses.
    fn correct(&self, pools: &DriverPools, part: Part) -> ResourceResult<()> {
        let (meter, missing) = {
            let mut state = self.state.lock();
            match part {
                Part::Ahead(bytes) => state.ahead -= bytes,
                Part::Claimed(bytes) => state.claimed -= bytes,
            }
            let Some(meter) = state.meter.clone() else { return Ok(()) };
            // Queried with the lock held: requests in flight correct the growth that this does not see. If the query fails, the
            // charge stays.
            let Ok(usage) = pools.usage() else { return Ok(()) };
            let held = usage.reserved as usize;
            let surplus = state.announced.saturating_sub(held.saturating_add(state.ahead));
            if surplus > 0 {
                state.announced -= surplus;
                // A release never waits.
                meter.release(surplus);
            }
            state.is_over &= held > state.announced;
            (meter, held.saturating_sub(state.announced))
        };
        if missing == 0 {
            return Ok(());
        }
        let taken = meter.charge(missing);
        let mut state = self.state.lock();
        state.is_over = taken.is_err();
        if taken.is_ok() {
            state.announced += missing;
        }
        taken
    }
}

/// Returns the growth that a request causes if it does not fit.
fn foreseen(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(GRAIN).unwrap_or(bytes).max(GROWTH)
}
