//! Page-locked host memory, as an optional capability: the device reads and writes it without staging.

use std::ptr::NonNull;

use crate::DriverResult;

/// Page-locked host memory, identified by its host address and its device address.
///
/// The value does not own the memory. On CUDA both addresses are equal; on the simulated device they differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostAllocation {
    /// The address for the host.
    pub host: NonNull<u8>,
    /// The address for copies, fills and kernels on the device.
    pub device: u64,
}

// SAFETY: the addresses are plain numbers to this type, which reads and writes nothing.
unsafe impl Send for HostAllocation {}
// SAFETY: as above.
unsafe impl Sync for HostAllocation {}

/// Allocates and frees page-locked host memory, which takes no device memory.
///
/// The driver pins page by page, so both calls are slow.
pub trait HostMemory: Send + Sync {
    /// Allocates `bytes`, usable by the host at once and by work queued on any stream after this call. Both addresses are
    /// multiples of 4096. The bytes are initialised, with unspecified values.
    ///
    /// # Errors
    /// [`DriverError::OutOfHostMemory`](crate::DriverError::OutOfHostMemory) if the host has no more pages to lock.
    fn alloc_host(&self, bytes: usize) -> DriverResult<HostAllocation>;

    /// Frees an allocation of [`HostMemory::alloc_host`]. May wait for the device.
    ///
    /// # Safety
    /// - `memory` is a live allocation of this device, and the caller's to free.
    /// - The host has seen all work on it complete, and no reference into it is left.
    unsafe fn free_host(&self, memory: HostAllocation) -> DriverResult<()>;
}
