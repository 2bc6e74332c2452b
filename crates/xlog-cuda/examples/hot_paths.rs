//! One hot path, many times: what `scripts/instruction-counts` counts the instructions of.
//!
//!     hot_paths PATH COUNT
//!
//! Memory is the simulated device's behind the plain driver seam, so that what is counted is the runtime and not the detector.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::num::NonZeroU64;
use std::process::ExitCode;
use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::logging::RecorderConfig;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BinarySink, BlockId, BlockState, DebugGuardResource,
    DeviceBlock, DeviceMemoryResource, Generation, GlobalDeviceBudget, GuardConfig, GuardMode,
    LoggingResource, NullSink, PoolConfig, PoolResource, ResourceResult, StatisticsConfig,
    StatisticsResource, StreamId, StreamPool,
};
use xlog_cuda::sim::SimDevice;

const TAG: AllocTag = AllocTag("hot");
const PATHS: [&str; 18] = [
    "pool-pair-1KiB",
    "pool-pair-64MiB",
    "pool-pair-varied",
    "pool-random-4MiB",
    "pool-16-streams-4MiB",
    "budget-pool-pair-1KiB",
    "async-pair-1KiB",
    "own-stream-use",
    "alternating-use",
    "nothing-pair",
    "null-log-pair",
    "binary-log-pair",
    "statistics-pair",
    "statistics-many-live",
    "stack-pair-1KiB",
    "stack-pair-1MiB",
    "escaped-stack-pair-1KiB",
    "sampled-stack-pair-1KiB",
];

type Resource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// Like RMM's random allocations, on each stream in turn; a count is a step: mostly more blocks at first, then as many as fit, at last
/// none.
fn random(resource: &Resource, streams: &[StreamId], count: usize, largest: u64) {
    const CAP: u64 = 4 << 30;
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        state = state * 16807 % 0x7fff_ffff;
        state % below
    };
    let (mut live, mut bytes, mut allocated) = (Vec::new(), 0_u64, 0);
    for _ in 0..count {
        let size = 1 + draw(largest);
        let wants = draw(100) < 73 && 2 * allocated < count && bytes + size < CAP;
        if wants || live.is_empty() {
            let stream = streams[allocated % streams.len()];
            live.push((size, resource.allocate(black_box(size as usize), stream, TAG).unwrap()));
            (bytes, allocated) = (bytes + size, allocated + 1);
        } else {
            let (size, block) = live.swap_remove(draw(live.len() as u64) as usize);
            resource.deallocate(black_box(block)).unwrap();
            bytes -= size;
        }
    }
    for (_, block) in live {
        resource.deallocate(block).unwrap();
    }
}

fn pairs(resource: &Resource, stream: StreamId, count: usize, size: impl Fn(usize) -> usize) {
    for n in 0..count {
        let block = resource.allocate(black_box(size(n)), stream, TAG).unwrap();
        resource.deallocate(black_box(block)).unwrap();
    }
}

/// Hands out addresses and checks nothing, so that what a decorator adds can be told from it.
struct Nothing;

impl DeviceMemoryResource for Nothing {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let generation = Generation::next();
        Ok(DeviceBlock {
            ptr: 0x7f00_0000_0000 | (generation.0 >> 16),
            device_ordinal: 0,
            alloc_stream: stream,
            bytes,
            align: 256,
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let _ = black_box(block);
        Ok(())
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn bytes_outstanding(&self) -> usize {
        0
    }
}

/// A log to a file that keeps nothing, with rings that never fill.
fn binary_sink(count: usize) -> Arc<BinarySink> {
    let records = (2 * count).next_power_of_two().max(16);
    let config = RecorderConfig::new().with_ring_records(records);
    Arc::new(BinarySink::with_config("/dev/null", config).unwrap())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, count] = arguments.as_slice() else {
        eprintln!("hot_paths: expected PATH and COUNT; a path is one of {PATHS:?}");
        return ExitCode::from(2);
    };
    let Ok(count) = count.parse::<usize>() else {
        eprintln!("hot_paths: '{count}' is not a count; expected a number");
        return ExitCode::from(2);
    };
    let device = CudaDevice::from_driver(SimDevice::open(Default::default()).unwrap());
    let device = Arc::new(device);
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let lease = streams.lease().unwrap();
    let pool = || {
        let config = PoolConfig::default();
        Box::new(PoolResource::new(device.clone(), 0, streams.clone(), config).unwrap()) as Resource
    };
    match path.as_str() {
        "pool-pair-1KiB" => pairs(&pool(), lease.id(), count, |_| 1 << 10),
        "pool-pair-64MiB" => pairs(&pool(), lease.id(), count, |_| 64 << 20),
        // Never the same size twice in a row, so the magazine does not serve it.
        "pool-pair-varied" => pairs(&pool(), lease.id(), count, |n| (8 << 20) + 256 * (n % 97)),
        "pool-random-4MiB" => random(&pool(), &[lease.id()], count, 4 << 20),
        "pool-16-streams-4MiB" => {
            let leases: Vec<_> = (1..16).map(|_| streams.lease().unwrap()).collect();
            let all = leases.iter().chain([&lease]).map(|lease| lease.id()).collect::<Vec<_>>();
            random(&pool(), &all, count, 4 << 20);
        }
        "budget-pool-pair-1KiB" => {
            let budget: Resource = Box::new(GlobalDeviceBudget::new(pool(), 1 << 32));
            pairs(&budget, lease.id(), count, |_| 1 << 10);
        }
        // What the simulated driver spends on a block and its return is left out of the count.
        "async-pair-1KiB" => {
            let resource = AsyncCudaResource::new(device.clone(), 0, streams.clone());
            for turn in 0..count {
                let block = resource.allocate(black_box(1 << 10), lease.id(), TAG).unwrap();
                resource.deallocate(black_box(block)).unwrap();
                if turn % 64 == 63 {
                    lease.synchronize().unwrap();
                }
            }
        }
        "own-stream-use" => {
            let resource = AsyncCudaResource::new(device.clone(), 0, streams.clone());
            let block = resource.allocate(256, lease.id(), TAG).unwrap();
            let id = BlockId::from_block(&block);
            for _ in 0..count {
                resource.prepare_block_use(black_box(id), lease.id(), Access::Write).unwrap();
                resource.finish_block_use(black_box(id), lease.id(), Access::Write).unwrap();
            }
            resource.deallocate(block).unwrap();
        }
        // What the simulated driver spends on a record and a wait is counted too.
        "alternating-use" => {
            let resource = AsyncCudaResource::new(device.clone(), 0, streams.clone());
            let other = streams.lease().unwrap();
            let block = resource.allocate(256, lease.id(), TAG).unwrap();
            let id = BlockId::from_block(&block);
            for turn in 0..count {
                let stream = if turn % 2 == 0 { other.id() } else { lease.id() };
                resource.prepare_block_use(black_box(id), stream, Access::Write).unwrap();
                resource.finish_block_use(black_box(id), stream, Access::Write).unwrap();
                // So that events complete and are used again, as they are on a device that keeps up.
                if turn % 64 == 63 {
                    lease.synchronize().unwrap();
                    other.synchronize().unwrap();
                }
            }
            resource.deallocate(block).unwrap();
        }
        "nothing-pair" => {
            let nothing: Resource = Box::new(Nothing);
            pairs(&nothing, StreamId::DEFAULT, count, |_| 1 << 10);
        }
        "null-log-pair" => {
            let sink = Arc::new(NullSink::new());
            let logged: Resource = Box::new(LoggingResource::new(Box::new(Nothing), sink));
            pairs(&logged, StreamId::DEFAULT, count, |_| 1 << 10);
        }
        "binary-log-pair" => {
            let sink = binary_sink(count);
            let logged: Resource = Box::new(LoggingResource::new(Box::new(Nothing), sink));
            pairs(&logged, StreamId::DEFAULT, count, |_| 1 << 10);
        }
        "statistics-pair" => {
            let counted: Resource = Box::new(StatisticsResource::new(Box::new(Nothing)));
            pairs(&counted, StreamId::DEFAULT, count, |_| 1 << 10);
        }
        // Thousands of blocks of all sizes, one freed for each that comes.
        "statistics-many-live" => {
            let counted: Resource = Box::new(StatisticsResource::new(Box::new(Nothing)));
            let size = |n: usize| 1 + (n * 40_503) % (1 << 20);
            let allocate =
                |n| counted.allocate(black_box(size(n)), StreamId::DEFAULT, TAG).unwrap();
            let mut live: Vec<_> = (0..5000).map(allocate).collect();
            for n in 0..count {
                let block = std::mem::replace(&mut live[n * 7919 % 5000], allocate(n));
                counted.deallocate(black_box(block)).unwrap();
            }
            live.into_iter().for_each(|block| counted.deallocate(block).unwrap());
        }
        // What the runtime of a process is made of; the second on a stream that other code may capture, as a framework's.
        "stack-pair-1KiB" | "stack-pair-1MiB" | "escaped-stack-pair-1KiB" => {
            if path == "escaped-stack-pair-1KiB" {
                let _ = lease.stream().handle();
            }
            let config = PoolConfig::default();
            let pool = PoolResource::new(device.clone(), 0, streams.clone(), config).unwrap();
            let counted = StatisticsResource::over(pool, StatisticsConfig::default());
            let stack: Resource = Box::new(GlobalDeviceBudget::over(counted, 1 << 32));
            let bytes = if path == "stack-pair-1MiB" { 1 << 20 } else { 1 << 10 };
            pairs(&stack, lease.id(), count, |_| bytes);
        }
        // The same with a guard of so few that none is met.
        "sampled-stack-pair-1KiB" => {
            let config = PoolConfig::default();
            let pool = PoolResource::new(device.clone(), 0, streams.clone(), config).unwrap();
            let mode = GuardMode::Sampled(NonZeroU64::MAX);
            let guard = DebugGuardResource::on_home(pool, GuardConfig::default().with_mode(mode));
            let counted = StatisticsResource::over(guard, StatisticsConfig::default());
            let stack: Resource = Box::new(GlobalDeviceBudget::over(counted, 1 << 32));
            pairs(&stack, lease.id(), count, |_| 1 << 10);
        }
        other => {
            eprintln!("hot_paths: unknown path '{other}'; accepted are {PATHS:?}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
