//! Safe code tries to break memory through every resource, and is refused.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_conformance::BoxedResource;
use xlog_cuda::device_runtime::{
    AllocTag, AsyncCudaResource, BlockId, BlockState, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DirectCudaResource, Generation, GlobalDeviceBudget, GuardConfig,
    GuardMode, GuardOutput, LoggingResource, NullSink, PoolConfig, PoolResource, PoolSegments,
    ResourceError, ResourceResult, StatisticsResource, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, TrackedCudaSlice, XlogError};
use xlog_testing::for_each_device;

const ELEMENTS: usize = 1000;
const FULL: u64 = 0x0707_0707_0707_0707;

type Make = fn(&Arc<CudaDevice>, &Arc<StreamPool>) -> BoxedResource;

/// Every resource, by name.
const RESOURCES: [(&str, Make); 4] = [
    ("direct", |device, _| Box::new(DirectCudaResource::new(device.clone(), device.ordinal()))),
    ("async", |device, pool| {
        Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone()))
    }),
    ("mapped pool", |device, pool| pool_of(device, pool, PoolSegments::Mapped)),
    ("plain pool", |device, pool| pool_of(device, pool, PoolSegments::Plain)),
];

fn pool_of(
    device: &Arc<CudaDevice>,
    pool: &Arc<StreamPool>,
    segments: PoolSegments,
) -> BoxedResource {
    let config = PoolConfig::default().with_segments(segments);
    Box::new(PoolResource::new(device.clone(), device.ordinal(), pool.clone(), config).unwrap())
}

type Wrap = Box<dyn Fn(BoxedResource) -> BoxedResource>;

/// Every decorator, by name.
fn stacks() -> Vec<(&'static str, Wrap)> {
    let guard = |mode| -> Wrap {
        let config = GuardConfig::default().with_output(GuardOutput::Silent).with_mode(mode);
        let config = config.with_quarantine(0, 0);
        Box::new(move |inner| Box::new(DebugGuardResource::new(inner, config.clone())))
    };
    vec![
        ("nothing", Box::new(|inner| inner)),
        ("budget", Box::new(|inner| Box::new(GlobalDeviceBudget::new(inner, 1 << 30)))),
        ("statistics", Box::new(|inner| Box::new(StatisticsResource::new(inner)))),
        (
            "logging",
            Box::new(|inner| Box::new(LoggingResource::new(inner, Arc::new(NullSink::new())))),
        ),
        ("canaries", guard(GuardMode::Canaries)),
        ("pages", guard(GuardMode::Pages)),
        ("sampled", guard(GuardMode::Sampled(NonZeroU64::new(2).unwrap()))),
        ("a stranger's decorator", Box::new(|inner| Box::new(Shifting { inner, by: 0 }))),
    ]
}

fn manager(
    device: &Arc<CudaDevice>,
    make: impl FnOnce(&Arc<CudaDevice>, &Arc<StreamPool>) -> BoxedResource,
) -> GpuMemoryManager {
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let resource = make(device, &pool);
    let ordinal = device.ordinal();
    let runtime = XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool, resource);
    GpuMemoryManager::with_runtime(Arc::new(runtime))
}

/// A block with the same fields: all of them are public.
fn copy_of(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}

fn is_stale(result: Result<(), XlogError>) -> bool {
    matches!(result, Err(XlogError::Resource(ResourceError::UseAfterFree { .. })))
}

#[test]
fn a_buffer_whose_block_was_freed_through_a_copy_is_neither_read_nor_written() {
    for_each_device(|device| {
        for (resource, make) in RESOURCES {
            for (stack, wrap) in stacks() {
                let name = format!("{resource} under {stack}");
                let manager = manager(device, |device, pool| wrap(make(device, pool)));
                let mut old = manager.alloc::<u64>(ELEMENTS).unwrap();
                old.fill_bytes(1).unwrap();
                let block = copy_of(old.runtime_block().unwrap());
                manager.runtime().deallocate(block).unwrap();
                manager.runtime().reap_pending().unwrap();
                // Most resources hand out the same address.
                let mut next = manager.alloc::<u64>(ELEMENTS).unwrap();
                next.fill_bytes(7).unwrap();

                assert!(is_stale(old.fill_bytes(2)), "{name}: a fill");
                assert!(is_stale(old.copy_from_slice(&[2; ELEMENTS])), "{name}: a copy");
                let mut seen = [0; ELEMENTS];
                assert!(is_stale(old.copy_to_slice(&mut seen)), "{name}: a copy back");
                assert!(old.to_vec().is_err(), "{name}: a read");
                drop(old);
                assert_eq!(manager.failed_frees(), 1, "{name}: the second free was refused");
                assert_eq!(next.to_vec().unwrap(), [FULL; ELEMENTS], "{name}");
                drop(next);
                manager.runtime().reap_pending().unwrap();
                assert_eq!(manager.runtime().bytes_outstanding(), 0, "{name}");
            }
        }
        assert!(device.races().is_empty(), "{:#?}", device.races());
    });
}

#[test]
fn a_block_freed_by_another_thread_is_not_written_behind_its_back() {
    for seed in 0..40 {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let sim = device.sim().unwrap().clone();
        for (name, make) in RESOURCES {
            let manager = manager(&device, make);
            let mut old = manager.alloc::<u64>(ELEMENTS).unwrap();
            let block = copy_of(old.runtime_block().unwrap());
            let next = std::sync::Mutex::new(None);
            let write = || {
                for _ in 0..3 {
                    let _ = old.fill_bytes(2);
                }
            };
            let free = || {
                manager.runtime().deallocate(block).unwrap();
                let mut buffer = manager.alloc::<u64>(ELEMENTS).unwrap();
                buffer.fill_bytes(7).unwrap();
                *next.lock().unwrap() = Some(buffer);
            };
            let threads: Vec<Box<dyn FnOnce() + Send + '_>> = vec![Box::new(write), Box::new(free)];
            sim.run_threads(threads);
            let next: TrackedCudaSlice<u64> = next.into_inner().unwrap().unwrap();
            assert_eq!(next.to_vec().unwrap(), [FULL; ELEMENTS], "{name}, seed {seed}");
            drop((old, next));
        }
        assert!(device.races().is_empty(), "seed {seed}: {:#?}", device.races());
    }
}

/// A stranger's decorator, which hands out other addresses than it was given.
struct Shifting {
    inner: BoxedResource,
    by: u64,
}

impl DeviceMemoryResource for Shifting {
    xlog_testing::decorates!(inner);
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let mut block = self.inner.allocate(bytes, stream, tag)?;
        block.ptr = block.ptr.wrapping_add(self.by);
        Ok(block)
    }
    fn deallocate(&self, mut block: DeviceBlock) -> ResourceResult<()> {
        block.ptr = block.ptr.wrapping_sub(self.by);
        self.inner.deallocate(block)
    }
}

/// A stranger's resource, which hands out an address of its choice.
struct Forging {
    ordinal: u32,
    ptr: u64,
    live: Arc<AtomicUsize>,
}

impl DeviceMemoryResource for Forging {
    fn allocate(
        &self,
        bytes: usize,
        alloc_stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.live.fetch_add(1, Ordering::SeqCst);
        Ok(DeviceBlock {
            ptr: self.ptr,
            device_ordinal: self.ordinal,
            alloc_stream,
            bytes,
            align: 256,
            tag,
            generation: Generation::next(),
            state: BlockState::Live,
        })
    }
    fn deallocate(&self, _block: DeviceBlock) -> ResourceResult<()> {
        self.live.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }
    fn bytes_outstanding(&self) -> usize {
        0
    }
    fn block_state(&self, _block: BlockId) -> BlockState {
        BlockState::Live
    }
}

fn refused(manager: &GpuMemoryManager, what: &str) {
    match manager.alloc::<u64>(ELEMENTS) {
        Err(XlogError::Resource(ResourceError::Driver(text))) => {
            assert!(text.contains("handed out"), "{what}: {text}");
        }
        Err(error) => panic!("{what}: {error:?}"),
        Ok(buffer) => panic!("{what}: {buffer:?}"),
    }
    assert_eq!((manager.live_allocations(), manager.allocated_bytes()), (0, 0), "{what}");
}

#[test]
fn an_address_that_the_driver_does_not_know_becomes_no_buffer() {
    for_each_device(|device| {
        let on_the_host = vec![0_u64; ELEMENTS];
        let host = on_the_host.as_ptr().addr() as u64;
        for ptr in [0, 0x1000, host, u64::MAX, u64::MAX - 255] {
            let live = Arc::new(AtomicUsize::new(0));
            let manager = manager(device, |device, _| {
                Box::new(Forging { ordinal: device.ordinal(), ptr, live: live.clone() })
            });
            refused(&manager, &format!("address {ptr:#x}"));
            assert_eq!(live.load(Ordering::SeqCst), 0, "a refused block goes back");
        }
        assert!(on_the_host.iter().all(|element| *element == 0));
    });
}

#[test]
fn a_strangers_decorator_that_moves_blocks_is_found_out_and_one_that_does_not_is_believed() {
    for_each_device(|device| {
        for (name, make) in RESOURCES {
            // Far beyond everything that is allocated here.
            let by = 1 << 40;
            let wrapped = manager(device, |device, pool| {
                Box::new(Shifting { inner: make(device, pool), by })
            });
            refused(&wrapped, name);
            wrapped.runtime().reap_pending().unwrap();
            assert_eq!(
                wrapped.runtime().bytes_outstanding(),
                0,
                "{name}: a refused block is freed"
            );
            // Our decorators over a stranger's are not trusted either.
            let under = manager(device, |device, pool| {
                let inner = Box::new(Shifting { inner: make(device, pool), by });
                Box::new(GlobalDeviceBudget::new(inner, 1 << 30))
            });
            refused(&under, name);

            let honest = manager(device, |device, pool| {
                Box::new(Shifting { inner: make(device, pool), by: 0 })
            });
            let mut buffer = honest.alloc::<u64>(ELEMENTS).unwrap();
            buffer.fill_bytes(7).unwrap();
            assert_eq!(buffer.to_vec().unwrap(), [FULL; ELEMENTS], "{name}");
        }
    });
}

#[test]
fn a_buffer_longer_than_the_memory_behind_its_block_is_refused() {
    for_each_device(|device| {
        let owner = manager(device, RESOURCES[0].1);
        let real = owner.alloc::<u64>(10).unwrap();
        let live = Arc::new(AtomicUsize::new(0));
        let forging = manager(device, |device, _| {
            let (ordinal, ptr) = (device.ordinal(), real.ptr());
            Box::new(Forging { ordinal, ptr, live })
        });
        refused(&forging, "80 bytes for 8000");
    });
}
