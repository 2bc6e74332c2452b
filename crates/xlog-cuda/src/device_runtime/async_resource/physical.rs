//! What the driver pool holds of the card, announced to a meter.
//!
//! The driver decides when its pool grows, and by how much. A request that does not fit what the pool has free is announced before
//! it is made, with what drivers grow by, and set right after by what the pool then says it holds. A pool that grew
//! unforeseen (its free memory was in pieces, or behind other streams) is announced at once after. If the meter refuses
//! that, the block goes back, the request is refused, and so is every other until the excess was trimmed or announced.
//!
//! Invariant: what is announced covers what the pool holds, but for growth under way and unforeseen steps, one for each
//! thread that met them at once, that could not be trimmed yet. Nobody waits with the lock held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use xlog_driver::sync::{Mutex, scheduling_point};

use super::driver_pools::DriverPools;
use crate::device_runtime::resource::{PhysicalMeter, ResourceResult};

/// What drivers are known to grow a pool by, at least, and in multiples of.
const GROWTH: usize = 32 << 20;
const GRAIN: usize = 2 << 20;
/// What driver pools hand memory out in multiples of.
const CHUNK: usize = 512;

/// How often, and how far apart, a pool is trimmed of what the meter refused before that is left to the next call.
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
    /// Of those, what was announced for requests that are being made: the pool may be about to hold it.
    ahead: usize,
    /// Free memory of the pool that requests being made are expected to be served from.
    claimed: usize,
    /// The pool holds what the meter refused.
    is_over: bool,
}

/// What a request that is being made has in the books.
#[derive(Clone, Copy)]
enum Part {
    /// Announced, because the pool must grow for it.
    Ahead(usize),
    /// Expected to be served from what the pool has free.
    Claimed(usize),
}

impl PhysicalBytes {
    /// Begins to announce, with what is held already.
    pub(super) fn start(
        &self,
        pools: &DriverPools,
        meter: Arc<dyn PhysicalMeter>,
    ) -> ResourceResult<()> {
        let held = pools.usage()?.reserved as usize;
        meter.take(held)?;
        *self.state.lock() = State { meter: Some(meter), announced: held, ..State::default() };
        self.metered.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether there is a meter to announce to.
    #[inline]
    pub(super) fn is_metered(&self) -> bool {
        self.metered.load(Ordering::Acquire)
    }

    /// Makes a request of `bytes`, announced before if the pool must grow for it. What the meter refuses after is undone.
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
                // What is still in the way of a trim is the next call's affair.
                let _ = self.recover(pools);
                Err(error)
            }
            (outcome, _) => outcome,
        }
    }

    fn meter(&self) -> Option<Arc<dyn PhysicalMeter>> {
        self.state.lock().meter.clone()
    }

    /// Whether a request fits what the pool has free and nobody else is about to take.
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
            meter.take(ahead)?;
            let mut state = self.state.lock();
            state.announced += ahead;
            state.ahead += ahead;
        }
        Ok(())
    }

    /// Lets go of what the meter does not grant, or has it granted after all. A free on a stream may be in the way for a while.
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

    /// Sets the announced bytes right by what the pool holds now. What the meter refuses is asked for again by the next call.
    pub(super) fn reconcile(&self, pools: &DriverPools) {
        if self.metered.load(Ordering::Acquire) {
            let _ = self.correct(pools, Part::Claimed(0));
        }
    }

    /// A request with this part in the books is over. An error: the pool holds what the meter does not grant.
    fn correct(&self, pools: &DriverPools, part: Part) -> ResourceResult<()> {
        let (meter, missing) = {
            let mut state = self.state.lock();
            match part {
                Part::Ahead(bytes) => state.ahead -= bytes,
                Part::Claimed(bytes) => state.claimed -= bytes,
            }
            let Some(meter) = state.meter.clone() else { return Ok(()) };
            // Asked with the lock held: growth that this does not see is of requests that correct it themselves. A failed query
            // corrects nothing: what is announced stays.
            let Ok(usage) = pools.usage() else { return Ok(()) };
            let held = usage.reserved as usize;
            let surplus = state.announced.saturating_sub(held.saturating_add(state.ahead));
            if surplus > 0 {
                state.announced -= surplus;
                // A give never waits.
                meter.give(surplus);
            }
            state.is_over &= held > state.announced;
            (meter, held.saturating_sub(state.announced))
        };
        if missing == 0 {
            return Ok(());
        }
        let taken = meter.take(missing);
        let mut state = self.state.lock();
        state.is_over = taken.is_err();
        if taken.is_ok() {
            state.announced += missing;
        }
        taken
    }
}

/// What the pool will grow by for a request that does not fit.
fn foreseen(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(GRAIN).unwrap_or(bytes).max(GROWTH)
}
