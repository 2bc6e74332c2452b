//! What goes wrong in pools, each as a test that would show it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::support::Random;
use crate::support::meter::Nearly;
use crate::support::pool_rig::{MIB, Rig, rig, scarce};
use crate::support::rig::{TAG, assert_all, fill, read};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AllocRequest, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, PoolConfig,
    PoolResource, PoolReuse, PoolSegments, ResourceError, StreamId, StreamLease, StreamPool,
};
use xlog_testing::{WatchedGate, for_each_seam, for_each_sim};

#[test]
fn memory_that_went_through_a_second_stream_is_not_handed_to_a_third_under_the_first() {
    for_each_seam(|device| {
        let rig = rig(device, scarce(2 * MIB));
        let [first, second, third] = rig.leases();
        let witness = rig.pool.allocate(MIB / 2, first.id(), TAG).unwrap();
        let block = rig.allocate(MIB, &first);
        fill(&first, block.ptr, 0x11, MIB);
        let gate = WatchedGate::new(first.hold().unwrap());
        // Behind the gate the first stream still reads what it is about to free.
        // SAFETY: both blocks are live when this runs; the free below comes after it.
        unsafe { first.copy_dtod(witness.ptr, block.ptr, MIB / 2).unwrap() };
        rig.pool.deallocate(block).unwrap();
        // The second stream gets it with a wait, and gives it back unused.
        let passed = rig.allocate(MIB, &second);
        rig.pool.deallocate(passed).unwrap();
        // The third stream gets it from the second, and overwrites it.
        let taken = rig.allocate(MIB, &third);
        fill(&third, taken.ptr, 0xee, MIB);
        gate.release();
        assert_all(&read(&first, witness.ptr, MIB / 2).unwrap(), 0x11);
        assert_all(&read(&third, taken.ptr, MIB).unwrap(), 0xee);
        assert!(rig.pool.snapshot().paths.waited >= 1, "{:?}", rig.pool.snapshot());
        rig.pool.deallocate(taken).unwrap();
        rig.pool.deallocate(witness).unwrap();
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_freed_block_that_another_stream_still_uses_is_pending_and_not_live() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [own, reader] = rig.leases();
        let block = rig.allocate(8 * MIB, &own);
        let id = BlockId::from_block(&block);
        let gate = WatchedGate::new(reader.hold().unwrap());
        rig.pool.prepare_block_use(id, reader.id(), Access::Read).unwrap();
        rig.pool.finish_block_use(id, reader.id(), Access::Read).unwrap();
        rig.pool.deallocate(block).unwrap();
        let snapshot = rig.pool.snapshot();
        assert_eq!(snapshot.live_bytes, 0);
        assert!(snapshot.deferred_bytes >= 8 * MIB, "{snapshot:?}");
        assert_eq!(
            (snapshot.free_bytes(), snapshot.fragmentation()),
            (0, 0.0),
            "no request can have it"
        );
        let held = rig.pool.memory_use().unwrap();
        assert_eq!((held.live, held.pending), (0, snapshot.deferred_bytes));
        gate.release();
        rig.pool.reap_pending().unwrap();
        assert_eq!(rig.pool.snapshot().deferred_bytes, 0);
        rig.empty();
    });
}

#[test]
fn a_free_goes_by_the_record_whatever_the_block_says_of_itself() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [home, other] = rig.leases();
        let size = 5000;
        let first = rig.allocate(size, &home);
        let (ptr, bytes) = (first.ptr, first.bytes);
        rig.pool.deallocate(first).unwrap();
        // Until the memory of the stream is this thread's: only then the short way is taken.
        for _ in 0..32 {
            rig.pool.deallocate(rig.allocate(size, &home)).unwrap();
        }
        let lies: [fn(&mut DeviceBlock); 9] = [
            |block| block.bytes *= 2,
            |block| block.bytes += 256,
            |block| block.bytes -= 256,
            |block| block.bytes -= 1,
            |block| block.bytes = 0,
            |block| block.bytes = usize::MAX,
            |block| block.alloc_stream = StreamId(u32::MAX - 7),
            |block| block.align = 1,
            |block| block.state = BlockState::Freed,
        ];
        for (number, lie) in lies.iter().enumerate() {
            let mut block = rig.allocate(size, &home);
            assert_eq!((block.ptr, block.bytes), (ptr, bytes), "lie {number}");
            lie(&mut block);
            rig.pool.deallocate(block).unwrap();
            assert_eq!(rig.pool.snapshot().live_bytes, 0, "lie {number}");
        }
        // The memory goes to the stream it is of, not to the one that the block names.
        let mut block = rig.allocate(size, &home);
        block.alloc_stream = other.id();
        let gate = WatchedGate::new(home.hold().unwrap());
        fill(&home, ptr, 1, size);
        rig.pool.deallocate(block).unwrap();
        let elsewhere = rig.allocate(size, &other);
        assert_ne!(elsewhere.ptr, ptr);
        gate.release();
        rig.pool.deallocate(elsewhere).unwrap();
        // What names another block is refused, and nothing is lost.
        for lie in [
            |block: &mut DeviceBlock| block.ptr += 256,
            |block: &mut DeviceBlock| block.generation.0 += 1 << 24,
            |block: &mut DeviceBlock| block.device_ordinal += 1,
        ] {
            let block = rig.allocate(size, &home);
            let mut lied = DeviceBlock { ..block };
            lie(&mut lied);
            assert!(rig.pool.deallocate(lied).is_err());
            assert_eq!(rig.pool.block_state(BlockId::from_block(&block)), BlockState::Live);
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn the_remainder_of_a_growth_serves_another_stream_at_once() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [first, second] = rig.leases();
        let gate = WatchedGate::new(first.hold().unwrap());
        let one = rig.allocate(MIB, &first);
        fill(&first, one.ptr, 1, MIB);
        let two = rig.allocate(MIB, &second);
        fill(&second, two.ptr, 2, MIB);
        // Not by a copy to the host: under a memory checker that waits for all streams.
        second.synchronize().unwrap();
        let snapshot = rig.pool.snapshot();
        assert_eq!((snapshot.paths.grown, snapshot.paths.waited), (1, 0), "{snapshot:?}");
        gate.release();
        assert_all(&read(&second, two.ptr, MIB).unwrap(), 2);
        rig.pool.deallocate(one).unwrap();
        rig.pool.deallocate(two).unwrap();
        rig.empty();
    });
}

#[test]
fn the_blocks_of_a_stream_that_was_given_back_serve_others() {
    for_each_seam(|device| {
        let rig = rig(device, scarce(2 * MIB));
        let [keeper] = rig.leases();
        {
            let [gone] = rig.leases();
            let blocks: Vec<_> = (0..40).map(|_| rig.allocate(32 << 10, &gone)).collect();
            for block in blocks {
                fill(&gone, block.ptr, 1, 32 << 10);
                rig.pool.deallocate(block).unwrap();
            }
        }
        let all = rig.allocate(2 * MIB, &keeper);
        fill(&keeper, all.ptr, 2, 2 * MIB);
        assert_all(&read(&keeper, all.ptr, 2 * MIB).unwrap(), 2);
        rig.pool.deallocate(all).unwrap();
        rig.empty();
    });
}

#[test]
fn the_hot_path_makes_no_driver_call() {
    for_each_sim(|device, sim| {
        let rig = rig(device, PoolConfig::default());
        let [stream] = rig.leases();
        for size in [1, 1000, 70_000, MIB, 5 * MIB].repeat(2) {
            let block = rig.allocate(size, &stream);
            rig.pool.deallocate(block).unwrap();
        }
        let warm = rig.pool.snapshot().paths;
        let before = sim.faults().total_calls();
        for size in [1, 1000, 70_000, MIB, 5 * MIB].repeat(100) {
            let block = rig.allocate(size, &stream);
            assert!(block.bytes >= size && block.align >= 256);
            rig.pool.deallocate(block).unwrap();
        }
        assert_eq!(sim.faults().total_calls(), before);
        let paths = rig.pool.snapshot().paths;
        assert_eq!((paths.magazine - warm.magazine, paths.own - warm.own), (400, 100));
        rig.empty();
    });
}

#[test]
fn a_large_request_is_served_by_moving_wholly_free_memory_together() {
    for_each_seam(|device| {
        let config = PoolConfig::default()
            .with_segments(PoolSegments::Mapped)
            .with_growth(2 * MIB)
            .with_maximum(16 * MIB);
        let rig = rig(device, config);
        let [stream] = rig.leases();
        // Eight pieces of 2 MiB; every second one stays in use.
        let mut blocks: Vec<_> = (0..8).map(|_| rig.allocate(2 * MIB, &stream)).collect();
        for (n, block) in blocks.iter().enumerate() {
            fill(&stream, block.ptr, n as u8, 2 * MIB);
        }
        for n in (0..8).rev().step_by(2) {
            rig.pool.deallocate(blocks.remove(n)).unwrap();
        }
        let large = rig.allocate(8 * MIB, &stream);
        fill(&stream, large.ptr, 0xaa, 8 * MIB);
        assert_all(&read(&stream, large.ptr, 8 * MIB).unwrap(), 0xaa);
        for (n, block) in blocks.iter().enumerate() {
            assert_all(&read(&stream, block.ptr, 2 * MIB).unwrap(), 2 * n as u8);
        }
        let full = rig.pool.allocate(256, stream.id(), TAG).unwrap_err();
        assert!(matches!(full, ResourceError::OutOfMemory { requested: 256, .. }), "{full}");
        blocks.into_iter().chain([large]).for_each(|block| rig.pool.deallocate(block).unwrap());
        rig.empty();
    });
}

#[test]
fn alignment_is_honoured_up_to_two_mebibytes_and_refused_by_name_beyond() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [stream] = rig.leases();
        let mut blocks = Vec::new();
        for power in 0..=21 {
            let align = 1_usize << power;
            let block = rig
                .pool
                .allocate_request(AllocRequest::new(1000, stream.id(), TAG).aligned(align), None)
                .unwrap();
            assert!(block.ptr.is_multiple_of(align as u64) && block.align >= align, "{block:?}");
            blocks.push(block);
        }
        for align in [0, 3, 4 * MIB] {
            let refused = rig
                .pool
                .allocate_request(AllocRequest::new(1000, stream.id(), TAG).aligned(align), None)
                .unwrap_err();
            assert!(refused.to_string().contains(&format!("alignment {align}")), "{refused}");
        }
        blocks.into_iter().for_each(|block| rig.pool.deallocate(block).unwrap());
        rig.empty();
    });
}

#[test]
fn a_bad_configuration_is_refused_by_the_name_of_its_field() {
    for_each_sim(|device, _| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        for (config, field) in [
            (PoolConfig::default().with_maximum(0), "maximum_bytes = 0"),
            (PoolConfig::default().with_growth(1000), "growth_bytes = 1000"),
            (PoolConfig::default().with_maximum(5).with_initial(6), "initial_bytes = 6"),
            (PoolConfig::default().with_magazines(usize::MAX), "magazine_bytes"),
        ] {
            let made = PoolResource::new(device.clone(), 0, streams.clone(), config);
            let refused = made.map(|_| ()).unwrap_err();
            assert!(refused.to_string().contains(field), "{refused}");
        }
    });
}

#[test]
fn two_streams_leave_one_free_range_after_idle_and_trim() {
    for_each_seam(|device| {
        let config = PoolConfig::default().with_initial(64 * MIB).with_maximum(64 * MIB);
        let rig = rig(device, config);
        let streams: [StreamLease; 2] = rig.leases();
        let mut random = Random::new(7);
        let mut live: Vec<DeviceBlock> = Vec::new();
        for step in 0..3000 {
            if live.len() < 60 && random.chance(60) {
                let size = 1 + random.below(400 << 10);
                live.push(rig.allocate(size, &streams[random.below(2)]));
            } else if !live.is_empty() {
                let block = live.swap_remove(random.below(live.len()));
                if step % 7 == 0 {
                    let user = &streams[random.below(2)];
                    let id = BlockId::from_block(&block);
                    rig.pool.prepare_block_use(id, user.id(), Access::Write).unwrap();
                    fill(user, block.ptr, 1, 64);
                    rig.pool.finish_block_use(id, user.id(), Access::Write).unwrap();
                }
                rig.pool.deallocate(block).unwrap();
            }
        }
        live.into_iter().for_each(|block| rig.pool.deallocate(block).unwrap());
        rig.pool.reap_pending().unwrap();
        let held = rig.pool.snapshot().reserved_bytes;
        rig.pool.trim_to(held - 1).unwrap();
        let snapshot = rig.pool.snapshot();
        assert!(snapshot.free_ranges <= 1 && snapshot.fragmentation() == 0.0, "{snapshot:?}");
        rig.empty();
        assert!(device.races().is_empty());
    });
}

/// Who has which bytes.
#[derive(Default)]
struct Oracle(Mutex<BTreeMap<u64, u64>>);

impl Oracle {
    fn begin(&self, block: &DeviceBlock) {
        let mut live = self.0.lock().unwrap();
        let end = block.ptr + block.bytes as u64;
        if let Some((ptr, other)) = live.range(..end).next_back() {
            assert!(*other <= block.ptr, "{block:?} overlaps {ptr:#x}..{other:#x}");
        }
        live.insert(block.ptr, end);
    }

    fn end(&self, block: &DeviceBlock) {
        self.0.lock().unwrap().remove(&block.ptr).unwrap();
    }
}

#[test]
fn eight_threads_on_eight_streams_never_overlap() {
    let steps = crate::support::number("XLOG_POOL_STEPS").unwrap_or(4000);
    for_each_seam(|device| {
        if device.sim().is_some_and(|sim| sim.seed().is_some()) {
            return;
        }
        let config = PoolConfig::default().with_growth(4 * MIB).with_maximum(96 * MIB);
        let rig = rig(device, config);
        let oracle = Oracle::default();
        let shared: Mutex<Vec<DeviceBlock>> = Mutex::default();
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (rig, oracle, shared) = (&rig, &oracle, &shared);
                let stream = rig.streams.lease().unwrap();
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    let mut live: Vec<DeviceBlock> = Vec::new();
                    for _ in 0..steps {
                        match random.below(10) {
                            0..5 if live.len() < 32 => {
                                let size = 1 << random.below(18);
                                let size = size + random.below(size);
                                let block = rig.allocate(size, &stream);
                                oracle.begin(&block);
                                live.push(block);
                            }
                            5 if !live.is_empty() => {
                                // Somebody else frees it.
                                let block = live.swap_remove(random.below(live.len()));
                                shared.lock().unwrap().push(block);
                            }
                            6 => {
                                let other = shared.lock().unwrap().pop();
                                if let Some(block) = other {
                                    oracle.end(&block);
                                    rig.pool.deallocate(block).unwrap();
                                }
                            }
                            _ if !live.is_empty() => {
                                let block = live.swap_remove(random.below(live.len()));
                                oracle.end(&block);
                                rig.pool.deallocate(block).unwrap();
                            }
                            _ => {}
                        }
                    }
                    for block in live {
                        oracle.end(&block);
                        rig.pool.deallocate(block).unwrap();
                    }
                });
            }
        });
        for block in shared.into_inner().unwrap() {
            oracle.end(&block);
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_deterministic_pool_gives_the_same_addresses_under_every_schedule() {
    let mut first: Option<Vec<u64>> = None;
    for seed in 0..20 {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let config = PoolConfig::default()
            .with_growth(64 << 10)
            .with_maximum(256 << 10)
            .with_reuse(PoolReuse::deterministic());
        let rig = rig(&device, config);
        let streams: [StreamLease; 3] = rig.leases();
        let mut random = Random::new(3);
        let mut live: Vec<DeviceBlock> = Vec::new();
        let mut addresses = Vec::new();
        for _ in 0..400 {
            if live.len() < 12 && random.chance(55) {
                let stream = &streams[random.below(3)];
                let block = rig.allocate(1 + random.below(8000), stream);
                fill(stream, block.ptr, 1, 16);
                addresses.push(block.ptr - live.first().map_or(block.ptr, |first| first.ptr));
                live.push(block);
            } else if live.len() > 1 {
                rig.pool.deallocate(live.remove(1 + random.below(live.len() - 1))).unwrap();
            }
        }
        assert!(device.races().is_empty());
        live.into_iter().for_each(|block| rig.pool.deallocate(block).unwrap());
        match &first {
            None => first = Some(addresses),
            Some(first) => assert_eq!(first, &addresses, "seed {seed}"),
        }
    }
}

#[test]
fn a_block_still_read_elsewhere_is_retired_and_its_memory_not_reused() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [owner, reader] = rig.leases();
        let copied = rig.allocate(MIB, &reader);
        let block = rig.allocate(MIB, &owner);
        let (id, ptr) = (BlockId::from_block(&block), block.ptr);
        fill(&owner, ptr, 0x42, MIB);
        let gate = WatchedGate::new(reader.hold().unwrap());
        rig.pool.prepare_block_use(id, reader.id(), Access::Read).unwrap();
        // SAFETY: both blocks live until frees that come after this.
        unsafe { reader.copy_dtod(copied.ptr, ptr, MIB).unwrap() };
        rig.pool.finish_block_use(id, reader.id(), Access::Read).unwrap();
        rig.pool.deallocate(block).unwrap();
        assert_eq!(rig.pool.block_state(id), BlockState::Retired);
        let next = rig.allocate(MIB, &owner);
        assert_ne!(next.ptr, ptr, "handed out under a reader");
        fill(&owner, next.ptr, 0xee, MIB);
        gate.release();
        assert_all(&read(&reader, copied.ptr, MIB).unwrap(), 0x42);
        rig.pool.deallocate(next).unwrap();
        rig.pool.deallocate(copied).unwrap();
        rig.empty();
        assert_eq!(rig.pool.block_state(id), BlockState::Freed);
    });
}

/// A small pool that hands out nothing because it has completed, under one schedule.
fn strict(seed: u64) -> (Arc<CudaDevice>, Rig) {
    let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
    let rig = rig(&device, scarce(2 * MIB).with_reuse(PoolReuse::deterministic()));
    (device, rig)
}

/// Another stream overwrites what it gets; nobody may still be at it.
fn overwrite(rig: &Rig, device: &CudaDevice, stream: &StreamLease, bytes: usize, seed: u64) {
    let Ok(taken) = rig.pool.allocate(bytes, stream.id(), TAG) else { return };
    fill(stream, taken.ptr, 9, bytes);
    rig.pool.deallocate(taken).unwrap();
    device.synchronize().unwrap_or_else(|error| panic!("sim:{seed}: {error}"));
    assert!(device.races().is_empty(), "sim:{seed}: {}", device.races()[0]);
}

#[test]
fn a_magazine_emptied_by_one_thread_keeps_the_order_of_what_another_just_freed() {
    for seed in 0..1500 {
        let (device, rig) = strict(seed);
        let [home, other] = rig.leases();
        let [seen, kept, freed] =
            [512 << 10, MIB, 512 << 10].map(|bytes| rig.allocate(bytes, &home));
        let id = BlockId::from_block(&seen);
        let served = Mutex::new(None);
        xlog_testing::threads(
            &device,
            vec![
                Box::new(|| {
                    let block = rig.pool.allocate(300 << 10, home.id(), TAG);
                    *served.lock().unwrap() = block.ok();
                }),
                Box::new(|| {
                    rig.pool.prepare_block_use(id, other.id(), Access::Read).unwrap();
                    rig.pool.finish_block_use(id, other.id(), Access::Read).unwrap();
                    fill(&home, freed.ptr, 7, 512 << 10);
                    rig.pool.deallocate(freed).unwrap();
                }),
            ],
        );
        overwrite(&rig, &device, &other, 200 << 10, seed);
        let served = served.into_inner().unwrap();
        for block in served.into_iter().chain([seen, kept]) {
            rig.pool.deallocate(block).unwrap();
        }
    }
}

#[test]
fn a_block_pushed_out_of_a_magazine_keeps_the_order_of_its_own_free() {
    const SMALL: usize = 64 << 10;
    for seed in 0..1000 {
        let (device, rig) = strict(seed);
        let [home, other] = rig.leases();
        let seen = rig.allocate(256 << 10, &home);
        // Eight blocks fill their bin; one of another size takes the place of the last.
        let same: Vec<_> = (0..7).map(|_| rig.allocate(SMALL, &home)).collect();
        let last = rig.allocate(SMALL + 256, &home);
        let next = rig.allocate(SMALL + 512, &home);
        let rest = std::iter::from_fn(|| rig.pool.allocate(SMALL / 2, home.id(), TAG).ok());
        let rest: Vec<_> = rest.collect();
        same.into_iter().for_each(|block| rig.pool.deallocate(block).unwrap());
        let id = BlockId::from_block(&seen);
        rig.pool.prepare_block_use(id, home.id(), Access::Write).unwrap();
        rig.pool.finish_block_use(id, home.id(), Access::Write).unwrap();
        xlog_testing::threads(
            &device,
            vec![
                Box::new(|| rig.pool.deallocate(next).unwrap()),
                Box::new(|| {
                    rig.pool.prepare_block_use(id, other.id(), Access::Read).unwrap();
                    rig.pool.deallocate(last).unwrap();
                }),
            ],
        );
        rig.pool.finish_block_use(id, other.id(), Access::Read).unwrap();
        overwrite(&rig, &device, &other, SMALL, seed);
        rest.into_iter().chain([seen]).for_each(|block| rig.pool.deallocate(block).unwrap());
    }
}

#[test]
fn a_pool_takes_the_last_that_a_ledger_has_when_the_step_it_would_like_does_not_fit() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let meter = Arc::new(Nearly::new(264 * MIB));
        rig.pool.meter_physical(meter.clone()).unwrap();
        let [stream] = rig.leases();
        let large = rig.allocate(256 * MIB, &stream);
        // The step would be 8 MiB and more; 8 are left, then 4.
        let small = rig.allocate(4 * MIB, &stream);
        let last = rig.allocate(4 * MIB, &stream);
        let refused = rig.pool.allocate(2 * MIB, stream.id(), TAG).unwrap_err();
        assert!(matches!(refused, ResourceError::OutOfBudget { .. }), "{refused}");
        for block in [large, small, last] {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert_eq!(meter.left(), 264 * MIB);
    });
}

#[test]
fn a_captured_stream_is_refused_by_a_pool_and_not_asked_whether_it_is_done() {
    for_each_sim(|device, sim| {
        let rig = rig(device, PoolConfig::default());
        let [own, other] = rig.leases();
        let block = rig.allocate(MIB, &own);
        let id = BlockId::from_block(&block);
        let _ = own.cu_stream();
        sim.set_capturing(own.handle(), true).unwrap();
        assert!(rig.pool.allocate(MIB, own.id(), TAG).is_err());
        assert!(rig.pool.deallocate(block).is_err());
        assert_eq!(rig.pool.block_state(id), BlockState::Retired);
        let queries = sim.faults().calls(xlog_cuda::sim::Call::StreamQuery);
        let served = rig.allocate(200 * MIB, &other);
        rig.pool.trim().unwrap();
        let asked = sim.faults().calls(xlog_cuda::sim::Call::StreamQuery) - queries;
        assert!(asked <= 1, "the captured stream was asked: {asked} queries");
        sim.set_capturing(own.handle(), false).unwrap();
        rig.pool.deallocate(served).unwrap();
        rig.empty();
        assert_eq!(rig.pool.block_state(id), BlockState::Freed);
    });
}
