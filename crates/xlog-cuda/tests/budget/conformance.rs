//! A budget is a resource like any other.

use xlog_conformance::{BoxedResource, Suite};
use xlog_cuda::device_runtime::{AsyncCudaResource, DirectCudaResource, GlobalDeviceBudget};
use xlog_testing::for_each_device;

const LIMIT: usize = 2 << 30;

#[test]
fn over_the_async_resource() {
    for_each_device(|device| {
        let suite = Suite::new(|device, pool| {
            let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
            Box::new(GlobalDeviceBudget::over(inner, LIMIT)) as BoxedResource
        });
        suite.run(device).assert_passed();
    });
}

#[test]
fn over_the_direct_resource() {
    for_each_device(|device| {
        let suite = Suite::new(|device, _| {
            let inner = DirectCudaResource::new(device.clone(), device.ordinal());
            Box::new(GlobalDeviceBudget::new(Box::new(inner), LIMIT)) as BoxedResource
        });
        suite.run(device).assert_passed();
    });
}

#[test]
fn over_another_budget() {
    for_each_device(|device| {
        let suite = Suite::new(|device, pool| {
            let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
            let below = GlobalDeviceBudget::over(inner, LIMIT);
            Box::new(GlobalDeviceBudget::new(Box::new(below), LIMIT)) as BoxedResource
        });
        suite.run(device).assert_passed();
    });
}
