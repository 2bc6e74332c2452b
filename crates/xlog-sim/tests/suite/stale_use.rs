//! Work that outlives its memory: behind a gate, through another mapping, after the memory went back to the device.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::support::{devices, edge, mapped, memset, read, seeded, two_streams};
use xlog_driver::{
    Access, AsyncPools, Driver, DriverError, Gate, MapAccess, PoolHandle, PoolOptions,
    StreamHandle, VirtualMemory,
};
use xlog_sim::{RaceKind, SimDevice, SimKernel};

fn pool(device: &SimDevice, release_threshold: u64) -> PoolHandle {
    device.pool_create(&PoolOptions { release_threshold, ..PoolOptions::default() }).unwrap()
}

fn free_async(device: &SimDevice, block: u64, stream: StreamHandle) {
    // SAFETY: the block is live; whether it is in use is what these tests are about.
    unsafe { device.free_async(block, stream) }.unwrap();
}

/// A write on `b` behind a closed gate, of a block that `a` then frees and sees freed.
fn gated_write(device: &SimDevice, pool: PoolHandle) -> (StreamHandle, StreamHandle, u64, Gate) {
    let (a, b) = two_streams(device);
    let block = device.alloc_async(1024, pool, a).unwrap();
    edge(device, a, b);
    let gate = device.hold(b).unwrap();
    memset(device, block, 0xbb, 1024, b);
    free_async(device, block, a);
    (a, b, block, gate)
}

#[test]
fn work_behind_a_gate_on_a_pool_block_freed_meanwhile() {
    // With a threshold of 0 the synchronisation gives the whole segment back to the device.
    for threshold in [0, u64::MAX] {
        for device in devices() {
            let pool = pool(&device, threshold);
            let (a, b, _, gate) = gated_write(&device, pool);
            device.stream_synchronize(a).unwrap();
            let reserved = device.pool_usage(pool).unwrap().reserved;
            assert_eq!(reserved == 0, threshold == 0, "{reserved} bytes reserved");
            gate.release();
            let outcome = device.stream_synchronize(b);
            assert!(matches!(outcome, Err(DriverError::Race { .. })), "{outcome:?}");
            let races = device.races();
            assert_eq!(races.len(), 1, "{races:?}");
            assert_eq!(races[0].kind, RaceKind::UseAfterFree);
            assert_eq!(races[0].first.operation, "free_async", "{}", races[0]);
        }
    }
}

#[test]
fn work_behind_a_gate_on_a_trimmed_or_destroyed_pool() {
    for destroyed in [false, true] {
        for device in devices() {
            let pool = pool(&device, u64::MAX);
            let (a, b, _, gate) = gated_write(&device, pool);
            device.stream_synchronize(a).unwrap();
            if destroyed {
                // SAFETY: made here, and not used any more.
                unsafe { device.pool_destroy(pool) }.unwrap();
            } else {
                device.pool_trim(pool, 0).unwrap();
            }
            // Its addresses, or even its host memory, may serve others by now.
            let other = device.alloc(32 << 20).unwrap();
            memset(&device, other, 1, 1024, a);
            gate.release();
            for stream in [a, b] {
                assert!(device.stream_synchronize(stream).is_err(), "both sides are told");
            }
            assert_eq!(device.races()[0].kind, RaceKind::UseAfterFree);
            assert_eq!(read(&device, other, 1024, a), [1; 1024]);
            assert_eq!(device.races().len(), 1);
        }
    }
}

#[test]
fn work_behind_a_gate_that_meets_the_next_block_at_its_place() {
    // Whatever the new owner did meanwhile, the old work lands in its block.
    for used in [None, Some(Access::Read), Some(Access::Write)] {
        for device in devices() {
            let pool = pool(&device, u64::MAX);
            let (a, b, block, gate) = gated_write(&device, pool);
            let next = device.alloc_async(1024, pool, a).unwrap();
            assert_eq!(next, block, "the stream's own freed memory comes first");
            if let Some(access) = used {
                for at in [0, 512] {
                    let kernel = SimKernel::new("owner", |_| {}).arg(next + at, 512, access);
                    device.launch(a, kernel).unwrap();
                }
            }
            device.stream_synchronize(a).unwrap();
            gate.release();
            assert!(device.stream_synchronize(b).is_err(), "{used:?}");
            let races = device.races();
            assert!(races.iter().any(|r| r.kind == RaceKind::UseAcrossReuse), "{races:?}");
        }
    }
}

#[test]
fn work_that_runs_before_the_allocation_of_its_block_however_well_ordered() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let pool = pool(&device, u64::MAX);
        let gate = device.hold(a).unwrap();
        let block = device.alloc_async(64, pool, a).unwrap();
        memset(&device, block, 1, 64, b);
        device.stream_synchronize(b).unwrap();
        gate.release();
        assert!(device.stream_synchronize(a).is_err());
        assert_eq!(device.races()[0].kind, RaceKind::UseBeforeAllocation);
    }
}

#[test]
fn every_use_after_a_free_is_reported_not_only_the_first() {
    for device in devices() {
        let pool = pool(&device, u64::MAX);
        let (a, b) = two_streams(&device);
        let block = device.alloc_async(64, pool, a).unwrap();
        edge(&device, a, b);
        let gate = device.hold(b).unwrap();
        memset(&device, block, 1, 64, b);
        memset(&device, block, 2, 64, b);
        free_async(&device, block, a);
        device.stream_synchronize(a).unwrap();
        gate.release();
        assert!(device.stream_synchronize(b).is_err());
        let frees = device.races().iter().filter(|r| r.kind == RaceKind::UseAfterFree).count();
        assert_eq!(frees, 2, "{:?}", device.races());
    }
}

/// The kinds of the races of a program, and whether it lost the device.
fn verdict(device: &SimDevice) -> (bool, Vec<RaceKind>) {
    let lost = device.memory_info().is_err();
    (lost, device.races().iter().map(|race| race.kind).collect())
}

#[test]
fn an_unmapping_and_a_gate_opened_by_a_host_function_give_one_verdict() {
    let mut lost = BTreeSet::new();
    for seed in 0..200 {
        let device = seeded(seed);
        let (a, b) = two_streams(&device);
        let (range, unit) = mapped(&device);
        let gate = device.hold(b).unwrap();
        device.host_fn(a, Box::new(move || gate.release())).unwrap();
        memset(&device, range, 1, 64, b);
        // SAFETY: what this test is about.
        unsafe { device.unmap(range, unit) }.unwrap();
        assert!(device.stream_synchronize(b).is_err());
        let (gone, races) = verdict(&device);
        assert_eq!(races, [RaceKind::UnmapUnderUse], "seed {seed}");
        lost.insert(gone);
    }
    assert_eq!(lost.len(), 2, "the gate must open before and after the unmapping");
}

#[test]
fn rights_taken_and_given_back_behind_a_gate_opened_by_a_host_function_give_one_verdict() {
    for seed in 0..100 {
        for back in [false, true] {
            let device = seeded(seed);
            let (a, b) = two_streams(&device);
            let (range, unit) = mapped(&device);
            let gate = device.hold(b).unwrap();
            device.host_fn(a, Box::new(move || gate.release())).unwrap();
            memset(&device, range, 1, 64, b);
            // SAFETY: what this test is about.
            unsafe { device.set_access(range, unit, MapAccess::Read) }.unwrap();
            if back {
                // SAFETY: gives rights only. By now the fault may have lost the device.
                let _ = unsafe { device.set_access(range, unit, MapAccess::ReadWrite) };
            }
            assert!(device.stream_synchronize(b).is_err());
            assert_eq!(verdict(&device).1, [RaceKind::UnmapUnderUse], "seed {seed}");
        }
    }
}

#[test]
fn a_free_and_a_gate_opened_by_a_host_function_give_one_verdict() {
    for seed in 0..200 {
        for again in [false, true] {
            let device = seeded(seed);
            let (a, b) = two_streams(&device);
            let block = device.alloc(64).unwrap();
            let gate = device.hold(b).unwrap();
            device.host_fn(a, Box::new(move || gate.release())).unwrap();
            memset(&device, block, 1, 64, b);
            // SAFETY: what this test is about.
            unsafe { device.free(block) }.unwrap();
            if again {
                assert_eq!(device.alloc(64), Ok(block), "addresses come back");
            }
            assert!(device.stream_synchronize(b).is_err());
            assert_eq!(verdict(&device), (false, vec![RaceKind::UseAfterFree]), "seed {seed}");
        }
    }
}

#[test]
fn a_reservation_given_back_under_work_behind_a_gate() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let (range, unit) = mapped(&device);
        let gate = device.hold(stream).unwrap();
        memset(&device, range, 1, unit, stream);
        // SAFETY: what this test is about.
        unsafe {
            device.unmap(range, unit).unwrap();
            device.release(range, unit).unwrap();
        }
        assert_eq!(device.alloc(unit), Ok(range), "addresses come back");
        gate.release();
        assert!(device.stream_synchronize(stream).unwrap_err().is_device_lost());
        assert_eq!(device.races()[0].kind, RaceKind::UnmapUnderUse);
    }
}

/// One piece of memory mapped at two places.
fn alias(device: &Arc<SimDevice>) -> (u64, u64, usize) {
    let unit = device.granularity();
    let memory = device.create(unit).unwrap();
    let (one, other) = (device.reserve(unit, 0).unwrap(), device.reserve(unit, 0).unwrap());
    for at in [one, other] {
        // SAFETY: fresh reservations.
        unsafe {
            device.map(at, unit, memory).unwrap();
            device.set_access(at, unit, MapAccess::ReadWrite).unwrap();
        }
    }
    (one, other, unit)
}

#[test]
fn a_mapping_nobody_uses_goes_while_its_memory_is_used_through_another() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let (one, other, unit) = alias(&device);
        memset(&device, other, 1, unit, stream);
        // SAFETY: no work goes through this mapping.
        unsafe { device.unmap(one, unit) }.unwrap();
        device.stream_synchronize(stream).unwrap();
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn a_mapping_in_use_is_not_hidden_by_later_work_through_another() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let (one, other, unit) = alias(&device);
        memset(&device, one, 1, unit, stream);
        memset(&device, other, 2, unit, stream);
        // SAFETY: what this test is about.
        unsafe { device.unmap(one, unit) }.unwrap();
        let races = device.races();
        assert_eq!(races.len(), 1, "{races:?}");
        assert_eq!((races[0].kind, races[0].ptr), (RaceKind::UnmapUnderUse, one));
        assert!(device.stream_synchronize(stream).is_err());
        // SAFETY: the host has seen the rest complete.
        unsafe { device.unmap(other, unit) }.unwrap();
        assert_eq!(device.races().len(), 1);
    }
}

#[test]
fn a_block_that_ended_in_one_mapping_is_not_used_there_although_the_next_one_began_in_another() {
    for late in [false, true] {
        for device in devices() {
            let stream = device.stream_create(0).unwrap();
            let (one, other, unit) = alias(&device);
            device.begin_range(one, unit, stream, "first").unwrap();
            device.end_range(one, unit, stream).unwrap();
            device.begin_range(other, unit, stream, "second").unwrap();
            memset(&device, other, 1, unit, stream);
            if late {
                memset(&device, one, 2, unit, stream);
            }
            let _ = device.stream_synchronize(stream);
            let kinds: Vec<_> = device.races().iter().map(|race| race.kind).collect();
            assert_eq!(kinds.contains(&RaceKind::UseAfterFree), late, "{kinds:?}");
            if !late {
                // SAFETY: the host has seen all work complete.
                unsafe { device.unmap(one, unit) }.unwrap();
                memset(&device, other, 3, unit, stream);
                device.stream_synchronize(stream).unwrap();
            }
        }
    }
}

#[test]
fn what_a_block_leaves_of_another_mapping_is_not_its_own() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let (one, other, unit) = alias(&device);
        device.begin_range(one, unit, stream, "first").unwrap();
        device.end_range(one, unit, stream).unwrap();
        device.begin_range(other, unit / 2, stream, "second").unwrap();
        memset(&device, other, 1, unit / 2, stream);
        device.stream_synchronize(stream).unwrap();
        memset(&device, other, 2, unit, stream);
        let _ = device.stream_synchronize(stream);
        let kinds: Vec<_> = device.races().iter().map(|race| race.kind).collect();
        assert_eq!(kinds, [RaceKind::UseAfterFree]);
    }
}

#[test]
fn a_block_that_ended_in_one_mapping_may_begin_in_another_if_it_is_ordered_after_the_end() {
    for ordered in [false, true] {
        for device in devices() {
            let (a, b) = two_streams(&device);
            let (one, other, unit) = alias(&device);
            device.begin_range(one, unit, a, "first").unwrap();
            memset(&device, one, 1, unit, a);
            device.end_range(one, unit, a).unwrap();
            if ordered {
                edge(&device, a, b);
            }
            device.begin_range(other, unit, b, "second").unwrap();
            memset(&device, other, 2, unit, b);
            let _ = device.stream_synchronize(b);
            assert_eq!(device.races().is_empty(), ordered, "{:?}", device.races());
        }
    }
}

#[test]
fn access_rights_taken_from_work_the_host_has_not_seen_complete() {
    use MapAccess::{None, Read, ReadWrite};
    for (work, to, wrong) in [
        (Access::Write, None, true),
        (Access::Write, Read, true),
        (Access::Write, ReadWrite, false),
        (Access::Read, None, true),
        (Access::Read, Read, false),
    ] {
        for seen in [false, true] {
            for device in devices() {
                let stream = device.stream_create(0).unwrap();
                let (range, unit) = mapped(&device);
                let kernel = SimKernel::new("work", |_| {}).arg(range, 64, work);
                device.launch(stream, kernel).unwrap();
                if seen {
                    device.stream_synchronize(stream).unwrap();
                }
                // SAFETY: what this test is about.
                unsafe { device.set_access(range, unit, to) }.unwrap();
                let races = device.races();
                assert_eq!(!races.is_empty(), wrong && !seen, "{work:?} to {to:?}: {races:?}");
                if let Some(race) = races.first() {
                    assert_eq!(race.kind, RaceKind::UnmapUnderUse);
                    assert_eq!(race.second.operation, "set_access");
                    assert!(device.stream_synchronize(stream).is_err());
                }
            }
        }
    }
}

#[test]
fn a_sub_allocator_of_mapped_memory_that_hands_it_on_too_early() {
    for ordered in [false, true] {
        for device in devices() {
            let (a, b) = two_streams(&device);
            let (range, _) = mapped(&device);
            device.begin_range(range, 64, a, "first").unwrap();
            memset(&device, range, 1, 64, a);
            device.end_range(range, 64, a).unwrap();
            if ordered {
                edge(&device, a, b);
            }
            device.begin_range(range, 64, b, "second").unwrap();
            assert_eq!(device.races().is_empty(), ordered, "{:?}", device.races());
        }
    }
}
