//! Streams of other libraries, by the number that Python passes.
//!
//! A stream is adopted for one call, by the rules of [`StreamPool::adopt`](xlog_cuda::device_runtime::StreamPool::adopt): its
//! handle is not used afterwards. Numbers are those of the CUDA runtime: 0 and 1 the legacy default stream, 2 the per-thread
//! default stream. On the simulated device they are its stream numbers.

use std::ptr;

use xlog_cuda::device_runtime::{
    Access, AdoptedStream, BlockId, DeviceBlock, ResourceError, ResourceResult, StreamId,
    XlogDeviceRuntime,
};
use xlog_cuda::driver::{CaptureStatus, DeviceKind};
use xlog_cuda::{Result, TrackedCudaSlice};

/// The number of the legacy default stream.
pub(crate) const LEGACY: usize = 1;
/// The number of the per-thread default stream.
const PER_THREAD: usize = 2;

/// Returns whether a stream handle is always valid: that of the legacy stream, and all of a simulated device, which validates them.
pub(crate) fn is_permanent(runtime: &XlogDeviceRuntime, stream: usize) -> bool {
    stream <= LEGACY || runtime.device().properties().kind != DeviceKind::Cuda
}

/// Returns whether a number names a different stream in each thread.
pub(crate) fn is_per_thread(runtime: &XlogDeviceRuntime, stream: usize) -> bool {
    stream == PER_THREAD && runtime.device().properties().kind == DeviceKind::Cuda
}

/// Returns whether a stream is being captured into a graph; false if the driver cannot tell.
///
/// # Safety
/// `stream` names a live stream of the runtime's device.
pub(crate) unsafe fn is_captured(runtime: &XlogDeviceRuntime, stream: usize) -> bool {
    let driver = runtime.device().driver();
    // SAFETY: the caller guarantees it.
    let handle = unsafe { driver.foreign_stream(ptr::without_provenance_mut(stream)) };
    let status = handle.and_then(|handle| driver.stream_capture(handle));
    matches!(status, Ok(CaptureStatus::Active | CaptureStatus::Invalidated))
}

/// Adopts a stream for the following calls. A captured one is refused: its work does not run now, so nothing can wait for it.
///
/// # Safety
/// `stream` names a live stream of the runtime's device, which is not destroyed before the returned object is dropped.
pub(crate) unsafe fn adopt(runtime: &XlogDeviceRuntime, stream: usize) -> Result<AdoptedStream> {
    // SAFETY: the caller guarantees it.
    if unsafe { is_captured(runtime, stream) } {
        return Err(ResourceError::InvalidRequest {
            value: format!("stream {stream:#x}, which is being captured into a graph,"),
            accepted:
                "a stream without a capture; allocate and exchange memory before the capture begins"
                    .to_owned(),
        }
        .into());
    }
    // SAFETY: the caller guarantees it.
    unsafe { runtime.stream_pool().adopt(ptr::without_provenance_mut(stream)) }
}

/// Makes a stream wait for every use of a block, as if it wrote the block now.
///
/// # Safety
/// As for [`adopt`].
pub(crate) unsafe fn hand_over(
    runtime: &XlogDeviceRuntime,
    block: BlockId,
    stream: usize,
) -> Result<()> {
    // SAFETY: the caller guarantees it.
    let adopted = unsafe { adopt(runtime, stream)? };
    write_on(runtime, block, adopted.id(), || adopted.run(|| Ok(())))
}

/// Runs `work` as a write of a block on a stream of the runtime.
pub(crate) fn write_on(
    runtime: &XlogDeviceRuntime,
    block: BlockId,
    stream: StreamId,
    work: impl FnOnce() -> Result<()>,
) -> Result<()> {
    runtime.prepare_block_use(block, stream, Access::Write)?;
    let worked = work();
    let finished: ResourceResult<()> = runtime.finish_block_use(block, stream, Access::Write);
    worked?;
    Ok(finished?)
}

/// Records that work queued on a stream so far may use a block: its free and later uses wait for that work.
///
/// # Safety
/// As for [`adopt`].
pub(crate) unsafe fn record_use(
    runtime: &XlogDeviceRuntime,
    block: &DeviceBlock,
    stream: usize,
) -> Result<()> {
    // SAFETY: the caller guarantees it.
    let adopted = unsafe { adopt(runtime, stream)? };
    adopted.run(|| Ok(()))?;
    Ok(runtime.record_block_use(block, adopted.id())?)
}

/// Queues a fill of a live buffer on a stream of the runtime, ordered like any other write.
pub(crate) fn fill(
    runtime: &XlogDeviceRuntime,
    block: BlockId,
    stream: StreamId,
    value: u8,
    slice: &TrackedCudaSlice<u8>,
) -> Result<()> {
    let queue = runtime.stream_pool().try_resolve(stream)?;
    // SAFETY: the buffer is live and borrowed, and its free is ordered after the write announced here.
    write_on(runtime, block, stream, || unsafe { queue.memset(slice.ptr(), value, slice.len()) })
}
