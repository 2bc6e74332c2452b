//! Misuse that the host sees, with a guard or without: in every stack the same answer, and nothing changed.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::{Arc, Mutex};

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DirectCudaResource, Generation, GlobalDeviceBudget, GpuMemoryManager,
    GuardMode, GuardSetting, InMemorySink, LeakReport, LedgerSetting, LoggingResource, PoolConfig,
    PoolResource, ResourceError, RuntimeConfig, StatisticsConfig, StatisticsResource, StreamLease,
    StreamPool, XlogDeviceRuntime, set_leak_handler,
};
use xlog_testing::for_each_device;

use crate::support::{ROWS, quiet, twin};

type Boxed = Box<dyn DeviceMemoryResource + Send + Sync>;

/// Every backend, bare, guarded in every mode, and under a budget, a log and statistics.
fn for_each_stack(check: impl Fn(&str, &Boxed, &StreamLease)) {
    for_each_device(|device| {
        for backend in ["direct", "async", "pool"] {
            for guard in ["none", "canaries", "pages"] {
                for full in [false, true] {
                    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
                    let stack = stack(device, &pool, backend, guard, full);
                    let stream = pool.lease().unwrap();
                    check(&format!("{backend}, guard {guard}, full {full}"), &stack, &stream);
                }
            }
        }
    });
}

fn stack(
    device: &Arc<CudaDevice>,
    pool: &Arc<StreamPool>,
    backend: &str,
    guard: &str,
    full: bool,
) -> Boxed {
    let (device, ordinal, pool) = (device.clone(), device.ordinal(), pool.clone());
    let inner: Boxed = match backend {
        "direct" => Box::new(DirectCudaResource::new(device, ordinal)),
        "async" => Box::new(AsyncCudaResource::new(device, ordinal, pool)),
        _ => Box::new(PoolResource::new(device, ordinal, pool, PoolConfig::default()).unwrap()),
    };
    let guarded: Boxed = match guard {
        "none" => inner,
        "pages" => Box::new(DebugGuardResource::new(inner, quiet().with_mode(GuardMode::Pages))),
        _ => Box::new(DebugGuardResource::new(inner, quiet())),
    };
    if !full {
        return guarded;
    }
    let counted = StatisticsResource::over(guarded, StatisticsConfig::default());
    let logged = LoggingResource::over(counted, Arc::new(InMemorySink::new()));
    Box::new(GlobalDeviceBudget::over(logged, 256 << 20))
}

/// Refused, with nothing changed: the block is as live as before.
fn is_refused(name: &str, stack: &Boxed, block: &DeviceBlock, claim: DeviceBlock, is_driver: bool) {
    let before = (stack.bytes_outstanding(), stack.block_state(block.into()));
    let generation = claim.generation;
    match stack.deallocate(claim) {
        Err(ResourceError::Driver(_)) if is_driver => {}
        Err(ResourceError::UseAfterFree { generation: named }) if !is_driver => {
            assert_eq!(named, generation, "{name}");
        }
        other => panic!("{name}: {other:?}"),
    }
    assert_eq!((stack.bytes_outstanding(), stack.block_state(block.into())), before, "{name}");
}

#[test]
fn a_double_free_is_refused_in_every_stack() {
    for_each_stack(|name, stack, stream| {
        let block = stack.allocate(1000, stream.id(), ROWS).unwrap();
        let (second, third) = (twin(&block), twin(&block));
        stack.deallocate(block).unwrap();
        let before = stack.bytes_outstanding();
        for claim in [second, third] {
            let generation = claim.generation;
            let refused = stack.deallocate(claim);
            assert_eq!(refused, Err(ResourceError::UseAfterFree { generation }), "{name}");
        }
        assert!(stack.bytes_outstanding() <= before, "{name}");
    });
}

#[test]
fn a_foreign_pointer_is_refused_in_every_stack() {
    for_each_stack(|name, stack, stream| {
        let block = stack.allocate(1000, stream.id(), ROWS).unwrap();
        for ptr in [0, block.ptr - 256, block.ptr + 1, block.ptr + 256, u64::MAX] {
            is_refused(name, stack, &block, DeviceBlock { ptr, ..twin(&block) }, false);
        }
        stack.deallocate(block).unwrap();
    });
}

#[test]
fn a_block_of_another_device_is_refused_in_every_stack() {
    for_each_stack(|name, stack, stream| {
        let block = stack.allocate(1000, stream.id(), ROWS).unwrap();
        let device_ordinal = block.device_ordinal + 1;
        is_refused(name, stack, &block, DeviceBlock { device_ordinal, ..twin(&block) }, true);
        stack.deallocate(block).unwrap();
    });
}

#[test]
fn a_stale_name_is_refused_in_every_stack() {
    for_each_stack(|name, stack, stream| {
        let block = stack.allocate(1000, stream.id(), ROWS).unwrap();
        let generation = Generation::next();
        is_refused(name, stack, &block, DeviceBlock { generation, ..twin(&block) }, false);
        let id = BlockId::from_block(&block);
        stack.deallocate(block).unwrap();
        if stack.supports_block_use_tracking() {
            let used = stack.prepare_block_use(id, stream.id(), Access::Read);
            let generation = id.generation;
            assert_eq!(used, Err(ResourceError::UseAfterFree { generation }), "{name}");
        }
    });
}

static LEAKS: Mutex<Vec<LeakReport>> = Mutex::new(Vec::new());
/// Reports of no block at all. The handler is the whole process's, and no runtime of these tests may cause one.
static EMPTY_LEAKS: Mutex<Vec<LeakReport>> = Mutex::new(Vec::new());

fn keep(leak: &LeakReport) {
    let kept = if leak.live_blocks == 0 { &EMPTY_LEAKS } else { &LEAKS };
    kept.lock().unwrap().push(leak.clone());
}

#[test]
fn a_leak_is_told_with_and_without_a_guard() {
    set_leak_handler(keep);
    for_each_device(|device| {
        for guard in ["off", "canary", "pages"] {
            let guard: GuardSetting = guard.parse().unwrap();
            let config = RuntimeConfig::default().with_ledger(LedgerSetting::Off).with_guard(guard);
            let runtime = XlogDeviceRuntime::with_config(device.clone(), &config).unwrap();
            let stream = runtime.stream_pool().lease().unwrap();
            let leaked = runtime.allocate(100, stream.id(), AllocTag("forgotten rows")).unwrap();
            drop(leaked);
            drop(stream);
            drop(runtime);
            let leak = LEAKS.lock().unwrap().pop().unwrap();
            assert_eq!(leak.live_blocks, 1, "{leak}");
            assert!(leak.to_string().contains("forgotten rows"), "{leak}");
        }
    });
}

#[test]
fn a_runtime_whose_buffers_were_all_dropped_leaks_nothing_under_any_guard() {
    set_leak_handler(keep);
    for seed in 0..12 {
        for guard in ["off", "canary", "pages", "sampled:1"] {
            let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
            let guard: GuardSetting = guard.parse().unwrap();
            let config = RuntimeConfig::default().with_ledger(LedgerSetting::Off).with_guard(guard);
            let runtime = XlogDeviceRuntime::with_config(device, &config).unwrap();
            let manager = GpuMemoryManager::with_runtime(Arc::new(runtime));
            for _ in 0..3 {
                drop(manager.alloc_zeroed::<u8>(4096).unwrap());
            }
            drop(manager);
            let empty = std::mem::take(&mut *EMPTY_LEAKS.lock().unwrap());
            assert!(empty.is_empty(), "sim:{seed}, {config:?}: {}", empty[0]);
        }
    }
}
