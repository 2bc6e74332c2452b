//! The address ranges that a log touches, concatenated without the gaps.
//!
//! Addresses are rounded to granules of 2 MiB. If that yields too many ranges, the granule is doubled until they fit.
//! Each process and device has its own address space.
use std::collections::BTreeMap;

/// The maximum number of separate ranges.
const MAX_SEGMENTS: usize = 512;
const GRANULE_BITS: u32 = 21;

/// A range of addresses that contained blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) process: u32,
    pub(crate) device: u32,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Its offset among all ranges.
    pub(crate) offset: u64,
}

/// Collects ranges: from process, device and first granule to the granule after the last.
#[derive(Debug)]
pub(crate) struct SegmentBuilder {
    bits: u32,
    ranges: BTreeMap<(u32, u32, u64), u64>,
}

impl Default for SegmentBuilder {
    fn default() -> Self {
        Self { bits: GRANULE_BITS, ranges: BTreeMap::new() }
    }
}

impl SegmentBuilder {
    /// Adds the addresses of a block.
    pub(crate) fn add(&mut self, process: u32, device: u32, ptr: u64, bytes: u64) {
        let end = ptr.saturating_add(bytes.max(1) - 1);
        self.insert(process, device, ptr >> self.bits, (end >> self.bits) + 1);
        while self.ranges.len() > MAX_SEGMENTS && self.bits < 63 {
            self.bits += 1;
            let ranges = std::mem::take(&mut self.ranges);
            for ((process, device, from), to) in ranges {
                self.insert(process, device, from >> 1, to.div_ceil(2));
            }
        }
    }

    fn insert(&mut self, process: u32, device: u32, from: u64, to: u64) {
        let (mut from, mut to) = (from, to);
        // The range that begins at or before this one, and all that begin inside it or at its end.
        loop {
            let touching = self
                .ranges
                .range((process, device, 0)..=(process, device, to))
                .next_back()
                .filter(|(_, end)| **end >= from)
                .map(|(key, end)| (*key, *end));
            let Some((key, end)) = touching else { break };
            if key.2 <= from && end >= to {
                return;
            }
            self.ranges.remove(&key);
            from = from.min(key.2);
            to = to.max(end);
        }
        self.ranges.insert((process, device, from), to);
    }

    pub(crate) fn finish(self) -> Segments {
        let mut offset = 0_u64;
        let segments = self.ranges.into_iter().map(|((process, device, from), to)| {
            let start = from << self.bits;
            let bytes = (to - from).checked_mul(1 << self.bits).unwrap_or(u64::MAX - start);
            let segment = Segment { process, device, start, bytes, offset };
            offset = offset.saturating_add(bytes);
            segment
        });
        Segments { all: segments.collect() }
    }
}

/// The ranges, by process, device and address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    pub(crate) all: Vec<Segment>,
}

impl Segments {
    /// Returns the total bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.all.last().map_or(0, |last| last.offset.saturating_add(last.bytes))
    }

    /// Returns the offset of an address among all ranges.
    pub(crate) fn offset(&self, process: u32, device: u32, ptr: u64) -> Option<u64> {
        let after = self.all.partition_point(|segment| {
            (segment.process, segment.device, segment.start) <= (process, device, ptr)
        });
        let segment = self.all.get(after.checked_sub(1)?)?;
        let inside = (segment.process, segment.device) == (process, device)
            && ptr - segment.start < segment.bytes;
        inside.then(|| segment.offset.saturating_add(ptr - segment.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_workloads::Minstd;

    #[test]
    fn stretches_that_meet_are_one_and_others_are_apart() {
        let mut builder = SegmentBuilder::default();
        let mib = 1 << 20;
        for at in [100, 104, 102, 300] {
            builder.add(1, 0, at * mib, 2 * mib);
        }
        builder.add(2, 0, 100 * mib, 1);
        let segments = builder.finish();
        let found: Vec<_> =
            segments.all.iter().map(|s| (s.process, s.start / mib, s.bytes / mib)).collect();
        assert_eq!(found, [(1, 100, 6), (1, 300, 2), (2, 100, 2)]);
        assert_eq!(segments.offset(1, 0, 301 * mib), Some(7 * mib));
        assert_eq!(segments.offset(2, 0, 101 * mib), Some(9 * mib));
        assert_eq!(segments.offset(1, 0, 106 * mib), None);
        assert_eq!(segments.bytes(), 10 * mib);
    }

    #[test]
    fn addresses_all_over_the_place_give_a_bounded_number_of_stretches() {
        let mut random = Minstd::new(3);
        let mut blocks = Vec::new();
        let mut builder = SegmentBuilder::default();
        for _ in 0..20_000 {
            let ptr = (random.draw(0, 1 << 30) << 34) | random.draw(1, 1 << 30);
            let bytes = random.draw(1, 1 << 24);
            builder.add(0, 0, ptr, bytes);
            blocks.push((ptr, bytes));
        }
        builder.add(0, 0, u64::MAX - 5, u64::MAX);
        let segments = builder.finish();
        assert!(segments.all.len() <= MAX_SEGMENTS);
        for (ptr, bytes) in blocks {
            let first = segments.offset(0, 0, ptr);
            let last = segments.offset(0, 0, ptr.saturating_add(bytes - 1));
            assert_eq!(first.map(|first| first + bytes - 1), last, "{ptr:#x}, {bytes} bytes");
        }
    }
}
