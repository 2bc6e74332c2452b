//! Large requests that wait for pending work before the pool grows.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use crate::support::pool_rig::{MIB, Rig, rig};
use crate::support::rig::{assert_all, fill, read};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, BlockId, DeviceBlock, DeviceMemoryResource, PoolConfig, PoolReuse, StreamLease,
};
use xlog_cuda::sim::SimDevice;
use xlog_testing::{WatchedGate, for_each_seam};

const BLOCK: usize = 64 * MIB;

/// Frees a block with work queued on it, and asks for as much on another stream. Returns by how much the pool grew.
fn growth_beside_queued_work(device: &Arc<CudaDevice>, config: PoolConfig) -> usize {
    let rig = rig(device, config);
    let [one, two] = rig.leases();
    let first = rig.allocate(BLOCK, &one);
    fill(&one, first.ptr, 1, BLOCK);
    rig.pool.deallocate(first).unwrap();
    let before = rig.pool.snapshot().reserved_bytes;
    let second = rig.allocate(BLOCK, &two);
    fill(&two, second.ptr, 2, BLOCK);
    let grown = rig.pool.snapshot().reserved_bytes - before;
    assert_all(&read(&two, second.ptr, BLOCK).unwrap(), 2);
    rig.pool.deallocate(second).unwrap();
    rig.empty();
    assert!(device.races().is_empty(), "{:?}", device.races());
    grown
}

#[test]
fn a_large_request_waits_as_long_as_growth_would_take() {
    let mut waited = 0;
    for seed in 0..20 {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let grown = growth_beside_queued_work(&device, PoolConfig::default());
        waited += u32::from(grown == 0);
        let config = PoolConfig::default().with_reuse(PoolReuse::deterministic());
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        assert!(
            growth_beside_queued_work(&device, config) > 0,
            "seed {seed}: it depends on timing"
        );
    }
    // The schedule decides whether the work completes within the wait.
    assert!(waited > 10, "{waited} of 20 schedules");
}

/// A deferred free becomes memory when its reader has completed, also if others may capture the reader's stream at any time.
#[test]
fn a_large_request_waits_for_the_reader_of_a_deferred_free() {
    let waited = |seed: &u64| {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let rig = rig(&device, PoolConfig::default());
        let [producer, reader] = rig.leases();
        let _escapes = reader.handle();
        let own = rig.allocate(MIB, &reader);
        // The second use is later than all that became free before the handle was taken.
        for bytes in [MIB, BLOCK] {
            let block = rig.allocate(bytes, &producer);
            free_used_on(&rig, block, &reader);
        }
        let before = rig.pool.snapshot().reserved_bytes;
        let second = rig.allocate(BLOCK, &producer);
        let grown = rig.pool.snapshot().reserved_bytes - before;
        rig.pool.deallocate(second).unwrap();
        rig.pool.deallocate(own).unwrap();
        rig.empty();
        grown == 0
    };
    let count = (0..20).filter(waited).count();
    assert!(count > 10, "{count} of 20 schedules");
}

#[test]
fn a_large_request_does_not_wait_for_ever() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two] = rig.leases();
        let first = rig.allocate(BLOCK, &one);
        let gate = WatchedGate::new(one.hold().unwrap());
        fill(&one, first.ptr, 1, BLOCK);
        rig.pool.deallocate(first).unwrap();
        let before = rig.pool.snapshot().reserved_bytes;
        let second = rig.allocate(BLOCK, &two);
        assert_eq!(rig.pool.snapshot().reserved_bytes, before + BLOCK);
        gate.release();
        rig.pool.deallocate(second).unwrap();
        rig.empty();
    });
}

#[test]
fn memory_of_a_stream_that_is_never_idle_serves_others_once_its_work_has_completed() {
    for_each_seam(|device| {
        for size in [6 * MIB, BLOCK] {
            let rig = rig(device, PoolConfig::default());
            let [busy, other] = rig.leases();
            let witness = rig.allocate(MIB, &busy);
            let freed = rig.allocate(size, &busy);
            let gate = WatchedGate::new(busy.hold().unwrap());
            fill(&busy, freed.ptr, 1, size);
            rig.pool.deallocate(freed).unwrap();
            let first = rig.allocate(size, &other);
            let before = rig.pool.snapshot().reserved_bytes;
            gate.release();
            // Whatever was queued on the stream before has completed.
            fill(&busy, witness.ptr, 2, MIB);
            assert_all(&read(&busy, witness.ptr, MIB).unwrap(), 2);
            let gate = WatchedGate::new(busy.hold().unwrap());
            fill(&busy, witness.ptr, 3, MIB);
            let second = rig.allocate(size, &other);
            let after = rig.pool.snapshot();
            assert_eq!(after.reserved_bytes, before, "{size} bytes: {after:?}");
            gate.release();
            for block in [witness, first, second] {
                rig.pool.deallocate(block).unwrap();
            }
            rig.empty();
        }
        assert!(device.races().is_empty());
    });
}

/// Frees pieces with work queued on them, between blocks that stay, and asks for far more. Returns by how much the pool grew.
fn growth_over_pieces(seed: u64, piece: usize, asked: usize) -> usize {
    let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
    let rig = rig(&device, PoolConfig::default());
    let [one] = rig.leases();
    let blocks: Vec<_> = (0..16).map(|_| rig.allocate(piece, &one)).collect();
    let (mut freed, mut kept) = (Vec::new(), Vec::new());
    for (at, block) in blocks.into_iter().enumerate() {
        if at % 4 == 0 { freed.push(block) } else { kept.push(block) }
    }
    for block in freed {
        fill(&one, block.ptr, 1, piece);
        rig.pool.deallocate(block).unwrap();
    }
    let before = rig.pool.snapshot().reserved_bytes;
    let large = rig.allocate(asked, &one);
    let grown = rig.pool.snapshot().reserved_bytes - before;
    for block in kept {
        rig.pool.deallocate(block).unwrap();
    }
    rig.pool.deallocate(large).unwrap();
    rig.empty();
    assert!(device.races().is_empty(), "{:?}", device.races());
    grown
}

#[test]
fn a_very_large_request_takes_pieces_with_pending_work_of_its_stream() {
    for seed in 0..10 {
        let grown = growth_over_pieces(seed, 8 * MIB, 320 * MIB);
        assert!(grown <= 290 * MIB, "seed {seed}: {} MiB", grown >> 20);
    }
}

#[test]
fn very_large_requests_do_not_wait_for_ever() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two] = rig.leases();
        let first = rig.allocate(BLOCK, &one);
        let gate = WatchedGate::new(one.hold().unwrap());
        fill(&one, first.ptr, 1, BLOCK);
        rig.pool.deallocate(first).unwrap();
        let before = rig.pool.snapshot().reserved_bytes;
        let large = rig.allocate(5 * BLOCK, &two);
        assert!(rig.pool.snapshot().reserved_bytes >= before + 5 * BLOCK);
        rig.pool.deallocate(large).unwrap();
        gate.release();
        rig.empty();
    });
}

#[test]
fn a_free_range_of_a_busy_stream_is_extended_in_place_for_the_same_stream() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two] = rig.leases();
        let gate = WatchedGate::new(one.hold().unwrap());
        let first = rig.allocate(20 * MIB, &one);
        fill(&one, first.ptr, 1, 20 * MIB);
        let ptr = first.ptr;
        rig.pool.deallocate(first).unwrap();
        let before = rig.pool.snapshot().reserved_bytes;
        let second = rig.allocate(30 * MIB, &one);
        fill(&one, second.ptr, 2, 30 * MIB);
        assert_eq!(second.ptr, ptr, "the same stream needs no wait");
        let grown = rig.pool.snapshot().reserved_bytes - before;
        assert!(grown <= 12 * MIB, "{grown}");
        // What was extended is still behind the work of its stream.
        rig.pool.deallocate(second).unwrap();
        let third = rig.allocate(30 * MIB, &two);
        fill(&two, third.ptr, 3, 30 * MIB);
        assert_ne!(third.ptr, ptr, "another stream does not get it");
        gate.release();
        assert_all(&read(&two, third.ptr, 30 * MIB).unwrap(), 3);
        rig.pool.deallocate(third).unwrap();
        rig.empty();
        assert!(device.races().is_empty(), "{:?}", device.races());
    });
}

/// Fills a block on another stream than its own, and frees it: the free is deferred until the fill completes.
fn free_used_on(rig: &Rig, block: DeviceBlock, stream: &StreamLease) {
    let id = BlockId::from_block(&block);
    rig.pool.prepare_block_use(id, stream.id(), Access::Write).unwrap();
    fill(stream, block.ptr, 7, block.bytes);
    rig.pool.finish_block_use(id, stream.id(), Access::Write).unwrap();
    rig.pool.deallocate(block).unwrap();
}

#[test]
fn completed_frees_serve_a_large_request_whatever_their_number() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two] = rig.leases();
        let (large, used) = (rig.allocate(96 * MIB, &one), rig.allocate(32 * MIB, &one));
        let small: Vec<_> = (0..200).map(|_| rig.allocate(1024, &one)).collect();
        small.into_iter().for_each(|block| free_used_on(&rig, block, &two));
        free_used_on(&rig, used, &two);
        rig.pool.deallocate(large).unwrap();
        one.synchronize().unwrap();
        two.synchronize().unwrap();
        let before = rig.pool.snapshot().reserved_bytes;
        let whole = rig.allocate(160 * MIB, &one);
        let grown = rig.pool.snapshot().reserved_bytes - before;
        assert!(grown <= 34 * MIB, "it grew by {} MiB", grown / MIB);
        rig.pool.deallocate(whole).unwrap();
        rig.empty();
    });
}

#[test]
fn a_deferred_free_does_not_follow_what_its_stream_queues_later() {
    // Behind the plain seam: for the race detector's hooks the block ends when its free is carried out.
    let sim = SimDevice::open(Default::default()).unwrap();
    let device = Arc::new(CudaDevice::from_driver(sim.clone()));
    let rig = rig(&device, PoolConfig::default());
    let [one, two, three] = rig.leases();
    let (first, other) = (rig.allocate(BLOCK, &one), rig.allocate(MIB, &one));
    free_used_on(&rig, first, &two);
    one.synchronize().unwrap();
    two.synchronize().unwrap();
    let gate = WatchedGate::new(one.hold().unwrap());
    fill(&one, other.ptr, 1, MIB);
    let before = rig.pool.snapshot().reserved_bytes;
    let second = rig.allocate(BLOCK, &three);
    assert_eq!(rig.pool.snapshot().reserved_bytes, before, "the pool grew beside complete memory");
    fill(&three, second.ptr, 2, BLOCK);
    assert_all(&read(&three, second.ptr, BLOCK).unwrap(), 2);
    gate.release();
    rig.pool.deallocate(second).unwrap();
    rig.pool.deallocate(other).unwrap();
    rig.empty();
    assert!(sim.races().is_empty(), "{:?}", sim.races());
}

#[test]
fn a_deferred_free_follows_the_work_of_its_own_stream() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two, three] = rig.leases();
        let first = rig.allocate(BLOCK, &one);
        let id = BlockId::from_block(&first);
        rig.pool.prepare_block_use(id, two.id(), Access::Read).unwrap();
        rig.pool.finish_block_use(id, two.id(), Access::Read).unwrap();
        let gate = WatchedGate::new(one.hold().unwrap());
        rig.pool.prepare_block_use(id, one.id(), Access::Read).unwrap();
        fill(&one, first.ptr, 1, BLOCK);
        rig.pool.finish_block_use(id, one.id(), Access::Read).unwrap();
        let ptr = first.ptr;
        rig.pool.deallocate(first).unwrap();
        two.synchronize().unwrap();
        let second = rig.allocate(BLOCK, &three);
        assert_ne!(second.ptr, ptr, "another stream gets memory that is still written");
        fill(&three, second.ptr, 2, BLOCK);
        gate.release();
        assert_all(&read(&three, second.ptr, BLOCK).unwrap(), 2);
        rig.pool.deallocate(second).unwrap();
        rig.empty();
        assert!(device.races().is_empty(), "{:?}", device.races());
    });
}
