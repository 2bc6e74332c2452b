//! The names, shapes and signatures that users were promised, written down as code that must compile.
//!
//! Behaviour is tested elsewhere; what is here fails when a promised item is renamed, moved or changes its type.

#![allow(clippy::unwrap_used, clippy::type_complexity)]

use std::error::Error;
use std::fmt::{Debug, Display};
use std::hash::Hash;
use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, CsvSink, DEFAULT_MAX_STREAMS,
    DebugGuardResource, DeviceBlock, DeviceMemoryResource, DeviceStream, DirectCudaResource,
    Generation, GlobalDeviceBudget, GuardConfig, GuardReport, InMemorySink, LogAction, LogRecord,
    LogResult, LoggingResource, LoggingSink, MAX_DEVICE_ORDINALS, NullSink, PoolConfig,
    PoolResource, ResourceError, ResourceResult, SinkError, StreamId, StreamLease, StreamPool,
    StreamPoolError, XlogDeviceRuntime,
};
use xlog_cuda::{
    CudaDevice, DeviceRepr, GpuMemoryManager, LaunchRecorder, Result, TrackedCudaSlice, XlogError,
};

type Boxed = Box<dyn DeviceMemoryResource + Send + Sync>;

fn is_shared<T: Debug + Send + Sync>() {}
fn is_value<T: Copy + Eq + Hash + Debug>() {}

#[test]
fn every_item_is_also_reachable_by_its_module() {
    use xlog_cuda::device_runtime::{
        async_resource, budget, debug_guard, direct, logging, pool, resource, runtime, stream_pool,
    };
    fn same<T>(_: Option<T>, _: Option<T>) {}
    same::<resource::DeviceBlock>(None, None::<DeviceBlock>);
    same::<direct::DirectCudaResource>(None, None::<DirectCudaResource>);
    same::<async_resource::AsyncCudaResource>(None, None::<AsyncCudaResource>);
    same::<pool::PoolResource>(None, None::<PoolResource>);
    same::<pool::PoolConfig>(None, None::<PoolConfig>);
    same::<debug_guard::GuardReport>(None, None::<GuardReport>);
    same::<debug_guard::GuardConfig>(None, None::<GuardConfig>);
    same::<budget::GlobalDeviceBudget>(None, None::<GlobalDeviceBudget>);
    same::<logging::LogRecord>(None, None::<LogRecord>);
    same::<runtime::XlogDeviceRuntime>(None, None::<XlogDeviceRuntime>);
    same::<stream_pool::StreamPool>(None, None::<StreamPool>);
    same::<debug_guard::DebugGuardResource>(None, None::<DebugGuardResource>);
    same::<logging::LoggingResource>(None, None::<LoggingResource>);
}

#[test]
fn the_device_and_its_streams() {
    let _: fn(&str) -> Result<CudaDevice> = CudaDevice::open;
    let _: fn(usize) -> Result<CudaDevice> = CudaDevice::new;
    is_shared::<CudaDevice>();
    is_shared::<XlogError>();
    assert!(matches!(XlogError::Kernel(String::new()), XlogError::Kernel(text) if text.is_empty()));

    let device = Arc::new(CudaDevice::open("sim:1").unwrap());
    assert!(device.races().is_empty());
    let pool: StreamPool = StreamPool::with_defaults(device.clone());
    let stream: Arc<DeviceStream> = pool.resolve(StreamId::DEFAULT).unwrap();
    let block = device.driver().alloc(64).unwrap();
    let mut back = [0_u8; 4];
    // SAFETY: 64 bytes that nothing else uses, on one stream.
    unsafe {
        let _: Result<()> = stream.memset(block, 1, 64);
        let _: Result<()> = stream.copy_htod(block, &[2; 4]);
        let _: Result<()> = stream.copy_dtod(block + 32, block, 4);
        let _: Result<()> = stream.copy_dtoh(&mut back, block + 32);
    }
    assert_eq!(back, [2; 4]);
    let _: Result<()> = stream.host_fn(|| {});
    stream.hold().unwrap().release();
    drop(stream.hold().unwrap());
    let _: Result<()> = stream.synchronize();
    let _ = stream.cu_stream();
    // SAFETY: allocated above, and its work has completed.
    unsafe { device.driver().free(block) }.unwrap();
}

#[test]
fn identities_and_blocks() {
    is_value::<StreamId>();
    is_value::<AllocTag>();
    is_value::<Generation>();
    is_value::<Access>();
    fn is_copy<T: Copy + Eq + Debug>() {}
    is_copy::<BlockId>();
    is_copy::<BlockState>();
    assert_eq!(StreamId::DEFAULT, StreamId(0));
    assert_eq!(AllocTag::UNTAGGED, AllocTag("untagged"));
    let _: AllocTag = AllocTag::intern("rows");
    let (first, second): (Generation, Generation) = (Generation::next(), Generation::next());
    assert!(first < second && Generation(1).0 == 1);
    for access in [Access::Read, Access::Write, Access::ReadWrite] {
        assert!(access.reads() || access.writes());
    }
    let _ = [BlockState::Live, BlockState::Retired, BlockState::Quarantined, BlockState::Freed];
    let of = |block: &DeviceBlock| -> (u64, u32, StreamId, usize, usize, AllocTag, Generation) {
        let _: BlockState = block.state;
        let id: BlockId = BlockId::from_block(block);
        let _: (u64, Generation, StreamId, u32) =
            (id.ptr, id.generation, id.alloc_stream, id.device_ordinal);
        let DeviceBlock {
            ptr, device_ordinal, alloc_stream, bytes, align, tag, generation, ..
        } = block;
        (*ptr, *device_ordinal, *alloc_stream, *bytes, *align, *tag, *generation)
    };
    let _ = of;
    is_shared::<DeviceBlock>();
}

#[test]
fn errors_keep_their_shapes() {
    fn is_error<T: Error + Display + Debug + Clone>() {}
    is_error::<ResourceError>();
    let generation = Generation(7);
    for error in [
        ResourceError::OutOfBudget { requested: 2, remaining: 1 },
        ResourceError::Driver(String::new()),
        ResourceError::StreamMisuse(String::new()),
        ResourceError::UseAfterFree { generation },
        ResourceError::OutOfBounds { generation },
    ] {
        let _: ResourceResult<()> = Err(error);
    }
    let _ = [StreamPoolError::Capacity { max: 1 }, StreamPoolError::ForkFailed(String::new())];
    let _ = [SinkError::Refused(String::new()), SinkError::Io(String::new())];
}

/// Only what the contract requires: everything else has a default.
#[derive(Debug)]
struct Required;

impl DeviceMemoryResource for Required {
    fn allocate(&self, bytes: usize, _: StreamId, _: AllocTag) -> ResourceResult<DeviceBlock> {
        Err(ResourceError::OutOfBudget { requested: bytes, remaining: 0 })
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        Err(ResourceError::UseAfterFree { generation: block.generation })
    }
    fn device_ordinal(&self) -> u32 {
        0
    }
    fn bytes_outstanding(&self) -> usize {
        0
    }
}

#[test]
fn a_resource_needs_four_methods_and_the_hooks_refuse_unless_they_are_real() {
    let resource: Boxed = Box::new(Required);
    let id = BlockId {
        ptr: 1,
        generation: Generation(1),
        alloc_stream: StreamId::DEFAULT,
        device_ordinal: 0,
    };
    assert_eq!(resource.reap_pending(), Ok(()));
    assert_eq!(resource.reap_completed(), Ok(()));
    assert!(!resource.supports_block_use_tracking());
    assert_eq!(resource.block_state(id), BlockState::Freed);
    for refused in [
        resource.prepare_block_use(id, StreamId::DEFAULT, Access::Read),
        resource.finish_block_use(id, StreamId::DEFAULT, Access::Read),
    ] {
        let Err(ResourceError::StreamMisuse(text)) = refused else { unreachable!("{refused:?}") };
        assert!(text.contains("unsupported"), "{text}");
    }
    let _: fn(&Required, &DeviceBlock, StreamId) -> ResourceResult<()> =
        <Required as DeviceMemoryResource>::record_block_use;
}

#[test]
fn streams_come_from_pools() {
    assert_eq!(DEFAULT_MAX_STREAMS, 16);
    let _: fn(Arc<CudaDevice>, usize) -> StreamPool = StreamPool::new;
    let device = Arc::new(CudaDevice::open("sim:1").unwrap());
    let pool = Arc::new(StreamPool::new(device, 2));
    let _: std::result::Result<StreamId, StreamPoolError> = pool.acquire();
    let lease: StreamLease = pool.lease().unwrap();
    let _: (StreamId, usize, usize) = (lease.id(), pool.non_default_len(), pool.max_streams());
    let _: &Arc<CudaDevice> = pool.device();
    let _: Result<()> = lease.synchronize();
    is_shared::<StreamPool>();
    is_shared::<StreamLease>();
}

#[test]
fn resources_and_decorators_are_made_as_promised() {
    let device = Arc::new(CudaDevice::open("sim:1").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let direct: DirectCudaResource = DirectCudaResource::new(device.clone(), 0);
    let asynchronous = AsyncCudaResource::new(device.clone(), 0, streams.clone());
    let pool: ResourceResult<PoolResource> =
        PoolResource::new(device.clone(), 0, streams.clone(), PoolConfig::default());
    let pool = pool.unwrap();
    let _ = (pool.trim(), pool.snapshot());
    let over = PoolResource::over(Box::new(asynchronous), streams.clone(), PoolConfig::default());
    let guard: DebugGuardResource =
        DebugGuardResource::new(Box::new(over.unwrap()), GuardConfig::default());
    let _: Vec<GuardReport> = guard.reports();
    let _ = (guard.check_now(), guard.flush_quarantine());
    let sink: Arc<dyn LoggingSink> = Arc::new(NullSink::new());
    let log: LoggingResource = LoggingResource::new(Box::new(guard), sink);
    let _: u64 = log.dropped_records();
    let budget: GlobalDeviceBudget = GlobalDeviceBudget::new(Box::new(log), 1 << 20);
    let _: (usize, usize, usize) = (budget.limit(), budget.reserved_bytes(), budget.remaining());
    let boxed: Boxed = Box::new(budget);
    let runtime = XlogDeviceRuntime::with_resource(device, 0, streams, boxed);
    is_shared::<XlogDeviceRuntime>();
    let _: u32 = runtime.device_ordinal();
    let _: (&Arc<CudaDevice>, &Arc<StreamPool>) = (runtime.device(), runtime.stream_pool());
    drop::<Boxed>(Box::new(direct));
}

#[test]
fn logs_have_these_fields() {
    let actions = [LogAction::Allocate, LogAction::Deallocate, LogAction::ReapPending];
    let names: Vec<String> = actions.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["allocate", "deallocate", "reap_pending"]);
    let sink = InMemorySink::new();
    let _: usize = sink.len();
    assert!(sink.is_empty());
    let _: Vec<LogRecord> = sink.snapshot();
    sink.clear();
    let _: fn(&InMemorySink, LogRecord) -> std::result::Result<(), SinkError> =
        <InMemorySink as LoggingSink>::emit;
    let fields = |record: LogRecord| {
        let _: (LogAction, u32, Option<StreamId>, Option<u64>, Option<usize>) =
            (record.action, record.device_ordinal, record.stream_id, record.ptr, record.bytes);
        let _: (Option<AllocTag>, Option<Generation>, u64, u64, u128) = (
            record.tag,
            record.generation,
            record.thread_id,
            record.order_counter,
            record.timestamp_nanos,
        );
        match record.result {
            LogResult::Ok => String::new(),
            LogResult::Err { kind, message } => {
                let kind: &'static str = kind;
                format!("{kind}{message}")
            }
        }
    };
    let _ = fields;
    let _ = |path: &str| -> std::result::Result<CsvSink, SinkError> { CsvSink::create(path) };
}

#[test]
fn the_runtime_the_manager_and_the_recorder() {
    assert_eq!(MAX_DEVICE_ORDINALS, 16);
    let _: fn(u32) -> Result<&'static XlogDeviceRuntime> = XlogDeviceRuntime::try_get;
    let device = Arc::new(CudaDevice::open("sim:1").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let resource: Boxed = Box::new(AsyncCudaResource::new(device.clone(), 0, streams.clone()));
    let runtime = Arc::new(XlogDeviceRuntime::with_resource(device, 0, streams, resource));
    let block: DeviceBlock = runtime.allocate(64, StreamId::DEFAULT, AllocTag::UNTAGGED).unwrap();
    let (id, stream) = (BlockId::from_block(&block), StreamId::DEFAULT);
    assert!(runtime.supports_block_use_tracking());
    runtime.prepare_block_use(id, stream, Access::Write).unwrap();
    runtime.finish_block_use(id, stream, Access::Write).unwrap();
    runtime.record_block_use(&block, stream).unwrap();
    runtime.deallocate(block).unwrap();
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0);

    let manager: GpuMemoryManager = GpuMemoryManager::with_runtime(runtime.clone());
    let manager = manager.with_limit(1 << 20).on_stream(stream);
    fn takes<T: DeviceRepr>(manager: &GpuMemoryManager) -> Result<TrackedCudaSlice<T>> {
        manager.alloc::<T>(16)
    }
    let slice: TrackedCudaSlice<u32> = takes(&manager).unwrap();
    let _: (usize, u64, Option<&DeviceBlock>) = (slice.len(), slice.ptr(), slice.runtime_block());
    runtime.prepare_first_use(&slice, stream, Access::Read).unwrap();
    runtime.finish_first_use(&slice, stream, Access::Read).unwrap();
    let mut recorder: LaunchRecorder = LaunchRecorder::new_strict(stream);
    recorder.read(&slice).write(&slice).read_write(&slice);
    let prepared: ResourceResult<()> = recorder.preflight(&runtime);
    prepared.unwrap();
    let recorded: ResourceResult<()> = recorder.commit(&runtime);
    recorded.unwrap();
    let _: fn(StreamId) -> LaunchRecorder = LaunchRecorder::new_permissive;
    let _ = slice.into_bytes();
    let _ = (manager.alloc_raw(64), manager.reserve_bytes(64));
}
