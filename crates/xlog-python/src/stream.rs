//! Streams of a runtime.

use std::sync::Arc;

use pyo3::prelude::*;
use xlog_base::Mutex;
use xlog_cuda::device_runtime::{StreamLease, XlogDeviceRuntime};
use xlog_cuda::{DeviceStream, Gate, StreamId};

use crate::errors::{exception, without_gil};

/// A stream of a runtime: the default one, or a leased one that is returned when this object is deleted.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Stream {
    stream: Arc<DeviceStream>,
    /// `None` for the default stream.
    _lease: Option<StreamLease>,
    /// The runtime that resolves its id.
    pub(crate) runtime: Arc<XlogDeviceRuntime>,
}

impl Stream {
    pub(crate) fn leased(py: Python<'_>, runtime: &Arc<XlogDeviceRuntime>) -> PyResult<Self> {
        let lease = runtime.stream_pool().lease().map_err(|error| exception(py, &error.into()))?;
        let stream = lease.stream().clone();
        Ok(Self { stream, _lease: Some(lease), runtime: runtime.clone() })
    }

    pub(crate) fn default_of(py: Python<'_>, runtime: &Arc<XlogDeviceRuntime>) -> PyResult<Self> {
        let stream = runtime.stream_pool().default_stream();
        let stream = stream.map_err(|error| exception(py, &error.into()))?;
        Ok(Self { stream, _lease: None, runtime: runtime.clone() })
    }

    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.stream
    }

    pub(crate) fn stream_id(&self) -> StreamId {
        self.stream.id()
    }
}

/// Returns the number by which other libraries name a stream: on a GPU the `CUstream`, on the simulated device the handle's number.
pub(crate) fn handle_of(stream: &DeviceStream) -> usize {
    stream.cu_stream().map_or_else(|| stream.handle().number() as usize, |raw| raw.addr())
}

#[pymethods]
impl Stream {
    #[getter]
    fn id(&self) -> u32 {
        self.stream.id().0
    }

    /// The `CUstream` as an int, for other libraries; on the simulated device the number of the stream.
    #[getter]
    fn handle(&self) -> usize {
        handle_of(&self.stream)
    }

    /// The protocol of cuda.core: version and handle.
    fn __cuda_stream__(&self) -> [usize; 2] {
        [0, handle_of(&self.stream)]
    }

    /// Waits until all work queued on this stream has completed.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        without_gil(py, || self.stream.synchronize())
    }

    /// Returns whether all work queued on this stream has completed.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        self.stream.query().map_err(|error| exception(py, &error))
    }

    /// Makes later work wait for everything queued on `other` so far.
    fn wait_for(&self, py: Python<'_>, other: &Self) -> PyResult<()> {
        self.stream.wait_for(&other.stream).map_err(|error| exception(py, &error))
    }

    /// Holds the stream inside `with`: work queued meanwhile runs afterwards.
    fn hold(&self) -> Hold {
        Hold { stream: self.stream.clone(), gate: Mutex::new(None) }
    }

    fn __repr__(&self) -> String {
        format!("<xlogmem.Stream {} of {}>", self.stream.id(), self.stream.device().spec())
    }
}

/// Holds a stream inside `with`.
#[pyclass(frozen, module = "xlogmem")]
pub(crate) struct Hold {
    stream: Arc<DeviceStream>,
    gate: Mutex<Option<Gate>>,
}

#[pymethods]
impl Hold {
    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let gate = self.stream.hold().map_err(|error| exception(py, &error))?;
        *self.gate.lock() = Some(gate);
        Ok(())
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> bool {
        drop(self.gate.lock().take());
        false
    }
}
