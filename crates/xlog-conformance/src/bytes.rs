//! Work on blocks, queued for the checks.
//!
//! This is the suite's only unsafe code. The checks satisfy its requirements: the resource under test orders a block's work before its
//! free. If it fails to, the simulated devices report it; on a GPU the worst case is a wrong byte in a block of this process.
use std::sync::Arc;

use xlog_cuda::device_runtime::BlockId;
use xlog_cuda::{CudaDevice, DeviceStream};

use crate::fixture::Stop;

/// Queues a fill of the first `bytes` bytes of a block.
pub(crate) fn fill(
    stream: &DeviceStream,
    block: BlockId,
    value: u8,
    bytes: usize,
) -> Result<(), Stop> {
    fill_at(stream, block, 0, value, bytes)
}

/// Queues a fill of `bytes` bytes from `offset` on.
pub(crate) fn fill_at(
    stream: &DeviceStream,
    block: BlockId,
    offset: usize,
    value: u8,
    bytes: usize,
) -> Result<(), Stop> {
    // SAFETY: see the module documentation.
    unsafe { stream.memset(block.ptr + offset as u64, value, bytes)? };
    Ok(())
}

/// Plain device memory to copy blocks to. A copy between two blocks of page-locked host memory would block the host, because CUDA waits for
/// the stream before it copies.
pub(crate) struct Target {
    device: Arc<CudaDevice>,
    ptr: u64,
}

impl Target {
    pub(crate) fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<Self, Stop> {
        Ok(Self { device: device.clone(), ptr: device.driver().alloc(bytes)? })
    }

    /// Queues a copy of the first `bytes` bytes of a block.
    pub(crate) fn copy_from(
        &self,
        stream: &DeviceStream,
        block: BlockId,
        bytes: usize,
    ) -> Result<(), Stop> {
        // SAFETY: see the module documentation.
        unsafe { stream.copy_dtod(self.ptr, block.ptr, bytes)? };
        Ok(())
    }

    /// Reads `bytes` bytes from `offset` on and fails unless all are `value`.
    pub(crate) fn expect(
        &self,
        stream: &DeviceStream,
        offset: usize,
        value: u8,
        bytes: usize,
    ) -> Result<(), Stop> {
        check(&read_at(stream, self.ptr + offset as u64, bytes)?, value)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Copies of a failed check may still be queued.
        let _ = self.device.synchronize();
        // SAFETY: no queued work uses it, and none can be queued any more.
        let _ = unsafe { self.device.driver().free(self.ptr) };
    }
}

/// Reads `bytes` bytes from `offset` on, waiting for the stream.
pub(crate) fn read(
    stream: &DeviceStream,
    block: BlockId,
    offset: usize,
    bytes: usize,
) -> Result<Vec<u8>, Stop> {
    read_at(stream, block.ptr + offset as u64, bytes)
}

/// Reads `bytes` bytes from `offset` on and fails unless all are `value`.
pub(crate) fn expect(
    stream: &DeviceStream,
    block: BlockId,
    offset: usize,
    value: u8,
    bytes: usize,
) -> Result<(), Stop> {
    check(&read(stream, block, offset, bytes)?, value)
}

fn read_at(stream: &DeviceStream, ptr: u64, bytes: usize) -> Result<Vec<u8>, Stop> {
    let mut back = vec![0; bytes];
    // SAFETY: see the module documentation; the call returns when the copy is done.
    unsafe { stream.copy_dtoh(&mut back, ptr)? };
    Ok(back)
}

fn check(read: &[u8], value: u8) -> Result<(), Stop> {
    match read.iter().position(|byte| *byte != value) {
        None => Ok(()),
        Some(at) => Err(Stop::Failed(format!(
            "byte {at} of those read is {:#04x}, {value:#04x} was written",
            read[at]
        ))),
    }
}
