//! Virtual memory management, as an optional capability: addresses and memory are allocated separately.

use crate::{DriverResult, MemoryHandle};

/// The device's access to a mapped range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MapAccess {
    /// Any access faults.
    None,
    /// Writes fault.
    Read,
    /// Everything is allowed.
    ReadWrite,
}

/// Reserve addresses, create physical memory, and map one onto the other.
///
/// Sizes and addresses are multiples of [`VirtualMemory::granularity`]. A new mapping has no access rights.
pub trait VirtualMemory: Send + Sync {
    /// The unit of every size and address below.
    fn granularity(&self) -> usize;

    /// Reserves a range of addresses. `align` is 0 for any, or a power of two.
    fn reserve(&self, bytes: usize, align: usize) -> DriverResult<u64>;

    /// Gives a whole reservation back.
    ///
    /// # Safety
    /// `ptr` and `bytes` are a reservation in which nothing is mapped.
    unsafe fn release(&self, ptr: u64, bytes: usize) -> DriverResult<()>;

    /// Takes physical memory from the device.
    fn create(&self, bytes: usize) -> DriverResult<MemoryHandle>;

    /// Gives physical memory back, once its last mapping is gone.
    ///
    /// # Safety
    /// - `memory` comes from [`VirtualMemory::create`] of this device, and is the caller's to destroy.
    /// - Once this has succeeded, no call names the memory, on any thread.
    unsafe fn destroy(&self, memory: MemoryHandle) -> DriverResult<()>;

    /// Maps a whole piece of physical memory, created with this size, at `ptr`.
    ///
    /// # Safety
    /// `ptr` and `bytes` lie in a reservation and nothing is mapped there.
    unsafe fn map(&self, ptr: u64, bytes: usize, memory: MemoryHandle) -> DriverResult<()>;

    /// Takes whole mappings away.
    ///
    /// # Safety
    /// The range is exactly one or more mappings, and the host has seen all work on it complete: a stream order is not
    /// enough.
    unsafe fn unmap(&self, ptr: u64, bytes: usize) -> DriverResult<()>;

    /// Sets what the device may do with a mapped range.
    ///
    /// # Safety
    /// The range is exactly one or more mappings. No queued work needs rights that this call takes away.
    unsafe fn set_access(&self, ptr: u64, bytes: usize, access: MapAccess) -> DriverResult<()>;
}
