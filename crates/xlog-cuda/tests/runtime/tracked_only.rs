//! Buffers whose every use is recorded: they may inherit the pending work of their memory.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use xlog_base::SplitMix;
use xlog_cuda::device_runtime::{
    PoolConfig, PoolResource, StreamLease, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder, TrackedCudaSlice};
use xlog_testing::{WatchedGate, for_each_device};

const MIB: usize = 1 << 20;

/// A runtime over a pool, with some streams.
struct Tracked {
    device: Arc<CudaDevice>,
    pool: Arc<PoolResource>,
    manager: GpuMemoryManager,
    streams: Vec<StreamLease>,
}

fn tracked(device: &Arc<CudaDevice>, config: PoolConfig, streams: usize) -> Tracked {
    let pool_of_streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let ordinal = device.ordinal();
    // A thread that returns idle memory would look into the arenas meanwhile.
    let config = config.without_decay();
    let pool = PoolResource::new(device.clone(), ordinal, pool_of_streams.clone(), config).unwrap();
    let pool = Arc::new(pool);
    let leases = (0..streams).map(|_| pool_of_streams.lease().unwrap()).collect();
    let resource = Box::new(pool.clone());
    let runtime =
        XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool_of_streams, resource);
    let manager = GpuMemoryManager::with_runtime(Arc::new(runtime)).tracked_only();
    Tracked { device: device.clone(), pool, manager, streams: leases }
}

impl Tracked {
    fn alloc(&self, bytes: usize, stream: usize) -> TrackedCudaSlice<u8> {
        self.manager.on_stream(self.streams[stream].id()).alloc(bytes).unwrap()
    }

    fn reserved(&self) -> usize {
        self.pool.snapshot().reserved_bytes
    }

    /// Fills a buffer on a stream, as a launch.
    #[allow(unsafe_code)]
    fn fill(&self, buffer: &TrackedCudaSlice<u8>, value: u8, stream: usize) {
        let mut recorder = LaunchRecorder::new_strict(self.streams[stream].id());
        recorder.write(buffer);
        let queued = recorder.run(self.manager.runtime(), |stream| {
            // SAFETY: the buffer is live and this long, and the recorder orders the fill.
            unsafe { stream.memset(buffer.ptr(), value, buffer.len()) }
        });
        queued.unwrap();
    }

    fn assert_holds(&self, buffer: &TrackedCudaSlice<u8>, value: u8, stream: usize) {
        let bytes = buffer.to_vec_on(self.streams[stream].id()).unwrap();
        assert!(bytes.iter().all(|byte| *byte == value), "{value} was overwritten");
    }

    fn assert_no_races(&self) {
        assert!(self.device.races().is_empty(), "{:?}", self.device.races());
    }
}

#[test]
fn an_address_is_shown_once_a_preflight_has_prepared_a_use() {
    for_each_device(|device| {
        let tracked = tracked(device, PoolConfig::default(), 1);
        let buffer = tracked.alloc(MIB, 0);
        assert_eq!((buffer.ptr(), buffer.slice(3..).unwrap().ptr()), (0, 0));
        let mut recorder = LaunchRecorder::new_strict(tracked.streams[0].id());
        recorder.write(&buffer);
        assert_eq!(buffer.ptr(), 0, "it was named and not prepared");
        recorder.preflight(tracked.manager.runtime()).unwrap();
        let ptr = buffer.ptr();
        assert_eq!(Some(ptr), buffer.id().map(|id| id.ptr));
        assert_eq!(buffer.slice(3..).unwrap().ptr(), ptr + 3);
        recorder.commit(tracked.manager.runtime()).unwrap();
        let ordinary = GpuMemoryManager::with_runtime(tracked.manager.runtime().clone());
        assert_ne!(ordinary.alloc::<u8>(MIB).unwrap().ptr(), 0);
    });
}

#[test]
fn memory_of_a_busy_stream_serves_another_one_without_growth_and_its_first_use_waits() {
    for_each_device(|device| {
        let tracked = tracked(device, PoolConfig::default(), 2);
        let first = tracked.alloc(6 * MIB, 0);
        tracked.fill(&first, 1, 0);
        let gate = WatchedGate::new(tracked.streams[0].hold().unwrap());
        tracked.fill(&first, 2, 0);
        drop(first);
        let reserved = tracked.reserved();
        let second = tracked.alloc(6 * MIB, 1);
        assert_eq!(tracked.reserved(), reserved, "the pool grew beside free memory");
        // The allocation made no stream wait.
        tracked.streams[1].synchronize().unwrap();
        tracked.fill(&second, 3, 1);
        gate.release();
        tracked.assert_holds(&second, 3, 1);
        tracked.assert_no_races();
    });
}

#[test]
fn a_freed_block_that_another_stream_reads_serves_a_third_one_of_its_size() {
    for_each_device(|device| {
        let tracked = tracked(device, PoolConfig::default(), 3);
        let (first, target) = (tracked.alloc(6 * MIB, 0), tracked.alloc(6 * MIB, 1));
        tracked.fill(&first, 1, 0);
        tracked.fill(&target, 0, 1);
        let gate = WatchedGate::new(tracked.streams[1].hold().unwrap());
        let mut target = target;
        target.copy_from_on(&first, tracked.streams[1].id()).unwrap();
        drop(first);
        let reserved = tracked.reserved();
        let third = tracked.alloc(6 * MIB, 2);
        assert_eq!(tracked.reserved(), reserved, "the pool grew beside free memory");
        tracked.streams[2].synchronize().unwrap();
        tracked.fill(&third, 9, 2);
        gate.release();
        tracked.assert_holds(&target, 1, 1);
        tracked.assert_holds(&third, 9, 2);
        tracked.assert_no_races();
    });
}

/// The free follows all work of the block's own stream, announced or not.
#[test]
fn a_freed_block_that_two_streams_read_serves_a_third_one_after_both() {
    for_each_device(|device| {
        let tracked = tracked(device, PoolConfig::default(), 3);
        let first = tracked.alloc(6 * MIB, 0);
        tracked.fill(&first, 1, 0);
        let mut targets = [0, 1].map(|stream| tracked.alloc(6 * MIB, stream));
        tracked.fill(&targets[0], 0, 0);
        tracked.fill(&targets[1], 0, 1);
        let gates = [1, 0].map(|at| {
            let gate = WatchedGate::new(tracked.streams[at].hold().unwrap());
            targets[at].copy_from_on(&first, tracked.streams[at].id()).unwrap();
            gate
        });
        drop(first);
        let reserved = tracked.reserved();
        let third = tracked.alloc(6 * MIB, 2);
        assert_eq!(tracked.reserved(), reserved, "the pool grew beside free memory");
        tracked.fill(&third, 9, 2);
        assert!(!tracked.streams[2].query().unwrap(), "it did not wait");
        let [other, own] = gates;
        other.release();
        tracked.streams[1].synchronize().unwrap();
        own.release();
        tracked.assert_holds(&targets[0], 1, 0);
        tracked.assert_holds(&targets[1], 1, 1);
        tracked.assert_holds(&third, 9, 2);
        tracked.assert_no_races();
    });
}

#[test]
fn a_buffer_that_inherits_and_is_never_used_frees_its_memory() {
    for_each_device(|device| {
        let tracked = tracked(device, PoolConfig::default(), 2);
        let first = tracked.alloc(6 * MIB, 0);
        let gate = WatchedGate::new(tracked.streams[0].hold().unwrap());
        tracked.fill(&first, 2, 0);
        drop(first);
        let second = tracked.alloc(6 * MIB, 1);
        drop(second);
        gate.release();
        let runtime = tracked.manager.runtime();
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.bytes_outstanding(), 0);
        tracked.pool.trim_to(0).unwrap();
        assert_eq!(tracked.reserved(), 0);
        tracked.assert_no_races();
    });
}

/// Buffers of a few sizes, filled, read, copied and dropped on random streams. Returns how many inherited.
fn random_program(seed: u64, config: PoolConfig) -> u64 {
    let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
    let tracked = tracked(&device, config, 4);
    let mut random = SplitMix::new(seed);
    let mut live: Vec<(TrackedCudaSlice<u8>, u8)> = Vec::new();
    for step in 0..120_u32 {
        let (stream, other) = (random.below(4), random.below(4));
        match random.below(8) {
            0..=2 if live.len() < 6 => {
                let bytes = [256 << 10, MIB, 3 * MIB][random.below(3)] + random.below(2) * 256;
                let buffer = tracked.alloc(bytes, stream);
                tracked.fill(&buffer, step as u8, other);
                live.push((buffer, step as u8));
            }
            3 if !live.is_empty() => {
                let at = random.below(live.len());
                let (buffer, value) = &mut live[at];
                *value = step as u8;
                let at = &tracked.streams[stream];
                buffer.copy_from_slice_on(&vec![step as u8; buffer.len()], at.id()).unwrap();
            }
            4 if !live.is_empty() => {
                let (buffer, value) = &live[random.below(live.len())];
                tracked.assert_holds(buffer, *value, stream);
            }
            _ if live.len() > 1 => {
                // Used elsewhere a moment ago, and freed.
                let (buffer, value) = live.swap_remove(random.below(live.len()));
                tracked.fill(&buffer, value, stream);
            }
            _ => {}
        }
    }
    for (buffer, value) in live {
        tracked.assert_holds(&buffer, value, random.below(4));
    }
    tracked.manager.runtime().reap_pending().unwrap();
    tracked.assert_no_races();
    tracked.pool.snapshot().paths.covered
}

#[test]
fn random_programs_of_tracked_buffers_have_no_race_and_keep_their_bytes() {
    let mut inherited = 0;
    for seed in 0..24 {
        inherited += random_program(seed, PoolConfig::default());
        inherited += random_program(seed, PoolConfig::default().with_maximum(24 * MIB));
    }
    assert!(inherited > 40, "only {inherited} buffers inherited pending work");
}
