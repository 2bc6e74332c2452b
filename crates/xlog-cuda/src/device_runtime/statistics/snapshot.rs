//! Snapshots: all counts of one instant.

use std::fmt;

use xlog_base::{PowerHistogram, escape, size_text};

use crate::device_runtime::resource::{AllocTag, StreamId};

/// Blocks and bytes of one account.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes of live blocks. Exact.
    pub current_bytes: usize,
    /// The peak of live bytes; see the module for its accuracy.
    pub peak_bytes: usize,
    /// Bytes of all blocks so far. Exact.
    pub total_bytes: u64,
    /// Bytes of all freed blocks. Exact.
    pub freed_bytes: u64,
    /// Live blocks. Exact.
    pub current_blocks: usize,
    /// The peak of live blocks; see the module for its accuracy.
    pub peak_blocks: usize,
    /// Blocks allocated so far. Exact.
    pub allocations: u64,
    /// Blocks freed so far. Exact.
    pub deallocations: u64,
    /// Allocations that failed or were refused. Exact.
    pub failures: u64,
}

/// All counts of a resource at one instant.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatisticsSnapshot {
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// All blocks.
    pub total: Usage,
    /// By tag, the largest first.
    pub by_tag: Vec<(AllocTag, Usage)>,
    /// By stream of the allocation, in the order of their ids. A stream without live blocks may have moved to `other_streams`.
    pub by_stream: Vec<(StreamId, Usage)>,
    /// By query; `None` is work outside of queries. A query without live blocks may have moved to `other_queries`.
    pub by_query: Vec<(Option<u64>, Usage)>,
    /// Tags beyond the first 1023.
    pub other_tags: Usage,
    /// Streams beyond 255, and those whose id was recycled.
    pub other_streams: Usage,
    /// Queries beyond 1023, and those whose id was recycled.
    pub other_queries: Usage,
    /// Requested bytes so far; `total.total_bytes` also includes rounding.
    pub requested_bytes: u64,
    /// The requested sizes, less one byte: class `n` counts requests above `2^(n - 1)` bytes and up to `2^n`.
    pub sizes: PowerHistogram,
    /// Failed allocations by kind of error.
    pub failures: Vec<(&'static str, u64)>,
    /// Frees of blocks that these statistics did not count.
    pub unknown_frees: u64,
}

impl StatisticsSnapshot {
    /// The account of a tag; empty for an unknown one.
    #[must_use]
    pub fn tag(&self, tag: AllocTag) -> Usage {
        self.by_tag
            .iter()
            .find(|(known, _)| *known == tag)
            .map_or_else(Usage::default, |found| found.1)
    }

    /// The account of a stream; empty for an unknown one.
    #[must_use]
    pub fn stream(&self, stream: StreamId) -> Usage {
        let found = self.by_stream.iter().find(|(known, _)| *known == stream);
        found.map_or_else(Usage::default, |found| found.1)
    }

    /// The account of a query; empty for an unknown one.
    #[must_use]
    pub fn query(&self, query: Option<u64>) -> Usage {
        let found = self.by_query.iter().find(|(known, _)| *known == query);
        found.map_or_else(Usage::default, |found| found.1)
    }
}

const SHOWN: usize = 12;

impl fmt::Display for StatisticsSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "device {}: {} in {} blocks, peak {}; {} allocations, {} failed",
            self.device_ordinal,
            size_text(self.total.current_bytes as u64),
            self.total.current_blocks,
            size_text(self.total.peak_bytes as u64),
            self.total.allocations,
            self.total.failures
        )?;
        writeln!(
            f,
            "{:<32} {:>10} {:>9} {:>10} {:>12}",
            "tag", "current", "blocks", "peak", "allocations"
        )?;
        for (tag, usage) in self.by_tag.iter().take(SHOWN) {
            writeln!(
                f,
                "{:<32} {:>10} {:>9} {:>10} {:>12}",
                escape::line(tag.0),
                size_text(usage.current_bytes as u64),
                usage.current_blocks,
                size_text(usage.peak_bytes as u64),
                usage.allocations
            )?;
        }
        match self.by_tag.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => writeln!(f, "... and {more} more tags"),
            _ => Ok(()),
        }
    }
}
