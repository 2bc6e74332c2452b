//! Runtimes and work for tests of graphs.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AsyncCudaResource, CaptureError, LedgerSetting, PoolConfig, PoolResource, ResourceError,
    RuntimeConfig, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{
    CudaDevice, GpuMemoryManager, LaunchRecorder, Result, TrackedCudaSlice, XlogError,
};

pub(super) const BYTES: usize = 4096;

/// A runtime over a pool, one over the driver's pools, and one with every decorator of a configuration.
pub(super) fn runtimes(device: &Arc<CudaDevice>) -> Vec<Arc<XlogDeviceRuntime>> {
    let ordinal = device.ordinal();
    let streams = || Arc::new(StreamPool::with_defaults(device.clone()));
    let first = streams();
    let pool =
        PoolResource::new(device.clone(), ordinal, first.clone(), PoolConfig::default()).unwrap();
    let second = streams();
    let asynchronous = AsyncCudaResource::new(device.clone(), ordinal, second.clone());
    let compose = |streams, resource| {
        Arc::new(XlogDeviceRuntime::with_resource(device.clone(), ordinal, streams, resource))
    };
    vec![
        compose(first, Box::new(pool)),
        compose(second, Box::new(asynchronous)),
        configured(device),
    ]
}

pub(super) fn configured(device: &Arc<CudaDevice>) -> Arc<XlogDeviceRuntime> {
    let config = RuntimeConfig::default().with_ledger(LedgerSetting::Off);
    Arc::new(XlogDeviceRuntime::with_config(device.clone(), &config).unwrap())
}

pub(super) fn manager(runtime: &Arc<XlogDeviceRuntime>) -> GpuMemoryManager {
    GpuMemoryManager::with_runtime(runtime.clone())
}

/// Returns the error of a call that a capture refuses.
pub(super) fn refused<T: std::fmt::Debug>(result: Result<T>) -> CaptureError {
    match result {
        Err(XlogError::Resource(ResourceError::Capture(error))) => *error,
        other => panic!("{other:?}"),
    }
}

/// Fills a buffer on a stream, ordered by a recorder.
pub(super) fn fill(
    runtime: &XlogDeviceRuntime,
    stream: StreamId,
    buffer: &TrackedCudaSlice<u8>,
    value: u8,
) -> Result<()> {
    let mut recorder = LaunchRecorder::new_strict(stream);
    recorder.write(buffer);
    // SAFETY: the buffer is live, and the recorder orders the fill.
    recorder.run(runtime, |stream| unsafe { stream.memset(buffer.ptr(), value, buffer.len()) })
}

/// Copies a buffer to another on a stream, ordered by a recorder.
pub(super) fn copy(
    runtime: &XlogDeviceRuntime,
    stream: StreamId,
    from: &TrackedCudaSlice<u8>,
    to: &TrackedCudaSlice<u8>,
) -> Result<()> {
    let mut recorder = LaunchRecorder::new_strict(stream);
    recorder.read(from).write(to);
    recorder.run(runtime, |stream| {
        // SAFETY: both buffers are live, and the recorder orders the copy.
        unsafe { stream.copy_dtod(to.ptr(), from.ptr(), from.len()) }
    })
}

/// Everything was freed.
pub(super) fn assert_empty(runtime: &XlogDeviceRuntime) {
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0, "{runtime:?}");
}
