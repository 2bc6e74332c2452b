//! The measured groups. The variants of a group do the same work; the first is the baseline.
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BinarySink, BlockId, DeviceMemoryResource,
    GlobalDeviceBudget, LoggingResource, LoggingSink, NullSink, PoolConfig, PoolResource,
    StatisticsConfig, StatisticsResource, StreamId, StreamPool,
};
use xlog_cuda::{CudaDevice, DeviceSpec, Result, XlogError};
use xlog_report::text_report::size;
use xlog_workloads::stack::{Stack, StackKind};

use super::measure::{Effort, Sample, Variant, take_turns};

const TAG: AllocTag = AllocTag("bench");
/// Block sizes.
const SIZES: [usize; 6] = [256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];
/// Decorators are measured with the block size that the resource serves fastest.
const SMALL: usize = 1 << 10;
/// Events that the bare driver cycles through.
const EVENTS: usize = 256;

#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) samples: Vec<Sample>,
}

type SharedResource = Arc<dyn DeviceMemoryResource + Send + Sync>;

/// Allocates and frees `bytes`, `count` times.
fn pairs(
    resource: &(impl DeviceMemoryResource + ?Sized),
    bytes: usize,
    stream: StreamId,
    count: usize,
) -> Result<()> {
    for _ in 0..count {
        let block = resource.allocate(black_box(bytes), stream, TAG)?;
        resource.deallocate(black_box(block))?;
    }
    Ok(())
}

/// Measures all groups; calls `progress` with the name of the next one. Files go to `scratch`.
pub(super) fn measure(
    spec: DeviceSpec,
    effort: Effort,
    scratch: &Path,
    mut progress: impl FnMut(&str),
) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    progress("allocate and free");
    resources(spec, effort, &mut groups)?;
    let device = Arc::new(CudaDevice::open_spec(spec)?);
    progress("uses of one stream");
    own_stream(&device, effort, &mut groups)?;
    progress("uses of two streams");
    alternating(&device, effort, &mut groups)?;
    progress("the bare driver");
    bare_driver(&device, effort, &mut groups)?;
    progress("budget, log and statistics");
    decorators(&device, effort, scratch, &mut groups)?;
    Ok(groups)
}

/// Measures the allocation and free of a block by each resource.
fn resources(spec: DeviceSpec, effort: Effort, groups: &mut Vec<Group>) -> Result<()> {
    let stacks = StackKind::ALL
        .into_iter()
        .map(|kind| Ok((kind, Stack::open(spec, kind, None, 2)?)))
        .collect::<Result<Vec<_>>>()?;
    for bytes in SIZES {
        let variants = stacks.iter().map(|(kind, stack)| {
            let work = move |count| pairs(stack.resource(), bytes, StreamId::DEFAULT, count);
            Variant::new(kind.name(), work, move || stack.drain())
        });
        let name = format!("allocate and free {}", size(bytes as u64));
        let samples = take_turns(effort, variants.collect())?;
        groups.push(Group { name, samples });
    }
    Ok(())
}

/// Measures uses of blocks on their own stream, which make no driver call.
fn own_stream(device: &Arc<CudaDevice>, effort: Effort, groups: &mut Vec<Group>) -> Result<()> {
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(device)));
    let lease = streams.lease()?;
    let stream = lease.id();
    let all: [(&str, SharedResource); 2] = [
        ("async", Arc::new(async_resource(device, &streams))),
        ("pool", Arc::new(pool(device, &streams)?)),
    ];
    let mut blocks = Vec::new();
    let mut variants = Vec::new();
    for (name, resource) in &all {
        let block = resource.allocate(256, stream, TAG)?;
        let id = BlockId::from_block(&block);
        blocks.push((resource, block));
        let work = move |count| {
            for _ in 0..count {
                resource.prepare_block_use(black_box(id), stream, Access::Write)?;
                resource.finish_block_use(black_box(id), stream, Access::Write)?;
            }
            Ok(())
        };
        variants.push(Variant::new(*name, work, || Ok(())));
    }
    let samples = take_turns(effort, variants)?;
    for (resource, block) in blocks {
        resource.deallocate(block)?;
    }
    groups.push(Group { name: "use on the block's own stream".to_owned(), samples });
    Ok(())
}

/// Measures one block written on two streams in turn, and the bare event record and wait that this takes.
fn alternating(device: &Arc<CudaDevice>, effort: Effort, groups: &mut Vec<Group>) -> Result<()> {
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(device)));
    let resource = async_resource(device, &streams);
    let (one, two) = (streams.lease()?, streams.lease()?);
    // The runtime asks a stream whose handle escaped whether it is capturing, so the bare driver has its own streams.
    let bare = (streams.lease()?, streams.lease()?);
    let (bare_one, bare_two) = (bare.0.handle(), bare.1.handle());
    let block = resource.allocate(256, one.id(), TAG)?;
    let id = BlockId::from_block(&block);
    let driver = device.driver();
    let events =
        (0..EVENTS).map(|_| driver.event_create()).collect::<std::result::Result<Vec<_>, _>>()?;
    let settle = || {
        one.synchronize()?;
        two.synchronize()?;
        bare.0.synchronize()?;
        bare.1.synchronize()?;
        Ok(())
    };
    let driven = |count: usize| {
        for turn in 0..count {
            let (own, other) =
                if turn % 2 == 0 { (bare_one, bare_two) } else { (bare_two, bare_one) };
            if let Some(event) = events.get(turn % EVENTS) {
                driver.event_record(*event, other)?;
                driver.stream_wait_event(own, *event)?;
            }
        }
        Ok(())
    };
    let ours = |count: usize| {
        for turn in 0..count {
            let stream = if turn % 2 == 0 { one.id() } else { two.id() };
            resource.prepare_block_use(id, stream, Access::Write)?;
            resource.finish_block_use(id, stream, Access::Write)?;
        }
        Ok(())
    };
    let variants = vec![
        Variant::new("record and wait", driven, settle),
        Variant::new("prepare and finish", ours, settle),
    ];
    let samples = take_turns(effort, variants)?;
    for event in events {
        #[allow(unsafe_code)]
        // SAFETY: the event was created here and is no longer used.
        unsafe {
            driver.event_destroy(event)?;
        }
    }
    resource.deallocate(block)?;
    resource.reap_pending()?;
    groups.push(Group { name: "use on two streams in turn".to_owned(), samples });
    Ok(())
}

/// Measures a block of the stream-ordered resource, and the two bare driver calls it takes in the same driver pool.
fn bare_driver(device: &Arc<CudaDevice>, effort: Effort, groups: &mut Vec<Group>) -> Result<()> {
    let Some(pools) = device.driver().async_pools() else { return Ok(()) };
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(device)));
    let resource = async_resource(device, &streams);
    let (stream, bare_stream) = (streams.lease()?, streams.lease()?);
    let driver_pool = device.memory_pool()?;
    for bytes in [SMALL, 1 << 20] {
        let settle = || {
            stream.synchronize()?;
            bare_stream.synchronize()?;
            resource.reap_pending()?;
            Ok(())
        };
        let bare = |count| {
            for _ in 0..count {
                let ptr = pools.alloc_async(bytes, driver_pool, bare_stream.handle())?;
                #[allow(unsafe_code)]
                // SAFETY: the block was just allocated on this stream and has no uses.
                unsafe {
                    pools.free_async(black_box(ptr), bare_stream.handle())?;
                }
            }
            Ok(())
        };
        let ours = |count| pairs(&resource, bytes, stream.id(), count);
        let variants =
            vec![Variant::new("bare driver", bare, settle), Variant::new("async", ours, settle)];
        let name = format!("allocate and free {} by the driver's pool", size(bytes as u64));
        let samples = take_turns(effort, variants)?;
        groups.push(Group { name, samples });
    }
    Ok(())
}

/// Measures the overhead of budget, log and statistics over a pool.
fn decorators(
    device: &Arc<CudaDevice>,
    effort: Effort,
    scratch: &Path,
    groups: &mut Vec<Group>,
) -> Result<()> {
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(device)));
    let lease = streams.lease()?;
    let stream = lease.id();
    let inner = || pool(device, &streams);
    let limit = usize::try_from(device.memory_info()?.free).unwrap_or(usize::MAX);
    let file = BinarySink::create(scratch.join("bench.xtrace"))
        .map_err(|error| XlogError::Kernel(error.to_string()))?;
    let file = Arc::new(file);
    let null = Arc::new(NullSink::new());
    let all: Vec<(&str, SharedResource)> = vec![
        ("pool alone", Arc::new(inner()?)),
        ("with a budget", Arc::new(GlobalDeviceBudget::over(inner()?, limit))),
        ("with a log to nowhere", Arc::new(LoggingResource::over(inner()?, null))),
        ("with a log to a file", Arc::new(LoggingResource::over(inner()?, file.clone()))),
        ("with statistics", Arc::new(StatisticsResource::over(inner()?, StatisticsConfig::new()))),
    ];
    let variants = all.iter().map(|(name, resource)| {
        let file = &file;
        let work = move |count| pairs(resource, SMALL, stream, count);
        // The log's writer thread is flushed outside the timed section.
        Variant::new(*name, work, move || {
            file.flush().map_err(|error| XlogError::Kernel(error.to_string()))
        })
    });
    let samples = take_turns(effort, variants.collect())?;
    let name = format!("allocate and free {} under what is on top", size(SMALL as u64));
    groups.push(Group { name, samples });
    Ok(())
}

fn async_resource(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> AsyncCudaResource {
    AsyncCudaResource::new(Arc::clone(device), device.ordinal(), Arc::clone(streams))
}

fn pool(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Result<PoolResource> {
    let (device, streams) = (Arc::clone(device), Arc::clone(streams));
    let ordinal = device.ordinal();
    Ok(PoolResource::new(device, ordinal, streams, PoolConfig::default())?)
}
