//! The runtime keeps the order and adds no other: two streams that could work at the same time do.
//!
//! The program is a pipeline of kernels of about a millisecond. The producer's kernel of a round runs while the consumer's
//! kernel of the round before does; whoever makes one wait for the other without need doubles the time. Times are
//! compared, so this is a binary of its own: no other test runs on the GPU meanwhile.

#![allow(clippy::unwrap_used)]

#[path = "gpu/gpu.rs"]
mod gpu;

use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use xlog_cuda::device_runtime::{
    AllocTag, PoolConfig, PoolResource, StreamLease, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder, TrackedCudaSlice};
use xlog_kernels::exercise::Exercise;

const ROUNDS: u32 = 100;
const REPEATS: usize = 5;
const BAR: f64 = 1.1;

struct Pipeline<'a> {
    device: &'a CudaDevice,
    manager: GpuMemoryManager,
    kernels: Exercise,
    producer: StreamLease,
    consumer: StreamLease,
    /// About a millisecond of the GPU's clock.
    ticks: u64,
}

impl Pipeline<'_> {
    fn wait(&self) {
        self.producer.synchronize().unwrap();
        self.consumer.synchronize().unwrap();
    }

    /// The same kernels on memory that stays, ordered by bare events: nothing can be faster.
    fn ideal(&self, passed: u64, result: u64) -> Duration {
        let driver = self.device.driver();
        let events: Vec<_> = (0..ROUNDS).map(|_| driver.event_create().unwrap()).collect();
        let start = Instant::now();
        for (round, event) in (0..ROUNDS).zip(&events) {
            // SAFETY: both words are live until the caller has waited for both streams, and each has one writer.
            unsafe { self.kernels.spin(&self.producer, self.ticks, passed, round).unwrap() };
            driver.event_record(*event, self.producer.handle()).unwrap();
            driver.stream_wait_event(self.consumer.handle(), *event).unwrap();
            // SAFETY: as above.
            unsafe { self.kernels.spin(&self.consumer, self.ticks, result, round).unwrap() };
        }
        self.wait();
        let time = start.elapsed();
        for event in events {
            // SAFETY: made here, and not used any more.
            unsafe { driver.event_destroy(event) }.unwrap();
        }
        time
    }

    /// A block per round, handed over and freed; it is freed when `held` younger ones are on their way.
    fn tracked(&self, result: &TrackedCudaSlice<u32>, held: usize) -> Duration {
        let runtime = self.manager.runtime();
        let memory = self.manager.on_stream(self.producer.id());
        let mut on_their_way = std::collections::VecDeque::new();
        let start = Instant::now();
        for round in 0..ROUNDS {
            let passed = memory.alloc::<u32>(1).unwrap();
            let mut produce = LaunchRecorder::new_strict(self.producer.id());
            produce.write(&passed);
            produce
                // SAFETY: the word is live, and the recorder orders the kernel.
                .run(runtime, |stream| unsafe {
                    self.kernels.spin(stream, self.ticks, passed.ptr(), round)
                })
                .unwrap();
            let mut consume = LaunchRecorder::new_strict(self.consumer.id());
            consume.read(&passed).write(result);
            consume
                // SAFETY: as above.
                .run(runtime, |stream| unsafe {
                    self.kernels.spin(stream, self.ticks, result.ptr(), round)
                })
                .unwrap();
            on_their_way.push_back(passed);
            if on_their_way.len() > held {
                drop(on_their_way.pop_front());
            }
        }
        drop(on_their_way);
        self.wait();
        start.elapsed()
    }
}

/// The ticks of the GPU's clock in a millisecond, once it runs at speed.
fn calibrate(kernels: &Exercise, stream: &StreamLease, word: u64) -> u64 {
    const TICKS: u64 = 20_000_000;
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        // SAFETY: the word is live until the stream was waited for.
        unsafe { kernels.spin(stream, TICKS, word, 0).unwrap() };
        stream.synchronize().unwrap();
        best = best.min(start.elapsed());
    }
    (TICKS as f64 / best.as_secs_f64() / 1e3) as u64
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Tests that compare times come one after the other.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn a_pipeline_over_two_streams_overlaps_as_with_bare_events() {
    let Some(device) = gpu::gpu("a_pipeline_over_two_streams_overlaps_as_with_bare_events") else {
        return;
    };
    overlaps("async", &device, gpu::runtime(&device, 2));
}

#[test]
fn a_pipeline_over_two_streams_of_a_pool_overlaps_as_with_bare_events() {
    let name = "a_pipeline_over_two_streams_of_a_pool_overlaps_as_with_bare_events";
    let Some(device) = gpu::gpu(name) else { return };
    let (runtime, _) = pooled(&device, 2);
    overlaps("pool", &device, runtime);
}

fn pooled(device: &Arc<CudaDevice>, streams: usize) -> (Arc<XlogDeviceRuntime>, Arc<PoolResource>) {
    let streams = Arc::new(StreamPool::new(device.clone(), streams));
    let ordinal = device.ordinal();
    // Memory that belongs to no stream yet: what a stream must not wait for is another stream.
    let config = PoolConfig::default().with_initial(32 << 20);
    let pool = PoolResource::new(device.clone(), ordinal, streams.clone(), config).unwrap();
    let pool = Arc::new(pool);
    let resource = Box::new(pool.clone());
    let runtime = XlogDeviceRuntime::with_resource(device.clone(), ordinal, streams, resource);
    (Arc::new(runtime), pool)
}

/// Kernels on several streams, each with a block of its own: on streams that had memory of the pool before, and on streams that
/// come to it for the first time.
#[test]
fn streams_of_a_cold_pool_take_what_those_of_a_warm_one_take() {
    const STREAMS: usize = 4;
    const KERNELS: usize = 4;
    const TICKS: u64 = 1_000_000;
    const COLD_BAR: f64 = 1.1;
    let name = "streams_of_a_cold_pool_take_what_those_of_a_warm_one_take";
    let Some(device) = gpu::gpu(name) else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = Exercise::load(&device).unwrap();
    let round = |warm: bool| {
        let (runtime, pool) = pooled(&device, STREAMS);
        let tag = AllocTag("multi_stream");
        let leases: Vec<_> = (0..STREAMS).map(|_| runtime.stream_pool().lease().unwrap()).collect();
        if warm {
            for lease in &leases {
                let block = runtime.allocate(8, lease.id(), tag).unwrap();
                runtime.deallocate(block).unwrap();
            }
            device.synchronize().unwrap();
        }
        let start = Instant::now();
        let mut calls = String::new();
        for kernel in 0..KERNELS {
            let lease = &leases[kernel % STREAMS];
            let call = Instant::now();
            let block = runtime.allocate(8, lease.id(), tag).unwrap();
            let allocated = call.elapsed();
            // SAFETY: the block is live, and this is its own stream.
            unsafe { kernels.spin(lease, TICKS, block.ptr, 1).unwrap() };
            let launched = call.elapsed();
            runtime.deallocate(block).unwrap();
            let freed = call.elapsed() - launched;
            let launched = launched - allocated;
            write!(calls, " {allocated:?} + {launched:?} + {freed:?}").unwrap();
        }
        device.synchronize().unwrap();
        let time = start.elapsed();
        assert_eq!(pool.snapshot().paths.waited, 0, "a stream was made to wait for another");
        println!("warm {warm}: {time:?}; allocation + launch + free:{calls}");
        time
    };
    round(true);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..15 {
        cold.push(round(false));
        warm.push(round(true));
    }
    let (cold, warm) = (median(cold), median(warm));
    let ratio = cold.as_secs_f64() / warm.as_secs_f64();
    println!(
        "{STREAMS} streams x {KERNELS} kernels: cold {cold:?}, warm {warm:?}, ratio {ratio:.3} (bar {COLD_BAR})"
    );
    assert!(ratio <= COLD_BAR, "a cold pool takes {ratio:.3} times as long");
}

fn overlaps(name: &str, device: &Arc<CudaDevice>, runtime: Arc<XlogDeviceRuntime>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = runtime.stream_pool().clone();
    let manager = GpuMemoryManager::with_runtime(runtime);
    let kernels = Exercise::load(device).unwrap();
    let (producer, consumer) = (pool.lease().unwrap(), pool.lease().unwrap());
    let words = manager.alloc::<u32>(2).unwrap();
    let result = manager.on_stream(consumer.id()).alloc::<u32>(1).unwrap();
    device.synchronize().unwrap();
    let ticks = calibrate(&kernels, &producer, words.ptr());
    let pipeline = Pipeline { device, manager, kernels, producer, consumer, ticks };

    let (mut ideal, mut tracked, mut at_once) = (Vec::new(), Vec::new(), Vec::new());
    for repeat in 0..=REPEATS {
        let times = (
            pipeline.ideal(words.ptr(), words.ptr() + 4),
            pipeline.tracked(&result, 1),
            pipeline.tracked(&result, 0),
        );
        // The first of each fills caches and pools.
        if repeat > 0 {
            ideal.push(times.0);
            tracked.push(times.1);
            at_once.push(times.2);
        }
    }
    assert_eq!(result.to_vec().unwrap(), [ROUNDS - 1]);
    let (ideal, tracked, at_once) = (median(ideal), median(tracked), median(at_once));
    let ratio = tracked.as_secs_f64() / ideal.as_secs_f64();
    println!(
        "{name}, {ROUNDS} rounds: bare events {ideal:?}, handoff and free {tracked:?}, ratio {ratio:.3} (bar {BAR}); freed while the \
         consumer still reads {at_once:?}, ratio {:.3}",
        at_once.as_secs_f64() / ideal.as_secs_f64()
    );
    // Were it serial, it would take two kernels a round.
    let overlaps = ideal.as_secs_f64() < 1.5e-3 * f64::from(ROUNDS);
    assert!(
        overlaps,
        "the bare program does not overlap, so there is nothing to compare with: {ideal:?}"
    );
    assert!(ratio <= BAR, "{ratio:.3} times the ideal, more than {BAR}");
}
