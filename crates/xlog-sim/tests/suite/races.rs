//! Every kind of race, by name: reported under every schedule, with both sides, and gone once the order is there.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::{devices, edge, mapped, memset, read, seeded, two_streams};
use xlog_driver::{
    Access, AsyncPools, Driver, DriverError, MapAccess, PoolOptions, ReusePolicy, StreamHandle,
    VirtualMemory,
};
use xlog_sim::{RaceKind, SimDevice, SimKernel};

/// Runs `program` on every engine and many seeds, broken and whole.
fn under_every_schedule(kind: RaceKind, program: impl Fn(&SimDevice, bool)) {
    let all = devices().into_iter().chain((100..600).map(seeded));
    for device in all {
        program(&device, false);
        let races = device.races();
        assert!(races.iter().any(|race| race.kind == kind), "{device:?}: {kind} missed: {races:?}");
    }
    for device in devices().into_iter().chain((100..160).map(seeded)) {
        program(&device, true);
        assert!(device.races().is_empty(), "{device:?}: {}", device.races()[0]);
        device.synchronize().unwrap();
    }
}

fn touch(device: &SimDevice, name: &str, ptr: u64, access: Access, stream: StreamHandle) {
    let kernel = SimKernel::new(name, |_| {}).arg(ptr, 64, access);
    device.launch(stream, kernel).unwrap();
}

#[test]
fn two_writers_nobody_orders() {
    under_every_schedule(RaceKind::WriteWrite, |device, ordered| {
        let (a, b) = two_streams(device);
        let block = device.alloc(64).unwrap();
        memset(device, block, 1, 64, a);
        if ordered {
            edge(device, a, b);
        }
        memset(device, block, 2, 64, b);
    });
}

#[test]
fn a_reader_that_does_not_wait_for_the_writer() {
    under_every_schedule(RaceKind::ReadWrite, |device, ordered| {
        let (a, b) = two_streams(device);
        let block = device.alloc(64).unwrap();
        touch(device, "producer", block, Access::Write, a);
        if ordered {
            edge(device, a, b);
        }
        touch(device, "consumer", block, Access::Read, b);
    });
}

#[test]
fn a_writer_that_does_not_wait_for_one_of_two_readers() {
    under_every_schedule(RaceKind::ReadWrite, |device, ordered| {
        let (a, b) = two_streams(device);
        let c = device.stream_create(0).unwrap();
        let block = device.alloc(64).unwrap();
        touch(device, "reader a", block, Access::Read, a);
        touch(device, "reader b", block, Access::Read, b);
        edge(device, a, c);
        if ordered {
            edge(device, b, c);
        }
        touch(device, "writer", block, Access::Write, c);
    });
}

#[test]
fn a_block_used_on_another_stream_before_its_allocation() {
    under_every_schedule(RaceKind::UseBeforeAllocation, |device, ordered| {
        let (a, b) = two_streams(device);
        let pool = device.pool_create(&PoolOptions::default()).unwrap();
        let block = device.alloc_async(64, pool, a).unwrap();
        if ordered {
            edge(device, a, b);
        }
        touch(device, "early", block, Access::Write, b);
    });
}

#[test]
fn a_block_freed_while_another_stream_still_reads_it() {
    under_every_schedule(RaceKind::UseAfterFree, |device, ordered| {
        let (a, b) = two_streams(device);
        let pool = device.pool_create(&PoolOptions::default()).unwrap();
        let block = device.alloc_async(64, pool, a).unwrap();
        edge(device, a, b);
        touch(device, "late", block, Access::Read, b);
        if ordered {
            edge(device, b, a);
        }
        // SAFETY: the block is live.
        unsafe { device.free_async(block, a) }.unwrap();
    });
}

#[test]
fn a_reader_that_meets_the_next_block_at_the_same_place() {
    under_every_schedule(RaceKind::UseAcrossReuse, |device, ordered| {
        let (a, b) = two_streams(device);
        let reuse = ReusePolicy::DETERMINISTIC;
        let pool = device.pool_create(&PoolOptions { reuse, ..PoolOptions::default() }).unwrap();
        let block = device.alloc_async(64, pool, a).unwrap();
        edge(device, a, b);
        touch(device, "late", block, Access::Read, b);
        if ordered {
            edge(device, b, a);
        }
        // SAFETY: the block is live.
        unsafe { device.free_async(block, a) }.unwrap();
        let again = device.alloc_async(64, pool, a).unwrap();
        assert_eq!(again, block, "the stream's own freed memory comes first");
        touch(device, "new owner", again, Access::Write, a);
    });
}

#[test]
fn a_sub_allocator_that_hands_memory_on_too_early() {
    under_every_schedule(RaceKind::UseAcrossReuse, |device, ordered| {
        let (a, b) = two_streams(device);
        let segment = device.alloc(4096).unwrap();
        device.begin_range(segment, 64, a, "first").unwrap();
        touch(device, "first use", segment, Access::Write, a);
        device.end_range(segment, 64, a).unwrap();
        if ordered {
            edge(device, a, b);
        }
        device.begin_range(segment, 64, b, "second").unwrap();
        touch(device, "second use", segment, Access::Write, b);
    });
}

#[test]
fn a_mapping_taken_away_before_the_host_saw_its_work_complete() {
    under_every_schedule(RaceKind::UnmapUnderUse, |device, ordered| {
        let (a, b) = two_streams(device);
        let (range, unit) = mapped(device);
        touch(device, "work", range, Access::Write, a);
        edge(device, a, b);
        if ordered {
            device.stream_synchronize(b).unwrap();
        }
        // SAFETY: what this test is about.
        unsafe { device.unmap(range, unit) }.unwrap();
    });
}

#[test]
fn a_plain_block_freed_before_the_host_saw_its_work_complete() {
    under_every_schedule(RaceKind::UseAfterFree, |device, ordered| {
        let (a, _) = two_streams(device);
        let block = device.alloc(64).unwrap();
        touch(device, "work", block, Access::Write, a);
        if ordered {
            device.stream_synchronize(a).unwrap();
        }
        // SAFETY: what this test is about.
        unsafe { device.free(block) }.unwrap();
    });
}

#[test]
fn memory_reached_through_two_mappings_is_one_memory() {
    under_every_schedule(RaceKind::WriteWrite, |device, ordered| {
        let (a, b) = two_streams(device);
        let unit = device.granularity();
        let range = device.reserve(2 * unit, 0).unwrap();
        let memory = device.create(unit).unwrap();
        for at in [range, range + unit as u64] {
            // SAFETY: a fresh reservation.
            unsafe { device.map(at, unit, memory) }.unwrap();
        }
        // SAFETY: just mapped.
        unsafe { device.set_access(range, 2 * unit, MapAccess::ReadWrite) }.unwrap();
        memset(device, range, 1, 64, a);
        if ordered {
            edge(device, a, b);
        }
        memset(device, range + unit as u64, 2, 64, b);
    });
}

#[test]
fn order_through_the_host_counts() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, a);
        device.stream_synchronize(a).unwrap();
        memset(&device, block, 2, 64, b);
        let event = device.event_create().unwrap();
        device.event_record(event, b).unwrap();
        device.event_synchronize(event).unwrap();
        memset(&device, block, 3, 64, a);
        while !device.stream_query(a).unwrap() {}
        memset(&device, block, 4, 64, b);
        device.event_record(event, b).unwrap();
        while !device.event_query(event).unwrap() {}
        assert_eq!(read(&device, block, 64, a), [4; 64]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn order_through_a_gate_counts_even_against_the_order_of_queueing() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        let gate = device.hold(a).unwrap();
        memset(&device, block, 1, 64, a);
        memset(&device, block, 2, 64, b);
        device.stream_synchronize(b).unwrap();
        gate.release();
        assert_eq!(read(&device, block, 64, a), [1; 64]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn a_gate_released_without_having_seen_the_other_stream_orders_nothing() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        let gate = device.hold(a).unwrap();
        memset(&device, block, 1, 64, a);
        memset(&device, block, 2, 64, b);
        gate.release();
        let _ = device.synchronize();
        assert_eq!(device.races().len(), 1);
    }
}

#[test]
fn a_gate_opened_by_a_host_function_passes_its_order_on() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        let gate = device.hold(b).unwrap();
        memset(&device, block, 2, 64, b);
        memset(&device, block, 1, 64, a);
        device.host_fn(a, Box::new(move || gate.release())).unwrap();
        assert_eq!(read(&device, block, 64, b), [2; 64]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn work_behind_a_gate_on_a_block_freed_meanwhile_is_a_use_after_free() {
    for device in devices() {
        let (a, _) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        let gate = device.hold(a).unwrap();
        memset(&device, block, 1, 64, a);
        // SAFETY: what this test is about.
        unsafe { device.free(block) }.unwrap();
        gate.release();
        assert!(matches!(device.stream_synchronize(a), Err(DriverError::Race { .. })));
        assert_eq!(device.races()[0].kind, RaceKind::UseAfterFree);
    }
}

#[test]
fn reuse_of_memory_whose_free_has_completed_is_no_race() {
    for seed in 0..200 {
        let device = seeded(seed);
        let (a, b) = two_streams(&device);
        let reuse = ReusePolicy {
            follow_event_dependencies: false,
            opportunistic: true,
            internal_dependencies: false,
        };
        let pool = device.pool_create(&PoolOptions { reuse, ..PoolOptions::default() }).unwrap();
        for round in 0..20 {
            let (from, to) = if round % 2 == 0 { (a, b) } else { (b, a) };
            let block = device.alloc_async(5000, pool, from).unwrap();
            memset(&device, block, round, 5000, from);
            // SAFETY: the block is live.
            unsafe { device.free_async(block, from) }.unwrap();
            let other = device.alloc_async(700, pool, to).unwrap();
            memset(&device, other, 77, 700, to);
            // SAFETY: the block is live.
            unsafe { device.free_async(other, to) }.unwrap();
        }
        device.synchronize().unwrap();
        assert!(device.races().is_empty(), "seed {seed}: {}", device.races()[0]);
    }
}

#[test]
fn a_machine_with_many_dead_streams_still_orders_rightly() {
    // Slots of destroyed streams are used again; nothing old may look ordered or unordered by accident.
    let device: Arc<SimDevice> = seeded(3);
    let keep = device.stream_create(0).unwrap();
    let block = device.alloc(64).unwrap();
    for round in 0..200 {
        let stream = device.stream_create(0).unwrap();
        edge(&device, keep, stream);
        memset(&device, block, round as u8, 64, stream);
        edge(&device, stream, keep);
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
        if round % 3 == 0 {
            device.stream_synchronize(keep).unwrap();
        }
    }
    assert!(device.races().is_empty(), "{}", device.races()[0]);
    let stray = device.stream_create(0).unwrap();
    memset(&device, block, 1, 64, keep);
    memset(&device, block, 1, 64, stray);
    assert_eq!(device.races().len(), 1);
}

#[test]
fn a_synchronised_host_knows_what_destroyed_streams_did() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, a);
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(a) }.unwrap();
        device.synchronize().unwrap();
        memset(&device, block, 2, 64, b);
        device.synchronize().unwrap();
        // SAFETY: the host has seen everything complete.
        unsafe { device.free(block) }.unwrap();
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}
