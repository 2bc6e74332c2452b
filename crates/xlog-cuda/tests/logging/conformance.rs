//! Both decorators pass the suite that every resource passes, over both kinds of backend.

use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::conformance::{BoxedResource, Suite};
use xlog_cuda::device_runtime::{
    AsyncCudaResource, Backtraces, DirectCudaResource, LoggingResource, NullSink, StatisticsConfig,
    StatisticsResource, StreamPool,
};
use xlog_testing::for_each_device;

fn backend(device: &Arc<CudaDevice>, pool: &Arc<StreamPool>, is_async: bool) -> BoxedResource {
    match is_async {
        true => Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone())),
        false => Box::new(DirectCudaResource::new(device.clone(), device.ordinal())),
    }
}

fn conforms(over: impl Fn(BoxedResource) -> BoxedResource, is_async: bool) {
    for_each_device(|device| {
        let suite = Suite::new(|device, pool| over(backend(device, pool, is_async)));
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
    conforms(logged, true);
}

#[test]
fn a_logged_direct_resource_conforms() {
    conforms(logged, false);
}

#[test]
fn a_counted_async_resource_conforms() {
    conforms(counted, true);
}

#[test]
fn a_counted_direct_resource_conforms() {
    conforms(counted, false);
}
