//! Random programs on the TLSF and on a model that keeps its ranges in an ordered map.
//!
//! A failing program prints its seed; `XLOG_INDEX_SEED=<seed>` runs that one alone, `XLOG_INDEX_PROGRAMS=<n>` runs more.

use std::collections::{BTreeMap, BTreeSet};

use super::super::classes::{class_of, newest, oldest};
use super::super::nodes::State;
use super::super::{BoundedFit, Range, Tlsf, TlsfAllocation, UNIT};
use super::{Random, for_each_seed};

const BASE: u64 = 1 << 44;

/// A model of the memory in ordered maps.
#[derive(Default)]
struct Model {
    /// Size and stamp by address.
    free: BTreeMap<u64, (u64, u64)>,
    live: Vec<TlsfAllocation>,
    /// Boundaries at which adjacent ranges are not merged.
    walls: BTreeSet<u64>,
    /// Memory outside the TLSF, for later insertion.
    outside: Vec<Range>,
}

impl Model {
    fn insert(&mut self, mut range: Range) {
        let before =
            self.free.range(..range.ptr).next_back().map(|(&ptr, &(bytes, _))| (ptr, bytes));
        if let Some((ptr, bytes)) = before {
            assert!(ptr + bytes <= range.ptr, "free ranges overlap at {range:?}");
            if ptr + bytes == range.ptr && !self.walls.contains(&range.ptr) {
                let (bytes, stamp) = self.free.remove(&ptr).unwrap();
                let stamp = stamp.max(range.stamp);
                range = Range { ptr, bytes: bytes + range.bytes, stamp };
            }
        }
        let end = range.ptr + range.bytes;
        if let Some(&(bytes, stamp)) = self.free.get(&end)
            && !self.walls.contains(&end)
        {
            self.free.remove(&end);
            range.bytes += bytes;
            range.stamp = range.stamp.max(stamp);
        }
        self.free.insert(range.ptr, (range.bytes, range.stamp));
    }

    /// Removes a part of the free range that holds it; returns the stamp of the range.
    fn split_block(&mut self, part_ptr: u64, part_bytes: u64) -> u64 {
        let (&ptr, &(bytes, stamp)) = self.free.range(..=part_ptr).next_back().unwrap();
        let (end, part_end) = (ptr + bytes, part_ptr + part_bytes);
        assert!(part_end <= end, "{part_ptr:#x}+{part_bytes} is not free");
        self.free.remove(&ptr);
        if part_ptr > ptr {
            self.free.insert(ptr, (part_ptr - ptr, stamp));
        }
        if end > part_end {
            self.free.insert(part_end, (end - part_end, stamp));
        }
        stamp
    }

    fn fits(&self, bytes: u64, align: u64, mut usable: impl FnMut(u64) -> bool) -> bool {
        self.free.iter().any(|(&ptr, &(free, stamp))| {
            usable(stamp) && ptr.next_multiple_of(align) + bytes <= ptr + free
        })
    }

    fn agrees(&self, tlsf: &Tlsf) {
        let mut ranges: Vec<_> = tlsf.ranges().collect();
        ranges.sort_by_key(|range| range.ptr);
        let expected: Vec<_> =
            self.free.iter().map(|(&ptr, &(bytes, stamp))| Range { ptr, bytes, stamp }).collect();
        assert_eq!(ranges, expected, "free ranges");
        assert_eq!(tlsf.free_ranges(), expected.len());
        assert_eq!(tlsf.free_bytes(), expected.iter().map(|range| range.bytes).sum::<u64>());
        assert_eq!(tlsf.allocated_bytes(), self.live.iter().map(|taken| taken.bytes).sum::<u64>());
        assert_eq!(
            tlsf.largest_free(),
            expected.iter().map(|range| range.bytes).max().unwrap_or(0)
        );
    }
}

/// Checks that every free node is in the list of its class, that lists hold nothing else, and that neighbours match.
fn audit(tlsf: &Tlsf) {
    let mut listed = 0;
    let mut class = tlsf.classes.next_nonempty(0);
    while let Some(filled) = class {
        let mut oldest: Vec<_> = oldest(&tlsf.nodes, filled).collect();
        assert!(!oldest.is_empty(), "class {filled} is marked but empty");
        for (id, node) in newest(&tlsf.nodes, filled) {
            assert_eq!(oldest.pop().map(|(id, _)| id), Some(id));
            assert!(node.is(State::Free) && class_of(node.bytes) == filled, "node {id}: {node:?}");
            listed += 1;
        }
        assert!(oldest.is_empty(), "class {filled} has two lengths");
        class = tlsf.classes.next_nonempty(filled + 1);
    }
    assert_eq!(listed, tlsf.free_ranges());
    for state in [State::Free, State::Allocated] {
        for (id, node) in tlsf.nodes.all(state) {
            assert_eq!(tlsf.nodes.at(node.phys.prev()).end(), node.ptr());
            assert_eq!(tlsf.nodes.at(node.phys.prev()).phys.next(), id);
            assert_eq!(tlsf.nodes.at(node.phys.next()).ptr(), node.end());
            assert_eq!(tlsf.nodes.at(node.phys.next()).phys.prev(), id);
        }
    }
}

fn size(random: &mut Random) -> u64 {
    let units = 1 << random.below(9);
    1 + random.next_u64() % (units * UNIT)
}

fn program(seed: u64) {
    let mut random = Random::new(seed);
    let (mut tlsf, mut model) = (Tlsf::default(), Model::default());
    let mut top = BASE + random.below(8) as u64 * UNIT;
    let (mut stamp, mut lowest) = (0, 0);
    for step in 0..20 + random.below(80) {
        match random.below(16) {
            // Inserts memory: at the top, after a gap, or where it was removed.
            0 | 1 => {
                let known = random.below(3) > 0 && !model.outside.is_empty();
                let range = if known {
                    let at = random.below(model.outside.len());
                    model.outside.swap_remove(at)
                } else {
                    top += if random.below(3) == 0 { UNIT } else { 0 };
                    let bytes = UNIT * (1 + random.next_u64() % 600);
                    let range = Range { ptr: top, bytes, stamp: random.next_u64() % 4 };
                    top += bytes;
                    range
                };
                let join = random.below(4) > 0;
                assert!(tlsf.insert_span(range, join), "{range:?}");
                assert!(!tlsf.insert_span(range, join), "added twice: {range:?}");
                for boundary in [range.ptr, range.ptr + range.bytes] {
                    if join {
                        model.walls.remove(&boundary);
                    } else {
                        model.walls.insert(boundary);
                    }
                }
                model.insert(range);
            }
            2..=8 => {
                let bytes = size(&mut random);
                let align = if random.below(4) > 0 { UNIT } else { UNIT << random.below(8) };
                let whole = bytes.next_multiple_of(UNIT);
                let bound =
                    if random.below(2) == 0 { u64::MAX } else { random.next_u64() % (stamp + 1) };
                let taken = if bound == u64::MAX {
                    let taken = tlsf.allocate(bytes, align);
                    assert_eq!(
                        taken.is_some(),
                        model.fits(whole, align, |_| true),
                        "{bytes} {align}"
                    );
                    taken
                } else {
                    let taken = tlsf
                        .allocate_if(BoundedFit { bytes, maximum: 0, align }, &mut |stamp| {
                            stamp <= bound
                        });
                    let fits = model.fits(whole, align, |stamp| stamp <= bound);
                    // With so few ranges the bounded search sees them all.
                    if taken.is_some() || model.free.len() <= 4 {
                        assert_eq!(taken.is_some(), fits, "{bytes} {align} {bound}");
                    }
                    taken
                };
                if let Some(taken) = taken {
                    assert_eq!((taken.bytes, taken.ptr % align), (whole, 0));
                    assert_eq!(taken.stamp, model.split_block(taken.ptr, taken.bytes));
                    assert!(taken.stamp <= bound);
                    model.live.push(taken);
                }
            }
            9..=12 if !model.live.is_empty() => {
                let taken = model.live.swap_remove(random.below(model.live.len()));
                stamp += random.next_u64() % 3;
                tlsf.free(taken.node, stamp);
                let TlsfAllocation { ptr, bytes, .. } = taken;
                model.insert(Range { ptr, bytes, stamp });
            }
            13 if !model.live.is_empty() => {
                let taken = model.live.swap_remove(random.below(model.live.len()));
                let TlsfAllocation { ptr, bytes, stamp, .. } = taken;
                assert_eq!(tlsf.remove_allocated(taken.node), Some(Range { ptr, bytes, stamp }));
                assert_eq!(tlsf.remove_allocated(taken.node), None);
                model.walls.extend([ptr, ptr + bytes]);
                model.outside.push(Range { ptr, bytes, stamp });
            }
            14 => {
                let min = UNIT * (random.next_u64() % 64);
                let mut pick = random.clone();
                let removed = tlsf.remove_if(min, &mut |range| {
                    assert!(range.bytes >= min);
                    let units = range.bytes / UNIT;
                    let skip = pick.next_u64() % units;
                    let bytes = UNIT * (1 + pick.next_u64() % (units - skip));
                    let part = Range { ptr: range.ptr + skip * UNIT, bytes, stamp: range.stamp };
                    (pick.below(2) == 0).then_some(part)
                });
                random.next_u64();
                for range in removed.ranges {
                    assert_eq!(model.split_block(range.ptr, range.bytes), range.stamp);
                    model.walls.extend([range.ptr, range.ptr + range.bytes]);
                    model.outside.push(range);
                }
            }
            // Ids of no allocated range.
            _ => {
                let node = if random.below(2) == 0 { u32::MAX } else { 1_000_000 };
                tlsf.free(node, u64::MAX);
                assert_eq!(tlsf.remove_allocated(node), None);
            }
        }
        model.agrees(&tlsf);
        lowest = lowest.min(tlsf.free_bytes());
        assert!(tlsf.low_water() <= lowest, "{} of {lowest}", tlsf.low_water());
        if step % 8 == 7 {
            tlsf.restart_low_water();
            lowest = tlsf.free_bytes();
        }
    }
    audit(&tlsf);
    while let Some(taken) = model.live.pop() {
        tlsf.free(taken.node, stamp);
        let TlsfAllocation { ptr, bytes, .. } = taken;
        model.insert(Range { ptr, bytes, stamp });
    }
    while let Some(range) = model.outside.pop() {
        assert!(tlsf.insert_span(range, true));
        model.walls.remove(&range.ptr);
        model.walls.remove(&(range.ptr + range.bytes));
        model.insert(range);
    }
    model.agrees(&tlsf);
    audit(&tlsf);
}

#[test]
fn random_programs_match_the_model() {
    for_each_seed(3000, program);
}
