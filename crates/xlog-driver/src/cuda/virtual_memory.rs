//! Virtual memory management of the CUDA driver.
//!
//! Addresses are reserved separately from memory, and this device's memory is mapped onto them. A new mapping has no access rights until
//! `set_access` gives them to this device; no other device gets any.
//!
//! Invariant: the granularity was read when the device was opened and never changes. This file does not round sizes or track mappings: the
//! layer above does.

use cudarc::driver::sys::CUmemGenericAllocationHandle;

use super::abi::{self, AccessDesc, Location};
use super::api::VirtualMemoryCalls;
use super::device::{CudaDriver, refuse_zero};
use super::open::device_memory;
use crate::{DriverError, DriverResult, MapAccess, MemoryHandle, VirtualMemory};

impl CudaDriver {
    fn virtual_memory_calls(&self, call: &'static str) -> DriverResult<VirtualMemoryCalls> {
        let calls = self.api().virtual_memory.filter(|_| self.core.properties.virtual_memory);
        calls.ok_or(DriverError::Unsupported { call })
    }
}

impl VirtualMemory for CudaDriver {
    fn granularity(&self) -> usize {
        self.core.properties.granularity
    }

    fn reserve(&self, bytes: usize, align: usize) -> DriverResult<u64> {
        refuse_zero("reserve", bytes)?;
        let calls = self.virtual_memory_calls("reserve")?;
        let _bound = self.core.context.bind_relaxed("reserve")?;
        let mut address = 0;
        // SAFETY: the out pointer is valid; no particular address is requested, so no mapping can be displaced.
        let code = unsafe { (calls.address_reserve)(&raw mut address, bytes, align, 0, 0) };
        self.core.context.check_allocation("cuMemAddressReserve", code, bytes as u64)?;
        Ok(address)
    }

    unsafe fn release(&self, ptr: u64, bytes: usize) -> DriverResult<()> {
        let calls = self.virtual_memory_calls("release")?;
        let _bound = self.core.context.bind_relaxed("release")?;
        // SAFETY: the caller promises a whole reservation in which nothing is mapped.
        let code = unsafe { (calls.address_free)(ptr, bytes) };
        self.core.context.check("cuMemAddressFree", code)
    }

    fn create(&self, bytes: usize) -> DriverResult<MemoryHandle> {
        refuse_zero("create", bytes)?;
        let calls = self.virtual_memory_calls("create")?;
        let context = &self.core.context;
        let _bound = context.bind("create")?;
        let prop = device_memory(context.device);
        let mut memory: CUmemGenericAllocationHandle = 0;
        // SAFETY: both pointers are valid for the call, and the layout is the driver's.
        let code = unsafe { (calls.create)(&raw mut memory, bytes, &raw const prop, 0) };
        context.check_allocation("cuMemCreate", code, bytes as u64)?;
        Ok(MemoryHandle::numbered(memory))
    }

    unsafe fn destroy(&self, memory: MemoryHandle) -> DriverResult<()> {
        let calls = self.virtual_memory_calls("destroy")?;
        let _bound = self.core.context.bind("destroy")?;
        // SAFETY: the caller promises that the memory is its own, and gives it up; the driver keeps it while it is mapped.
        let code = unsafe { (calls.release)(memory.number()) };
        self.core.context.check("cuMemRelease", code)
    }

    unsafe fn map(&self, ptr: u64, bytes: usize, memory: MemoryHandle) -> DriverResult<()> {
        let calls = self.virtual_memory_calls("map")?;
        let _bound = self.core.context.bind("map")?;
        // SAFETY: the caller promises a reserved range in which nothing is mapped.
        let code = unsafe { (calls.map)(ptr, bytes, 0, memory.number(), 0) };
        self.core.context.check_allocation("cuMemMap", code, bytes as u64)
    }

    unsafe fn unmap(&self, ptr: u64, bytes: usize) -> DriverResult<()> {
        let calls = self.virtual_memory_calls("unmap")?;
        let _bound = self.core.context.bind("unmap")?;
        // SAFETY: the caller promises whole mappings on which all work has completed.
        let code = unsafe { (calls.unmap)(ptr, bytes) };
        self.core.context.check("cuMemUnmap", code)
    }

    unsafe fn set_access(&self, ptr: u64, bytes: usize, access: MapAccess) -> DriverResult<()> {
        let calls = self.virtual_memory_calls("set_access")?;
        let context = &self.core.context;
        let _bound = context.bind("set_access")?;
        let desc = AccessDesc {
            location: Location::device(context.device),
            flags: match access {
                MapAccess::None => abi::ACCESS_NONE,
                MapAccess::Read => abi::ACCESS_READ,
                MapAccess::ReadWrite => abi::ACCESS_READ_WRITE,
            },
        };
        // SAFETY: one descriptor is passed and counted; the caller promises whole mappings and that no queued work
        // needs rights that are taken away.
        let code = unsafe { (calls.set_access)(ptr, bytes, &raw const desc, 1) };
        context.check_allocation("cuMemSetAccess", code, bytes as u64)
    }
}
