//! Validation of addresses from untrusted resources.
//!
//! Typed buffers access the blocks of a resource in safe code. This library's resources are trusted: their blocks lie in memory of
//! their device. The driver must know the blocks of any other resource, including decorators that other crates implement.

use super::{DeviceBlock, ResourceError, ResourceResult};
use crate::CudaDevice;

/// Seals a method of a public trait: only this crate can implement or call it.
#[derive(Clone, Copy, Debug)]
pub struct Seal(pub(crate) ());

/// Checks that the driver knows the first `bytes` bytes of a block as memory of this device.
pub(crate) fn check_memory(
    device: &CudaDevice,
    block: &DeviceBlock,
    bytes: usize,
) -> ResourceResult<()> {
    let refuse = |why: &str| {
        let (ptr, ordinal) = (block.ptr, device.ordinal());
        Err(ResourceError::Driver(format!(
            "the resource handed out {} bytes at {ptr:#x} for {bytes} bytes of device {ordinal}: {why}",
            block.bytes
        )))
    };
    if block.device_ordinal != device.ordinal() {
        return refuse(&format!("the block says device {}", block.device_ordinal));
    }
    if block.bytes < bytes {
        return refuse("the block is too small");
    }
    let Some(end) = block.ptr.checked_add(bytes as u64) else {
        return refuse("no device has such addresses");
    };
    let mut at = block.ptr;
    while at < end {
        match device.driver().memory_at(at)? {
            Some(range) if at.wrapping_sub(range.start) < range.bytes => {
                at = range.start.saturating_add(range.bytes);
            }
            _ => return refuse(&format!("the driver knows no memory of this device at {at:#x}")),
        }
    }
    Ok(())
}
