//! Kernels: loading PTX and launching.
//!
//! A [`CudaModule`] owns a loaded image. A [`CudaFunction`] is one of its kernels and keeps the module, and with it the device, open.
//! Loading compiles PTX for the device, which takes milliseconds: load once.
//!
//! Invariant: a module is unloaded when its last kernel and its last owner are dropped, after a wait for the device, so that no launched
//! kernel loses its code. If that wait cannot cover a captured stream, the module stays loaded until the context is released. While a gate
//! is held, the drop waits for it. The caller guarantees that the arguments match the kernel and that their memory is live.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::api::ModuleCalls;
use super::core::DriverCore;
use super::device::CudaDriver;
use crate::{DriverError, DriverResult, StreamHandle, Waited};

/// Kernels that are loaded on one device.
///
/// ```no_run
/// use xlog_driver::cuda::{CudaDriver, CudaModule, LaunchShape};
/// use xlog_driver::Driver;
///
/// let driver = CudaDriver::open(0)?;
/// let module = CudaModule::load(&driver, c"... PTX ...")?;
/// let kernel = module.function("fill")?;
/// let stream = driver.stream_create(0)?;
/// let block = driver.alloc(1024)?;
/// // SAFETY: the kernel takes an address and a number of rows, and the block is live and this long.
/// unsafe { kernel.launch(stream, LaunchShape::for_rows(256), &[block.into(), 256_u64.into()])? };
/// # Ok::<(), xlog_driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct CudaModule {
    loaded: Arc<Loaded>,
}

struct Loaded {
    core: Arc<DriverCore>,
    calls: ModuleCalls,
    raw: CUmodule,
}

// SAFETY: a module handle is a name the driver accepts on every thread; the driver does its own locking.
unsafe impl Send for Loaded {}
// SAFETY: as above; nothing here changes after it was made.
unsafe impl Sync for Loaded {}

impl CudaModule {
    /// Loads PTX, compiling it for the device of `driver`.
    pub fn load(driver: &CudaDriver, image: &CStr) -> DriverResult<Self> {
        let calls = driver.api().modules.ok_or(DriverError::Unsupported { call: "load" })?;
        let core = Arc::clone(&driver.core);
        let mut raw: CUmodule = ptr::null_mut();
        {
            let _bound = core.context.bind_relaxed("load")?;
            // SAFETY: the out pointer is valid, the image is a string with a NUL at its end, and the context is current.
            let code = unsafe { (calls.load_data)(&raw mut raw, image.as_ptr().cast()) };
            core.context.check("cuModuleLoadData", code)?;
        }
        Ok(Self { loaded: Arc::new(Loaded { core, calls, raw }) })
    }

    /// Returns the `extern "C"` kernel called `name`.
    pub fn function(&self, name: &str) -> DriverResult<CudaFunction> {
        let Ok(symbol) = CString::new(name) else {
            return Err(DriverError::invalid("function", format!("{name:?}"), "a kernel's name"));
        };
        let Loaded { core, calls, raw } = &*self.loaded;
        let _bound = core.context.bind_relaxed("function")?;
        let mut function: CUfunction = ptr::null_mut();
        // SAFETY: the out pointer is valid, the name ends with a NUL, and the module is loaded.
        let code = unsafe { (calls.get_function)(&raw mut function, *raw, symbol.as_ptr()) };
        core.context.check("cuModuleGetFunction", code)?;
        Ok(CudaFunction { module: self.clone(), raw: function, name: name.into() })
    }

    /// Returns the ordinal of the module's device.
    pub fn device_ordinal(&self) -> u32 {
        self.loaded.core.properties.ordinal
    }
}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaModule")
            .field("handle", &self.loaded.raw)
            .field("device_ordinal", &self.device_ordinal())
            .finish()
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // A lost device has already unloaded the module, and a drop cannot report an error.
        if let Ok(_bound) = self.core.context.bind_relaxed("unload")
            // If work may still run, the module stays loaded until the context is released.
            && matches!(self.core.streams.synchronize(&self.core.context), Ok(Waited::ForAll))
        {
            // SAFETY: the module was loaded once, this is its last owner, and none of its kernels runs any more.
            unsafe { (self.calls.unload)(self.raw) };
        }
    }
}

/// Arguments that a launch passes without an allocation.
const INLINE_ARGUMENTS: usize = 16;

/// One kernel of a loaded module.
#[derive(Clone)]
pub struct CudaFunction {
    module: CudaModule,
    raw: CUfunction,
    name: Arc<str>,
}

// SAFETY: a function handle is a name the driver accepts on every thread, alive as long as its module.
unsafe impl Send for CudaFunction {}
// SAFETY: as above; nothing here changes after it was made.
unsafe impl Sync for CudaFunction {}

impl CudaFunction {
    /// Queues the kernel on `stream`.
    ///
    /// # Safety
    /// `arguments` are those the kernel takes, in number, order and type. The memory it touches is live when it runs, and
    /// the launch is ordered against all other work on that memory. `stream` is a live stream of the module's device.
    pub unsafe fn launch(
        &self,
        stream: StreamHandle,
        shape: LaunchShape,
        arguments: &[KernelArgument],
    ) -> DriverResult<()> {
        let Loaded { core, calls, .. } = &*self.module.loaded;
        let stream = core.raw_stream("launch", stream)?;
        // Pointers stay on the stack up to `INLINE_ARGUMENTS`, so that a launch does not allocate.
        let (mut few, mut many) = ([ptr::null_mut(); INLINE_ARGUMENTS], Vec::new());
        let pointers: &mut [*mut c_void] = match few.get_mut(..arguments.len()) {
            Some(few) => few,
            None => {
                many.resize(arguments.len(), ptr::null_mut());
                &mut many
            }
        };
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.bytes.as_ptr().cast_mut().cast();
        }
        let LaunchShape { grid: (gx, gy, gz), block: (bx, by, bz), shared_bytes } = shape;
        let _bound = core.context.bind("launch")?;
        // SAFETY: the function belongs to a loaded module, each pointer leads to an argument, which the driver copies before
        // it returns, and the caller promises that they are the kernel's arguments.
        let code = unsafe {
            (calls.launch_kernel)(
                self.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared_bytes,
                stream,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        core.context.check("cuLaunchKernel", code)
    }

    /// Returns the kernel's name in the module.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the module of the kernel.
    pub fn module(&self) -> &CudaModule {
        &self.module
    }
}

impl fmt::Debug for CudaFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaFunction")
            .field("name", &self.name)
            .field("module", &self.module)
            .finish()
    }
}

/// The grid, block and shared memory of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaunchShape {
    /// Blocks in x, y and z.
    pub grid: (u32, u32, u32),
    /// Threads of a block in x, y and z.
    pub block: (u32, u32, u32),
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
}

impl LaunchShape {
    const BLOCK: u32 = 256;
    const MAX_BLOCKS: u64 = 1 << 16;

    /// One thread.
    pub const SINGLE: Self = Self { grid: (1, 1, 1), block: (1, 1, 1), shared_bytes: 0 };

    /// One thread per row, up to 65,536 blocks; the kernel must stride over further rows.
    #[must_use]
    pub fn for_rows(rows: usize) -> Self {
        let blocks = (rows as u64).div_ceil(u64::from(Self::BLOCK)).clamp(1, Self::MAX_BLOCKS);
        Self { grid: (blocks as u32, 1, 1), block: (Self::BLOCK, 1, 1), shared_bytes: 0 }
    }
}

/// One scalar or address that a kernel takes, of at most eight bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(8))]
pub struct KernelArgument {
    bytes: [u8; 8],
}

macro_rules! arguments {
    ($($type:ty),*) => {
        $(impl From<$type> for KernelArgument {
            fn from(value: $type) -> Self {
                let mut bytes = [0; 8];
                bytes[..size_of::<$type>()].copy_from_slice(&value.to_ne_bytes());
                Self { bytes }
            }
        })*
    };
}

arguments!(u32, i32, u64, i64, f32, f64);
