//! A pool under a memory checker: what the checker is told, and when memory is handed out again.

#![allow(clippy::unwrap_used)]

mod tool;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tool::{attached, known};
use xlog_base::Random;
use xlog_conformance::Suite;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    MIN_ALIGN, PoolConfig, PoolResource, PoolSanitizer, PoolSegments, ResourceError, StreamLease,
    StreamPool,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{CudaDevice, DeviceStream, Gate};
use xlog_testing::{WatchedGate, for_each_device, threads};

const ROWS: AllocTag = AllocTag("rows");

fn config() -> PoolConfig {
    PoolConfig::default().with_sanitizer(PoolSanitizer::On)
}

fn pool(device: &Arc<CudaDevice>) -> (Arc<StreamPool>, PoolResource) {
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool = PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config());
    (streams, pool.unwrap())
}

/// Queues work on a block, of which the checker knows whether it has run.
fn touch(stream: &DeviceStream, block: &DeviceBlock) {
    let done = Arc::new(AtomicBool::new(false));
    known(|known| known.work.entry(block.ptr).or_default().push(done.clone()));
    // SAFETY: the block is freed after this in the order that the pool keeps.
    unsafe { stream.memset(block.ptr, 1, block.bytes) }.unwrap();
    stream.host_fn(move || done.store(true, Ordering::Release)).unwrap();
}

#[track_caller]
fn assert_nothing_wrong() {
    known(|known| assert!(known.complaints.is_empty(), "{:#?}", known.complaints));
}

#[test]
fn a_checker_is_told_the_requested_bytes_and_the_tag() {
    let _alone = attached();
    for_each_device(|device| {
        let (streams, pool) = pool(device);
        let stream = streams.lease().unwrap();
        let block = pool.allocate(1000, stream.id(), ROWS).unwrap();
        assert_eq!(
            (block.bytes, pool.bytes_outstanding(), pool.charge_for(1000, MIN_ALIGN)),
            (1000, 1000, 1000)
        );
        known(|known| {
            let region = known.regions.get(&block.ptr).unwrap();
            assert_eq!((region.bytes, region.name.as_str()), (1000, "rows"));
        });
        let told = pool.sanitizer().unwrap();
        assert_eq!((told.tool, told.heaps, told.regions, told.refused_heaps), (true, 1, 1, 0));
        pool.deallocate(block).unwrap();
        pool.reap_pending().unwrap();
        pool.trim().unwrap();
        assert_eq!((pool.bytes_outstanding(), pool.snapshot().reserved_bytes), (0, 0));
        known(|known| assert!(known.regions.is_empty() && known.heaps.is_empty()));
        assert_nothing_wrong();
    });
}

#[test]
fn a_freed_block_keeps_its_region_and_its_memory_until_its_work_has_completed() {
    let _alone = attached();
    for_each_device(|device| {
        let (streams, pool) = pool(device);
        let (own, other) = (streams.lease().unwrap(), streams.lease().unwrap());
        let block = pool.allocate(4096, own.id(), ROWS).unwrap();
        let id = BlockId::from_block(&block);
        pool.prepare_block_use(id, other.id(), Access::Write).unwrap();
        let gate = WatchedGate::new(other.hold().unwrap());
        touch(&other, &block);
        pool.finish_block_use(id, other.id(), Access::Write).unwrap();
        pool.deallocate(block).unwrap();
        own.synchronize().unwrap();
        // Another stream is not done: neither stream gets the memory, and the checker still knows it.
        for stream in [&own, &other] {
            let next = pool.allocate(4096, stream.id(), ROWS).unwrap();
            assert_ne!(next.ptr, id.ptr);
            pool.deallocate(next).unwrap();
        }
        pool.reap_completed().unwrap();
        assert_eq!(pool.block_state(id), BlockState::Retired);
        known(|known| assert!(known.regions.contains_key(&id.ptr)));
        gate.release();
        other.synchronize().unwrap();
        pool.reap_completed().unwrap();
        assert_eq!(pool.block_state(id), BlockState::Freed);
        known(|known| assert!(!known.regions.contains_key(&id.ptr)));
        pool.reap_pending().unwrap();
        assert_eq!((pool.bytes_outstanding(), pool.sanitizer().unwrap().waiting_blocks), (0, 0));
        assert_nothing_wrong();
    });
}

#[test]
fn the_own_stream_does_not_get_memory_back_before_it_is_done() {
    let _alone = attached();
    for_each_device(|device| {
        let (streams, pool) = pool(device);
        let stream = streams.lease().unwrap();
        let block = pool.allocate(512, stream.id(), ROWS).unwrap();
        let first = block.ptr;
        let gate = WatchedGate::new(stream.hold().unwrap());
        touch(&stream, &block);
        pool.deallocate(block).unwrap();
        let next = pool.allocate(512, stream.id(), ROWS).unwrap();
        assert_ne!(next.ptr, first);
        gate.release();
        stream.synchronize().unwrap();
        let again = pool.allocate(512, stream.id(), ROWS).unwrap();
        assert_eq!(again.ptr, first, "what has completed is handed out");
        pool.deallocate(next).unwrap();
        pool.deallocate(again).unwrap();
        assert_nothing_wrong();
    });
}

/// A program of allocations, uses with and without hooks, frees and held streams.
fn program(device: &Arc<CudaDevice>, seed: u64) {
    let (streams, pool) = pool(device);
    let leases: [StreamLease; 3] = std::array::from_fn(|_| streams.lease().unwrap());
    let mut random = Random::new(seed);
    let mut live: Vec<(DeviceBlock, usize)> = Vec::new();
    let mut gates: [Option<Gate>; 3] = [const { None }; 3];
    for _ in 0..60 {
        let at = random.below(3);
        match random.below(10) {
            0..=3 => {
                let most = if random.below(4) == 0 { 1 << 20 } else { 5000 };
                let bytes = 1 + random.below(most);
                let block = pool.allocate(bytes, leases[at].id(), ROWS).unwrap();
                assert_eq!(block.bytes, bytes);
                touch(&leases[at], &block);
                live.push((block, at));
            }
            4..=5 if !live.is_empty() => {
                let (block, _) = &live[random.below(live.len())];
                let id = BlockId::from_block(block);
                pool.prepare_block_use(id, leases[at].id(), Access::Write).unwrap();
                touch(&leases[at], block);
                pool.finish_block_use(id, leases[at].id(), Access::Write).unwrap();
            }
            6..=8 if !live.is_empty() => {
                let (block, _) = live.swap_remove(random.below(live.len()));
                pool.deallocate(block).unwrap();
            }
            9 if gates[at].is_none() => gates[at] = Some(leases[at].hold().unwrap()),
            _ => {
                gates[at] = None;
                pool.reap_completed().unwrap();
            }
        }
        assert_nothing_wrong();
    }
    drop(gates);
    let outstanding: usize = live.iter().map(|(block, _)| block.bytes).sum();
    pool.reap_pending().unwrap();
    assert_eq!(pool.bytes_outstanding(), outstanding);
    assert_eq!(known(|known| known.regions.len()), live.len());
    for (block, _) in live {
        pool.deallocate(block).unwrap();
    }
    drop(pool);
    known(|known| assert!(known.regions.is_empty() && known.heaps.is_empty()));
    assert_nothing_wrong();
}

#[test]
fn regions_never_overlap_and_end_after_the_work_in_random_programs() {
    let _alone = attached();
    let programs = std::env::var("XLOG_TEST_PROGRAMS").ok().and_then(|text| text.parse().ok());
    for_each_device(|device| {
        for seed in 0..programs.unwrap_or(12_u64) {
            let ran =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| program(device, seed)));
            if let Err(panic) = ran {
                eprintln!("the program of seed {seed} on {} failed", device.spec());
                std::panic::resume_unwind(panic);
            }
        }
    });
    assert!(known(|known| known.ended) > 100, "blocks came and went");
}

#[test]
fn regions_of_threads_that_pass_memory_to_each_other_never_overlap() {
    let _alone = attached();
    for_each_device(|device| {
        let (streams, pool) = pool(device);
        // One stream: what one thread gives back, the next takes.
        let stream = streams.lease().unwrap();
        // Which seeds had each page of 256 bytes.
        let users = Mutex::new(HashMap::<u64, HashSet<u64>>::new());
        let body = |seed: u64| {
            let mut random = Random::new(seed);
            let mut live = Vec::new();
            for _ in 0..200 {
                if live.len() < 3 || random.below(2) == 0 {
                    let bytes = 200 * (1 + random.below(4));
                    let block = pool.allocate(bytes, stream.id(), ROWS).unwrap();
                    touch(&stream, &block);
                    users.lock().unwrap().entry(block.ptr / 256).or_default().insert(seed);
                    live.push(block);
                } else {
                    pool.deallocate(live.swap_remove(random.below(live.len()))).unwrap();
                    pool.reap_completed().unwrap();
                }
            }
            live.into_iter().for_each(|block| pool.deallocate(block).unwrap());
        };
        let bodies: Vec<Box<dyn FnOnce() + Send>> = (1..=3)
            .map(|seed| {
                Box::new({
                    let body = &body;
                    move || body(seed)
                }) as Box<dyn FnOnce() + Send>
            })
            .collect();
        threads(device, bodies);
        pool.reap_pending().unwrap();
        assert_eq!(pool.bytes_outstanding(), 0);
        assert_nothing_wrong();
        // Beside each other they may or may not have met in the same memory. One after the other they do: all of it is free in between.
        for seed in 4..=6 {
            std::thread::scope(|scope| scope.spawn(|| body(seed)).join().unwrap());
            pool.reap_pending().unwrap();
            assert_eq!(pool.bytes_outstanding(), 0);
        }
        let users = users.into_inner().unwrap();
        let later = |seeds: &HashSet<u64>| seeds.iter().filter(|seed| **seed >= 4).count();
        assert!(users.values().any(|seeds| later(seeds) > 1), "no memory went round");
        assert_nothing_wrong();
    });
}

#[test]
fn a_pool_for_a_checker_conforms() {
    let _alone = attached();
    for_each_device(|device| {
        let suite = Suite::new(|device, streams| {
            let (device, streams) = (device.clone(), streams.clone());
            let ordinal = device.ordinal();
            Box::new(PoolResource::new(device, ordinal, streams, config()).unwrap())
        });
        suite.run(device).assert_passed();
    });
    assert_nothing_wrong();
}

#[test]
fn memory_that_a_checker_does_not_take_is_refused_or_left_alone() {
    let _alone = attached();
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let mapped = config().with_segments(PoolSegments::Mapped);
    let over = |config: PoolConfig| {
        let inner = AsyncCudaResource::new(device.clone(), 0, streams.clone());
        PoolResource::over(Box::new(inner), streams.clone(), config)
    };
    let new = |config: PoolConfig| PoolResource::new(device.clone(), 0, streams.clone(), config);
    for refused in [new(mapped.clone()), over(config())] {
        let error = refused.unwrap_err();
        assert!(matches!(error, ResourceError::InvalidRequest { .. }), "{error}");
        assert!(error.to_string().contains("PoolSegments::Plain"), "{error}");
    }
    let automatic = |config: PoolConfig| config.with_sanitizer(PoolSanitizer::Automatic);
    assert!(new(automatic(mapped)).unwrap().sanitizer().is_none());
    assert!(over(automatic(config())).unwrap().sanitizer().is_none());
    assert!(new(PoolConfig::default()).unwrap().sanitizer().is_none());
    // A tool is attached to this process, so automatic is on where it can be: on a GPU.
    for_each_device(|device| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let is_gpu = device.properties().kind == DeviceKind::Cuda;
        let pool = PoolResource::new(device.clone(), 0, streams, automatic(config())).unwrap();
        assert_eq!(pool.sanitizer().is_some_and(|told| told.tool), is_gpu);
    });
}
