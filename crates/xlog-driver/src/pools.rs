//! The stream-ordered allocator of a driver, as an optional capability.

use crate::{DriverResult, PoolHandle, StreamHandle};

/// The conditions under which a pool reuses memory that another stream freed.
///
/// Memory freed on the requesting stream is always a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReusePolicy {
    /// Reuse if the requesting stream is already ordered after the free.
    pub follow_event_dependencies: bool,
    /// Reuse if the free has completed.
    pub opportunistic: bool,
    /// If nothing else fits, make the requesting stream wait for the free.
    pub internal_dependencies: bool,
}

impl ReusePolicy {
    /// All three switches on, the default of drivers.
    pub const ALL: Self =
        Self { follow_event_dependencies: true, opportunistic: true, internal_dependencies: true };

    /// Reuse that depends on program order alone: every run of one program gets the same addresses.
    pub const DETERMINISTIC: Self = Self {
        follow_event_dependencies: true,
        opportunistic: false,
        internal_dependencies: false,
    };
}

impl Default for ReusePolicy {
    fn default() -> Self {
        Self::ALL
    }
}

/// The options of a new pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PoolOptions {
    /// The cached bytes that the pool keeps across synchronisations.
    pub release_threshold: u64,
    /// The maximum physical bytes of the pool; `None` leaves it to the device.
    pub max_bytes: Option<u64>,
    /// The conditions for reuse between streams.
    pub reuse: ReusePolicy,
}

impl Default for PoolOptions {
    /// Keeps all reserved memory: a pool that releases memory at every synchronisation maps it again for the next request.
    fn default() -> Self {
        Self { release_threshold: u64::MAX, max_bytes: None, reuse: ReusePolicy::ALL }
    }
}

/// The bytes that a pool holds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolUsage {
    /// Physical bytes the pool holds now.
    pub reserved: u64,
    /// The peak of reserved bytes.
    pub reserved_peak: u64,
    /// Bytes in blocks now.
    pub used: u64,
    /// The peak of used bytes.
    pub used_peak: u64,
}

/// Stream-ordered allocation: a block exists between its allocation and its free in stream order.
pub trait AsyncPools: Send + Sync {
    /// Creates a pool on this device.
    fn pool_create(&self, options: &PoolOptions) -> DriverResult<PoolHandle>;

    /// Destroys a pool. Its memory is released when its last block is freed.
    ///
    /// # Safety
    /// - The pool is the caller's to destroy: no other owner uses it.
    /// - Once this has succeeded, no call names the pool, on any thread. CUDA reuses the handle for another pool.
    unsafe fn pool_destroy(&self, pool: PoolHandle) -> DriverResult<()>;

    /// Returns the bytes that the pool holds.
    fn pool_usage(&self, pool: PoolHandle) -> DriverResult<PoolUsage>;

    /// Releases cached memory until at most `keep_bytes` are reserved or no cached memory is left.
    fn pool_trim(&self, pool: PoolHandle, keep_bytes: u64) -> DriverResult<()>;

    /// Allocates `bytes` in stream order: usable at once by work queued on `stream`.
    fn alloc_async(
        &self,
        bytes: usize,
        pool: PoolHandle,
        stream: StreamHandle,
    ) -> DriverResult<u64>;

    /// Frees a block of [`AsyncPools::alloc_async`] in stream order.
    ///
    /// # Safety
    /// `ptr` is a live block of this device, every use of it is ordered before this free, and nothing queued later
    /// uses it.
    unsafe fn free_async(&self, ptr: u64, stream: StreamHandle) -> DriverResult<()>;
}
