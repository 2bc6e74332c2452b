//! Free handles that are remapped before the pool grows.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::cell::Cell;
use std::sync::Arc;

use crate::support::pool_rig::{MIB, Rig, rig, scarce};
use crate::support::rig::{TAG, assert_all, fill, read};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{DeviceBlock, DeviceMemoryResource, PoolConfig, StreamLease};
use xlog_cuda::sim::{Call, Fault, SimConfig, SimDevice};
use xlog_testing::{WatchedGate, for_each_seam, for_each_sim};

/// No magazine keeps blocks of this size.
const BLOCK: usize = 6 * MIB;

/// Eight blocks side by side, each filled with its number; every other one is free again.
struct Holes {
    rig: Rig,
    one: StreamLease,
    two: StreamLease,
    live: Vec<(DeviceBlock, u8)>,
    reserved: usize,
}

/// Allocates eight blocks side by side, fills each with its number, and frees every other one. Returns those that are live.
fn every_other_of_eight(rig: &Rig, stream: &StreamLease) -> Vec<(DeviceBlock, u8)> {
    let blocks: Vec<_> = (0..8).map(|number| (rig.allocate(BLOCK, stream), number)).collect();
    let mut live = Vec::new();
    for (block, number) in blocks {
        fill(stream, block.ptr, number, BLOCK);
        if number % 2 == 0 {
            rig.pool.deallocate(block).unwrap();
        } else {
            live.push((block, number));
        }
    }
    live
}

fn holes(device: &Arc<CudaDevice>) -> Holes {
    let rig = rig(device, PoolConfig::default());
    let [one, two] = rig.leases();
    let live = every_other_of_eight(&rig, &one);
    one.synchronize().unwrap();
    let reserved = rig.pool.snapshot().reserved_bytes;
    Holes { rig, one, two, live, reserved }
}

impl Holes {
    /// Checks and frees the live blocks; all memory goes back.
    fn end(self, device: &CudaDevice) {
        for (block, number) in self.live {
            assert_all(&read(&self.one, block.ptr, BLOCK).unwrap(), number);
            self.rig.pool.deallocate(block).unwrap();
        }
        self.rig.empty();
        assert!(device.races().is_empty(), "{:?}", device.races());
    }
}

#[test]
fn free_handles_between_live_blocks_are_remapped_before_the_pool_grows() {
    for_each_seam(|device| {
        let holes = holes(device);
        let whole = holes.rig.allocate(20 * MIB, &holes.two);
        fill(&holes.two, whole.ptr, 99, 20 * MIB);
        assert_all(&read(&holes.two, whole.ptr, 20 * MIB).unwrap(), 99);
        assert_eq!(holes.rig.pool.snapshot().reserved_bytes, holes.reserved);
        holes.rig.pool.deallocate(whole).unwrap();
        holes.end(device);
    });
}

/// Free handles all over a pool of which little is free serve a request where growth, which is better, is refused.
#[test]
fn many_handles_are_remapped_for_a_small_request_where_the_pool_cannot_grow() {
    const HANDLES: usize = 1200;
    for is_limited in [true, false] {
        let sim = SimDevice::open(SimConfig::default()).unwrap();
        let device = Arc::new(CudaDevice::from_driver(sim.clone()));
        let limit = HANDLES * 2 * MIB;
        let config = if is_limited { scarce(limit) } else { PoolConfig::default() };
        let rig = rig(&device, config);
        let [one, held] = rig.leases();
        let pending = rig.allocate(2 * MIB, &held);
        let mut live: Vec<_> = (1..HANDLES).map(|_| rig.allocate(2 * MIB, &one)).collect();
        for block in live.extract_if(.., |block| block.ptr % (40 * MIB as u64) == 0) {
            rig.pool.deallocate(block).unwrap();
        }
        one.synchronize().unwrap();
        if !is_limited {
            sim.faults().limit_memory(Some(rig.pool.snapshot().reserved_bytes as u64));
        }
        let gate = WatchedGate::new(held.hold().unwrap());
        rig.pool.deallocate(pending).unwrap();
        let waits = || sim.faults().calls(Call::EventSynchronize);
        let before = waits();
        live.push(rig.allocate(24 * MIB, &one));
        assert_eq!(waits(), before, "it waited for the held stream; with a maximum: {is_limited}");
        gate.release();
        for block in live {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
    }
}

#[test]
fn memory_with_pending_work_is_remapped_for_its_own_stream_and_goes_back_once_that_work_is_complete()
 {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two] = rig.leases();
        let gate = WatchedGate::new(one.hold().unwrap());
        let live = every_other_of_eight(&rig, &one);
        let reserved = rig.pool.snapshot().reserved_bytes;
        let whole = rig.allocate(20 * MIB, &one);
        fill(&one, whole.ptr, 99, 20 * MIB);
        assert_eq!(rig.pool.snapshot().reserved_bytes, reserved, "neither growth nor a wait");
        // Free again and pending still, it moves once more, and a part of it goes to a stream that must wait.
        rig.pool.deallocate(whole).unwrap();
        let larger = rig.allocate(23 * MIB, &one);
        fill(&one, larger.ptr, 98, 23 * MIB);
        assert_eq!(rig.pool.trim().unwrap(), 0, "all free memory has pending work");
        gate.release();
        assert_all(&read(&one, larger.ptr, 23 * MIB).unwrap(), 98);
        rig.pool.deallocate(larger).unwrap();
        let other = rig.allocate(20 * MIB, &two);
        fill(&two, other.ptr, 97, 20 * MIB);
        assert_all(&read(&two, other.ptr, 20 * MIB).unwrap(), 97);
        rig.pool.deallocate(other).unwrap();
        Holes { rig, one, two, live, reserved }.end(device);
    });
}

/// Allocates `handles` blocks of a handle each, queues work on them, and frees all but one in `kept`. Returns the others.
fn pending_handles(
    rig: &Rig,
    stream: &StreamLease,
    handles: usize,
    kept: usize,
) -> Vec<DeviceBlock> {
    let blocks: Vec<_> = (0..handles).map(|_| rig.allocate(2 * MIB, stream)).collect();
    let mut live = Vec::new();
    for (at, block) in blocks.into_iter().enumerate() {
        fill(stream, block.ptr, 1, 2 * MIB);
        match at % kept {
            0 => live.push(block),
            _ => rig.pool.deallocate(block).unwrap(),
        }
    }
    live
}

#[test]
fn pending_handles_of_its_stream_serve_a_request_without_a_wait_where_the_pool_cannot_grow() {
    let sim = SimDevice::open(SimConfig::default()).unwrap();
    let device = Arc::new(CudaDevice::from_driver(sim.clone()));
    let rig = rig(&device, scarce(160 * MIB));
    let [one] = rig.leases();
    let gate = WatchedGate::new(one.hold().unwrap());
    let live = pending_handles(&rig, &one, 80, 2);
    // More handles than a pool that may grow would move.
    let whole = rig.allocate(76 * MIB, &one);
    fill(&one, whole.ptr, 2, 76 * MIB);
    assert_eq!(sim.faults().calls(Call::EventSynchronize), 0, "it waited for its own stream");
    gate.release();
    assert_all(&read(&one, whole.ptr, 76 * MIB).unwrap(), 2);
    for block in live.into_iter().chain([whole]) {
        rig.pool.deallocate(block).unwrap();
    }
    rig.empty();
    assert!(device.races().is_empty(), "{:?}", device.races());
}

#[test]
fn very_large_requests_unmap_as_many_left_addresses_as_they_moved_handles() {
    let sim = SimDevice::open(SimConfig::default()).unwrap();
    let device = Arc::new(CudaDevice::from_driver(sim.clone()));
    let rig = rig(&device, PoolConfig::default());
    let [one] = rig.leases();
    let gate = WatchedGate::new(one.hold().unwrap());
    let mut live = pending_handles(&rig, &one, 192, 8);
    let whole = rig.allocate(288 * MIB, &one);
    rig.pool.deallocate(whole).unwrap();
    gate.release();
    one.synchronize().unwrap();
    let unmapped = || sim.faults().calls(Call::Unmap);
    let before = unmapped();
    live.push(rig.allocate(296 * MIB, &one));
    assert!(
        unmapped() - before > 100,
        "{} of the addresses that the first left",
        unmapped() - before
    );
    for block in live {
        rig.pool.deallocate(block).unwrap();
    }
    rig.empty();
}

#[test]
fn a_handle_with_pending_work_of_another_stream_is_not_remapped() {
    for_each_seam(|device| {
        let mut holes = holes(device);
        let (late, number) = holes.live.pop().unwrap();
        let gate = WatchedGate::new(holes.one.hold().unwrap());
        fill(&holes.one, late.ptr, number, BLOCK);
        holes.rig.pool.deallocate(late).unwrap();
        // The last hole has coalesced with it. Three are complete.
        let whole = holes.rig.allocate(20 * MIB, &holes.two);
        fill(&holes.two, whole.ptr, 99, 20 * MIB);
        let grown = holes.rig.pool.snapshot().reserved_bytes - holes.reserved;
        assert!(grown > 0, "work was pending on a part of what was needed");
        gate.release();
        assert_all(&read(&holes.two, whole.ptr, 20 * MIB).unwrap(), 99);
        holes.rig.pool.deallocate(whole).unwrap();
        holes.end(device);
    });
}

#[test]
fn memory_of_a_stream_that_was_given_back_and_of_a_thread_that_ended_serves_the_next_request() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [one, two, three] = rig.leases();
        let use_all = |stream: &StreamLease| {
            let blocks: Vec<_> = (0..4).map(|_| rig.allocate(BLOCK, stream)).collect();
            blocks.iter().for_each(|block| fill(stream, block.ptr, 1, BLOCK));
            blocks.into_iter().for_each(|block| rig.pool.deallocate(block).unwrap());
            stream.synchronize().unwrap();
        };
        use_all(&one);
        drop(one);
        std::thread::scope(|scope| {
            scope.spawn(|| use_all(&two)).join().unwrap();
        });
        let reserved = rig.pool.snapshot().reserved_bytes;
        let all = rig.pool.allocate(20 * MIB, three.id(), TAG).unwrap();
        assert_eq!(rig.pool.snapshot().reserved_bytes, reserved);
        rig.pool.deallocate(all).unwrap();
        rig.empty();
    });
}

#[test]
fn a_remap_whose_driver_call_fails_loses_nothing_and_the_pool_grows() {
    let calls = [Call::Unmap, Call::Map, Call::SetAccess, Call::Create, Call::Destroy];
    let (runs, failed) = (Cell::new(0), Cell::new(0));
    for (call, nth) in calls.into_iter().flat_map(|call| [1, 2, 7, 12].map(|nth| (call, nth))) {
        for_each_sim(|device, sim| {
            runs.set(runs.get() + 1);
            let holes = holes(device);
            let faults = sim.faults();
            let before = faults.calls(call);
            faults.fail_nth(call, nth, Fault::Code(999));
            // 26 MiB: the free handles, and one more.
            let served = holes.rig.pool.allocate(26 * MIB, holes.two.id(), TAG);
            failed.set(failed.get() + usize::from(faults.calls(call) >= before + nth));
            faults.clear();
            if let Ok(block) = served {
                fill(&holes.two, block.ptr, 99, 26 * MIB);
                assert_all(&read(&holes.two, block.ptr, 26 * MIB).unwrap(), 99);
                holes.rig.pool.deallocate(block).unwrap();
            }
            holes.end(device);
        });
    }
    // None on a GPU, where no call can be made to fail.
    assert!(failed.get() > 10 || runs.get() == 0, "only {} calls failed", failed.get());
}
