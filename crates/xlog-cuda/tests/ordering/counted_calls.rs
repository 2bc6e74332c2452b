//! What ordering costs, in driver calls: nothing on a block's own stream, one record and one wait for a handover however
//! many blocks it has, nothing for one that is implied.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::rig::{Rig, TAG};
use xlog_cuda::device_runtime::{
    Access, BlockId, DeviceBlock, DeviceMemoryResource, StreamId, StreamLease,
};
use xlog_cuda::sim::{Call, SimDevice};
use xlog_testing::for_each_sim;

/// The calls that a body made.
struct Counted {
    total: u64,
    records: u64,
    waits: u64,
    events: u64,
}

fn counted(sim: &Arc<SimDevice>, body: impl FnOnce()) -> Counted {
    let faults = sim.faults();
    let count = || {
        let calls = |call| faults.calls(call);
        (
            faults.total_calls(),
            calls(Call::EventRecord),
            calls(Call::StreamWaitEvent),
            calls(Call::EventCreate) + calls(Call::EventQuery) + calls(Call::EventDestroy),
        )
    };
    let before = count();
    body();
    let after = count();
    Counted {
        total: after.0 - before.0,
        records: after.1 - before.1,
        waits: after.2 - before.2,
        events: after.3 - before.3,
    }
}

fn uses(blocks: &[DeviceBlock], access: Access) -> Vec<(BlockId, Access)> {
    blocks.iter().map(|block| (BlockId::from_block(block), access)).collect()
}

fn prepare_all(rig: &Rig, uses: &[(BlockId, Access)], stream: &StreamLease) {
    uses.iter().for_each(|&(block, access)| rig.prepare(block, stream, access));
}

fn finish_all(rig: &Rig, uses: &[(BlockId, Access)], stream: &StreamLease) {
    rig.resource.finish_block_uses(uses, stream.id()).unwrap();
}

fn blocks(rig: &Rig, count: usize, stream: &StreamLease) -> Vec<DeviceBlock> {
    (0..count).map(|_| rig.resource.allocate(64, stream.id(), TAG).unwrap()).collect()
}

#[test]
fn a_use_on_the_own_stream_makes_no_driver_call() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        let mine = blocks(&rig, 100, &own);
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            let uses = uses(&mine, access);
            let cost = counted(sim, || {
                for &(block, access) in &uses {
                    rig.prepare(block, &own, access);
                    rig.finish(block, &own, access);
                }
                prepare_all(&rig, &uses, &own);
                finish_all(&rig, &uses, &own);
            });
            assert_eq!(cost.total, 0, "{access:?}");
        }
        mine.into_iter().for_each(|block| rig.free(block));
        rig.settle();
    });
}

#[test]
fn blocks_handed_over_together_cost_one_record_and_one_wait() {
    for_each_sim(|device, sim| {
        for count in [1, 2, 64, 500] {
            let rig = Rig::new(device);
            let [owner, a, b] = rig.leases();
            let passed = blocks(&rig, count, &owner);
            let writes = uses(&passed, Access::Write);
            // Written on the own stream and read on another: the tail is recorded when it is needed.
            prepare_all(&rig, &writes, &owner);
            finish_all(&rig, &writes, &owner);
            let cost = counted(sim, || prepare_all(&rig, &writes, &a));
            assert_eq!((cost.records, cost.waits), (1, 1), "{count} blocks from their own stream");
            // Written on a foreign stream and read on another: recorded when the uses close, waited for once.
            let cost = counted(sim, || finish_all(&rig, &writes, &a));
            assert_eq!((cost.records, cost.waits), (1, 0), "{count} blocks closed together");
            let reads = uses(&passed, Access::Read);
            let cost = counted(sim, || prepare_all(&rig, &reads, &b));
            assert_eq!((cost.records, cost.waits), (0, 1), "{count} blocks handed over");
            assert_eq!(cost.total, 1, "{count} blocks handed over");
            finish_all(&rig, &reads, &b);
            passed.into_iter().for_each(|block| rig.free(block));
            rig.settle();
        }
    });
}

#[test]
fn preparing_again_without_new_work_makes_no_driver_call() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [owner, a, b] = rig.leases();
        let passed = blocks(&rig, 50, &owner);
        let writes = uses(&passed, Access::Write);
        prepare_all(&rig, &writes, &a);
        finish_all(&rig, &writes, &a);
        let reads = uses(&passed, Access::Read);
        prepare_all(&rig, &reads, &b);
        let before = rig.resource.statistics();
        let cost = counted(sim, || (0..10).for_each(|_| prepare_all(&rig, &reads, &b)));
        assert_eq!(cost.total, 0);
        let after = rig.resource.statistics();
        assert_eq!(after.waits_inserted, before.waits_inserted);
        assert!(after.waits_elided > before.waits_elided, "{after:?}");
        (0..11).for_each(|_| finish_all(&rig, &reads, &b));
        passed.into_iter().for_each(|block| rig.free(block));
        rig.settle();
    });
}

#[test]
fn what_a_stream_has_seen_by_way_of_another_is_not_waited_for_again() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [a, b, c] = rig.leases();
        let first = blocks(&rig, 1, &a);
        let second = blocks(&rig, 1, &b);
        let (x, y) = (BlockId::from_block(&first[0]), BlockId::from_block(&second[0]));
        // A's work reaches B, B's reaches C: C need not wait for A.
        rig.write(x, &a, 1, 64);
        rig.prepare(x, &b, Access::Read);
        rig.write(y, &b, 1, 64);
        rig.finish(x, &b, Access::Read);
        rig.prepare(y, &c, Access::Read);
        let cost = counted(sim, || rig.prepare(x, &c, Access::Read));
        assert_eq!(cost.total, 0);
        rig.finish(x, &c, Access::Read);
        rig.finish(y, &c, Access::Read);
        first.into_iter().chain(second).for_each(|block| rig.free(block));
        rig.settle();
    });
}

#[test]
fn a_free_without_foreign_uses_records_no_event() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        let mine = blocks(&rig, 50, &own);
        mine.iter().for_each(|block| rig.write(block.into(), &own, 1, 64));
        let cost = counted(sim, || mine.into_iter().for_each(|block| rig.free(block)));
        assert_eq!((cost.records, cost.waits, cost.events), (0, 0, 0));
        assert_eq!(cost.total, 50, "one free_async each");
        rig.settle();
    });
}

#[test]
fn a_pair_costs_its_two_driver_calls_and_hardly_more() {
    const PAIRS: u64 = 10_000;
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        rig.free(rig.allocate(1024, &own));
        for stream in [own.id(), StreamId::DEFAULT] {
            let (allocs, frees) = {
                let faults = sim.faults();
                (faults.calls(Call::AllocAsync), faults.calls(Call::FreeAsync))
            };
            let cost = counted(sim, || {
                for _ in 0..PAIRS {
                    let block = rig.resource.allocate(1024, stream, TAG).unwrap();
                    rig.free(block);
                }
            });
            assert_eq!(sim.faults().calls(Call::AllocAsync) - allocs, PAIRS);
            assert_eq!(sim.faults().calls(Call::FreeAsync) - frees, PAIRS);
            let per_call = cost.total as f64 / (2 * PAIRS) as f64;
            assert!(per_call <= 1.1, "{per_call} driver calls per call, {} in all", cost.total);
        }
        rig.settle();
    });
}

#[test]
fn what_the_host_has_waited_for_is_neither_asked_about_nor_waited_for() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own, other] = rig.leases();
        let mine = blocks(&rig, 100, &own);
        let uses = uses(&mine, Access::Write);
        for is_asked in [false, true] {
            prepare_all(&rig, &uses, &other);
            finish_all(&rig, &uses, &other);
            match is_asked {
                true => while !other.query().unwrap() {},
                false => other.synchronize().unwrap(),
            }
            let cost = counted(sim, || {
                prepare_all(&rig, &uses, &own);
                finish_all(&rig, &uses, &own);
            });
            assert_eq!(cost.total, 0, "by a {}", if is_asked { "question" } else { "wait" });
        }
        mine.into_iter().for_each(|block| rig.resource.deallocate(block).unwrap());
        rig.settle();
    });
}
