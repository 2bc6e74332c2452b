//! Single accesses, valid or not, for the certification of memory checkers.

use std::sync::Arc;

use xlog_cuda::driver::Access;
use xlog_cuda::kernels::{CudaFunction, KernelImage, LaunchShape};
use xlog_cuda::sim::{KernelSlice, SimKernel};
use xlog_cuda::{CudaDevice, DeviceStream, Result, kernel_image};

/// The PTX of these kernels.
pub const IMAGE: KernelImage = kernel_image!("certify");

/// The kernels, loaded on one device.
///
/// ```
/// use std::sync::Arc;
/// use xlog_kernels::certify::Certify;
/// use xlog_cuda::{CudaDevice, device_runtime::StreamPool};
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let stream = StreamPool::with_defaults(device.clone()).default_stream()?;
/// let kernels = Certify::load(&device)?;
/// let block = device.driver().alloc(16)?;
/// let mut bytes = [0; 2];
/// // SAFETY: the block is live and 16 bytes long until the copy has waited for the stream.
/// unsafe {
///     kernels.poke(&stream, block + 1, 7)?;
///     kernels.carry(&stream, block, block + 1)?;
///     stream.copy_dtoh(&mut bytes, block)?;
///     device.driver().free(block)?;
/// }
/// assert_eq!(bytes, [7, 7]);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Certify {
    /// `None` on a simulated device.
    cuda: Option<Arc<(CudaFunction, CudaFunction)>>,
}

impl Certify {
    /// Loads the kernels on a GPU; a simulated device needs none.
    pub fn load(device: &CudaDevice) -> Result<Self> {
        if device.sim().is_some() {
            return Ok(Self { cuda: None });
        }
        let module = IMAGE.load(device)?;
        Ok(Self { cuda: Some(Arc::new((module.function("poke")?, module.function("carry")?))) })
    }

    /// Queues a write of one byte.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`] with one byte, unless the process may be lost to a wrong access.
    pub unsafe fn poke(&self, stream: &DeviceStream, at: u64, value: u8) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("poke", move |args| args.bytes_mut(0).fill(value));
            return stream.launch_sim(kernel.arg(at, 1, Access::Write));
        };
        let arguments = [at.into(), u32::from(value).into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the byte.
        unsafe { stream.launch_cuda(&functions.0, LaunchShape::SINGLE, &arguments) }
    }

    /// Queues a copy of one byte.
    ///
    /// # Safety
    /// As for [`Certify::poke`], with both bytes.
    pub unsafe fn carry(&self, stream: &DeviceStream, to: u64, from: u64) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("carry", |args| {
                if let [KernelSlice::Write(to), KernelSlice::Read(from)] = args.slices() {
                    to.copy_from_slice(from);
                }
            });
            let kernel = kernel.arg(to, 1, Access::Write).arg(from, 1, Access::Read);
            return stream.launch_sim(kernel);
        };
        let arguments = [to.into(), from.into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the bytes.
        unsafe { stream.launch_cuda(&functions.1, LaunchShape::SINGLE, &arguments) }
    }
}
