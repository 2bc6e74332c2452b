//! Random programs on the TLSF and on the crate `offset-allocator`, each over one span of the same size.
//!
//! The other allocator keeps free ranges in bins of an eighth of a power of two and serves a request only from bins in which
//! every range is large enough: it may refuse a request that fits. The TLSF never does, so from the same free memory it
//! serves every request that the other one serves. Their free memory diverges; then every refusal of the TLSF must be
//! correct. A failing program prints its seed; `XLOG_INDEX_SEED=<seed>` runs that one.

use std::collections::BTreeMap;

use offset_allocator::{Allocation, Allocator};

use super::super::{Range, Tlsf, TlsfAllocation, UNIT};
use super::{Random, for_each_seed};

const BASE: u64 = 1 << 40;

/// Both allocators over one span, and the live ranges of ours by address.
struct Both {
    units: u32,
    tlsf: Tlsf,
    other: Allocator,
    live: BTreeMap<u64, u64>,
}

impl Both {
    fn new(units: u32) -> Self {
        let mut tlsf = Tlsf::default();
        let bytes = u64::from(units) * UNIT;
        assert!(tlsf.insert_span(Range { ptr: BASE, bytes, stamp: 0 }, true));
        let other = Allocator::with_max_allocs(units, 4096);
        Self { units, tlsf, other, live: BTreeMap::new() }
    }

    /// Allocates a block of ours, which must lie in the span and in no other block.
    fn take(&mut self, units: u32) -> Option<TlsfAllocation> {
        let taken = self.tlsf.allocate(u64::from(units) * UNIT, UNIT)?;
        let (ptr, end) = (taken.ptr, taken.ptr + taken.bytes);
        assert_eq!(taken.bytes, u64::from(units) * UNIT);
        assert!(ptr >= BASE && end <= BASE + u64::from(self.units) * UNIT, "{taken:?}");
        let below = self.live.range(..end).next_back();
        assert!(below.is_none_or(|(_, &live_end)| live_end <= ptr), "{taken:?} over {below:?}");
        self.live.insert(ptr, end);
        Some(taken)
    }

    fn give(&mut self, taken: TlsfAllocation, stamp: u64) {
        assert!(self.live.remove(&taken.ptr).is_some());
        self.tlsf.free(taken.node, stamp);
    }

    /// The largest gap between live ranges, in units.
    fn largest_gap(&self) -> u64 {
        let top = BASE + u64::from(self.units) * UNIT;
        let mut from = BASE;
        let mut largest = 0;
        for (&ptr, &end) in self.live.iter().chain([(&top, &top)]) {
            largest = largest.max(ptr - from);
            from = end;
        }
        largest / UNIT
    }

    /// Checks that one free range is left, and that the other allocator has all its memory back.
    fn is_whole(&self) {
        let all = u64::from(self.units) * UNIT;
        let ranges: Vec<_> = self.tlsf.ranges().map(|range| (range.ptr, range.bytes)).collect();
        assert_eq!(ranges, [(BASE, all)]);
        assert_eq!(self.other.storage_report().total_free_space, self.units);
    }
}

fn size(random: &mut Random) -> u32 {
    let bound = 1 << random.below(10);
    1 + random.below(bound) as u32
}

fn program(seed: u64) {
    let mut random = Random::new(seed);
    let mut both = Both::new(1 + random.below(1 << 13) as u32);
    let mut live: Vec<(TlsfAllocation, Option<Allocation>)> = Vec::new();
    let mut others: Vec<Allocation> = Vec::new();
    for stamp in 0..200 {
        if random.below(5) < 3 {
            let units = size(&mut random);
            match (both.take(units), both.other.allocate(units)) {
                (Some(taken), other) => live.push((taken, other)),
                (None, other) => {
                    let gap = both.largest_gap();
                    assert!(gap < u64::from(units), "{units} refused beside a gap of {gap}");
                    others.extend(other);
                }
            }
        } else if !live.is_empty() {
            let (taken, other) = live.swap_remove(random.below(live.len()));
            both.give(taken, stamp);
            other.into_iter().for_each(|other| both.other.free(other));
        }
        assert_eq!(both.tlsf.largest_free() / UNIT, both.largest_gap());
    }
    for (taken, other) in live {
        both.give(taken, 200);
        others.extend(other);
    }
    others.into_iter().for_each(|other| both.other.free(other));
    both.is_whole();
}

/// Fills the span with blocks in the same order in both allocators, then frees the same ones. From the equal free ranges
/// the TLSF serves at least as many requests of every size.
fn from_the_same_free_memory(seed: u64) {
    let mut random = Random::new(seed);
    let sizes: Vec<u32> = (0..2 + random.below(60)).map(|_| size(&mut random)).collect();
    // With spare space: the bins of the other allocator would refuse the last request if it had to fill the span.
    let filled: u32 = sizes.iter().sum();
    let mut both = Both::new(filled + filled / 4 + 16);
    let mut blocks = Vec::new();
    for &units in &sizes {
        let taken = both.take(units).expect("all that is left is one range");
        let other = both.other.allocate(units).expect("so it is for the other one");
        assert_eq!((taken.ptr - BASE) / UNIT, u64::from(other.offset));
        blocks.push((taken, other));
    }
    for (taken, other) in blocks {
        if random.below(2) == 0 {
            both.give(taken, 1);
            both.other.free(other);
        }
    }
    let units = size(&mut random);
    let theirs = std::iter::from_fn(|| both.other.allocate(units)).count();
    let ours = std::iter::from_fn(|| both.take(units)).count();
    assert!(ours >= theirs, "{ours} blocks of {units} units, the other one has {theirs}");
}

#[test]
fn what_another_allocator_serves_is_served() {
    for_each_seed(2000, program);
}

#[test]
fn the_same_free_memory_holds_at_least_as_many_blocks() {
    for_each_seed(2000, from_the_same_free_memory);
}
