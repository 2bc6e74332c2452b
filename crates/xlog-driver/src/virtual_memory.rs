//! Virtual memory management, as an optional capability: addresses and memory are allocated separately.

use crate::{DriverResult, MemoryHandle};

/// The device's access to a mapped range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MapAccess {
    /// Every access faults.
    None,
    /// Writes fault.
    Read,
    /// Reads and writes are allowed.
    ReadWrite,
}

/// Reserves addresses, creates physical memory, and maps one onto the other.
///
/// Sizes and addresses are multiples of [`VirtualMemory::granularity`]. A new mapping has no access rights.
pub trait VirtualMemory: Send + Sync {
    /// Returns the unit of every size and address.
    fn granularity(&self) -> usize;

    /// Reserves a range of addresses. `align` is 0 for any, or a power of two.
    fn reserve(&self, bytes: usize, align: usize) -> DriverResult<u64>;

    /// Releases a whole reservation.
    ///
    /// # Safety
    /// `ptr` and `bytes` are a reservation in which nothing is mapped.
    unsafe fn release(&self, ptr: u64, bytes: usize) -> DriverResult<()>;

    /// Allocates physical memory of the device.
    fn create(&self, bytes: usize) -> DriverResult<MemoryHandle>;

    /// Frees physical memory once its last mapping is removed.
    ///
    /// # Safety
    /// - `memory` comes from [`VirtualMemory::create`] of this device, and is the caller's to destroy.
    /// - Once this has succeeded, no call names the memory, on any thread.
    unsafe fn destroy(&self, memory: MemoryHandle) -> DriverResult<()>;

    /// Maps a whole handle of physical memory, created with this size, at `ptr`.
    ///
    /// # Safety
    /// `ptr` and `bytes` lie in a reservation and nothing is mapped there.
    unsafe fn map(&self, ptr: u64, bytes: usize, memory: MemoryHandle) -> DriverResult<()>;

    /// Removes whole mappings.
    ///
    /// # Safety
    /// The range is exactly one or more mappings, and the host has seen all work on it complete. Stream order is not enough.
    unsafe fn unmap(&self, ptr: u64, bytes: usize) -> DriverResult<()>;

    /// Sets the device's access to a mapped range.
    ///
    /// # Safety
    /// The range is exactly one or more mappings. No queued work needs rights that this call takes away.
    unsafe fn set_access(&self, ptr: u64, bytes: usize, access: MapAccess) -> DriverResult<()>;
}
