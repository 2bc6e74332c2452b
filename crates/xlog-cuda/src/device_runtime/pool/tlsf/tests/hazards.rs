//! Hazards of free lists, one test each.

use super::super::classes::{CLASSES, class_of};
use super::super::nodes::Node;
use super::super::{BoundedFit, CHUNK, Range, SMALL, Tlsf, TlsfAllocation, UNIT};

const BASE: u64 = 1 << 40;

fn with(bytes: u64) -> Tlsf {
    let mut tlsf = Tlsf::default();
    assert!(tlsf.insert_span(Range { ptr: BASE, bytes, stamp: 0 }, true));
    tlsf
}

fn only(tlsf: &Tlsf) -> Range {
    let ranges: Vec<_> = tlsf.ranges().collect();
    assert_eq!(ranges.len(), 1, "{ranges:?}");
    ranges[0]
}

#[test]
fn no_node_lies_on_two_cache_lines() {
    assert_eq!((size_of::<Node>(), align_of::<Node>()), (32, 32));
}

#[test]
fn no_size_has_a_class_beyond_the_last() {
    assert_eq!(class_of(u64::MAX) as usize, CLASSES - 1);
    assert!((0..64).all(|shift| (class_of(1 << shift) as usize) < CLASSES));
}

#[test]
fn a_range_given_twice_is_given_once() {
    let mut tlsf = with(16 * UNIT);
    let taken = tlsf.allocate(4 * UNIT, UNIT).unwrap();
    let _between = tlsf.allocate(UNIT, UNIT).unwrap();
    tlsf.free(taken.node, 3);
    tlsf.free(taken.node, 9);
    assert_eq!((tlsf.free_bytes(), tlsf.allocated_bytes()), (15 * UNIT, UNIT));
    assert!(tlsf.ranges().all(|range| range.stamp < 9));
}

#[test]
fn memory_that_the_tlsf_has_is_not_inserted_again() {
    let mut tlsf = with(16 * UNIT);
    for (ptr, bytes) in [
        (BASE, 16 * UNIT),
        (BASE - UNIT, 2 * UNIT),
        (BASE + 15 * UNIT, 2 * UNIT),
        (BASE + 4 * UNIT, UNIT),
        (BASE - UNIT, 32 * UNIT),
    ] {
        assert!(!tlsf.insert_span(Range { ptr, bytes, stamp: 0 }, true), "{ptr:#x}+{bytes}");
    }
    assert_eq!(only(&tlsf).bytes, 16 * UNIT);
}

#[test]
fn a_small_range_is_not_split_off_a_large_one_but_off_a_chunk() {
    let mut tlsf = with(8 * CHUNK);
    assert_eq!(tlsf.allocate_units(SMALL - UNIT), None);
    assert!(tlsf.split_chunk());
    let small = tlsf.allocate_units(SMALL - UNIT).unwrap();
    let large = tlsf.allocate_units(SMALL).unwrap();
    // The smallest range that holds it is the rest of the chunk.
    assert_eq!(large.ptr / CHUNK, small.ptr / CHUNK);
    let beside = tlsf.allocate_units(7 * CHUNK).unwrap();
    for taken in [small, large, beside] {
        tlsf.free(taken.node, taken.ptr);
    }
    assert_eq!(tlsf.ranges().count(), 2, "a free chunk stays one");
    tlsf.coalesce_chunks();
    assert_eq!(
        only(&tlsf),
        Range { ptr: BASE, bytes: 8 * CHUNK, stamp: beside.ptr.max(large.ptr) }
    );
}

#[test]
fn the_low_water_is_what_no_request_needed_since_its_restart() {
    let mut tlsf = with(8 * CHUNK);
    tlsf.restart_low_water();
    let taken = tlsf.allocate_units(3 * CHUNK).unwrap();
    tlsf.free(taken.node, 0);
    assert_eq!(tlsf.low_water(), 5 * CHUNK);
    tlsf.restart_low_water();
    assert_eq!(tlsf.low_water(), 8 * CHUNK);
    // Memory that left for another stream was needed.
    let removed = tlsf.remove_if(0, &mut |range| Some(*range));
    removed.ranges.into_iter().for_each(|range| assert!(tlsf.insert_span(range, true)));
    assert_eq!(tlsf.low_water(), 0);
}

#[test]
fn chunks_that_are_split_off_or_coalesced_are_not_needed_yet() {
    let mut tlsf = with(8 * CHUNK);
    tlsf.restart_low_water();
    assert!(tlsf.split_chunk());
    assert_eq!(tlsf.low_water(), 8 * CHUNK);
    let small = tlsf.allocate_units(UNIT).unwrap();
    assert_eq!(tlsf.low_water(), 8 * CHUNK - UNIT);
    tlsf.free(small.node, 0);
    tlsf.coalesce_chunks();
    assert_eq!(tlsf.low_water(), 8 * CHUNK - UNIT);
}

#[test]
fn what_no_request_needed_leaves_first_and_arrives_as_such() {
    let mut tlsf = with(9 * CHUNK);
    let [idle, _between, pending] =
        [3, 1, 5].map(|chunks| tlsf.allocate_units(chunks * CHUNK).unwrap());
    tlsf.free(idle.node, 0);
    tlsf.free(pending.node, 7);
    tlsf.restart_low_water();
    let needed = tlsf.allocate_units(4 * CHUNK).unwrap();
    tlsf.free(needed.node, 7);
    assert_eq!(tlsf.low_water(), 4 * CHUNK);
    // The five pending chunks serve what needed four.
    let removed = tlsf.remove_if(0, &mut |range| (range.stamp == 0).then_some(*range));
    assert_eq!((removed.unneeded, tlsf.low_water()), (3 * CHUNK, CHUNK));
    tlsf.raise_low_water(removed.unneeded);
    removed.ranges.into_iter().for_each(|range| assert!(tlsf.insert_span(range, true)));
    assert_eq!(tlsf.low_water(), 4 * CHUNK);
    let removed = tlsf.remove_if(0, &mut |range| Some(*range));
    assert_eq!((removed.ranges.len(), removed.unneeded, tlsf.low_water()), (2, 4 * CHUNK, 0));
    tlsf.raise_low_water(removed.unneeded);
    assert_eq!(tlsf.low_water(), 0, "never more than is free");
}

#[test]
fn without_room_for_a_chunk_nothing_changes() {
    let mut tlsf = with(CHUNK - UNIT);
    let all = only(&tlsf);
    assert!(!tlsf.split_chunk());
    tlsf.coalesce_chunks();
    assert_eq!(only(&tlsf), all);
    assert!(tlsf.allocate_units(UNIT).is_some(), "a small range serves small requests as it is");
}

#[test]
fn a_chunk_is_aligned_where_the_range_allows_it() {
    let mut tlsf = Tlsf::default();
    assert!(tlsf.insert_span(Range { ptr: BASE + UNIT, bytes: 3 * CHUNK, stamp: 5 }, true));
    assert!(tlsf.split_chunk());
    let chunk = Range { ptr: BASE + CHUNK, bytes: CHUNK, stamp: 5 };
    assert!(tlsf.ranges().any(|range| range == chunk), "{:?}", tlsf.ranges().collect::<Vec<_>>());
}

#[test]
fn ranges_that_are_not_whole_units_are_refused() {
    let mut tlsf = Tlsf::default();
    for (ptr, bytes) in [(BASE + 1, UNIT), (BASE, UNIT + 1), (BASE, 0), (u64::MAX - 255, 512)] {
        assert!(!tlsf.insert_span(Range { ptr, bytes, stamp: 0 }, true), "{ptr:#x}+{bytes}");
    }
    assert_eq!(tlsf.free_ranges(), 0);
    assert_eq!(tlsf.largest_free(), 0);
}

#[test]
fn requests_that_cannot_be_are_refused() {
    let mut tlsf = with(16 * UNIT);
    for (bytes, align) in [
        (u64::MAX, UNIT),
        (17 * UNIT, UNIT),
        (1, 1 << 63),
        (UNIT, 0),
        (UNIT, 768),
        (u64::MAX - 511, 4096),
    ] {
        assert_eq!(tlsf.allocate(bytes, align), None, "{bytes} at {align}");
        assert_eq!(
            tlsf.allocate_if(BoundedFit { bytes, maximum: 0, align }, &mut |_| true),
            None,
            "{bytes} at {align}"
        );
    }
    assert_eq!(tlsf.allocate(0, 1).map(|taken| taken.bytes), Some(UNIT));
}

#[test]
fn the_last_range_that_fits_is_found_behind_many_that_do_not() {
    // All in one class of 2^k..2^k (1 + 1/32); the one that fits is the oldest.
    let mut tlsf = Tlsf::default();
    for at in 0..100 {
        let bytes = if at == 0 { 1030 * UNIT } else { 1024 * UNIT };
        assert!(tlsf.insert_span(Range { ptr: BASE + at * 4096 * UNIT, bytes, stamp: 0 }, false));
    }
    assert_eq!(tlsf.allocate(1030 * UNIT, UNIT).map(|taken| taken.ptr), Some(BASE));
    assert_eq!(tlsf.allocate(1030 * UNIT, UNIT), None);
}

#[test]
fn an_aligned_request_leaves_head_and_tail_free() {
    let mut tlsf = Tlsf::default();
    let range = Range { ptr: BASE + UNIT, bytes: (4 << 20) + 7 * UNIT, stamp: 5 };
    assert!(tlsf.insert_span(range, true));
    let taken = tlsf.allocate(3 * UNIT, 2 << 20).unwrap();
    assert_eq!((taken.ptr % (2 << 20), taken.bytes, taken.stamp), (0, 3 * UNIT, 5));
    assert_eq!(tlsf.free_ranges(), 2);
    assert!(tlsf.ranges().all(|range| range.stamp == 5));
    tlsf.free(taken.node, 4);
    assert_eq!(only(&tlsf), range);
}

#[test]
fn a_merge_keeps_the_latest_stamp_of_three() {
    for (first, middle, last) in [(9, 1, 2), (1, 9, 2), (1, 2, 9)] {
        let mut tlsf = with(12 * UNIT);
        let taken: Vec<_> = (0..3).map(|_| tlsf.allocate(4 * UNIT, UNIT).unwrap()).collect();
        tlsf.free(taken[0].node, first);
        tlsf.free(taken[2].node, last);
        tlsf.free(taken[1].node, middle);
        assert_eq!(only(&tlsf), Range { ptr: BASE, bytes: 12 * UNIT, stamp: 9 });
    }
}

#[test]
fn memory_that_left_is_a_boundary_until_it_returns() {
    let mut tlsf = with(12 * UNIT);
    let taken: Vec<TlsfAllocation> =
        (0..3).map(|_| tlsf.allocate(4 * UNIT, UNIT).unwrap()).collect();
    let middle = tlsf.remove_allocated(taken[1].node).unwrap();
    tlsf.free(taken[0].node, 1);
    tlsf.free(taken[2].node, 2);
    assert_eq!((tlsf.free_ranges(), tlsf.largest_free()), (2, 4 * UNIT));
    assert!(tlsf.insert_span(Range { stamp: 7, ..middle }, true));
    assert_eq!(only(&tlsf), Range { ptr: BASE, bytes: 12 * UNIT, stamp: 7 });
}

#[test]
fn spans_that_touch_but_were_not_joined_stay_apart() {
    let mut tlsf = with(8 * UNIT);
    assert!(tlsf.insert_span(Range { ptr: BASE + 8 * UNIT, bytes: 8 * UNIT, stamp: 0 }, false));
    assert_eq!(tlsf.allocate(9 * UNIT, UNIT), None);
    let whole = tlsf.allocate(8 * UNIT, UNIT).unwrap();
    tlsf.free(whole.node, 1);
    assert_eq!(tlsf.free_ranges(), 2);
}

#[test]
fn a_part_that_is_not_in_its_range_does_not_leave() {
    let mut tlsf = with(16 * UNIT);
    for (ptr, bytes) in [
        (BASE - UNIT, 2 * UNIT),
        (BASE + UNIT, 16 * UNIT),
        (BASE + 1, UNIT),
        (BASE, 0),
        (BASE, u64::MAX - 255),
        (u64::MAX - 255, UNIT),
    ] {
        let left = tlsf.remove_if(0, &mut |_| Some(Range { ptr, bytes, stamp: 0 })).ranges;
        assert_eq!(left, [], "{ptr:#x}+{bytes}");
    }
    assert_eq!(only(&tlsf).bytes, 16 * UNIT);
}

#[test]
fn every_aligned_part_of_a_range_leaves_in_one_call() {
    const HANDLE: u64 = 16 * UNIT;
    let mut tlsf = Tlsf::default();
    assert!(tlsf.insert_span(Range { ptr: BASE + UNIT, bytes: 4 * HANDLE, stamp: 3 }, true));
    let removed = tlsf.remove_if(HANDLE, &mut |range| {
        let ptr = range.ptr.next_multiple_of(HANDLE);
        (ptr + HANDLE <= range.ptr + range.bytes).then_some(Range { ptr, bytes: HANDLE, stamp: 0 })
    });
    let mut left = removed.ranges;
    left.sort_by_key(|range| range.ptr);
    let whole: Vec<_> =
        (1..4).map(|at| Range { ptr: BASE + at * HANDLE, bytes: HANDLE, stamp: 3 }).collect();
    assert_eq!(left, whole);
    assert_eq!(tlsf.free_bytes(), HANDLE);
}

#[test]
fn usable_memory_is_found_above_classes_that_are_not() {
    // More unusable ranges than the search probes, then one large range that may be used.
    let mut tlsf = Tlsf::default();
    for at in 0..200 {
        let range = Range { ptr: BASE + (at << 20), bytes: (40 + at) * UNIT, stamp: 9 };
        assert!(tlsf.insert_span(range, false));
    }
    assert!(tlsf.insert_span(Range { ptr: BASE << 1, bytes: 1 << 30, stamp: 1 }, false));
    let taken = tlsf
        .allocate_if(BoundedFit { bytes: UNIT, maximum: 0, align: UNIT }, &mut |stamp| stamp <= 1)
        .unwrap();
    assert_eq!(taken.ptr, BASE << 1);
}
