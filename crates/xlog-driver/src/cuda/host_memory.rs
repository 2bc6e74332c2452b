//! Page-locked host memory of the CUDA driver.
//!
//! Memory is portable and mapped: every stream of every context reaches it by the device address that the driver reports. It is not pooled:
//! each allocation and each free is one driver call.

use std::ptr::{self, NonNull};

use super::abi::{self, code};
use super::device::{CudaDriver, refuse_zero};
use crate::{DriverError, DriverResult, HostAllocation, HostMemory};

impl HostMemory for CudaDriver {
    fn alloc_host(&self, bytes: usize) -> DriverResult<HostAllocation> {
        const CALL: &str = "cuMemHostAlloc";
        refuse_zero("alloc_host", bytes)?;
        let (context, calls) = (&self.core.context, self.calls());
        let _bound = context.bind_relaxed("alloc_host")?;
        let mut memory = ptr::null_mut();
        let flags = abi::HOST_ALLOC_PORTABLE | abi::HOST_ALLOC_DEVICE_MAP;
        // SAFETY: the out pointer is valid for the call.
        let code = unsafe { (calls.mem_host_alloc)(&raw mut memory, bytes, flags) };
        if code == code::OUT_OF_MEMORY {
            return Err(DriverError::OutOfHostMemory { call: CALL, requested: bytes as u64 });
        }
        context.check(CALL, code)?;
        let Some(host) = NonNull::new(memory) else {
            return Err(DriverError::OutOfHostMemory { call: CALL, requested: bytes as u64 });
        };
        let mut device = 0;
        // SAFETY: the out pointer is valid, and the memory is mapped and pinned.
        let code = unsafe { (calls.mem_host_get_device_pointer)(&raw mut device, memory, 0) };
        if let Err(error) = context.check("cuMemHostGetDevicePointer", code) {
            // SAFETY: this memory was allocated above, and nothing refers to it yet.
            unsafe { (calls.mem_free_host)(memory) };
            return Err(error);
        }
        Ok(HostAllocation { host: host.cast(), device })
    }

    unsafe fn free_host(&self, memory: HostAllocation) -> DriverResult<()> {
        let context = &self.core.context;
        let _bound = context.bind_relaxed("free_host")?;
        // SAFETY: the caller promises a live allocation that is its own, and that nothing uses any more.
        let code = unsafe { (self.calls().mem_free_host)(memory.host.as_ptr().cast()) };
        context.check("cuMemFreeHost", code)
    }
}
