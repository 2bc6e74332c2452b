//! Counters, and the hook that meters physical memory.

use std::time::Duration;

use super::{ResourceError, ResourceResult};

/// Meters the physical memory that a resource takes and returns.
///
/// It counts segments, driver pools and raw allocations, cached or not; it does not count blocks.
pub trait PhysicalMeter: Send + Sync {
    /// Charges `bytes` before they are taken from the device. An error refuses them.
    fn charge(&self, bytes: usize) -> ResourceResult<()>;

    /// Releases `bytes` after they were returned to the device.
    fn release(&self, bytes: usize);

    /// Requests cached memory of other processes before a request is refused with `error`, and waits at most `limit` for it. Returns
    /// whether another attempt is worthwhile.
    fn request_cached(&self, _error: &ResourceError, _limit: Duration) -> bool {
        false
    }
}

/// The physical memory that a resource holds of its device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Bytes of live blocks, and the remainders of their granules.
    pub live: usize,
    /// Free bytes without pending work. A trim returns the granules that consist of them.
    pub cached: usize,
    /// Freed bytes that wait for work on streams.
    pub pending: usize,
}

impl MemoryUse {
    /// Returns the sum.
    pub fn physical(&self) -> usize {
        self.live.saturating_add(self.cached).saturating_add(self.pending)
    }

    /// Divides `physical` bytes: those that are neither cached nor pending are live.
    #[must_use]
    pub fn of_physical(physical: usize, cached: usize, pending: usize) -> Self {
        let cached = cached.min(physical);
        let pending = pending.min(physical - cached);
        Self { live: physical - cached - pending, cached, pending }
    }
}

/// Counters of a resource. A counter that the resource does not keep is 0.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct ResourceStatistics {
    /// Bytes of live and retired blocks.
    pub bytes_outstanding: usize,
    /// Live blocks.
    pub live_blocks: usize,
    /// Freed blocks whose free has not been counted as complete.
    pub retired_blocks: usize,
    /// Blocks allocated so far.
    pub allocations: u64,
    /// Blocks freed so far.
    pub deallocations: u64,
    /// Events recorded to order streams. Those that only show the host what has completed are not counted.
    pub events_recorded: u64,
    /// Waits queued on streams.
    pub waits_inserted: u64,
    /// Waits that were not queued because earlier ones imply them.
    pub waits_elided: u64,
}

/// Memory that a resource holds and no block occupies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FreeSpace {
    /// The size of all of it.
    pub bytes: usize,
    /// The size of the largest range.
    pub largest: usize,
}

impl FreeSpace {
    /// Returns the part of the free memory outside the largest range: 0 for a single range, towards 1 for many small ones.
    pub fn fragmentation(&self) -> f64 {
        if self.bytes == 0 { 0.0 } else { 1.0 - self.largest as f64 / self.bytes as f64 }
    }
}
