//! Both decorators pass the suite that every resource passes, over every kind of backend.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use xlog_conformance::{BoxedResource, Suite};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AsyncCudaResource, Backtraces, DirectCudaResource, LoggingResource, NullSink, PoolConfig,
    PoolResource, StatisticsConfig, StatisticsResource, StreamPool,
};
use xlog_testing::for_each_device;

#[derive(Clone, Copy)]
enum Backend {
    Direct,
    Async,
    Pool,
}

fn backend(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>, kind: Backend) -> BoxedResource {
    let (of, ordinal, streams) = (device.clone(), device.ordinal(), streams.clone());
    match kind {
        Backend::Direct => Box::new(DirectCudaResource::new(of, ordinal)),
        Backend::Async => Box::new(AsyncCudaResource::new(of, ordinal, streams)),
        Backend::Pool => {
            Box::new(PoolResource::new(of, ordinal, streams, PoolConfig::default()).unwrap())
        }
    }
}

fn conforms(over: impl Fn(BoxedResource) -> BoxedResource, kind: Backend) {
    for_each_device(|device| {
        let suite = Suite::new(|device, pool| over(backend(device, pool, kind)));
        suite.run(device).assert_passed();
    });
}

fn logged(inner: BoxedResource) -> BoxedResource {
    Box::new(LoggingResource::new(inner, Arc::new(NullSink::new())).with_use_logging(true))
}

fn counted(inner: BoxedResource) -> BoxedResource {
    let config = StatisticsConfig::new().with_backtraces(Backtraces::Off);
    Box::new(StatisticsResource::over(inner, config))
}

#[test]
fn a_logged_async_resource_conforms() {
    conforms(logged, Backend::Async);
}

#[test]
fn a_logged_direct_resource_conforms() {
    conforms(logged, Backend::Direct);
}

#[test]
fn a_counted_async_resource_conforms() {
    conforms(counted, Backend::Async);
}

#[test]
fn a_counted_direct_resource_conforms() {
    conforms(counted, Backend::Direct);
}

#[test]
fn a_logged_pool_conforms() {
    conforms(logged, Backend::Pool);
}

#[test]
fn a_counted_pool_conforms() {
    conforms(counted, Backend::Pool);
}

#[test]
fn a_logged_and_counted_pool_conforms() {
    conforms(|pool| logged(counted(pool)), Backend::Pool);
}
