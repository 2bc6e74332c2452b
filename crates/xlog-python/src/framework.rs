//! The allocator for CuPy, Numba, cuda.core and RMM, with addresses instead of objects and the framework's streams.
//!
//! Memory comes from the shared runtime. A stream is adopted for each call, so it may be destroyed afterwards. Work on a block
//! is not announced: the free waits for everything queued so far on the streams that it names, or on the device. A block freed
//! on a captured stream is parked: nothing can wait for that stream now, and it may be destroyed later.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use xlog_base::Mutex;
use xlog_cuda::device_runtime::{DeviceBlock, XlogDeviceRuntime};
use xlog_cuda::{Result, StreamId};

use crate::errors::{exception, without_gil};
use crate::foreign;
use crate::idle::By;
use crate::scope::current_tag;

/// Allocates memory of a device's shared runtime for a framework.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Allocator {
    runtime: Arc<XlogDeviceRuntime>,
    blocks: Mutex<HashMap<u64, DeviceBlock>>,
}

#[pymethods]
impl Allocator {
    /// Builds the device's shared runtime at the first allocator.
    #[new]
    #[pyo3(signature = (device = 0))]
    fn new(py: Python<'_>, device: u32) -> PyResult<Self> {
        let runtime = without_gil(py, || XlogDeviceRuntime::try_get_arc(device))?;
        Ok(Self { runtime, blocks: Mutex::default() })
    }

    #[getter]
    fn device(&self) -> u32 {
        self.runtime.device_ordinal()
    }

    /// Allocates memory that is ready on a stream of the framework; without one, on all streams.
    #[pyo3(signature = (nbytes, stream = None))]
    fn malloc(&self, py: Python<'_>, nbytes: usize, stream: Option<usize>) -> PyResult<u64> {
        if nbytes == 0 {
            return Ok(0);
        }
        let allocate = || match stream {
            Some(stream) => self.allocate_on(nbytes, stream),
            None => self.allocate_for_all(nbytes),
        };
        let block = without_gil(py, || By::Python.with_room(&self.runtime, allocate))?;
        let ptr = block.ptr;
        self.blocks.lock().insert(ptr, block);
        Ok(ptr)
    }

    /// Frees memory after everything queued on these streams so far has completed; without streams, everything on the device.
    #[pyo3(signature = (ptr, streams = None))]
    fn free(&self, py: Python<'_>, ptr: u64, streams: Option<Vec<usize>>) -> PyResult<()> {
        if ptr == 0 {
            return Ok(());
        }
        let Some(block) = self.blocks.lock().remove(&ptr) else {
            return Err(PyValueError::new_err(format!(
                "{ptr:#x} is not a live address of this allocator"
            )));
        };
        without_gil(py, || self.release(block, streams.as_deref()))
    }

    /// Returns free and total bytes, within the limit.
    fn memory_info(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let info = self.runtime.device().memory_info().map_err(|error| exception(py, &error))?;
        let Some(budget) = self.runtime.budget() else { return Ok((info.free, info.total)) };
        Ok((info.free.min(budget.remaining() as u64), info.total.min(budget.limit() as u64)))
    }

    /// The number of live addresses.
    fn __len__(&self) -> usize {
        self.blocks.lock().len()
    }
}

impl Allocator {
    fn allocate_on(&self, nbytes: usize, stream: usize) -> Result<DeviceBlock> {
        // SAFETY: a framework passes its own stream, which is live during the call.
        #[allow(unsafe_code)]
        let adopted = unsafe { foreign::adopt(&self.runtime, stream)? };
        let block = self.runtime.allocate(nbytes, adopted.id(), current_tag())?;
        match adopted.run(|| Ok(())) {
            Ok(()) => Ok(block),
            Err(error) => {
                self.runtime.deallocate(block)?;
                Err(error)
            }
        }
    }

    fn allocate_for_all(&self, nbytes: usize) -> Result<DeviceBlock> {
        let block = self.runtime.allocate(nbytes, StreamId::DEFAULT, current_tag())?;
        let stream = self.runtime.stream_pool().try_resolve(StreamId::DEFAULT);
        match stream.and_then(|stream| stream.synchronize()) {
            Ok(()) => Ok(block),
            Err(error) => {
                self.runtime.deallocate(block)?;
                Err(error)
            }
        }
    }

    fn is_captured(&self, stream: usize) -> bool {
        // SAFETY: a framework passes its own streams, which are live during the call.
        #[allow(unsafe_code)]
        unsafe {
            foreign::is_captured(&self.runtime, stream)
        }
    }

    /// Records the work on a stream as a use of a block; returns false if that is not possible.
    fn record(&self, block: &DeviceBlock, stream: usize) -> bool {
        // The work may be on another thread's per-thread stream than the free.
        let is_per_thread = foreign::is_per_thread(&self.runtime, stream);
        // SAFETY: a framework passes its own streams, which are live during the call.
        #[allow(unsafe_code)]
        let recorded = || unsafe { foreign::record_use(&self.runtime, block, stream) };
        !is_per_thread && recorded().is_ok()
    }

    fn release(&self, block: DeviceBlock, streams: Option<&[usize]>) -> Result<()> {
        let is_captured =
            streams.unwrap_or_default().iter().any(|stream| self.is_captured(*stream));
        let is_recorded = || {
            streams.is_some_and(|streams| streams.iter().all(|stream| self.record(&block, *stream)))
        };
        if !is_captured && is_recorded() {
            return Ok(self.runtime.deallocate(block)?);
        }
        let runtime = self.runtime.clone();
        // The runtime keeps a block whose free failed, and a later reap frees it.
        let free = move || drop(runtime.deallocate(block));
        match is_captured {
            true => By::Python.park(&self.runtime, free),
            false => By::Python.free(&self.runtime, free),
        }
        Ok(())
    }
}
