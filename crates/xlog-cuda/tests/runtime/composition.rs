//! Parts that do not belong together: two stream pools of one device, two opens of one device.
//!
//! `StreamId::DEFAULT` exists in every pool, so an id alone cannot show that a stack mixes pools.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, AsyncCudaResource, DebugGuardResource, DeviceMemoryResource, DirectCudaResource,
    GlobalDeviceBudget, GuardConfig, LoggingResource, NullSink, PoolConfig, PoolResource,
    ResourceError, ResourceResult, StatisticsResource, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_testing::for_each_device;

const TAG: AllocTag = AllocTag("test");

type Resource = Box<dyn DeviceMemoryResource + Send + Sync>;
type Build = Box<dyn Fn(Resource) -> Resource>;

fn pool_of(device: &Arc<CudaDevice>) -> Arc<StreamPool> {
    Arc::new(StreamPool::with_defaults(device.clone()))
}

fn asynchronous(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Resource {
    Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), streams.clone()))
}

fn pooled(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Resource {
    let config = PoolConfig::default();
    let pool = PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config);
    Box::new(pool.unwrap())
}

/// Every decorator, and none.
fn decorators() -> Vec<(&'static str, Build)> {
    vec![
        ("bare", Box::new(|inner| inner)),
        ("budget", Box::new(|inner| Box::new(GlobalDeviceBudget::new(inner, 1 << 20)))),
        (
            "logging",
            Box::new(|inner| Box::new(LoggingResource::new(inner, Arc::new(NullSink::new())))),
        ),
        ("statistics", Box::new(|inner| Box::new(StatisticsResource::new(inner)))),
        (
            "guard",
            Box::new(|inner| Box::new(DebugGuardResource::new(inner, GuardConfig::default()))),
        ),
    ]
}

fn runtime(
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
    resource: Resource,
) -> XlogDeviceRuntime {
    let (device, ordinal) = (device.clone(), device.ordinal());
    XlogDeviceRuntime::with_resource(device, ordinal, streams.clone(), resource)
}

/// The name that a message has for a pool.
fn name_of(pool: &StreamPool) -> String {
    format!("stream pool {}", pool.number())
}

#[track_caller]
fn refused<T>(answer: ResourceResult<T>, pools: [&StreamPool; 2]) {
    let Err(ResourceError::Driver(message)) = answer.map(drop) else {
        panic!("parts of two stream pools were accepted");
    };
    for pool in pools {
        assert!(message.contains(&name_of(pool)), "{message:?} does not name {}", name_of(pool));
    }
}

#[test]
fn a_resource_of_another_stream_pool_is_refused_at_first_use_under_every_decorator() {
    for_each_device(|device| {
        let (first, second) = (pool_of(device), pool_of(device));
        for build in [asynchronous, pooled] {
            for (name, decorate) in decorators() {
                let mixed = runtime(device, &second, decorate(build(device, &first)));
                eprintln!("{name}");
                refused(mixed.allocate(64, StreamId::DEFAULT, TAG), [&first, &second]);
                refused(mixed.reap_pending(), [&first, &second]);
                let whole = runtime(device, &first, decorate(build(device, &first)));
                let block = whole.allocate(64, StreamId::DEFAULT, TAG).unwrap();
                whole.deallocate(block).unwrap();
                whole.reap_pending().unwrap();
            }
        }
    });
}

#[test]
fn a_pool_over_a_resource_of_another_stream_pool_is_refused() {
    for_each_device(|device| {
        let (first, second) = (pool_of(device), pool_of(device));
        for (name, decorate) in decorators() {
            eprintln!("{name}");
            let inner = decorate(asynchronous(device, &first));
            let mixed = PoolResource::over(inner, second.clone(), PoolConfig::default());
            refused(mixed, [&first, &second]);
            // A guard fills what its user gave back, which the detector takes for a use after the pool's own frees.
            if name == "guard" {
                continue;
            }
            let inner = decorate(asynchronous(device, &first));
            let pool = PoolResource::over(inner, first.clone(), PoolConfig::default()).unwrap();
            let block = pool.allocate(64, StreamId::DEFAULT, TAG).unwrap();
            pool.deallocate(block).unwrap();
        }
    });
}

#[test]
fn a_guard_on_other_streams_than_its_resource_is_refused_at_first_use() {
    for_each_device(|device| {
        let (first, second) = (pool_of(device), pool_of(device));
        let inner = asynchronous(device, &first);
        let config = GuardConfig::default();
        let mixed = DebugGuardResource::over(inner, device.clone(), second.clone(), config);
        refused(mixed.allocate(64, StreamId::DEFAULT, TAG), [&first, &second]);
    });
}

#[test]
fn a_resource_to_which_a_stream_is_a_label_serves_any_stream_pool() {
    for_each_device(|device| {
        for (name, decorate) in decorators() {
            eprintln!("{name}");
            let direct = Box::new(DirectCudaResource::new(device.clone(), device.ordinal()));
            let runtime = runtime(device, &pool_of(device), decorate(direct));
            let block = runtime.allocate(64, StreamId::DEFAULT, TAG).unwrap();
            runtime.deallocate(block).unwrap();
            if name == "guard" {
                continue;
            }
            let direct = Box::new(DirectCudaResource::new(device.clone(), device.ordinal()));
            let streams = pool_of(device);
            let pool = PoolResource::over(decorate(direct), streams, PoolConfig::default());
            let pool = pool.unwrap();
            let block = pool.allocate(64, StreamId::DEFAULT, TAG).unwrap();
            pool.deallocate(block).unwrap();
        }
    });
}

#[test]
fn a_resource_of_another_open_of_the_device_is_refused_at_first_use() {
    let open = || Arc::new(CudaDevice::open("sim").unwrap());
    let (device, other) = (open(), open());
    let streams = pool_of(&device);
    for resource in [
        asynchronous(&other, &pool_of(&other)),
        Box::new(DirectCudaResource::new(other.clone(), 0)) as Resource,
    ] {
        let mixed = runtime(&device, &streams, resource);
        let Err(ResourceError::Driver(message)) = mixed.allocate(64, StreamId::DEFAULT, TAG) else {
            panic!("a resource of another open device was accepted");
        };
        assert!(message.contains("another open device"), "{message}");
    }
    let inner: Resource = Box::new(DirectCudaResource::new(other, 0));
    let mixed = PoolResource::over(inner, streams, PoolConfig::default());
    let Err(ResourceError::Driver(message)) = mixed.map(drop) else {
        panic!("a resource of another open device was accepted");
    };
    assert!(message.contains("another open device"), "{message}");
}
