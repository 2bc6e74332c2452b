//! The driver pools that blocks come from: the device's own or, under a cap, pools of this resource with a maximum.
//!
//! The driver enforces the maximum: a pool at its maximum reuses freed memory of other streams, with waits that the driver inserts,
//! before it refuses. A maximum is fixed when a pool is created, so another cap needs another pool. Pools made for an earlier cap
//! serve no request; what they hold until their blocks are freed counts against the cap. Those that hold nothing are destroyed when
//! another pool is made, and by a trim.
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
    /// The pool that serves requests.
    current: Option<Arc<OwnPool>>,
    /// The cap that it was made for.
    made_for: usize,
    /// Pools made for an earlier cap. No request takes one of these, but one that took it before may still name it.
    earlier: Vec<Arc<OwnPool>>,
}

/// A driver pool of this resource. Dropped, it is destroyed.
pub(super) struct OwnPool {
    device: Arc<CudaDevice>,
    handle: PoolHandle,
    maximum: u64,
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        let Some(pools) = self.device.driver().async_pools() else { return };
        #[allow(unsafe_code)]
        // SAFETY: this resource created the pool and every request that names it shares this owner, which goes.
        let destroyed = unsafe { pools.pool_destroy(self.handle) };
        // A lost device has taken the pool with it. Memory of blocks that are still live goes back with their frees.
        let _ = destroyed;
    }
}

/// The pool for one request, which stays as long as this.
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

    /// The pool for the next request.
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

    /// What a cap allows; everything where it is more than the device has.
    fn allowed(&self, cap: usize) -> u64 {
        let allowed = (cap as u64).checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        if allowed >= self.device.properties().total_bytes { u64::MAX } else { allowed }
    }

    /// The pool for a cap that the present one was not made for.
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

    /// Creates the pool for a cap, with what the earlier pools leave of it.
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

    /// Makes a larger pool where earlier ones have given memory back since the present one was made. False where another request
    /// would find what this one found.
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

    /// What all pools hold together.
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

    /// Gives cached memory back until all pools together hold at most `keep` bytes, or nothing more is free.
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

    /// Names the cap in a refusal of `requested` bytes, where there is one.
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

    /// Trims the earlier pools and destroys those that hold nothing; returns what the others still hold.
    fn drain(&mut self, pools: &dyn AsyncPools) -> DriverResult<u64> {
        let (mut held, mut outcome) = (0, Ok(()));
        self.earlier.retain_mut(|pool| {
            let trimmed = pools.pool_trim(pool.handle, 0);
            // Before its usage is asked for: a request that still names it may be about to take memory.
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
        // A driver that knows no maximum: the budget holds for blocks alone.
        Err(DriverError::Unsupported { .. }) => pools.pool_create(&PoolOptions::default()),
        created => created,
    }
}

#[cold]
fn no_pools() -> ResourceError {
    DriverError::Unsupported { call: "stream-ordered pools" }.into()
}
