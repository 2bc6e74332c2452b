//! The crate cudarc: `CudaStream::alloc`, which gives a slice that frees itself, with and without the events that it keeps for
//! each slice.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, sys,
};
use cudarc::nvrtc::Ptx;
use xlog_kernels::exercise::IMAGE;

use crate::workloads::{Maker, Peer};

pub struct Cudarc {
    context: Arc<CudaContext>,
    spin: CudaFunction,
    is_tracking: bool,
}

impl Peer for Cudarc {
    type Stream = Arc<CudaStream>;
    type Block = CudaSlice<u8>;
    type Failure = cudarc::driver::DriverError;

    fn stream(&self) -> Result<Arc<CudaStream>, String> {
        self.context.new_stream().map_err(|error| error.to_string())
    }

    fn allocate(
        &self,
        bytes: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaSlice<u8>, Self::Failure> {
        // SAFETY: nothing reads the bytes.
        unsafe { stream.alloc::<u8>(bytes) }
    }

    fn free(&self, block: CudaSlice<u8>) {
        drop(block);
    }

    fn free_elsewhere(
        &self,
        block: CudaSlice<u8>,
        allocated: &Arc<CudaStream>,
        used: &Arc<CudaStream>,
    ) -> Result<(), String> {
        if self.is_tracking {
            // The slice's own events order the other stream after the last write and the free after this read.
            let (_pointer, recorded) = block.device_ptr(used);
            drop(recorded);
        } else {
            used.join(allocated).map_err(|error| error.to_string())?;
            allocated.join(used).map_err(|error| error.to_string())?;
        }
        drop(block);
        Ok(())
    }

    fn spin(
        &self,
        stream: &Arc<CudaStream>,
        block: &CudaSlice<u8>,
        ticks: u64,
    ) -> Result<(), String> {
        let value = 1_u32;
        let mut launch = stream.launch_builder(&self.spin);
        launch.arg(&ticks).arg(block).arg(&value);
        let shape = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: these are the kernel's arguments; the block is live, longer than a word, and this is its own stream.
        unsafe { launch.launch(shape) }.map(drop).map_err(|error| error.to_string())
    }

    fn synchronize(&self) {
        self.context.synchronize().unwrap();
    }
}

impl Drop for Cudarc {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        let _ = with_default_pool(&self.context, |pool| {
            // SAFETY: the pool is the device's own.
            unsafe { sys::cuMemPoolTrimTo(pool, 0) }.result()
        });
    }
}

/// Calls into the pool that cudarc allocates from.
fn with_default_pool(
    context: &CudaContext,
    call: impl FnOnce(sys::CUmemoryPool) -> Result<(), cudarc::driver::DriverError>,
) -> Result<(), String> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: the pointer is to a pool handle, and the context's device exists.
    let found = unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) };
    found.result().and_then(|()| call(pool)).map_err(|error| error.to_string())
}

/// Makes one variant: `tracking`, as cudarc starts, or `plain`, with its events turned off.
pub struct CudarcMaker {
    context: Arc<CudaContext>,
    spin: CudaFunction,
    is_tracking: bool,
}

impl CudarcMaker {
    pub fn find(context: &Arc<CudaContext>, variant: &str) -> Result<Self, String> {
        let is_tracking = match variant {
            "tracking" => true,
            "plain" => false,
            _ => return Err(format!("there is no variant '{variant}'")),
        };
        let text = |error: cudarc::driver::DriverError| error.to_string();
        let source = IMAGE.ptx().to_str().map_err(|error| error.to_string())?;
        let module = context.load_module(Ptx::from_src(source)).map_err(text)?;
        let spin = module.load_function("spin").map_err(text)?;
        Ok(Self { context: context.clone(), spin, is_tracking })
    }
}

impl Maker for CudarcMaker {
    type Peer = Cudarc;

    fn make(&self, _grows: bool) -> Result<Cudarc, String> {
        // SAFETY: no slice is alive between two rows.
        unsafe {
            match self.is_tracking {
                true => self.context.enable_event_tracking(),
                false => self.context.disable_event_tracking(),
            }
        }
        // As for the bare driver: the pool keeps what it has.
        with_default_pool(&self.context, |pool| {
            let mut most = u64::MAX;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            // SAFETY: the attribute is a 64-bit number.
            unsafe { sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut most).cast()) }.result()
        })?;
        let (context, spin) = (self.context.clone(), self.spin.clone());
        Ok(Cudarc { context, spin, is_tracking: self.is_tracking })
    }

    fn taken_and_total(&self) -> Option<(u64, u64)> {
        let (free, total) = self.context.mem_get_info().ok()?;
        Some(((total - free) as u64, total as u64))
    }
}
