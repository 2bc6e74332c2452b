//! Decorators forward the whole trait, ours and a stranger's; what one does not forward is found and named.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroU64;
use std::sync::Arc;

use xlog_conformance::{BoxedResource, Outcome, Report, Suite};
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, GlobalDeviceBudget, GuardConfig, GuardMode, GuardOutput, LoggingResource,
    NullSink, ResourceError, ResourceResult, StatisticsResource, StreamId, StreamPool,
    XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, XlogError};
use xlog_testing::for_each_device;

const GIB: usize = 1 << 30;

/// The required methods of a decorator.
macro_rules! required {
    () => {
        fn allocate(
            &self,
            bytes: usize,
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<DeviceBlock> {
            self.0.allocate(bytes, stream, tag)
        }
        fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
            self.0.deallocate(block)
        }
        fn device_ordinal(&self) -> u32 {
            self.0.device_ordinal()
        }
        fn bytes_outstanding(&self) -> usize {
            self.0.bytes_outstanding()
        }
    };
}

/// The required methods, and the name of what is below.
struct Minimal(BoxedResource);

impl DeviceMemoryResource for Minimal {
    required!();
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.0)
    }
}

/// Forwards by hand what the table of the contract lists, and nothing else.
struct Partial(BoxedResource);

impl DeviceMemoryResource for Partial {
    required!();
    fn reap_pending(&self) -> ResourceResult<()> {
        self.0.reap_pending()
    }
    fn reap_completed(&self) -> ResourceResult<()> {
        self.0.reap_completed()
    }
    fn record_block_use(&self, block: &DeviceBlock, stream: StreamId) -> ResourceResult<()> {
        self.0.record_block_use(block, stream)
    }
    fn supports_block_use_tracking(&self) -> bool {
        self.0.supports_block_use_tracking()
    }
    fn prepare_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.0.prepare_block_use(block, stream, access)
    }
    fn finish_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.0.finish_block_use(block, stream, access)
    }
    fn block_state(&self, block: BlockId) -> BlockState {
        self.0.block_state(block)
    }
}

/// Names what is below, and answers one method itself.
struct TrimsNothing(BoxedResource);

impl DeviceMemoryResource for TrimsNothing {
    required!();
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.0)
    }
    fn trim(&self) -> ResourceResult<usize> {
        Ok(0)
    }
}

fn forwarding(device: &Arc<CudaDevice>, wrap: impl Fn(BoxedResource) -> BoxedResource) -> Report {
    Suite::of_decorator(wrap).only("forwarding").run(device)
}

fn guarded(mode: GuardMode) -> impl Fn(BoxedResource) -> BoxedResource {
    let config = GuardConfig::default().with_output(GuardOutput::Silent).with_mode(mode);
    let config = config.with_quarantine(0, 0);
    move |inner| Box::new(DebugGuardResource::new(inner, config.clone()))
}

#[test]
fn our_decorators_forward_everything() {
    for_each_device(|device| {
        let every = NonZeroU64::new(2).unwrap();
        let reports = [
            ("a box", forwarding(device, |inner| inner)),
            (
                "a shared pointer",
                forwarding(device, |inner| {
                    let shared: Arc<dyn DeviceMemoryResource + Send + Sync> = Arc::from(inner);
                    Box::new(shared)
                }),
            ),
            (
                "budget",
                forwarding(device, |inner| Box::new(GlobalDeviceBudget::new(inner, 4 * GIB))),
            ),
            (
                "logging",
                forwarding(device, |inner| {
                    Box::new(LoggingResource::new(inner, Arc::new(NullSink::new())))
                }),
            ),
            ("statistics", forwarding(device, |inner| Box::new(StatisticsResource::new(inner)))),
            ("canaries", forwarding(device, guarded(GuardMode::Canaries))),
            ("guard pages", forwarding(device, guarded(GuardMode::Pages))),
            ("sampled guard", forwarding(device, guarded(GuardMode::Sampled(every)))),
        ];
        for (name, report) in reports {
            assert!(report.passed() && report.skipped().count() == 0, "{name}\n{report}");
        }
    });
}

#[test]
fn a_decorator_of_the_required_methods_that_names_its_inner_resource_conforms() {
    for_each_device(|device| {
        let report = Suite::of_decorator(|inner| Box::new(Minimal(inner))).run(device);
        println!("{report}");
        report.assert_passed();
    });
}

#[test]
fn what_a_decorator_does_not_forward_is_named() {
    for_each_device(|device| {
        let report = forwarding(device, |inner| Box::new(Partial(inner)));
        for method in [
            "while_live",
            "charge_for",
            "home",
            "statistics",
            "trim",
            "trim_under_pressure",
            "return_idle",
            "on_growth",
            "memory_use",
            "meter_physical",
            "watch_segments",
            "free_space",
            "places_blocks",
            "reserve_budget",
        ] {
            let check = format!("forwarding::{method}");
            let check = report.checks().iter().find(|found| found.name == check).unwrap();
            let named = format!("{method} is not forwarded");
            let is_named = matches!(&check.outcome, Outcome::Failed(text) if text.contains(&named));
            assert!(is_named, "{method}: {check:?}\n{report}");
        }
        let report = forwarding(device, |inner| Box::new(TrimsNothing(inner)));
        let failed: Vec<_> = report.failed().map(|check| check.name).collect();
        assert_eq!(failed, ["forwarding::trim"], "{report}");
    });
}

#[test]
fn the_suite_finds_a_partial_decorator_that_it_does_not_know_to_be_one() {
    for_each_device(|device| {
        let suite = Suite::new(|device, pool| {
            let memory = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
            Box::new(Partial(Box::new(GlobalDeviceBudget::over(memory, 2 * GIB))))
        });
        let report = suite.only("forwarding").run(device);
        let failed: Vec<_> = report.failed().collect();
        assert_eq!(failed.len(), 1, "{report}");
        let text = format!("{:?}", failed[0].outcome);
        assert!(text.contains("reserve_budget") && text.contains("inner_resource"), "{text}");
    });
}

fn over_a_budget(
    device: &Arc<CudaDevice>,
    wrap: impl Fn(BoxedResource) -> BoxedResource,
) -> GpuMemoryManager {
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let memory = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
    let resource = wrap(Box::new(GlobalDeviceBudget::over(memory, 64 << 20)));
    let device = device.clone();
    let ordinal = device.ordinal();
    let runtime = XlogDeviceRuntime::with_resource(device, ordinal, pool, resource);
    GpuMemoryManager::with_runtime(Arc::new(runtime))
}

#[test]
fn a_decorator_over_a_budget_reserves_of_it_or_says_that_it_does_not() {
    for_each_device(|device| {
        let manager = over_a_budget(device, |inner| Box::new(Minimal(inner)));
        let refused = manager.reserve_bytes(GIB).unwrap_err();
        let is_budget = |error: &XlogError| {
            matches!(error, XlogError::Resource(ResourceError::OutOfBudget { .. }))
        };
        assert!(is_budget(&refused), "{refused}");
        let reservation = manager.reserve_bytes(60 << 20).unwrap();
        assert!(is_budget(&manager.alloc::<u8>(8 << 20).unwrap_err()));
        drop(reservation);
        drop(manager.alloc::<u8>(8 << 20).unwrap());

        let manager = over_a_budget(device, |inner| Box::new(Partial(inner)));
        let refused = manager.reserve_bytes(GIB).unwrap_err();
        assert!(refused.to_string().contains("unsupported"), "{refused}");
        drop(manager.alloc::<u8>(8 << 20).unwrap());
        manager.runtime().reap_pending().unwrap();
    });
}
