//! The driver pools that blocks come from: the device's own or, under a cap, pools of this resource with a maximum.
//!
//! The driver enforces the maximum: a pool at its maximum reuses freed memory of other streams, with waits that the driver inserts,
//! before it refuses. A maximum is fixed when a pool is created, so another cap needs another pool. Pools made for an earlier cap
//! serve no request; what they hold until their blocks are freed counts against the cap.
//!
//! Not covered: a request that is under way on another thread while the cap changes may still grow the earlier pool.

use std::sync::Arc;

use xlog_driver::sync::Mutex;
use xlog_driver::{AsyncPools, DriverError, DriverResult, PoolHandle, PoolOptions, PoolUsage};

use crate::CudaDevice;
use crate::device_runtime::resource::{
    CapSlot, PhysicalCap, ResourceError, ResourceResult, refused_by_cap,
};

/// What drivers grow a pool by, and round its maximum up to.
pub(super) const GRANULE: u64 = 32 << 20;

pub(super) struct DriverPools {
    device: Arc<CudaDevice>,
    cap: CapSlot,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The pool that serves requests, and its maximum.
    current: Option<(PoolHandle, u64)>,
    /// The cap that it was made for.
    made_for: usize,
    /// Pools made for an earlier cap, with their maxima. They are destroyed with the resource: until then another thread may name one.
    earlier: Vec<(PoolHandle, u64)>,
}

impl DriverPools {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        Self { device, cap: CapSlot::default(), state: Mutex::default() }
    }

    pub(super) fn cap(&self, cap: Arc<PhysicalCap>) {
        self.cap.add(cap);
    }

    #[inline]
    pub(super) fn driver(&self) -> ResourceResult<&dyn AsyncPools> {
        self.device.driver().async_pools().ok_or_else(no_pools)
    }

    /// The pool for the next request.
    #[inline]
    pub(super) fn current(&self) -> ResourceResult<PoolHandle> {
        let Some(cap) = self.cap.get() else { return self.of_device() };
        let bytes = cap.bytes();
        let mut state = self.state.lock();
        match state.current {
            Some((pool, _)) if state.made_for == bytes => Ok(pool),
            _ => self.renew(&mut state, bytes),
        }
    }

    #[inline]
    fn of_device(&self) -> ResourceResult<PoolHandle> {
        match self.device.known_memory_pool() {
            Some(pool) => Ok(pool),
            None => self.first_of_device(),
        }
    }

    #[cold]
    fn first_of_device(&self) -> ResourceResult<PoolHandle> {
        self.device.memory_pool().map_err(|error| match error {
            crate::XlogError::Driver(error) => error.into(),
            other => ResourceError::Driver(other.to_string()),
        })
    }

    /// What a cap allows; everything where it is more than the device has.
    fn allowed(&self, cap: usize) -> u64 {
        let allowed = (cap as u64).checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        if allowed >= self.device.properties().total_bytes { u64::MAX } else { allowed }
    }

    /// The pool for a cap that the present one was not made for.
    #[cold]
    fn renew(&self, state: &mut State, cap: usize) -> ResourceResult<PoolHandle> {
        let (pools, allowed) = (self.driver()?, self.allowed(cap));
        if let Some((pool, maximum)) = state.current
            && maximum == allowed
        {
            state.made_for = cap;
            return Ok(pool);
        }
        state.earlier.extend(state.current.take());
        self.create(pools, state, cap)
    }

    /// Creates the pool for a cap, with what the earlier pools leave of it.
    fn create(
        &self,
        pools: &dyn AsyncPools,
        state: &mut State,
        cap: usize,
    ) -> ResourceResult<PoolHandle> {
        let (allowed, held) = (self.allowed(cap), state.drain(pools)?);
        let maximum = match allowed {
            u64::MAX => u64::MAX,
            _ => allowed.saturating_sub(held) / GRANULE * GRANULE,
        };
        if maximum == 0 {
            return Err(refused_by_cap(0, allowed, GRANULE, held));
        }
        let pool = match state.empty_pool(pools, maximum)? {
            Some(pool) => pool,
            None => create_pool(pools, maximum)?,
        };
        state.current = Some((pool, maximum));
        state.made_for = cap;
        Ok(pool)
    }

    /// Makes a larger pool where earlier ones have given memory back since the present one was made. False where another request
    /// would find what this one found.
    #[cold]
    pub(super) fn reclaim(&self) -> ResourceResult<bool> {
        let Some(cap) = self.cap.get().map(PhysicalCap::bytes) else { return Ok(false) };
        let (pools, allowed) = (self.driver()?, self.allowed(cap));
        let mut state = self.state.lock();
        let Some((pool, maximum)) = state.current else { return Ok(true) };
        if maximum == allowed {
            return Ok(false);
        }
        let held = state.drain(pools)?;
        if allowed.saturating_sub(held) < maximum.saturating_add(GRANULE) {
            return Ok(false);
        }
        state.current = None;
        state.earlier.push((pool, maximum));
        self.create(pools, &mut state, cap).map(|_| true)
    }

    /// What all pools hold together.
    pub(super) fn usage(&self) -> ResourceResult<PoolUsage> {
        let pools = self.driver()?;
        if self.cap.get().is_none() {
            return Ok(pools.pool_usage(self.of_device()?)?);
        }
        let state = self.state.lock();
        let mut sum = PoolUsage::default();
        for pool in state.all() {
            let usage = pools.pool_usage(pool)?;
            sum.reserved += usage.reserved;
            sum.reserved_peak += usage.reserved_peak;
            sum.used += usage.used;
            sum.used_peak += usage.used_peak;
        }
        Ok(sum)
    }

    /// Gives cached memory back until all pools together hold at most `keep` bytes, or nothing more is free.
    pub(super) fn trim(&self, keep: u64) -> ResourceResult<()> {
        let pools = self.driver()?;
        if self.cap.get().is_none() {
            return Ok(pools.pool_trim(self.of_device()?, keep)?);
        }
        let mut state = self.state.lock();
        let held = state.drain(pools)?;
        match state.current {
            Some((pool, _)) => Ok(pools.pool_trim(pool, keep.saturating_sub(held))?),
            None => Ok(()),
        }
    }

    /// Names the cap in a refusal of `requested` bytes, where there is one.
    #[cold]
    pub(super) fn explain(&self, requested: usize, error: ResourceError) -> ResourceError {
        let ResourceError::OutOfMemory { detail, .. } = error else { return error };
        let (Some(cap), Ok(usage)) = (self.cap.get(), self.usage()) else {
            return ResourceError::OutOfMemory { requested, detail };
        };
        let allowed = cap.in_granules(GRANULE);
        let free = usage.reserved.saturating_sub(usage.used);
        let cause = if free >= requested as u64 {
            format!("{free} of them free and in pieces (fragmentation)")
        } else {
            format!("in granules of {GRANULE}, {free} of them free")
        };
        let held = usage.reserved;
        let detail = format!(
            "{detail}; the driver pool holds {held} bytes of the {allowed} that the budget allows, {cause}"
        );
        ResourceError::OutOfMemory { requested, detail }
    }
}

impl State {
    fn all(&self) -> impl Iterator<Item = PoolHandle> {
        self.earlier.iter().copied().chain(self.current).map(|(pool, _)| pool)
    }

    /// Trims the earlier pools; returns what they still hold.
    fn drain(&mut self, pools: &dyn AsyncPools) -> DriverResult<u64> {
        let mut held = 0;
        for (pool, _) in &self.earlier {
            pools.pool_trim(*pool, 0)?;
            held += pools.pool_usage(*pool)?.reserved;
        }
        Ok(held)
    }

    /// Takes an earlier pool of this maximum that holds nothing, so that a cap which goes up and down makes no more pools.
    fn empty_pool(
        &mut self,
        pools: &dyn AsyncPools,
        maximum: u64,
    ) -> DriverResult<Option<PoolHandle>> {
        for at in 0..self.earlier.len() {
            let (pool, known) = self.earlier[at];
            if known == maximum && pools.pool_usage(pool)?.reserved == 0 {
                self.earlier.swap_remove(at);
                return Ok(Some(pool));
            }
        }
        Ok(None)
    }
}

impl Drop for DriverPools {
    fn drop(&mut self) {
        let Ok(pools) = self.driver() else { return };
        for pool in self.state.lock().all() {
            #[allow(unsafe_code)]
            // SAFETY: this resource created the pool and hands it to nobody; it is being dropped, so no call names the pool any more.
            let destroyed = unsafe { pools.pool_destroy(pool) };
            // A lost device has taken the pool with it. Memory of blocks that are still live goes back with their frees.
            let _ = destroyed;
        }
    }
}

fn create_pool(pools: &dyn AsyncPools, maximum: u64) -> DriverResult<PoolHandle> {
    let max_bytes = (maximum < u64::MAX).then_some(maximum);
    match pools.pool_create(&PoolOptions { max_bytes, ..PoolOptions::default() }) {
        // A driver that knows no maximum: the budget holds for blocks alone.
        Err(DriverError::Unsupported { .. }) => pools.pool_create(&PoolOptions::default()),
        created => created,
    }
}

#[cold]
fn no_pools() -> ResourceError {
    DriverError::Unsupported { call: "stream-ordered pools" }.into()
}
