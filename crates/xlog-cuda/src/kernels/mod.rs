//! CUDA kernels: how they are kept, loaded and launched.
//!
//! A kernel's source `kernels/NAME.cu` lies beside the `NAME.ptx` built from it, since a compiler for it is not to be had
//! everywhere. `scripts/build-kernels` builds the PTX and stamps its first line with the hash of the source, the hash of
//! the lines below, the compiler and the target; a test compares the hashes. PTX is embedded in the program and compiled by
//! the driver for the GPU at hand when a [`KernelImage`] is loaded, which takes milliseconds: load once, launch often.
//!
//! [`exercise`] has kernels of our own with their twins for the simulated device, [`certify`] those that do wrong on purpose,
//! [`guard`] that of the debug guard. What is not here: ordering. A launch says nothing about the buffers it uses; that is the
//! work of a [`LaunchRecorder`](crate::LaunchRecorder).

pub mod certify;
pub mod exercise;
pub mod guard;

use std::ffi::CStr;

use xlog_driver::cuda::CudaDriver;
pub use xlog_driver::cuda::{CudaFunction, CudaModule, KernelArgument, LaunchShape};
use xlog_driver::{DeviceKind, DriverError};

use crate::{CudaDevice, DeviceStream, Result, XlogError};

/// PTX with the name of its source.
///
/// ```
/// use xlog_cuda::{CudaDevice, kernels::exercise};
///
/// // A simulated device has no use for PTX and says so; on a GPU this gives the module.
/// assert!(exercise::IMAGE.load(&CudaDevice::open("sim")?).is_err());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelImage {
    name: &'static str,
    ptx: &'static CStr,
}

impl KernelImage {
    /// An image of the given PTX.
    #[must_use]
    pub const fn new(name: &'static str, ptx: &'static CStr) -> Self {
        Self { name, ptx }
    }

    /// The name of its source, without the extension.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The PTX.
    #[must_use]
    pub const fn ptx(&self) -> &'static CStr {
        self.ptx
    }

    /// Compiles it for `device`; [`DriverError::Unsupported`] on a device that is not a GPU.
    pub fn load(&self, device: &CudaDevice) -> Result<CudaModule> {
        let properties = device.properties();
        if properties.kind != DeviceKind::Cuda {
            return Err(DriverError::Unsupported { call: "load" }.into());
        }
        // All openings of one ordinal share one context, so this is the device's own.
        let driver = CudaDriver::open(properties.ordinal as usize)?;
        Ok(CudaModule::load(&driver, self.ptx)?)
    }
}

/// Embeds `kernels/NAME.ptx` of this crate.
macro_rules! image {
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
                // A file with a NUL inside is no PTX, and nothing of it is loaded.
                Err(_) => c"",
            },
        )
    };
}
use image;

impl DeviceStream {
    /// Queues a kernel; [`DriverError::Unsupported`] on a device that is not a GPU.
    ///
    /// [`XlogError::DifferentDevices`] when the kernel was loaded on another GPU.
    ///
    /// # Safety
    /// `arguments` are those the kernel takes, in number, order and type. The memory it touches is live when it runs, and
    /// the launch is ordered against all other work on that memory.
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
        // SAFETY: the stream is alive and of the kernel's device; the caller answers for the rest.
        unsafe { kernel.launch(self.raw().handle(), shape, arguments)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a of 64 bits, as scripts/build-kernels computes it.
    fn hash(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        })
    }

    /// What keeps `ptx` from being the build of `source`.
    fn mismatch(source: &str, ptx: &str) -> Option<&'static str> {
        let (first, body) = ptx.split_once('\n').unwrap_or((ptx, ""));
        let mut words = first.split(' ');
        let stamp = |text: &str| format!("fnv1a64:{:016x}", hash(text.as_bytes()));
        if (words.next(), words.next()) != (Some("//"), Some("source")) {
            return Some("has no stamp");
        }
        if words.next() != Some(&stamp(source)) {
            return Some("was built from another source");
        }
        if (words.next(), words.next()) != (Some("body"), Some(&stamp(body))) {
            return Some("was changed after it was built");
        }
        None
    }

    const IMAGES: [(KernelImage, &str); 3] = [
        (certify::IMAGE, include_str!("../../kernels/certify.cu")),
        (exercise::IMAGE, include_str!("../../kernels/exercise.cu")),
        (guard::IMAGE, include_str!("../../kernels/guard.cu")),
    ];

    #[test]
    fn no_source_is_left_out_of_these_tests() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        // A host that only has the test binary has no sources to look for.
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap();
            assert!(IMAGES.iter().any(|(image, _)| image.name() == name), "{}", path.display());
        }
    }

    #[test]
    fn every_ptx_was_built_from_the_source_beside_it() {
        for (image, source) in IMAGES {
            let ptx = image.ptx().to_str().unwrap();
            assert!(!ptx.is_empty(), "{}.ptx is empty", image.name());
            if let Some(problem) = mismatch(source, ptx) {
                panic!("kernels/{}.ptx {problem}; run scripts/build-kernels", image.name());
            }
        }
    }

    #[test]
    fn a_ptx_that_does_not_belong_is_told_from_one_that_does() {
        let (source, body) = ("source", ".version 8.0\n");
        let stamped = |of: &str, with: &str| {
            let (of, with) = (hash(of.as_bytes()), hash(with.as_bytes()));
            format!("// source fnv1a64:{of:016x} body fnv1a64:{with:016x} compiler x\n{body}")
        };
        assert_eq!(mismatch(source, &stamped(source, body)), None);
        assert_eq!(mismatch(source, body), Some("has no stamp"));
        assert!(mismatch(source, &stamped("sourcf", body)).is_some());
        assert!(mismatch(source, &stamped(source, "other")).is_some());
    }

    #[test]
    fn the_oldest_driver_that_is_accepted_can_load_every_ptx() {
        // CUDA 12.0 reads PTX up to 8.0.
        for (image, _) in IMAGES {
            let ptx = image.ptx().to_str().unwrap();
            let version = ptx.lines().find_map(|line| line.strip_prefix(".version "));
            let (major, minor) = version.unwrap().split_once('.').unwrap();
            let version: (u32, u32) = (major.parse().unwrap(), minor.parse().unwrap());
            assert!(version <= (8, 0), "{}.ptx is of PTX {version:?}", image.name());
        }
    }
}
