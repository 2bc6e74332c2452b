//! Buffers: device memory of a runtime as a Python object.
//!
//! Invariants:
//! - The memory lives until the buffer and all its exports are gone.
//! - The lock of a memory is taken without the GIL: its holder may wait for the device, which may wait for a host function in Python.
//! - If a consumer's work cannot be identified at the free, the host waits for the whole device.
//! - The lock is held during every export and during the decision to free, so exported memory is never freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use xlog_base::Mutex;
use xlog_cuda::device_runtime::XlogDeviceRuntime;
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{Result, StreamId, TrackedCudaSlice, XlogError};

use crate::dlpack::{self, DeviceType, Layout};
use crate::errors::{invalid, without_gil};
use crate::foreign;
use crate::idle::By;
use crate::import::Lender;
use crate::stream::{Stream, handle_of};

/// The memory of a buffer.
pub(crate) struct Memory {
    /// `None` after the free.
    slice: Mutex<Option<TrackedCudaSlice<u8>>>,
    runtime: Arc<XlogDeviceRuntime>,
    ptr: u64,
    bytes: usize,
    /// The number of consumers that hold it by DLPack. Incremented under the lock of `slice`.
    lent: AtomicUsize,
    /// Whether it was exported by the CUDA array interface, which does not report when the consumer is done. Set under that lock.
    is_exposed: AtomicBool,
    /// Whether a consumer may have work on it that no clock covers.
    is_untracked: AtomicBool,
    /// The owner of imported memory, which gets it back when the slice is dropped.
    lender: Mutex<Option<Lender>>,
}

/// Runs `work` without the GIL, whether this thread holds it or not.
pub(crate) fn detached(work: impl Fn() + Send + Sync) {
    if Python::try_attach(|py| py.detach(&work)).is_none() {
        work();
    }
}

impl Memory {
    pub(crate) fn new(
        runtime: &Arc<XlogDeviceRuntime>,
        slice: TrackedCudaSlice<u8>,
        lender: Option<Lender>,
    ) -> Arc<Self> {
        Arc::new(Self {
            ptr: slice.ptr(),
            bytes: slice.len(),
            slice: Mutex::new(Some(slice)),
            runtime: runtime.clone(),
            lent: AtomicUsize::new(0),
            is_exposed: AtomicBool::new(false),
            is_untracked: AtomicBool::new(false),
            lender: Mutex::new(lender),
        })
    }

    pub(crate) fn runtime(&self) -> &Arc<XlogDeviceRuntime> {
        &self.runtime
    }

    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn freed() -> XlogError {
        XlogError::Kernel("the buffer was freed".to_owned())
    }

    fn with<R>(&self, work: impl FnOnce(&mut TrackedCudaSlice<u8>) -> Result<R>) -> Result<R> {
        self.slice.lock().as_mut().map_or_else(|| Err(Self::freed()), work)
    }

    /// Returns the stream of the allocation while it is leased, and the default stream afterwards.
    fn own_stream(&self) -> Result<StreamId> {
        let own = self.with(|slice| Ok(slice.stream()))?;
        let is_leased = self.runtime.stream_pool().resolve(own).is_some();
        Ok(if is_leased { own } else { StreamId::DEFAULT })
    }

    fn fill(&self, value: u8) -> Result<()> {
        let stream = self.own_stream()?;
        self.with(|slice| match slice.id() {
            _ if slice.stream() == stream => slice.fill_bytes(value),
            None => Ok(()),
            Some(block) => foreign::fill(&self.runtime, block, stream, value, slice),
        })
    }

    /// Lends the memory to a consumer, whose stream waits for every use. Without a stream the host waits.
    pub(crate) fn lend(&self, stream: Option<usize>) -> Result<()> {
        self.with(|slice| {
            match (slice.id(), stream) {
                (None, _) => {}
                // SAFETY: a consumer passes its own stream, which lives while it calls.
                #[allow(unsafe_code)]
                (Some(block), Some(stream)) => unsafe {
                    foreign::hand_over(&self.runtime, block, stream)?;
                },
                (Some(_), None) => By::Python.wait(&self.runtime)?,
            }
            self.lent.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Makes the default stream wait for every use, for consumers that never report that they are done; returns its number.
    fn expose(&self) -> Result<usize> {
        self.with(|slice| {
            let stream = self.runtime.stream_pool().default_stream()?;
            if let Some(block) = slice.id() {
                foreign::write_on(&self.runtime, block, StreamId::DEFAULT, || Ok(()))?;
            }
            self.is_exposed.store(true, Ordering::Relaxed);
            self.is_untracked.store(true, Ordering::Relaxed);
            Ok(handle_of(&stream))
        })
    }

    /// Takes the memory back from a consumer that used it on a stream: later uses and the free wait for the work queued there.
    ///
    /// The stream may no longer exist, so only permanently valid handles are used; otherwise the free waits for the device.
    pub(crate) fn take_back(&self, stream: Option<usize>) {
        let recorded = stream
            .filter(|stream| foreign::is_permanent(&self.runtime, *stream))
            .is_some_and(|stream| self.record(stream).is_ok());
        if !recorded {
            self.is_untracked.store(true, Ordering::Relaxed);
        }
        self.lent.fetch_sub(1, Ordering::Release);
    }

    fn record(&self, stream: usize) -> Result<()> {
        self.with(|slice| match slice.runtime_block() {
            None => Ok(()),
            // SAFETY: the callers pass a valid stream: a permanent one, or one that a Python program is using.
            #[allow(unsafe_code)]
            Some(block) => unsafe { foreign::record_use(&self.runtime, block, stream) },
        })
    }

    /// Frees the memory; an error says which kind of consumer holds it.
    fn free(&self) -> Result<(), &'static str> {
        let mut slice = self.slice.lock();
        if self.lent.load(Ordering::Acquire) > 0 {
            return Err("the buffer is in use by another library; delete its arrays first");
        }
        if self.is_exposed.load(Ordering::Relaxed) {
            return Err(
                "the buffer was handed out by __cuda_array_interface__, which does not say when it is given back; \
                 delete the buffer and the arrays made of it instead",
            );
        }
        let taken = slice.take();
        drop(slice);
        self.release(taken);
        Ok(())
    }

    fn release(&self, slice: Option<TrackedCudaSlice<u8>>) {
        let Some(slice) = slice else { return };
        let (runtime, lender) = (self.runtime.clone(), self.lender.lock().take());
        let free = move || match lender {
            None => drop(slice),
            Some(lender) => lender.give_back(&runtime, slice),
        };
        match self.is_untracked.load(Ordering::Relaxed) {
            true => By::Python.free(&self.runtime, free),
            false => free(),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The wait must not hold the GIL, which a host function of another library may need.
        detached(|| self.release(self.slice.lock().take()));
    }
}

/// Device memory of a runtime.
#[pyclass(frozen, weakref, module = "xlogmem")]
pub(crate) struct Buffer {
    memory: Arc<Memory>,
    layout: Layout,
}

impl Buffer {
    pub(crate) fn new(memory: Arc<Memory>, layout: Layout) -> Self {
        Self { memory, layout }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the stream of a copy: the given one, or the buffer's own.
    fn stream_of(&self, py: Python<'_>, stream: Option<&Stream>) -> PyResult<StreamId> {
        match stream {
            None => without_gil(py, || self.memory.own_stream()),
            Some(stream) if Arc::ptr_eq(&stream.runtime, &self.memory.runtime) => {
                Ok(stream.stream_id())
            }
            Some(_) => Err(invalid(
                py,
                "a stream of another runtime".to_owned(),
                "a stream of the buffer's runtime",
            )),
        }
    }

    fn device_type(&self) -> DeviceType {
        match self.memory.runtime.device().properties().kind {
            DeviceKind::Cuda => DeviceType::Cuda,
            _ => DeviceType::Extension,
        }
    }
}

#[pymethods]
impl Buffer {
    /// The device address.
    #[getter]
    fn ptr(&self) -> u64 {
        self.memory.ptr
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.bytes
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.shape())
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.dtype().name()
    }

    #[getter]
    fn tag(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        let tag_of =
            |slice: &mut TrackedCudaSlice<u8>| Ok(slice.runtime_block().map(|block| block.tag.0));
        without_gil(py, || self.memory.with(tag_of))
    }

    #[getter]
    fn is_freed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.memory.slice.lock().is_none())
    }

    /// Copies host bytes to the device, ordered like any other use. `source` may be reused immediately.
    #[pyo3(signature = (source, *, stream = None))]
    fn copy_from(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        stream: Option<&Stream>,
    ) -> PyResult<()> {
        let bytes = host_bytes(source)?;
        let stream = self.stream_of(py, stream)?;
        without_gil(py, || self.memory.with(|slice| slice.copy_from_slice_on(&bytes, stream)))
    }

    /// Returns the bytes after all writes to them have completed.
    #[pyo3(signature = (*, stream = None))]
    fn to_bytes<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Stream>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let stream = self.stream_of(py, stream)?;
        let bytes = without_gil(py, || self.memory.with(|slice| slice.to_vec_on(stream)))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Sets every byte.
    fn fill(&self, py: Python<'_>, value: u8) -> PyResult<()> {
        without_gil(py, || self.memory.fill(value))
    }

    /// Copies another buffer of equal size on the device.
    #[pyo3(signature = (source, *, stream = None))]
    fn copy_from_device(
        &self,
        py: Python<'_>,
        source: &Self,
        stream: Option<&Stream>,
    ) -> PyResult<()> {
        if Arc::ptr_eq(&self.memory, &source.memory) {
            return Err(invalid(py, "a copy of a buffer to itself".to_owned(), "two buffers"));
        }
        let stream = self.stream_of(py, stream)?;
        // Locked in address order, so that two threads copying in opposite directions do not deadlock.
        let (this, other) = (&self.memory, &source.memory);
        without_gil(py, || {
            let is_first = Arc::as_ptr(this) < Arc::as_ptr(other);
            let [first, second] = if is_first { [this, other] } else { [other, this] };
            let (mut first, mut second) = (first.slice.lock(), second.slice.lock());
            let [into, from] =
                if is_first { [&mut first, &mut second] } else { [&mut second, &mut first] };
            match (into.as_mut(), from.as_ref()) {
                (Some(into), Some(from)) => into.copy_from_on(from, stream),
                _ => Err(Memory::freed()),
            }
        })
    }

    /// Records that work queued so far on a stream of another library may use the buffer: later uses and the free wait for it.
    ///
    /// `stream` is the number of a live stream of this device, as other libraries pass it.
    fn record_use(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        without_gil(py, || self.memory.record(stream))
    }

    /// Frees the memory in stream order. Refused while another library holds it, or if it was exported by the CUDA array interface.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.memory.free()).map_err(PyBufferError::new_err)
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        (self.device_type() as i32, self.memory.runtime.device_ordinal())
    }

    /// Exports the buffer as a DLPack capsule. The consumer's `stream` waits for every use; the memory stays until the consumer is done.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "copies are not supported; copy the array in the consumer",
            ));
        }
        let ours = (self.device_type() as i32, self.memory.runtime.device_ordinal() as i32);
        if dl_device.is_some_and(|wanted| wanted != ours) {
            return Err(PyBufferError::new_err(format!(
                "the buffer is on the device {ours:?} of DLPack, and stays there"
            )));
        }
        let stream = match (stream, self.device_type()) {
            // The consumer requests no synchronization.
            (Some(-1), _) => None,
            // DLPack reserves 0. It may mean either default stream, and the legacy one is ordered with both.
            (Some(0), DeviceType::Cuda) => Some(foreign::LEGACY),
            (Some(stream), _) => Some(usize::try_from(stream).map_err(|_| {
                PyValueError::new_err(format!(
                    "stream {stream} is not accepted; expected -1 or the number of a stream"
                ))
            })?),
            (None, DeviceType::Cuda) => Some(foreign::LEGACY),
            (None, _) => None,
        };
        without_gil(py, || self.memory.lend(stream))?;
        dlpack::capsule(
            py,
            dlpack::Loan { memory: self.memory.clone(), stream },
            &self.layout,
            self.device_type(),
            max_version.is_some_and(|version| version >= (1, 0)),
        )
    }

    /// The CUDA array interface, version 3. Its stream waits for every use of the buffer.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device_type() != DeviceType::Cuda {
            return Err(PyAttributeError::new_err(
                "memory of a simulated device has no CUDA array interface",
            ));
        }
        let Some(typestr) = self.layout.dtype().typestr() else {
            return Err(PyAttributeError::new_err(format!(
                "the CUDA array interface has no type {}; use DLPack",
                self.dtype()
            )));
        };
        let stream = without_gil(py, || self.memory.expose())?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, self.layout.shape())?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (self.memory.ptr, false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", stream)?;
        Ok(interface)
    }

    fn __len__(&self) -> usize {
        self.layout.shape().first().map_or(0, |length| *length as usize)
    }

    fn __repr__(&self) -> String {
        format!(
            "<xlogmem.Buffer {:?} {} at {:#x} of {}>",
            self.layout.shape(),
            self.dtype(),
            self.memory.ptr,
            self.memory.runtime.device().spec()
        )
    }
}

/// Returns the bytes of an object with the buffer protocol: bytes, a memoryview, a NumPy array.
fn host_bytes(source: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let py = source.py();
    let flat = py.import("builtins")?.getattr("memoryview")?.call1((source,)).map_err(|_| {
        PyTypeError::new_err(format!(
            "{source} is not accepted; expected an object with the buffer protocol"
        ))
    })?;
    let bytes = flat.call_method1("cast", ("B",))?;
    PyBuffer::<u8>::get(&bytes)?.to_vec(py)
}
