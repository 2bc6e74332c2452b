//! One allocation and one free through a warm runtime, each in a function of its own: `scripts/house` counts the functions that they
//! enter.
//!
//!     walk pool     a runtime over a pool
//!     walk stack    with budget and statistics above the pool, as a shared runtime has them
//!
//! Memory is the simulated device's; neither path calls it once the pool is warm.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, GlobalDeviceBudget, PoolConfig, PoolResource, StatisticsConfig,
    StatisticsResource, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::sim::SimDevice;

const TAG: AllocTag = AllocTag("walk");
/// Pairs after which memory is at hand and every lock belongs to this thread.
const WARM_UP: usize = 1000;

#[inline(never)]
fn one_allocate(runtime: &XlogDeviceRuntime, stream: StreamId) -> DeviceBlock {
    runtime.allocate(black_box(1 << 10), stream, TAG).unwrap()
}

#[inline(never)]
fn one_deallocate(runtime: &XlogDeviceRuntime, block: DeviceBlock) {
    runtime.deallocate(block).unwrap();
}

fn main() -> ExitCode {
    let device = CudaDevice::from_driver(SimDevice::open(Default::default()).unwrap());
    let device = Arc::new(device);
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let lease = streams.lease().unwrap();
    let pool = PoolResource::new(device.clone(), 0, streams.clone(), PoolConfig::default());
    let pool = pool.unwrap();
    let runtime = match std::env::args().nth(1).as_deref() {
        Some("pool") => {
            XlogDeviceRuntime::with_resource(device, 0, streams.clone(), Box::new(pool))
        }
        Some("stack") => {
            let counted = StatisticsResource::over(pool, StatisticsConfig::default());
            let budget = GlobalDeviceBudget::over(counted, 1 << 32);
            XlogDeviceRuntime::with_resource(device, 0, streams.clone(), Box::new(budget))
        }
        _ => {
            eprintln!("walk: expected 'pool' or 'stack'");
            return ExitCode::from(2);
        }
    };
    for _ in 0..WARM_UP {
        let block = runtime.allocate(black_box(1 << 10), lease.id(), TAG).unwrap();
        runtime.deallocate(block).unwrap();
    }
    let block = one_allocate(&runtime, lease.id());
    one_deallocate(&runtime, black_box(block));
    ExitCode::SUCCESS
}
