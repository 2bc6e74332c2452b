//! Counters, and the hook by which physical memory is metered.

use std::time::Duration;

use super::{ResourceError, ResourceResult};

/// Told of the physical memory a resource takes from its device and returns to it.
///
/// Blocks are metered elsewhere: this counts segments, driver pools and raw allocations, cached or not.
pub trait PhysicalMeter: Send + Sync {
    /// Called before `bytes` are taken. An error refuses them.
    fn take(&self, bytes: usize) -> ResourceResult<()>;

    /// Called after `bytes` were returned.
    fn give(&self, bytes: usize);

    /// Called before a request is refused with `error`: asks other holders of the device to return what they have cached, and waits at
    /// most `limit` for that. Returns whether another attempt is worthwhile.
    fn relieve(&self, _error: &ResourceError, _limit: Duration) -> bool {
        false
    }
}

/// The physical memory that a resource holds of its device.
///
/// ```
/// use xlog_cuda::device_runtime::MemoryUse;
///
/// let held = MemoryUse::of_physical(100, 30, 10);
/// assert_eq!((held.live, held.cached, held.pending, held.physical()), (60, 30, 10, 100));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Bytes of live blocks, and what their granules have beyond them.
    pub live: usize,
    /// Bytes in no block, on which no work is pending. A trim returns those whose granule has nothing else.
    pub cached: usize,
    /// Bytes that were freed and wait for work on streams.
    pub pending: usize,
}

impl MemoryUse {
    /// All bytes.
    pub fn physical(&self) -> usize {
        self.live.saturating_add(self.cached).saturating_add(self.pending)
    }

    /// Divides `physical` bytes: what is neither cached nor pending is live.
    #[must_use]
    pub fn of_physical(physical: usize, cached: usize, pending: usize) -> Self {
        let cached = cached.min(physical);
        let pending = pending.min(physical - cached);
        Self { live: physical - cached - pending, cached, pending }
    }
}

/// Counters of a resource. What a resource does not count is 0.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct ResourceStatistics {
    /// Bytes of live and retired blocks.
    pub bytes_outstanding: usize,
    /// Live blocks.
    pub live_blocks: usize,
    /// Blocks returned whose free has not been counted.
    pub retired_blocks: usize,
    /// Blocks handed out so far.
    pub allocations: u64,
    /// Blocks returned so far.
    pub deallocations: u64,
    /// Events recorded to order streams.
    pub events_recorded: u64,
    /// Waits queued on streams.
    pub waits_inserted: u64,
    /// Waits that were needed for order but already implied.
    pub waits_elided: u64,
}

/// Memory that a resource holds and no block occupies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FreeSpace {
    /// All of it.
    pub bytes: usize,
    /// The largest piece.
    pub largest: usize,
}

impl FreeSpace {
    /// 0 for one piece, towards 1 for many.
    pub fn fragmentation(&self) -> f64 {
        if self.bytes == 0 { 0.0 } else { 1.0 - self.largest as f64 / self.bytes as f64 }
    }
}
