//! What the tests that need a GPU share.

// `gpu_overlap`, which is another binary, uses a part of it.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::ops::Deref;
use std::sync::{Arc, MutexGuard};

use xlog_cuda::device_runtime::{AsyncCudaResource, StreamPool, XlogDeviceRuntime};
use xlog_cuda::{CudaDevice, DeviceSpec};

/// The GPU to test on, with this test's turn on it, which ends after the device is closed.
pub(crate) struct Gpu {
    device: Arc<CudaDevice>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Deref for Gpu {
    type Target = Arc<CudaDevice>;

    fn deref(&self) -> &Self::Target {
        &self.device
    }
}

/// The GPU to test on; `None`, with a line that says so, where none is asked for.
pub(crate) fn gpu(test: &str) -> Option<Gpu> {
    let specs = xlog_testing::specs();
    let cuda = specs.iter().find(|spec| matches!(spec.parse(), Ok(DeviceSpec::Cuda(_))));
    if cuda.is_none() {
        eprintln!("{test}: skipped, it needs a GPU; run it with XLOG_TEST_DEVICE=cuda:0");
    }
    cuda.map(|spec| {
        let _turn = xlog_testing::turn(spec);
        let device = CudaDevice::open(spec).unwrap_or_else(|error| panic!("{error}"));
        Gpu { device: Arc::new(device), _turn }
    })
}

/// A runtime on the async resource, with room for `streams` streams besides the default one.
pub(crate) fn runtime(device: &Arc<CudaDevice>, streams: usize) -> Arc<XlogDeviceRuntime> {
    let pool = Arc::new(StreamPool::new(device.clone(), streams));
    let resource = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
    let ordinal = device.ordinal();
    Arc::new(XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool, Box::new(resource)))
}
