//! The address ranges that a log touches, in granules, merged when they meet.

use std::collections::BTreeMap;

/// Granule of a range: the smallest unit that a driver maps.
const GRANULE: u64 = 2 << 20;
/// The maximum number of separate ranges; further ones are merged with their neighbour.
const MAX_EXTENTS: usize = 1 << 18;

/// Disjoint ranges by first address.
#[derive(Debug, Default)]
pub(super) struct Extents {
    by_start: BTreeMap<u64, u64>,
}

impl Extents {
    /// Adds the granules that `bytes` at `address` touch.
    pub(super) fn add(&mut self, address: u64, bytes: u64) {
        let mut start = address - address % GRANULE;
        let last = address.saturating_add(bytes.max(1) - 1);
        let mut end = (last - last % GRANULE).saturating_add(GRANULE);
        if let Some((&before, &until)) = self.by_start.range(..=start).next_back() {
            if until >= end {
                return;
            }
            if until >= start || self.by_start.len() >= MAX_EXTENTS {
                start = before;
            }
        }
        while let Some((&next, &until)) = self.by_start.range(start..=end).next() {
            end = end.max(until);
            self.by_start.remove(&next);
        }
        self.by_start.insert(start, end);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_start.iter().map(|(&start, &end)| (start, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_stretches_become_one() {
        let mut extents = Extents::default();
        extents.add(5 * GRANULE + 7, 100);
        extents.add(7 * GRANULE, GRANULE);
        assert_eq!(extents.iter().count(), 2);
        extents.add(6 * GRANULE - 1, 2);
        assert_eq!(extents.iter().collect::<Vec<_>>(), [(5 * GRANULE, 8 * GRANULE)]);
        extents.add(0, 0);
        extents.add(u64::MAX, u64::MAX);
        assert_eq!(extents.iter().count(), 3);
        extents.add(0, 20 * GRANULE);
        assert_eq!(extents.iter().next(), Some((0, 20 * GRANULE)));
    }
}
