//! Free ranges of an arena: best fit by size, coalesced within a chunk.
//!
//! A range that was freed inside the open capture carries the points that its next owner must follow. Ranges of different
//! chunks are never coalesced, because a block must lie in one chunk.

use std::collections::{BTreeMap, BTreeSet};

use super::order::{Points, add_point};

/// A range without a block.
#[derive(Clone, Debug)]
pub(super) struct FreeRange {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) chunk: usize,
    /// The captured work that a new owner must follow.
    pub(super) after: Points,
}

/// Free ranges by address and by size.
#[derive(Debug, Default)]
pub(super) struct FreeRanges {
    by_start: BTreeMap<u64, FreeRange>,
    by_size: BTreeSet<(u64, u64)>,
}

impl FreeRanges {
    /// Inserts a range, and coalesces it with its free neighbours.
    pub(super) fn insert(&mut self, range: FreeRange) {
        let mut range = range;
        let previous = self.by_start.range(..range.start).next_back();
        let previous = previous.filter(|(_, before)| before.start + before.bytes == range.start);
        if let Some(start) =
            previous.filter(|(_, before)| before.chunk == range.chunk).map(|(&start, _)| start)
            && let Some(before) = self.remove(start)
        {
            range.start = before.start;
            range.bytes += before.bytes;
            before.after.into_iter().for_each(|point| add_point(&mut range.after, point));
        }
        let end = range.start + range.bytes;
        if self.by_start.get(&end).is_some_and(|next| next.chunk == range.chunk)
            && let Some(next) = self.remove(end)
        {
            range.bytes += next.bytes;
            next.after.into_iter().for_each(|point| add_point(&mut range.after, point));
        }
        self.by_size.insert((range.bytes, range.start));
        self.by_start.insert(range.start, range);
    }

    fn remove(&mut self, start: u64) -> Option<FreeRange> {
        let range = self.by_start.remove(&start)?;
        self.by_size.remove(&(range.bytes, start));
        Some(range)
    }

    /// Removes a range if it is one whole free range.
    pub(super) fn remove_whole(&mut self, start: u64, bytes: u64) -> bool {
        let is_whole = self.by_start.get(&start).is_some_and(|range| range.bytes == bytes);
        is_whole && self.remove(start).is_some()
    }

    /// Allocates `bytes` at a multiple of `align` from the smallest range that `accepts`.
    pub(super) fn take(
        &mut self,
        bytes: u64,
        align: u64,
        accepts: impl Fn(&Points) -> bool,
    ) -> Option<FreeRange> {
        let found = self.by_size.range((bytes, 0)..).find_map(|&(_, start)| {
            let range = self.by_start.get(&start)?;
            let first = start.checked_next_multiple_of(align)?;
            let fits = first.checked_add(bytes)? <= start + range.bytes;
            (fits && accepts(&range.after)).then_some((start, first))
        });
        let (start, first) = found?;
        let range = self.remove(start)?;
        let FreeRange { chunk, after, .. } = range;
        let end = start + range.bytes;
        for (from, to) in [(start, first), (first + bytes, end)] {
            if from < to {
                let rest = FreeRange { start: from, bytes: to - from, chunk, after: after.clone() };
                self.by_size.insert((rest.bytes, from));
                self.by_start.insert(from, rest);
            }
        }
        Some(FreeRange { start: first, bytes, chunk, after })
    }

    /// Clears all points after the capture: launches in one arena follow each other.
    pub(super) fn forget_order(&mut self) {
        for range in self.by_start.values_mut() {
            range.after.clear();
        }
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.by_start.values().map(|range| range.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, bytes: u64, chunk: usize) -> FreeRange {
        FreeRange { start, bytes, chunk, after: Points::new() }
    }

    #[test]
    fn neighbours_of_one_chunk_are_joined_and_those_of_two_are_not() {
        let mut free = FreeRanges::default();
        free.insert(range(0x1000, 0x400, 0));
        free.insert(range(0x1800, 0x400, 0));
        free.insert(range(0x1400, 0x400, 0));
        free.insert(range(0x1c00, 0x400, 1));
        assert!(free.take(0x1000, 256, |_| true).is_none(), "a block would lie in two chunks");
        let taken = free.take(0xc00, 256, |_| true).map(|taken| (taken.start, taken.chunk));
        assert_eq!(taken, Some((0x1000, 0)));
        assert_eq!(free.bytes(), 0x400);
    }

    #[test]
    fn an_aligned_range_leaves_both_rests_free() {
        let mut free = FreeRanges::default();
        free.insert(range(0x1100, 0x2f00, 0));
        let taken = free.take(0x1000, 0x2000, |_| true).map(|taken| taken.start);
        assert_eq!(taken, Some(0x2000));
        assert_eq!(free.bytes(), 0x1f00);
        assert!(free.take(0xf00, 256, |_| true).is_some());
        assert!(free.take(0x1000, 256, |_| true).is_some());
    }

    #[test]
    fn the_smallest_range_that_is_accepted_serves() {
        let mut free = FreeRanges::default();
        free.insert(range(0x1000, 0x1000, 0));
        free.insert(range(0x4000, 0x400, 0));
        free.insert(range(0x8000, 0x800, 0));
        let taken = free.take(0x300, 256, |_| true).map(|taken| taken.start);
        assert_eq!(taken, Some(0x4000));
        let taken = free.take(0x300, 256, |_| true).map(|taken| taken.start);
        assert_eq!(taken, Some(0x8000));
    }
}
