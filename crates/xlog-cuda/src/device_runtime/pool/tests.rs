//! Tests that need access to an arena.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::device_runtime::resource::{BlockId, BlockState};

const MIB: usize = 1 << 20;

fn devices() -> [Arc<CudaDevice>; 2] {
    let plain = xlog_sim::SimDevice::open(Default::default()).unwrap();
    [CudaDevice::open("sim").unwrap(), CudaDevice::from_driver(plain)].map(Arc::new)
}

#[test]
fn two_streams_allocate_while_a_third_ones_memory_is_held() {
    // Includes pools that prefer a wait for another stream over growth.
    for (device, eager) in
        devices().into_iter().flat_map(|device| [(device.clone(), usize::MAX), (device, 0)])
    {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = PoolConfig::default().with_eager_growth(eager);
        let pool = PoolResource::new(device, 0, streams.clone(), config).unwrap();
        let [first, second, third] = [(); 3].map(|()| streams.lease().unwrap());
        let own = pool.allocate(MIB, third.id(), AllocTag("own")).unwrap();
        pool.deallocate(own).unwrap();
        let owner = pool.tracker.stream(third.id()).unwrap();
        pool.arena(owner.clock().slot()).unwrap().with(|_| {
            std::thread::scope(|scope| {
                for stream in [&first, &second] {
                    let pool = &pool;
                    scope.spawn(move || {
                        for size in [1000, MIB, 40 * MIB] {
                            let block = pool.allocate(size, stream.id(), AllocTag("other"));
                            pool.deallocate(block.unwrap()).unwrap();
                        }
                    });
                }
            });
        });
        pool.reap_pending().unwrap();
        assert_eq!(pool.bytes_outstanding(), 0);
    }
}

/// Four idle handles between live ones lie in an arena that another thread is inside of, and the pool cannot grow.
#[test]
fn a_pool_that_cannot_grow_waits_for_an_arena_before_it_refuses() {
    for device in devices() {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = PoolConfig::default().with_growth(2 * MIB).with_maximum(16 * MIB);
        let pool = PoolResource::new(device, 0, streams.clone(), config).unwrap();
        let [owner, other] = [(); 2].map(|()| streams.lease().unwrap());
        let mut live: Vec<_> = (0..8)
            .map(|_| pool.allocate(2 * MIB, owner.id(), AllocTag("handle")).unwrap())
            .collect();
        for at in [6, 4, 2, 0] {
            pool.deallocate(live.swap_remove(at)).unwrap();
        }
        let slot = pool.tracker.stream(owner.id()).unwrap().clock().slot();
        let is_waiting = AtomicBool::new(false);
        let block = std::thread::scope(|scope| {
            let (entered, has_entered) = std::sync::mpsc::channel();
            let (pool, is_waiting) = (&pool, &is_waiting);
            scope.spawn(move || {
                pool.arena(slot).unwrap().with(|_| {
                    entered.send(()).unwrap();
                    // The other thread refuses at once if it does not wait.
                    let until = Instant::now() + Duration::from_millis(200);
                    while Instant::now() < until && !is_waiting.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                });
            });
            has_entered.recv().unwrap();
            let block = pool.allocate(8 * MIB, other.id(), AllocTag("whole"));
            is_waiting.store(true, Ordering::Release);
            block
        });
        for block in live.into_iter().chain([block.unwrap()]) {
            pool.deallocate(block).unwrap();
        }
        pool.reap_pending().unwrap();
        assert_eq!(pool.bytes_outstanding(), 0);
    }
}

/// A pool with a decay of a minute on one stream, and a clock that the test moves.
struct Decaying {
    pool: PoolResource,
    streams: Arc<StreamPool>,
    stream: crate::device_runtime::StreamLease,
    now: Instant,
}

const DECAY: Duration = Duration::from_secs(60);

impl Decaying {
    fn new(device: Arc<CudaDevice>, config: PoolConfig) -> Self {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let pool = PoolResource::new(device, 0, streams.clone(), config).unwrap();
        Self { pool, stream: streams.lease().unwrap(), streams, now: Instant::now() }
    }

    fn pair(&self, bytes: usize) {
        let block = self.pool.allocate(bytes, self.stream.id(), AllocTag("pair")).unwrap();
        self.pool.deallocate(block).unwrap();
    }

    /// [`Self::pair`], with all its work complete.
    fn complete_pair(&self, bytes: usize) {
        self.pair(bytes);
        self.stream.synchronize().unwrap();
    }

    /// Returns the bytes that go back to the device after `after` more time.
    fn returned(&mut self, after: Duration) -> usize {
        self.now += after;
        self.pool.return_idle_at(self.now).unwrap()
    }

    fn reserved(&self) -> usize {
        self.pool.snapshot().reserved_bytes
    }
}

#[test]
fn a_large_request_gets_the_free_memory_that_cached_blocks_divide() {
    for device in devices() {
        let Decaying { pool, stream, .. } = Decaying::new(device, PoolConfig::default());
        let allocate = |bytes| pool.allocate(bytes, stream.id(), AllocTag("block")).unwrap();
        let divided = allocate(80 * MIB);
        let wall = allocate(MIB);
        let larger = allocate(128 * MIB);
        let place = divided.ptr..divided.ptr + divided.bytes as u64;
        pool.deallocate(divided).unwrap();
        let small: Vec<_> = (0..16).map(|_| allocate(2 * MIB)).collect();
        assert!(small.iter().all(|block| place.contains(&block.ptr)), "{small:#?}");
        pool.deallocate(larger).unwrap();
        for block in small {
            pool.deallocate(block).unwrap();
        }
        assert!(pool.snapshot().magazine_bytes > 8 * MIB);
        let again = allocate(80 * MIB);
        assert_eq!(again.ptr, place.start, "the larger range stays whole");
        pool.deallocate(again).unwrap();
        pool.deallocate(wall).unwrap();
    }
}

#[test]
fn another_chunk_for_small_blocks_leaves_a_large_magazine_as_it_is() {
    for device in devices() {
        let Decaying { pool, stream, .. } = Decaying::new(device, PoolConfig::default());
        let allocate = |bytes| pool.allocate(bytes, stream.id(), AllocTag("block")).unwrap();
        pool.deallocate(allocate(2048 * MIB)).unwrap();
        let blocks: Vec<_> = (0..10).map(|_| allocate(4 * MIB)).collect();
        blocks.into_iter().for_each(|block| pool.deallocate(block).unwrap());
        let cached = pool.snapshot().magazine_bytes;
        assert!(cached > 16 * MIB, "{cached}");
        let small = allocate(1000);
        assert_eq!(pool.snapshot().magazine_bytes, cached);
        pool.deallocate(small).unwrap();
    }
}

#[test]
fn memory_that_no_request_needed_for_the_decay_goes_back_and_not_before() {
    for device in devices() {
        let config = PoolConfig::default().with_decay(DECAY, 0);
        let mut decaying = Decaying::new(device, config);
        let live = decaying.pool.allocate(MIB, decaying.stream.id(), AllocTag("live")).unwrap();
        decaying.complete_pair(64 * MIB);
        assert_eq!(decaying.returned(Duration::ZERO), 0);
        assert_eq!(decaying.returned(DECAY - Duration::from_nanos(1)), 0);
        // A request restarts the time.
        decaying.complete_pair(64 * MIB);
        assert_eq!(decaying.returned(Duration::from_secs(1)), 0);
        assert_eq!(decaying.returned(DECAY - Duration::from_nanos(1)), 0);
        assert!(decaying.returned(Duration::from_nanos(1)) >= 62 * MIB);
        assert!(decaying.reserved() <= 4 * MIB, "the live block's handles stay");
        decaying.pool.deallocate(live).unwrap();
        decaying.stream.synchronize().unwrap();
        assert!(decaying.returned(Duration::ZERO) > 0);
        assert_eq!(decaying.reserved(), 0);
    }
}

#[test]
fn a_little_work_does_not_keep_the_memory_of_a_peak() {
    for device in devices() {
        let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
        decaying.complete_pair(1024 * MIB);
        assert_eq!(decaying.returned(Duration::ZERO), 0);
        let mut returned = 0;
        for check in 1..=12 {
            // Outside the magazines, between all checks.
            decaying.complete_pair(8 * MIB);
            returned += decaying.returned(DECAY / 4);
            assert!(check >= 4 || returned == 0, "the peak was less than a decay ago");
        }
        assert!(returned >= 900 * MIB, "{returned}");
        assert!(decaying.reserved() >= 8 * MIB, "the pair still needs this");
        let kept = decaying.reserved();
        decaying.complete_pair(8 * MIB);
        assert_eq!(decaying.reserved(), kept);
    }
}

#[test]
fn a_peak_within_every_decay_keeps_its_memory() {
    let [_, device] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    for _ in 0..6 {
        decaying.complete_pair(256 * MIB);
        for _ in 0..3 {
            decaying.complete_pair(8 * MIB);
            assert_eq!(decaying.returned(DECAY / 4), 0);
        }
    }
}

#[test]
fn fragments_do_not_count_as_unused_memory_of_whole_handles() {
    let [_, device] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    let (pool, stream) = (&decaying.pool, decaying.stream.id());
    let tag = AllocTag("fragments");
    let pairs: Vec<_> = (0..200)
        .map(|_| [3 * MIB / 2, MIB / 2].map(|bytes| pool.allocate(bytes, stream, tag).unwrap()))
        .collect();
    let live: Vec<_> = pairs
        .into_iter()
        .map(|[large, small]| {
            pool.deallocate(large).unwrap();
            small
        })
        .collect();
    for check in 0..12 {
        // It is free at each check, and needed between all of them.
        decaying.complete_pair(128 * MIB);
        assert_eq!(decaying.returned(DECAY / 4), 0, "check {check}");
    }
    for block in live {
        decaying.pool.deallocate(block).unwrap();
    }
}

/// One stream has pending work on its memory at each check, and needs it between all of them.
#[test]
fn pending_memory_of_one_stream_does_not_keep_the_idle_memory_of_another() {
    let [device, _] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    let busy = decaying.streams.lease().unwrap();
    decaying.complete_pair(512 * MIB);
    let request = |pool: &PoolResource| {
        let block = pool.allocate(128 * MIB, busy.id(), AllocTag("busy")).unwrap();
        pool.deallocate(block).unwrap();
    };
    let mut returned = 0;
    for check in 0..8 {
        request(&decaying.pool);
        let gate = busy.hold().unwrap();
        request(&decaying.pool);
        returned += decaying.returned(DECAY / 4);
        assert!(check >= 4 || returned == 0, "the peak was less than a decay ago");
        gate.release();
        busy.synchronize().unwrap();
    }
    assert!(returned >= 320 * MIB, "{returned}");
    let reserved = decaying.reserved();
    assert!(reserved >= 128 * MIB, "{reserved}");
    request(&decaying.pool);
    assert_eq!(decaying.reserved(), reserved, "what the busy stream needs has stayed");
}

/// A trim of another kind between the checks moves idle memory to the shared free list.
#[test]
fn a_trim_in_between_does_not_make_unneeded_memory_needed() {
    let [_, device] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    decaying.complete_pair(1024 * MIB);
    assert_eq!(decaying.returned(Duration::ZERO), 0);
    let mut returned = 0;
    for check in 1..=6 {
        decaying.complete_pair(8 * MIB);
        let held = decaying.reserved();
        assert!(decaying.pool.trim_to(held - 2 * MIB).unwrap() <= 4 * MIB);
        returned += decaying.returned(DECAY / 4);
        assert!(check >= 4 || returned == 0, "the peak was less than a decay ago");
    }
    assert!(returned >= 900 * MIB, "{returned}");
}

#[test]
fn frequent_reaps_and_returns_check_no_more_often_than_the_decay_does() {
    let [_, device] = devices();
    let decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    decaying.complete_pair(64 * MIB);
    for _ in 0..100 {
        decaying.pool.reap_completed().unwrap();
    }
    assert_eq!(decaying.pool.demand.lock().checks(), 0);
    for _ in 0..100 {
        decaying.pool.return_idle(Instant::now()).unwrap();
    }
    assert_eq!(decaying.pool.demand.lock().checks(), 0);
}

#[test]
fn a_magazine_that_serves_stays_while_idle_ranges_go_back() {
    let [_, device] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    decaying.complete_pair(1000);
    // It flushes the magazine.
    decaying.complete_pair(64 * MIB);
    decaying.complete_pair(1000);
    assert_eq!(decaying.returned(Duration::ZERO), 0);
    decaying.complete_pair(1000);
    let from_magazine = decaying.pool.snapshot().paths.magazine;
    assert!(decaying.returned(DECAY) >= 60 * MIB, "only the magazine served");
    decaying.complete_pair(1000);
    assert_eq!(decaying.pool.snapshot().paths.magazine, from_magazine + 1, "it still does");
    // Without any request for as long the magazine is returned too.
    assert_eq!(decaying.returned(Duration::ZERO), 0);
    assert_eq!(decaying.returned(DECAY - Duration::from_nanos(1)), 0);
    assert!(decaying.returned(Duration::from_nanos(1)) > 0);
    assert_eq!(decaying.reserved(), 0);
}

#[test]
fn memory_under_pending_work_stays_through_a_decay_and_goes_back_once_it_is_complete() {
    let [device, _] = devices();
    let mut decaying = Decaying::new(device, PoolConfig::default().with_decay(DECAY, 0));
    let gate = decaying.stream.hold().unwrap();
    decaying.pair(64 * MIB);
    assert_eq!(decaying.returned(Duration::ZERO), 0);
    assert_eq!(decaying.returned(DECAY), 0, "the stream may still work on it");
    gate.release();
    decaying.stream.synchronize().unwrap();
    assert!(decaying.returned(Duration::ZERO) >= 64 * MIB);
}

#[test]
fn a_pool_without_decay_keeps_its_memory_and_a_threshold_is_kept() {
    let [_, device] = devices();
    let mut kept = Decaying::new(device.clone(), PoolConfig::default().without_decay());
    kept.complete_pair(64 * MIB);
    kept.returned(Duration::ZERO);
    assert_eq!(kept.returned(100 * DECAY), 0);
    let config = PoolConfig::default().with_decay(DECAY, 32 * MIB);
    let mut decaying = Decaying::new(device, config);
    decaying.complete_pair(256 * MIB);
    decaying.returned(Duration::ZERO);
    assert!(decaying.returned(DECAY) > 0);
    assert!((32 * MIB..=64 * MIB).contains(&decaying.reserved()), "{}", decaying.reserved());
}

#[test]
fn every_hook_learns_of_the_memory_that_the_pool_holds_and_of_growth() {
    let [device, _] = devices();
    let config = PoolConfig::default().with_decay(DECAY, 0).with_initial(32 * MIB);
    let decaying = Decaying::new(device, config);
    let counts = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    for count in &counts {
        let count = count.clone();
        let hook = move |interval: Duration| {
            assert_eq!(interval, DECAY / 4);
            // It is forgotten after the second call.
            count.fetch_add(1, Ordering::Relaxed) == 0
        };
        assert!(decaying.pool.on_growth(Arc::new(hook)));
    }
    let heard = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
    assert_eq!(heard(), [1, 1]);
    decaying.pair(MIB);
    assert_eq!(heard(), [1, 1], "it fits");
    for bytes in [64, 128] {
        decaying.pair(bytes * MIB);
        assert_eq!(heard(), [2, 2]);
    }
}

/// The stamps of frees are noted only on streams whose handle others have.
#[test]
fn memory_that_was_free_before_the_handle_was_taken_is_polled_for() {
    for device in devices() {
        let pool = Decaying::new(device, PoolConfig::default());
        let gate = pool.stream.hold().unwrap();
        pool.pair(64 * MIB);
        let _escapes = pool.stream.handle();
        let owner = pool.pool.tracker.stream(pool.stream.id()).unwrap();
        assert!(!owner.poll_freed(), "the stream is held");
        gate.release();
        pool.stream.synchronize().unwrap();
        assert!(owner.poll_freed());
    }
}

/// Without an observer the blocks are unshared, and [`PoolResource::free_escaped`] frees them.
#[test]
fn a_stream_that_other_code_captures_gets_no_memory_and_frees_none() {
    for device in devices() {
        let pool = Decaying::new(device.clone(), PoolConfig::default());
        let (handle, pool_of) = (pool.stream.handle(), &pool.pool);
        let allocate = || pool_of.allocate(1000, pool.stream.id(), AllocTag("captured"));
        pool.pair(1000);
        let [kept, freed] = [(); 2].map(|()| allocate().unwrap());
        let (id, graphs) = (BlockId::from_block(&freed), device.driver().graphs().unwrap());
        graphs.begin_capture(handle, xlog_driver::CaptureMode::Global).unwrap();
        assert!(allocate().is_err());
        assert!(pool_of.deallocate(freed).is_err());
        assert_eq!(pool_of.block_state(id), BlockState::Retired);
        graphs.end_capture(handle).unwrap();
        pool_of.reap_completed().unwrap();
        assert_eq!(pool_of.block_state(id), BlockState::Freed);

        // Its next work has another stamp.
        pool.stream.synchronize().unwrap();
        let gate = pool.stream.hold().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(pool_of.deallocate_with_state(&kept), Ok(BlockState::Freed)));
        });
        assert!(matches!(pool_of.deallocate(kept), Err(ResourceError::UseAfterFree { .. })));
        let owner = pool_of.tracker.stream(pool.stream.id()).unwrap();
        assert!(!owner.poll_freed(), "the stream is held");
        gate.release();
        pool.stream.synchronize().unwrap();
        assert!(owner.poll_freed());
        let counted = pool_of.statistics();
        assert_eq!((counted.allocations, counted.deallocations), (3, 3));
        assert_eq!((counted.live_blocks, counted.retired_blocks), (0, 0));
        assert_eq!(counted.bytes_outstanding, 0);
    }
}

/// More polls than a stream may have marks pending, then a free; the stream has other work before its work on that memory is polled.
#[test]
fn another_process_gets_the_memory_of_a_stream_that_is_never_idle() {
    for device in devices() {
        let pool = Decaying::new(device, PoolConfig::default().without_decay());
        let first = pool.stream.hold().unwrap();
        pool.pair(MIB);
        for _ in 0..16 {
            assert_eq!(pool.pool.trim_under_pressure().unwrap(), 0);
        }
        pool.pair(64 * MIB);
        assert_eq!(pool.pool.trim_under_pressure().unwrap(), 0, "the stream is held");
        let (reached, was_reached) = std::sync::mpsc::channel();
        pool.stream.host_fn(move || reached.send(()).unwrap()).unwrap();
        let second = pool.stream.hold().unwrap();
        first.release();
        was_reached.recv_timeout(Duration::from_secs(120)).unwrap();
        assert!(pool.pool.trim_under_pressure().unwrap() >= 64 * MIB);
        second.release();
    }
}
