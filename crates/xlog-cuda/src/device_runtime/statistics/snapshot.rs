//! What is read: all counts of one instant.

use std::fmt;

use crate::device_runtime::resource::{AllocTag, StreamId};

/// Classes of sizes: class `n` is for sizes above 2^(n-1), up to 2^n.
pub(super) const CLASSES: usize = usize::BITS as usize + 1;

#[inline(always)]
pub(super) fn class_of(bytes: usize) -> usize {
    (usize::BITS - bytes.saturating_sub(1).leading_zeros()) as usize
}

/// Blocks and bytes of one account.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes of live blocks. Exact.
    pub current_bytes: usize,
    /// The most bytes that were live at once. See the module for how exact.
    pub peak_bytes: usize,
    /// Bytes of all blocks so far. Exact.
    pub total_bytes: u64,
    /// Bytes of all blocks that were given back. Exact.
    pub freed_bytes: u64,
    /// Live blocks. Exact.
    pub current_blocks: usize,
    /// The most blocks that were live at once. See the module for how exact.
    pub peak_blocks: usize,
    /// Blocks handed out so far. Exact.
    pub allocations: u64,
    /// Blocks given back so far. Exact.
    pub deallocations: u64,
    /// Allocations that failed or were refused. Exact.
    pub failures: u64,
}

/// How many blocks of which size were asked for, in powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeHistogram(pub(super) [u64; CLASSES]);

impl SizeHistogram {
    /// Requests above `2^(log2 - 1)` bytes and up to `2^log2`.
    #[must_use]
    pub fn count(&self, log2: u32) -> u64 {
        self.0.get(log2 as usize).copied().unwrap_or(0)
    }

    /// The classes that are not empty: the largest size of each, as a power of two, and how many.
    pub fn classes(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(n, count)| (n as u32, *count))
    }
}

/// All counts of a resource at one instant.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatisticsSnapshot {
    /// The device.
    pub device_ordinal: u32,
    /// Everything.
    pub total: Usage,
    /// By tag, those that hold most first.
    pub by_tag: Vec<(AllocTag, Usage)>,
    /// By stream of the allocation, in the order of their ids. A stream with nothing live may have been moved to `other_streams`.
    pub by_stream: Vec<(StreamId, Usage)>,
    /// By query; none is for work outside of any. A query with nothing live may have been moved to `other_queries`.
    pub by_query: Vec<(Option<u64>, Usage)>,
    /// Tags beyond the first 1023.
    pub other_tags: Usage,
    /// Streams that found no room among 255, and those whose room was given to others.
    pub other_streams: Usage,
    /// Queries that found no room among 1023, and those whose room was given to others.
    pub other_queries: Usage,
    /// Bytes asked for so far; the rest of `total.total_bytes` is rounding.
    pub requested_bytes: u64,
    /// Sizes asked for.
    pub sizes: SizeHistogram,
    /// Failed allocations by kind of error.
    pub failures: Vec<(&'static str, u64)>,
    /// Frees of blocks that were allocated before these statistics began.
    pub unknown_frees: u64,
}

impl StatisticsSnapshot {
    /// The account of a tag; empty for one never seen.
    #[must_use]
    pub fn tag(&self, tag: AllocTag) -> Usage {
        self.by_tag
            .iter()
            .find(|(known, _)| *known == tag)
            .map_or_else(Usage::default, |found| found.1)
    }

    /// The account of a stream; empty for one never seen.
    #[must_use]
    pub fn stream(&self, stream: StreamId) -> Usage {
        let found = self.by_stream.iter().find(|(known, _)| *known == stream);
        found.map_or_else(Usage::default, |found| found.1)
    }

    /// The account of a query; empty for one never seen.
    #[must_use]
    pub fn query(&self, query: Option<u64>) -> Usage {
        let found = self.by_query.iter().find(|(known, _)| *known == query);
        found.map_or_else(Usage::default, |found| found.1)
    }
}

/// Bytes for people: three digits and a unit.
pub(super) struct Bytes(pub(super) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let unit = ((63 - self.0.leading_zeros()) / 10) as usize;
        let value = self.0 as f64 / (1_u64 << (10 * unit)) as f64;
        let digits = if value < 100.0 { 1 } else { 0 };
        let name = UNITS.get(unit - 1).copied().unwrap_or("B");
        f.pad(&format!("{value:.digits$} {name}"))
    }
}

const SHOWN: usize = 12;

impl fmt::Display for StatisticsSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "device {}: {} in {} blocks, peak {}; {} allocations, {} failed",
            self.device_ordinal,
            Bytes(self.total.current_bytes as u64),
            self.total.current_blocks,
            Bytes(self.total.peak_bytes as u64),
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
                tag.0,
                Bytes(usage.current_bytes as u64),
                usage.current_blocks,
                Bytes(usage.peak_bytes as u64),
                usage.allocations
            )?;
        }
        match self.by_tag.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => writeln!(f, "... and {more} more tags"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_ends_at_its_power_of_two() {
        for (bytes, class) in
            [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)]
        {
            assert_eq!(class_of(bytes), class, "{bytes}");
        }
        assert_eq!(class_of(usize::MAX), 64);
    }

    #[test]
    fn bytes_are_told_in_the_unit_that_fits() {
        let text: Vec<String> =
            [0, 1023, 1024, 1536, 200 << 20, u64::MAX].map(|b| Bytes(b).to_string()).into();
        assert_eq!(text, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "200 MiB", "16.0 EiB"]);
    }
}
