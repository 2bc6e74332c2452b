//! The driver pools that blocks come from: the device's own or, under a cap, pools of this resource with a maximum.
//!
//! The driver enforces the maximum: a pool at its maximum reuses freed memory of other streams, with waits that the driver inserts,
//! before it refuses. A maximum is fixed when a pool is created, so another cap needs another pool. Pools made for an earlier cap
//! serve no request; what they hold until their blocks are freed counts against the cap.
//!
//! Not covered: a request that is under way on another thread while the cap changes may still grow the earlier pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xlog_driver::sync::Mutex;
use xlog_driver::{AsyncPools, DriverError, DriverResult, PoolHandle, PoolOptions, PoolUsage};

use crate::CudaDevice;
use crate::device_runtime::resource::{
    CapSlot, PhysicalCap, ResourceError, ResourceResult, refused_by_cap,
};

/// What drivers grow a pool by, and round its maximum up to.
pub(super) const GRANULE: u64 = 32 << 20;

/// No cap that a pool can have been made for.
const NONE: usize = usize::MAX;

pub(super) struct DriverPools {
    device: Arc<CudaDevice>,
    cap: CapSlot,
    /// The cap that the pool in `current` was made for. Written after it.
    made_for: AtomicUsize,
    current: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The pool that serves requests, and its maximum.
    current: Option<(PoolHandle, u64)>,
    /// Pools made for an earlier cap that still hold memory.
    earlier: Vec<PoolHandle>,
}

impl DriverPools {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        Self {
            device,
            cap: CapSlot::default(),
            made_for: AtomicUsize::new(NONE),
            current: AtomicU64::new(0),
            state: Mutex::default(),
        }
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
        let bytes = cap.bytes().min(NONE - 1);
        if self.made_for.load(Ordering::Acquire) == bytes {
            return Ok(PoolHandle(self.current.load(Ordering::Acquire)));
        }
        self.renew(bytes)
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
    fn renew(&self, cap: usize) -> ResourceResult<PoolHandle> {
        let (pools, allowed) = (self.driver()?, self.allowed(cap));
        let mut state = self.state.lock();
        if let Some((pool, maximum)) = state.current
            && maximum == allowed
        {
            self.made_for.store(cap, Ordering::Release);
            return Ok(pool);
        }
        self.made_for.store(NONE, Ordering::Release);
        if let Some((pool, _)) = state.current.take() {
            state.earlier.push(pool);
        }
        self.create(pools, &mut state, cap)
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
        let options = PoolOptions {
            max_bytes: (maximum < u64::MAX).then_some(maximum),
            ..PoolOptions::default()
        };
        let created = match pools.pool_create(&options) {
            // A driver that knows no maximum: the budget holds for blocks alone.
            Err(DriverError::Unsupported { .. }) => pools.pool_create(&PoolOptions::default()),
            created => created,
        };
        let pool = created?;
        state.current = Some((pool, maximum));
        self.current.store(pool.0, Ordering::Release);
        self.made_for.store(cap, Ordering::Release);
        Ok(pool)
    }

    /// Makes a larger pool where earlier ones have given memory back since the present one was made. False where another request
    /// would find what this one found.
    #[cold]
    pub(super) fn reclaim(&self) -> ResourceResult<bool> {
        let Some(cap) = self.cap.get().map(|cap| cap.bytes().min(NONE - 1)) else {
            return Ok(false);
        };
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
        state.earlier.push(pool);
        self.made_for.store(NONE, Ordering::Release);
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
        self.earlier.iter().copied().chain(self.current.map(|(pool, _)| pool))
    }

    /// Trims the earlier pools and destroys those that are empty; returns what the others hold.
    fn drain(&mut self, pools: &dyn AsyncPools) -> DriverResult<u64> {
        let mut held = 0;
        for at in (0..self.earlier.len()).rev() {
            let pool = self.earlier[at];
            pools.pool_trim(pool, 0)?;
            let usage = pools.pool_usage(pool)?;
            if (usage.reserved, usage.used) == (0, 0) {
                pools.pool_destroy(pool)?;
                self.earlier.swap_remove(at);
            }
            held += usage.reserved;
        }
        Ok(held)
    }
}

impl Drop for DriverPools {
    fn drop(&mut self) {
        let Ok(pools) = self.driver() else { return };
        for pool in self.state.lock().all() {
            // A lost device has taken the pool with it. Memory of blocks that are still live goes back with their frees.
            let _ = pools.pool_destroy(pool);
        }
    }
}

#[cold]
fn no_pools() -> ResourceError {
    DriverError::Unsupported { call: "stream-ordered pools" }.into()
}
