//! The kernel that looks at guarded bytes; `debug_guard` queues it, and has its twin for the simulated device.

use super::{CudaFunction, KernelImage, image};
use crate::CudaDevice;
use crate::device_runtime::resource::{ResourceError, ResourceResult};

/// The PTX of `kernels/guard.cu`.
pub const IMAGE: KernelImage = image!("guard");

/// The kernel, loaded on a GPU.
pub(crate) fn load(device: &CudaDevice) -> ResourceResult<CudaFunction> {
    let failed = |error: crate::XlogError| ResourceError::Driver(error.to_string());
    Ok(IMAGE.load(device).map_err(failed)?.function("guard_check")?)
}
