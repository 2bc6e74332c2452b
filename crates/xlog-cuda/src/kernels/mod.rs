//! CUDA kernels: embedded PTX, loading and launching.
//!
//! The source `kernels/NAME.cu` is stored with the `NAME.ptx` that was built from it, so a build needs no CUDA compiler.
//! `scripts/build-kernels` builds the PTX and stamps its first line with the hash of the source, the hash of the lines below, the
//! compiler and the target; a test compares the hashes. [`kernel_image!`](crate::kernel_image) embeds the PTX. The driver compiles it
//! for the GPU when a [`KernelImage`] is loaded, which takes milliseconds: load once, launch often.
//!
//! A launch is not ordered against other uses of its buffers: a [`LaunchRecorder`](crate::LaunchRecorder) does that.

#[cfg(feature = "guard")]
pub mod guard;

use std::ffi::CStr;

use xlog_driver::cuda::CudaDriver;
pub use xlog_driver::cuda::{CudaFunction, CudaModule, KernelArgument, LaunchShape};
use xlog_driver::{DeviceKind, DriverError};

use crate::{CudaDevice, DeviceStream, Result, XlogError};

/// PTX with the name of its source.
///
/// ```
/// use xlog_cuda::{CudaDevice, kernels::KernelImage};
///
/// const IMAGE: KernelImage = KernelImage::new("nothing", c".version 8.0\n.target sm_75\n.address_size 64\n");
/// // A simulated device has no use for PTX and says so; on a GPU this gives the module.
/// assert!(IMAGE.load(&CudaDevice::open("sim")?).is_err());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelImage {
    name: &'static str,
    ptx: &'static CStr,
}

impl KernelImage {
    /// Creates an image of PTX.
    #[must_use]
    pub const fn new(name: &'static str, ptx: &'static CStr) -> Self {
        Self { name, ptx }
    }

    /// The name of its source, without the extension.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The PTX.
    pub const fn ptx(&self) -> &'static CStr {
        self.ptx
    }

    /// Compiles the PTX for `device`; [`DriverError::Unsupported`] on a device that is not a GPU.
    pub fn load(&self, device: &CudaDevice) -> Result<CudaModule> {
        let properties = device.properties();
        if properties.kind != DeviceKind::Cuda {
            return Err(DriverError::Unsupported { call: "load" }.into());
        }
        // All drivers of one ordinal share one context, so this is the device's.
        let driver = CudaDriver::open(properties.ordinal as usize)?;
        Ok(CudaModule::load(&driver, self.ptx)?)
    }
}

/// Embeds `kernels/NAME.ptx` of the crate that calls it, as a [`KernelImage`](crate::kernels::KernelImage).
#[macro_export]
macro_rules! kernel_image {
    ($name:literal) => {
        $crate::kernels::KernelImage::new(
            $name,
            match ::std::ffi::CStr::from_bytes_with_nul(
                concat!(
                    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $name, ".ptx")),
                    "\0"
                )
                .as_bytes(),
            ) {
                Ok(text) => text,
                // PTX contains no NUL.
                Err(_) => c"",
            },
        )
    };
}

impl DeviceStream {
    /// Queues a kernel.
    ///
    /// It is [`DriverError::Unsupported`] on a device that is not a GPU, and [`XlogError::DifferentDevices`] if the kernel was loaded on
    /// another GPU.
    ///
    /// # Safety
    /// `arguments` are those of the kernel, in number, order and type. The memory that it accesses is live while it runs, and the launch is
    /// ordered against all other work on that memory.
    pub unsafe fn launch_cuda(
        &self,
        kernel: &CudaFunction,
        shape: LaunchShape,
        arguments: &[KernelArgument],
    ) -> Result<()> {
        let device = self.device();
        if device.properties().kind != DeviceKind::Cuda {
            return Err(DriverError::Unsupported { call: "launch_cuda" }.into());
        }
        let loaded_on = kernel.module().device_ordinal();
        if loaded_on != device.ordinal() {
            return Err(XlogError::DifferentDevices {
                call: "launch_cuda",
                left: format!("{} of {}", self.id(), device.spec()),
                right: format!("kernel '{}' of cuda:{loaded_on}", kernel.name()),
            });
        }
        // SAFETY: the stream is alive and of the kernel's device; the caller guarantees the rest.
        unsafe { kernel.launch(self.raw().handle(), shape, arguments)? };
        Ok(())
    }
}

#[cfg(all(test, feature = "guard"))]
mod tests {
    use xlog_testing::kernels::{Kernel, assert_complete, assert_loadable, assert_stamped};

    const KERNELS: [Kernel<'static>; 1] = [Kernel {
        name: super::guard::IMAGE.name(),
        ptx: super::guard::IMAGE.ptx(),
        source: include_str!("../../kernels/guard.cu"),
    }];

    #[test]
    fn no_source_is_left_out_of_these_tests() {
        assert_complete(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"), &KERNELS);
    }

    #[test]
    fn every_ptx_was_built_from_the_source_beside_it() {
        assert_stamped(&KERNELS);
    }

    #[test]
    fn the_oldest_driver_that_is_accepted_can_load_every_ptx() {
        assert_loadable(&KERNELS);
    }
}
