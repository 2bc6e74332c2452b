//! Counters, and the hook by which physical memory is metered.

use super::ResourceResult;

/// Told of the physical memory a resource takes from its device and returns to it.
///
/// Blocks are metered elsewhere: this counts segments, driver pools and raw allocations, cached or not.
pub trait PhysicalMeter: Send + Sync {
    /// Called before `bytes` are taken. An error refuses them.
    fn take(&self, bytes: usize) -> ResourceResult<()>;

    /// Called after `bytes` were returned.
    fn give(&self, bytes: usize);
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

/// Memory that a resource holds and nobody has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FreeSpace {
    /// All of it.
    pub bytes: usize,
    /// The largest piece.
    pub largest: usize,
}

impl FreeSpace {
    /// 0 for one piece, towards 1 for many.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.bytes == 0 { 0.0 } else { 1.0 - self.largest as f64 / self.bytes as f64 }
    }
}
