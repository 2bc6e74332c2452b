//! Driver pools of blocks: the device's own or, under a cap, pools of this resource with a maximum.
//!
//! The driver enforces the maximum: before it refuses, a pool at its maximum reuses freed memory of other streams, with waits
//! that the driver inserts. A maximum is fixed when a pool is created, so another cap needs another pool. Pools of an earlier
//! cap serve no request; the memory that they hold until their blocks are freed counts against the cap. Empty ones are
//! destroyed by a trim, and when another pool is created.
//!
//! Not covered: if the cap changes during a request of another thread, that request may still grow the earlier pool.

use std::sync::Arc;

use xlog_driver::sync::Mutex;
use xlog_driver::{AsyncPools, DriverError, DriverResult, PoolHandle, PoolOptions, PoolUsage};

use crate::CudaDevice;
use crate::device_runtime::resource::{
    CapSlot, PhysicalCap, ResourceError, ResourceResult, refused_by_cap,
};

/// The step of a driver pool's growth, and the unit of its maximum.
pub(super) const GRANULE: u64 = 32 << 20;

pub(super) struct DriverPools {
    device: Arc<CudaDevice>,
    cap: CapSlot,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The pool that serves requests.
    current: Option<Arc<OwnPool>>,
    /// The cap of that pool.
    made_for: usize,
    /// Pools of earlier caps. No new request uses one, but a request in flight may.
    earlier: Vec<Arc<OwnPool>>,
}

/// A driver pool of this resource; dropping it destroys it.
pub(super) struct OwnPool {
    device: Arc<CudaDevice>,
    handle: PoolHandle,
    maximum: u64,
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        let Some(pools) = self.device.driver().async_pools() else { return };
        #[allow(unsafe_code)]
        // SAFETY: this resource created the pool, and every request that uses it shares this owner, which is dropped now.
        let destroyed = unsafe { pools.pool_destroy(self.handle) };
        // A lost device has destroyed the pool. Live blocks release their memory with their frees.
        let _ = destroyed;
    }
}

/// The pool for one request, kept alive by this value.
pub(super) enum RequestPool {
    OfDevice(PoolHandle),
    Own(Arc<OwnPool>),
}

impl RequestPool {
    #[inline]
    pub(super) fn handle(&self) -> PoolHandle {
        match self {
            Self::OfDevice(handle) => *handle,
            Self::Own(pool) => pool.handle,
        }
    }
}

impl DriverPools {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        Self { device, cap: CapSlot::default(), state: Mutex::default() }
    }

    pub(super) fn cap(&self, cap: Arc<PhysicalCap>) {
        self.cap.add(&cap);
    }

    #[inline]
    pub(super) fn driver(&self) -> ResourceResult<&dyn AsyncPools> {
        self.device.driver().async_pools().ok_or_else(no_pools)
    }

    #[inline]
    pub(super) fn current(&self) -> ResourceResult<RequestPool> {
        let Some(bytes) = self.cap.bytes() else {
            return self.of_device().map(RequestPool::OfDevice);
        };
        let mut state = self.state.lock();
        let pool = match &state.current {
            Some(pool) if state.made_for == bytes => Arc::clone(pool),
            _ => self.renew(&mut state, bytes)?,
        };
        Ok(RequestPool::Own(pool))
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

    /// Returns the maximum of a pool under a cap; unlimited if the cap exceeds the device.
    fn allowed(&self, cap: usize) -> u64 {
        let allowed = (cap as u64).checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        if allowed >= self.device.properties().total_bytes { u64::MAX } else { allowed }
    }

    /// Replaces the pool after a change of the cap.
    #[cold]
    fn renew(&self, state: &mut State, cap: usize) -> ResourceResult<Arc<OwnPool>> {
        let (pools, allowed) = (self.driver()?, self.allowed(cap));
        if let Some(pool) = state.current.as_ref().filter(|pool| pool.maximum == allowed) {
            state.made_for = cap;
            return Ok(Arc::clone(pool));
        }
        let replaced = state.current.take();
        state.earlier.extend(replaced);
        self.create(pools, state, cap)
    }

    /// Creates the pool for a cap, less the bytes that earlier pools hold.
    fn create(
        &self,
        pools: &dyn AsyncPools,
        state: &mut State,
        cap: usize,
    ) -> ResourceResult<Arc<OwnPool>> {
        let (allowed, held) = (self.allowed(cap), state.drain(pools)?);
        let maximum = match allowed {
            u64::MAX => u64::MAX,
            _ => allowed.saturating_sub(held) / GRANULE * GRANULE,
        };
        if maximum == 0 {
            return Err(refused_by_cap(0, allowed, GRANULE, held));
        }
        let handle = create_pool(pools, maximum)?;
        let pool = Arc::new(OwnPool { device: Arc::clone(&self.device), handle, maximum });
        state.current = Some(Arc::clone(&pool));
        state.made_for = cap;
        Ok(pool)
    }

    /// Creates a larger pool if earlier pools have released memory since the current one was created. Returns false if a retry
    /// would find the same memory.
    #[cold]
    pub(super) fn reclaim(&self) -> ResourceResult<bool> {
        let Some(cap) = self.cap.bytes() else { return Ok(false) };
        let (pools, allowed) = (self.driver()?, self.allowed(cap));
        let mut state = self.state.lock();
        let Some(maximum) = state.current.as_ref().map(|pool| pool.maximum) else {
            return Ok(true);
        };
        if maximum == allowed {
            return Ok(false);
        }
        let held = state.drain(pools)?;
        if allowed.saturating_sub(held) < maximum.saturating_add(GRANULE) {
            return Ok(false);
        }
        let replaced = state.current.take();
        state.earlier.extend(replaced);
        self.create(pools, &mut state, cap).map(|_| true)
    }

    /// Returns the usage of all pools together.
    pub(super) fn usage(&self) -> ResourceResult<PoolUsage> {
        let pools = self.driver()?;
        if self.cap.bytes().is_none() {
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

    /// Releases cached memory until all pools together hold at most `keep` bytes, or nothing more is free.
    pub(super) fn trim(&self, keep: u64) -> ResourceResult<()> {
        let pools = self.driver()?;
        if self.cap.bytes().is_none() {
            return Ok(pools.pool_trim(self.of_device()?, keep)?);
        }
        let mut state = self.state.lock();
        let held = state.drain(pools)?;
        match &state.current {
            Some(pool) => Ok(pools.pool_trim(pool.handle, keep.saturating_sub(held))?),
            None => Ok(()),
        }
    }

    /// Adds the cap, if there is one, to a refusal of `requested` bytes.
    #[cold]
    pub(super) fn explain(&self, requested: usize, error: ResourceError) -> ResourceError {
        let ResourceError::OutOfMemory { detail, .. } = error else { return error };
        let allowed = self.cap.in_granules(GRANULE);
        let usage = if allowed < u64::MAX { self.usage().ok() } else { None };
        let Some(usage) = usage else {
            return ResourceError::OutOfMemory { requested, detail };
        };
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
        self.earlier.iter().chain(&self.current).map(|pool| pool.handle)
    }

    /// Trims the earlier pools and destroys empty ones; returns the bytes that the others hold.
    fn drain(&mut self, pools: &dyn AsyncPools) -> DriverResult<u64> {
        let (mut held, mut outcome) = (0, Ok(()));
        self.earlier.retain_mut(|pool| {
            let trimmed = pools.pool_trim(pool.handle, 0);
            // Checked before its usage: a request that still uses it may be about to allocate.
            let is_named = Arc::get_mut(pool).is_none();
            match trimmed.and_then(|()| pools.pool_usage(pool.handle)) {
                Ok(usage) => {
                    held += usage.reserved;
                    is_named || usage.reserved > 0 || usage.used > 0
                }
                Err(error) => {
                    if outcome.is_ok() {
                        outcome = Err(error);
                    }
                    true
                }
            }
        });
        outcome.map(|()| held)
    }
}

fn create_pool(pools: &dyn AsyncPools, maximum: u64) -> DriverResult<PoolHandle> {
    let max_bytes = (maximum < u64::MAX).then_some(maximum);
    match pools.pool_create(&PoolOptions { max_bytes, ..PoolOptions::default() }) {
        // This driver supports no maximum, so the budget limits blocks only.
        Err(DriverError::Unsupported { .. }) => pools.pool_create(&PoolOptions::default()),
        created => created,
    }
}

#[cold]
fn no_pools() -> ResourceError {
    DriverError::Unsupported { call: "stream-ordered pools" }.into()
}
