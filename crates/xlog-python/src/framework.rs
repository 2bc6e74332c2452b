//! The allocator behind CuPy, Numba, cuda.core and RMM: addresses instead of objects, and streams of the framework.
//!
//! Memory is that of the shared runtime. A stream is adopted for each call, so it may be destroyed afterwards. Work on a block between its
//! allocation and its free is not announced: the free waits for everything queued by then on the streams that it names, or for the device.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use xlog_base::Mutex;
use xlog_cuda::device_runtime::{DeviceBlock, XlogDeviceRuntime};
use xlog_cuda::{Result, StreamId};

use crate::errors::exception;
use crate::foreign;
use crate::scope::current_tag;

/// Allocates memory of a device's shared runtime for a framework.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Allocator {
    runtime: Arc<XlogDeviceRuntime>,
    blocks: Mutex<HashMap<u64, DeviceBlock>>,
    /// Blocks that were freed on a captured stream.
    deferred: Mutex<Vec<Deferred>>,
}

/// A block that was freed while a stream was captured. The next call on that stream, outside of a capture, frees it.
struct Deferred {
    block: DeviceBlock,
    stream: usize,
}

#[pymethods]
impl Allocator {
    /// The shared runtime of the device is built at the first allocator.
    #[new]
    #[pyo3(signature = (device = 0))]
    fn new(py: Python<'_>, device: u32) -> PyResult<Self> {
        let runtime = py.detach(|| XlogDeviceRuntime::try_get_arc(device));
        let runtime = runtime.map_err(|error| exception(py, &error))?;
        Ok(Self { runtime, blocks: Mutex::default(), deferred: Mutex::default() })
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
        let block = py.detach(|| {
            self.free_deferred(stream.as_slice())?;
            match stream {
                Some(stream) => self.allocate_on(nbytes, stream),
                None => self.allocate_for_all(nbytes),
            }
        });
        let block = block.map_err(|error| exception(py, &error))?;
        let ptr = block.ptr;
        self.blocks.lock().insert(ptr, block);
        Ok(ptr)
    }

    /// Frees memory once everything queued on these streams so far has completed; without streams, everything on the device.
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
        let released = py.detach(|| {
            self.free_deferred(streams.as_deref().unwrap_or_default())?;
            self.release(block, streams.as_deref())
        });
        released.map_err(|error| exception(py, &error))
    }

    /// Free and total bytes, within the limit.
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
        // SAFETY: a framework passes its own stream, which lives while it calls.
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
        // SAFETY: a framework passes its own streams, which live while it calls.
        #[allow(unsafe_code)]
        unsafe {
            foreign::is_captured(&self.runtime, stream)
        }
    }

    /// Frees what was freed on these streams while they were captured. The host does not wait: that could break another capture.
    fn free_deferred(&self, streams: &[usize]) -> Result<()> {
        if self.deferred.lock().is_empty() {
            return Ok(());
        }
        for &stream in streams.iter().filter(|stream| !self.is_captured(**stream)) {
            let ready: Vec<_> =
                self.deferred.lock().extract_if(.., |deferred| deferred.stream == stream).collect();
            for Deferred { block, stream } in ready {
                self.release(block, Some(&[stream]))?;
            }
        }
        Ok(())
    }

    fn release(&self, block: DeviceBlock, streams: Option<&[usize]>) -> Result<()> {
        let captured = streams.unwrap_or_default().iter().find(|stream| self.is_captured(**stream));
        if let Some(&stream) = captured {
            self.deferred.lock().push(Deferred { block, stream });
            return Ok(());
        }
        let record = |streams: &[usize]| -> Result<()> {
            for &stream in streams {
                if foreign::is_per_thread(&self.runtime, stream) {
                    // The free may run on another thread than the work.
                    return self.runtime.device().synchronize();
                }
                // SAFETY: a framework passes its own streams, which live while it calls.
                #[allow(unsafe_code)]
                unsafe {
                    foreign::record_use(&self.runtime, &block, stream)?;
                }
            }
            Ok(())
        };
        let is_recorded = streams.is_some_and(|streams| record(streams).is_ok());
        if !is_recorded {
            self.runtime.device().synchronize()?;
        }
        Ok(self.runtime.deallocate(block)?)
    }
}
