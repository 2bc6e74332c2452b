//! Work on blocks, queued for the checks.
//!
//! The only unsafe code of the suite. The checks keep what these calls need: a block stays live until its work is ordered
//! before its free, by the resource under test. Where the resource fails in that, the simulated devices report it; on a GPU
//! the worst case is a wrong byte in memory of this process's own blocks.
use xlog_cuda::DeviceStream;
use xlog_cuda::device_runtime::BlockId;

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

/// Queues a copy of the first `bytes` bytes of one block to another.
pub(crate) fn copy(
    stream: &DeviceStream,
    to: BlockId,
    from: BlockId,
    bytes: usize,
) -> Result<(), Stop> {
    // SAFETY: see the module documentation.
    unsafe { stream.copy_dtod(to.ptr, from.ptr, bytes)? };
    Ok(())
}

/// Reads `bytes` bytes from `offset` on, waiting for the stream.
pub(crate) fn read(
    stream: &DeviceStream,
    block: BlockId,
    offset: usize,
    bytes: usize,
) -> Result<Vec<u8>, Stop> {
    let mut back = vec![0; bytes];
    // SAFETY: see the module documentation; the call returns when the copy is done.
    unsafe { stream.copy_dtoh(&mut back, block.ptr + offset as u64)? };
    Ok(back)
}

/// Reads `bytes` bytes from `offset` on and fails unless all are `value`.
pub(crate) fn expect(
    stream: &DeviceStream,
    block: BlockId,
    offset: usize,
    value: u8,
    bytes: usize,
) -> Result<(), Stop> {
    let back = read(stream, block, offset, bytes)?;
    match back.iter().position(|byte| *byte != value) {
        None => Ok(()),
        Some(at) => Err(Stop::Failed(format!(
            "byte {} of {block:?} is {:#04x}, {value:#04x} was written",
            offset + at,
            back[at]
        ))),
    }
}
