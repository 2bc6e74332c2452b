//! Stream-ordered pools of the CUDA driver.
//!
//! Every pool is created here. The device's default pool is not used, because the whole process shares it and its settings. Pools hold
//! device memory only and are not shared with other processes.
//!
//! Invariant: `pool_create` returns a pool with all its options set, or an error and no pool. This file does not track blocks: the driver
//! knows the pool of each block.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys::CUmemoryPool;

use super::abi::{self, Location, PoolProps, pool_attribute};
use super::api::PoolCalls;
use super::device::{CudaDriver, refuse_zero};
use crate::{
    AsyncPools, DriverError, DriverResult, PoolHandle, PoolOptions, PoolUsage, StreamHandle,
};

/// The first driver version that reads the maximum size of a pool.
const MAX_SIZE_SINCE: u32 = 12_020;

impl CudaDriver {
    fn pool_calls(&self, call: &'static str) -> DriverResult<PoolCalls> {
        let calls = self.api().pools.filter(|_| self.core.properties.async_pools);
        calls.ok_or(DriverError::Unsupported { call })
    }

    /// Sets the attributes of a new pool. The context is current.
    fn set_attributes(
        &self,
        calls: &PoolCalls,
        pool: CUmemoryPool,
        options: &PoolOptions,
    ) -> DriverResult<()> {
        let PoolOptions { mut release_threshold, reuse, .. } = *options;
        let set = |attribute: c_uint, value: *mut c_void| {
            // SAFETY: below, the threshold is documented as a 64-bit unsigned number, and the three switches as `int`.
            let code = unsafe { (calls.set_attribute)(pool, attribute, value) };
            self.core.context.check("cuMemPoolSetAttribute", code)
        };
        set(pool_attribute::RELEASE_THRESHOLD, (&raw mut release_threshold).cast())?;
        let switches = [
            (pool_attribute::REUSE_FOLLOW_EVENT_DEPENDENCIES, reuse.follow_event_dependencies),
            (pool_attribute::REUSE_ALLOW_OPPORTUNISTIC, reuse.opportunistic),
            (pool_attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES, reuse.internal_dependencies),
        ];
        for (attribute, is_on) in switches {
            let mut is_on = c_int::from(is_on);
            set(attribute, (&raw mut is_on).cast())?;
        }
        Ok(())
    }
}

impl AsyncPools for CudaDriver {
    fn pool_create(&self, options: &PoolOptions) -> DriverResult<PoolHandle> {
        const CALL: &str = "pool_create";
        let calls = self.pool_calls(CALL)?;
        let max_size = match options.max_bytes {
            None => 0,
            Some(0) => {
                return Err(DriverError::invalid(CALL, "max_bytes 0", "at least 1 byte, or none"));
            }
            Some(_) if self.core.properties.driver_version < MAX_SIZE_SINCE => {
                return Err(DriverError::Unsupported { call: "pool_create with max_bytes" });
            }
            Some(bytes) => usize::try_from(bytes).unwrap_or(usize::MAX),
        };
        let context = &self.core.context;
        let _bound = context.bind_relaxed(CALL)?;
        let props = PoolProps {
            allocation_type: abi::ALLOCATION_TYPE_PINNED,
            handle_types: 0,
            location: Location::device(context.device),
            win32_security_attributes: ptr::null_mut(),
            max_size,
            reserved: [0; 56],
        };
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: both pointers are valid for the call, and the layout is the driver's.
        let code = unsafe { (calls.create)(&raw mut pool, &raw const props) };
        context.check("cuMemPoolCreate", code)?;
        if let Err(error) = self.set_attributes(&calls, pool, options) {
            // SAFETY: the pool was created above, and no other thread has its handle.
            unsafe { (calls.destroy)(pool) };
            return Err(error);
        }
        self.core.pool_handle(pool)
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> DriverResult<()> {
        let calls = self.pool_calls("pool_destroy")?;
        let pool = self.core.raw_pool("pool_destroy", pool)?;
        let _bound = self.core.context.bind_relaxed("pool_destroy")?;
        // SAFETY: the caller promises that the pool is its own, and gives it up.
        let code = unsafe { (calls.destroy)(pool) };
        self.core.context.check("cuMemPoolDestroy", code)
    }

    fn pool_usage(&self, pool: PoolHandle) -> DriverResult<PoolUsage> {
        let calls = self.pool_calls("pool_usage")?;
        let pool = self.core.raw_pool("pool_usage", pool)?;
        let context = &self.core.context;
        let _bound = context.bind_relaxed("pool_usage")?;
        let read = |attribute: c_uint| {
            let mut value: u64 = 0;
            // SAFETY: the usage attributes are documented as 64-bit unsigned numbers; the handle is of this device, and no call names it
            // once it is destroyed.
            let code = unsafe {
                (calls.get_attribute)(pool, attribute, (&raw mut value).cast::<c_void>())
            };
            context.check("cuMemPoolGetAttribute", code).map(|()| value)
        };
        Ok(PoolUsage {
            reserved: read(pool_attribute::RESERVED_MEM_CURRENT)?,
            reserved_peak: read(pool_attribute::RESERVED_MEM_HIGH)?,
            used: read(pool_attribute::USED_MEM_CURRENT)?,
            used_peak: read(pool_attribute::USED_MEM_HIGH)?,
        })
    }

    fn pool_trim(&self, pool: PoolHandle, keep_bytes: u64) -> DriverResult<()> {
        let calls = self.pool_calls("pool_trim")?;
        let pool = self.core.raw_pool("pool_trim", pool)?;
        let _bound = self.core.context.bind_relaxed("pool_trim")?;
        let keep = usize::try_from(keep_bytes).unwrap_or(usize::MAX);
        // SAFETY: the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (calls.trim_to)(pool, keep) };
        self.core.context.check("cuMemPoolTrimTo", code)
    }

    fn alloc_async(
        &self,
        bytes: usize,
        pool: PoolHandle,
        stream: StreamHandle,
    ) -> DriverResult<u64> {
        const CALL: &str = "alloc_async";
        refuse_zero(CALL, bytes)?;
        let stream = self.core.raw_stream(CALL, stream)?;
        let pool = self.core.raw_pool(CALL, pool)?;
        let requested = bytes as u64;
        // The driver would first take all memory that is free on the device, and hold it for about a second.
        if requested > self.core.properties.total_bytes {
            return Err(DriverError::OutOfMemory { call: "cuMemAllocFromPoolAsync", requested });
        }
        let calls = self.pool_calls(CALL)?;
        let _bound = self.core.context.bind_relaxed(CALL)?;
        let mut block = 0;
        // SAFETY: the out pointer is valid; both handles are of this device, and no call names one once it is destroyed.
        let code = unsafe { (calls.alloc_from_pool_async)(&raw mut block, bytes, pool, stream) };
        self.core.context.check_allocation("cuMemAllocFromPoolAsync", code, requested)?;
        Ok(block)
    }

    unsafe fn free_async(&self, ptr: u64, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("free_async", stream)?;
        let calls = self.pool_calls("free_async")?;
        let _bound = self.core.context.bind_relaxed("free_async")?;
        // SAFETY: the caller promises a live block whose uses are all ordered before this free.
        let code = unsafe { (calls.free_async)(ptr, stream) };
        self.core.context.check("cuMemFreeAsync", code)
    }
}
