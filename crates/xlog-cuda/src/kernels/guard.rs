//! The kernel that checks guarded bytes. `debug_guard` queues it, and implements it for the simulated device.

use super::{CudaFunction, KernelImage};
use crate::CudaDevice;
use crate::device_runtime::resource::{ResourceError, ResourceResult};

/// The PTX of `kernels/guard.cu`.
pub const IMAGE: KernelImage = crate::kernel_image!("guard");

/// Loads the kernel once per device and keeps it: loading and unloading wait for all work on the GPU.
pub(crate) fn load(device: &CudaDevice) -> ResourceResult<CudaFunction> {
    let kept = device.guard_kernel();
    if let Some(kernel) = kept.get() {
        return Ok(kernel.clone());
    }
    let failed = |error: crate::XlogError| ResourceError::Driver(error.to_string());
    let loaded = IMAGE.load(device).map_err(failed)?.function("guard_check")?;
    Ok(kept.get_or_init(|| loaded).clone())
}
