//! A runtime of parts: what it forwards, what it refuses, and how it ends.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{manager, runtime};
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    LeakReport, PoolConfig, ResourceError, ResourceResult, RuntimeConfig, StreamId, StreamPool,
    XlogDeviceRuntime, set_leak_handler,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, TrackedCudaSlice, XlogError};
use xlog_testing::{WatchedGate, for_each_device};

const TAG: AllocTag = AllocTag("test");

/// Claims to belong to a device and must never be asked for anything else.
struct Untouchable(u32);

impl DeviceMemoryResource for Untouchable {
    fn allocate(&self, _: usize, _: StreamId, _: AllocTag) -> ResourceResult<DeviceBlock> {
        panic!("a runtime of mixed parts reached its resource");
    }
    fn deallocate(&self, _: DeviceBlock) -> ResourceResult<()> {
        panic!("a runtime of mixed parts reached its resource");
    }
    fn device_ordinal(&self) -> u32 {
        self.0
    }
    fn bytes_outstanding(&self) -> usize {
        0
    }
}

fn block(ordinal: u32) -> DeviceBlock {
    DeviceBlock {
        ptr: 0x1000,
        device_ordinal: ordinal,
        alloc_stream: StreamId::DEFAULT,
        bytes: 1,
        align: 256,
        tag: TAG,
        generation: xlog_cuda::device_runtime::Generation::next(),
        state: BlockState::Live,
    }
}

#[test]
fn parts_of_different_devices_are_refused_at_first_use_and_both_are_named() {
    for_each_device(|device| {
        let ordinal = device.ordinal();
        let other = Arc::new(CudaDevice::open("sim").unwrap());
        let pool = || Arc::new(StreamPool::with_defaults(device.clone()));
        let foreign_pool = Arc::new(StreamPool::with_defaults(other));
        let wrong = ordinal + 7;
        let mixed = [
            (wrong, pool(), Untouchable(wrong), [format!("ordinal {ordinal}"), format!("{wrong}")]),
            (
                ordinal,
                pool(),
                Untouchable(wrong),
                [format!("ordinal {ordinal}"), format!("resource of ordinal {wrong}")],
            ),
            (
                ordinal,
                foreign_pool,
                Untouchable(ordinal),
                [format!("{:?}", device.spec()), "stream pool on another open device".to_owned()],
            ),
        ];
        for (asked, pool, resource, names) in mixed {
            let runtime =
                XlogDeviceRuntime::with_resource(device.clone(), asked, pool, Box::new(resource));
            let id = BlockId::from_block(&block(ordinal));
            let (stream, access) = (StreamId::DEFAULT, Access::Read);
            let answers = [
                runtime.allocate(64, stream, TAG).map(drop),
                runtime.deallocate(block(ordinal)),
                runtime.reap_pending(),
                runtime.reap_completed(),
                runtime.record_block_use(&block(ordinal), stream),
                runtime.prepare_block_use(id, stream, access),
                runtime.finish_block_use(id, stream, access),
                runtime.finish_block_uses(&[(id, access)], stream),
            ];
            for answer in answers {
                let Err(ResourceError::Driver(message)) = &answer else {
                    panic!("{answer:?}");
                };
                assert!(names.iter().all(|name| message.contains(name)), "{message} {names:?}");
            }
        }
    });
}

#[test]
fn the_facade_says_what_its_resource_says() {
    for_each_device(|device| {
        let runtime = runtime(device);
        assert_eq!(runtime.device_ordinal(), device.ordinal());
        assert!(Arc::ptr_eq(runtime.device(), device));
        assert!(runtime.supports_block_use_tracking());
        let block = runtime.allocate(1000, StreamId::DEFAULT, TAG).unwrap();
        let id = BlockId::from_block(&block);
        assert_eq!(runtime.block_state(id), BlockState::Live);
        assert_eq!(runtime.bytes_outstanding(), runtime.resource().bytes_outstanding());
        assert_eq!(runtime.statistics().live_blocks, 1);
        runtime.record_block_use(&block, StreamId::DEFAULT).unwrap();
        runtime.deallocate(block).unwrap();
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.block_state(id), BlockState::Freed);
        assert_eq!(runtime.bytes_outstanding(), 0);
        let gone = runtime.prepare_block_use(id, StreamId::DEFAULT, Access::Read);
        assert!(matches!(gone, Err(ResourceError::UseAfterFree { .. })), "{gone:?}");
    });
}

#[test]
fn a_first_use_on_another_stream_follows_the_write_before_it() {
    for_each_device(|device| {
        let manager = manager(device);
        let runtime = manager.runtime();
        let reader = runtime.stream_pool().lease().unwrap();
        let mut buffer = manager.alloc::<u32>(64).unwrap();
        buffer.copy_from_slice(&[7; 64]).unwrap();

        let mut bytes = [0; 256];
        runtime.prepare_first_use(&buffer, reader.id(), Access::Read).unwrap();
        // SAFETY: the buffer is live and the use is prepared.
        unsafe { reader.copy_dtoh(&mut bytes, buffer.ptr()).unwrap() };
        runtime.finish_first_use(&buffer, reader.id(), Access::Read).unwrap();
        assert_eq!(bytes[..4], 7_u32.to_le_bytes());
    });
}

#[test]
fn first_use_needs_no_order_for_nothing_and_refuses_what_no_runtime_backs() {
    for_each_device(|device| {
        let manager = manager(device);
        let runtime = manager.runtime();
        let empty = manager.alloc::<u64>(0).unwrap();
        // SAFETY: it is never given to any work.
        let foreign = unsafe { TrackedCudaSlice::<u64>::from_foreign(0x1000, 4) };
        let stream = StreamId::DEFAULT;
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            assert_eq!(runtime.prepare_first_use(&empty, stream, access), Ok(()));
            assert_eq!(runtime.finish_first_use(&empty, stream, access), Ok(()));
            for refused in [
                runtime.prepare_first_use(&foreign, stream, access),
                runtime.finish_first_use(&foreign, stream, access),
            ] {
                assert!(matches!(refused, Err(ResourceError::StreamMisuse(_))), "{refused:?}");
            }
        }
    });
}

static LEAKS: Mutex<Vec<LeakReport>> = Mutex::new(Vec::new());

/// The handler is the whole process's, so each leak has a size that only it has.
fn leak_bytes() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    set_leak_handler(|leak| {
        LEAKS.lock().unwrap().push(leak.clone());
        panic!("a handler's panic does not leave the drop");
    });
    NEXT.fetch_add(1, Ordering::SeqCst) * 4096
}

fn leaks_of(bytes: usize) -> Vec<LeakReport> {
    LEAKS.lock().unwrap().iter().filter(|leak| leak.bytes == bytes).cloned().collect()
}

#[test]
fn a_runtime_that_ends_with_live_blocks_says_so_and_frees_nothing_under_running_work() {
    for_each_device(|device| {
        let bytes = leak_bytes();
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let stream = pool.resolve(StreamId::DEFAULT).unwrap();
        let resource = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let runtime = XlogDeviceRuntime::with_resource(
            device.clone(),
            device.ordinal(),
            pool,
            Box::new(resource),
        );
        let leaked = runtime.allocate(bytes, StreamId::DEFAULT, TAG).unwrap();
        let gate = WatchedGate::new(stream.hold().unwrap());
        // SAFETY: nobody frees the block.
        unsafe { stream.memset(leaked.ptr, 3, bytes).unwrap() };
        drop(runtime);
        gate.release();
        let mut read = vec![0; bytes];
        // SAFETY: as above.
        unsafe { stream.copy_dtoh(&mut read, leaked.ptr).unwrap() };
        assert!(read.iter().all(|&byte| byte == 3));

        let leaks = leaks_of(bytes);
        assert_eq!(leaks.len(), 1, "{leaks:?}");
        assert_eq!((leaks[0].live_blocks, leaks[0].device_ordinal), (1, device.ordinal()));
        assert_eq!(leaks[0].device, device.spec());
        assert!(leaks[0].to_string().contains(&bytes.to_string()));
    });
}

/// A stranger's resource: counts bytes but no blocks, and says when it is torn down.
struct Tearable {
    bytes: usize,
    torn_down: Arc<AtomicUsize>,
}

impl DeviceMemoryResource for Tearable {
    fn allocate(&self, _: usize, _: StreamId, _: AllocTag) -> ResourceResult<DeviceBlock> {
        Ok(block(0))
    }
    fn deallocate(&self, _: DeviceBlock) -> ResourceResult<()> {
        Ok(())
    }
    fn device_ordinal(&self) -> u32 {
        0
    }
    fn bytes_outstanding(&self) -> usize {
        self.bytes
    }
}

impl Drop for Tearable {
    fn drop(&mut self) {
        self.torn_down.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_resource_is_torn_down_with_its_runtime_unless_it_has_bytes_out() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let leaked = leak_bytes();
    for (bytes, torn) in [(0, 1), (leaked, 0)] {
        let torn_down = Arc::new(AtomicUsize::new(0));
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let resource = Box::new(Tearable { bytes, torn_down: torn_down.clone() });
        drop(XlogDeviceRuntime::with_resource(device.clone(), 0, pool, resource));
        assert_eq!(torn_down.load(Ordering::SeqCst), torn);
    }
    let leaks = leaks_of(leaked);
    assert_eq!((leaks.len(), leaks[0].live_blocks), (1, 0));
}

#[test]
fn a_runtime_that_ends_while_frees_wait_leaks_nothing_and_does_not_wait() {
    for_each_device(|device| {
        let bytes = leak_bytes();
        let runtime = runtime(device);
        let stream = runtime.stream_pool().resolve(StreamId::DEFAULT).unwrap();
        let block = runtime.allocate(bytes, StreamId::DEFAULT, TAG).unwrap();
        let gate = WatchedGate::new(stream.hold().unwrap());
        // SAFETY: the block is live, and freed in the order of this stream.
        unsafe { stream.memset(block.ptr, 3, bytes).unwrap() };
        runtime.deallocate(block).unwrap();
        drop(runtime);
        assert!(leaks_of(bytes).is_empty());
        gate.release();
        stream.synchronize().unwrap();
    });
}

#[test]
fn buffers_keep_the_runtime_alive_whatever_is_dropped_first() {
    for_each_device(|device| {
        let bytes = leak_bytes();
        let runtime = runtime(device);
        let manager = GpuMemoryManager::with_runtime(runtime.clone());
        let mut buffer = manager.alloc::<u8>(bytes).unwrap();
        let mut reservation = manager.reserve_bytes(bytes).unwrap();
        drop((runtime, manager));
        buffer.fill_bytes(9).unwrap();
        let second = reservation.alloc::<u8>(bytes).unwrap();
        drop(reservation);
        assert!(buffer.to_vec().unwrap().iter().all(|&byte| byte == 9));
        drop((buffer, second));
        assert!(leaks_of(bytes).is_empty() && leaks_of(2 * bytes).is_empty());
        device.synchronize().unwrap();
        let usage = device.memory_pool().and_then(|pool| {
            let pools = device.driver().async_pools().unwrap();
            Ok(pools.pool_usage(pool)?)
        });
        assert_eq!(usage.unwrap().used, 0);
    });
}

#[test]
fn a_configured_runtime_logs_every_operation_with_the_path_that_served_it() {
    use xlog_cuda::device_runtime::{ResourceKind, RuntimeConfig};

    let folder = std::env::temp_dir().join(format!("xlog-runtime-log-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["log.xtrace", "log.csv"] {
        let file = folder.join(name);
        let device = Arc::new(CudaDevice::open("sim:3").unwrap());
        let config =
            RuntimeConfig::default().with_resource(ResourceKind::Pool).with_log(file.clone());
        let runtime = XlogDeviceRuntime::with_config(device, &config).unwrap();
        let tag = AllocTag("logged");
        for _ in 0..3 {
            let block = runtime.allocate(1000, StreamId::DEFAULT, tag).unwrap();
            let holders = runtime.usage().unwrap().live_report().to_string();
            assert!(holders.contains("logged"), "{holders}");
            runtime.deallocate(block).unwrap();
        }
        drop(runtime);
        let reader = xlog_trace::Reader::open(&file).unwrap();
        let records: Vec<_> = reader.map(Result::unwrap).collect();
        let allocations: Vec<_> = records
            .iter()
            .filter(|record| record.action() == xlog_trace::Action::Allocate)
            .collect();
        assert_eq!((records.len() >= 6, allocations.len()), (true, 3), "{records:?}");
        assert_eq!(allocations[0].served_by(), xlog_trace::ServedBy::Grown);
        assert_eq!(allocations[2].served_by(), xlog_trace::ServedBy::Magazine);
    }
    let bad = RuntimeConfig::default().with_log(folder.join("missing").join("log.csv"));
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let refused = XlogDeviceRuntime::with_config(device, &bad).unwrap_err().to_string();
    assert!(refused.contains("missing"), "{refused}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn two_runtimes_of_one_log_are_refused_and_patterns_keep_them_apart() {
    use xlog_cuda::device_runtime::RuntimeConfig;

    let folder = std::env::temp_dir().join(format!("xlog-one-writer-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let open = |log: &std::path::Path| {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        XlogDeviceRuntime::with_config(device, &RuntimeConfig::default().with_log(log))
    };
    let log = folder.join("%d-%p-%%.csv");
    let named = folder.join(format!("0-{}-%.csv", std::process::id()));
    let first = open(&log).unwrap();
    let block = first.allocate(1000, StreamId::DEFAULT, AllocTag("first")).unwrap();
    let error = open(&log).unwrap_err();
    assert_eq!(error, XlogError::LogInUse { path: named.clone() });
    assert!(error.to_string().contains(named.to_str().unwrap()), "{error}");
    let error = open(&folder.join("%x.csv")).unwrap_err();
    assert!(matches!(error, XlogError::BadSetting { .. }), "{error:?}");
    first.deallocate(block).unwrap();
    drop(first);
    let records = xlog_trace::Reader::open(&named).unwrap().count();
    assert!(records >= 2, "the second opener cut the log to {records} records");
    drop(open(&log).unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_quiet_runtime_returns_its_memory_without_a_call() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let pool = PoolConfig::default().with_decay(Duration::from_millis(1), 0);
    let config = RuntimeConfig::default().with_pool(pool);
    let runtime = Arc::new(XlogDeviceRuntime::with_config(device.clone(), &config).unwrap());
    let manager = GpuMemoryManager::with_runtime(runtime);
    let used = || {
        let info = device.memory_info().unwrap();
        info.total - info.free
    };
    let hang = Instant::now() + Duration::from_secs(120);
    // Twice: the thread ends with the memory, and growth starts another one.
    for _ in 0..2 {
        drop(manager.alloc::<u8>(64 << 20).unwrap());
        while used() > 0 {
            assert!(Instant::now() < hang, "{} bytes are held by an idle runtime", used());
            std::thread::yield_now();
        }
    }
}
