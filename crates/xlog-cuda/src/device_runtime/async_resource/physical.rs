//! What the driver pool holds of the card, announced to a meter.
//!
//! The driver decides when its pool grows. A request that does not fit what the pool has reserved is announced with its own size
//! before it is made, and set right after by what the pool then says it holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use xlog_driver::sync::Mutex;
use xlog_driver::{AsyncPools, PoolHandle};

use crate::device_runtime::resource::{PhysicalMeter, ResourceResult};

#[derive(Default)]
pub(super) struct PhysicalBytes {
    metered: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    meter: Option<Arc<dyn PhysicalMeter>>,
    announced: usize,
}

impl PhysicalBytes {
    /// Begins to announce, with what is held already.
    pub(super) fn start(
        &self,
        pools: &dyn AsyncPools,
        pool: PoolHandle,
        meter: Arc<dyn PhysicalMeter>,
    ) -> ResourceResult<()> {
        let held = pools.pool_usage(pool)?.reserved as usize;
        let mut state = self.state.lock();
        meter.take(held)?;
        *state = State { meter: Some(meter), announced: held };
        self.metered.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes a request of `bytes`, announced before if the pool must grow for it.
    #[inline]
    pub(super) fn around<T>(
        &self,
        pools: &dyn AsyncPools,
        pool: PoolHandle,
        bytes: usize,
        request: impl FnOnce() -> ResourceResult<T>,
    ) -> ResourceResult<T> {
        if !self.metered.load(Ordering::Acquire) {
            return request();
        }
        let usage = pools.pool_usage(pool)?;
        let room = usage.reserved.saturating_sub(usage.used) as usize;
        let ahead = if bytes > room { bytes } else { 0 };
        {
            let mut state = self.state.lock();
            if let (Some(meter), 1..) = (&state.meter, ahead) {
                meter.take(ahead)?;
                state.announced += ahead;
            }
        }
        let outcome = request();
        self.settle(pools, pool);
        outcome
    }

    /// Sets the announced bytes right by what the pool holds now.
    pub(super) fn settle(&self, pools: &dyn AsyncPools, pool: PoolHandle) {
        if !self.metered.load(Ordering::Acquire) {
            return;
        }
        let Ok(usage) = pools.pool_usage(pool) else { return };
        let held = usage.reserved as usize;
        let mut state = self.state.lock();
        let Some(meter) = state.meter.clone() else { return };
        if held < state.announced {
            meter.give(state.announced - held);
            state.announced = held;
        } else if held > state.announced && meter.take(held - state.announced).is_ok() {
            // The memory is taken already: a meter that refuses it now is asked again at the next call.
            state.announced = held;
        }
    }
}
