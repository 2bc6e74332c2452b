//! Memory of other libraries as buffers: DLPack and the CUDA array interface.
//!
//! A block of the runtime represents the memory, so the runtime's clocks order its uses. When the buffer is dropped, the host waits
//! for these uses before it returns the memory to its owner: neither protocol names a stream for the return.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use xlog_cuda::device_runtime::XlogDeviceRuntime;
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::sim::{Call, Fault};
use xlog_cuda::{CudaDevice, GpuMemoryManager, Result, TrackedCudaSlice, XlogError};

use crate::buffer::{Buffer, Memory};
use crate::dlpack::{
    DeviceType, DlManagedTensor, DlManagedTensorVersioned, DlTensor, Dtype, LEGACY_NAME,
    LEGACY_USED, Layout, VERSIONED_NAME, VERSIONED_USED,
};
use crate::errors::{exception, without_gil};
use crate::foreign;
use crate::idle::By;
use crate::stream::{Stream, handle_of};

/// The owner of imported memory.
pub(crate) enum Lender {
    Dlpack {
        _tensor: Managed,
    },
    /// A Python object, kept alive.
    Object {
        _owner: Py<PyAny>,
    },
}

/// A managed tensor whose deleter must be called exactly once.
pub(crate) enum Managed {
    Legacy(*mut DlManagedTensor),
    Versioned(*mut DlManagedTensorVersioned),
}

// SAFETY: DLPack permits the deleter on any thread, and the drop calls it once.
unsafe impl Send for Managed {}
// SAFETY: shared access reads nothing.
unsafe impl Sync for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken from its capsule, so this is its only owner.
        let delete = || unsafe {
            match *self {
                Self::Legacy(tensor) => {
                    if let Some(delete) = (*tensor).deleter {
                        delete(tensor);
                    }
                }
                Self::Versioned(tensor) => {
                    if let Some(delete) = (*tensor).deleter {
                        delete(tensor);
                    }
                }
            }
        };
        // Some deleters require the GIL.
        if Python::try_attach(|_| delete()).is_none() {
            delete();
        }
    }
}

impl Lender {
    /// Waits for every use of a buffer over the lender's memory, and returns the memory.
    pub(crate) fn give_back(self, runtime: &Arc<XlogDeviceRuntime>, slice: TrackedCudaSlice<u8>) {
        let wait = || -> Result<()> {
            let stream = runtime.stream_pool().default_stream()?;
            // SAFETY: it is a stream of the runtime, which lives until the end of this call.
            let adopted = unsafe { foreign::adopt(runtime, handle_of(&stream))? };
            adopted.give_back(slice)?;
            stream.synchronize()
        };
        if wait().is_err() {
            By::Python.free(runtime, move || drop(self));
        }
    }
}

struct Array {
    ptr: u64,
    layout: Layout,
    /// The stream on which its contents are ready.
    stream: usize,
    lender: Lender,
}

/// Returns a buffer over an array of another library, by DLPack or the CUDA array interface.
pub(crate) fn import(
    py: Python<'_>,
    manager: &GpuMemoryManager,
    object: &Bound<'_, PyAny>,
) -> PyResult<Buffer> {
    let array = if object.hasattr("__dlpack__")? {
        from_dlpack(manager.runtime(), object)?
    } else if object.hasattr("__cuda_array_interface__")? {
        from_interface(py, manager.runtime(), object)?
    } else {
        return Err(PyTypeError::new_err(format!(
            "{} is not accepted; expected an object with __dlpack__ or __cuda_array_interface__",
            object.get_type()
        )));
    };
    let Array { ptr, layout, stream, lender } = array;
    let slice = without_gil(py, || {
        // SAFETY: the array's owner names its own stream, which is live now. Its memory lives until the owner gets it back.
        unsafe {
            let stream = foreign::adopt(manager.runtime(), stream)?;
            stream.adopt::<u8>(manager, ptr, layout.bytes())
        }
    })?;
    Ok(Buffer::new(Memory::new(manager.runtime(), slice, Some(lender)), layout))
}

fn from_dlpack(runtime: &Arc<XlogDeviceRuntime>, object: &Bound<'_, PyAny>) -> PyResult<Array> {
    let py = object.py();
    let device: (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let kind = match runtime.device().properties().kind {
        DeviceKind::Cuda => DeviceType::Cuda,
        _ => DeviceType::Extension,
    };
    let ours = (kind as i32, runtime.device_ordinal() as i32);
    if device != ours {
        return Err(PyBufferError::new_err(format!(
            "an array on the device {device:?} of DLPack is not accepted; expected {ours:?}, the device of {}",
            runtime.device().spec()
        )));
    }
    let stream = runtime.stream_pool().default_stream();
    let stream = handle_of(&*stream.map_err(|error| exception(py, &error.into()))?);
    let options = PyDict::new(py);
    options.set_item("stream", stream)?;
    options.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        // A producer that predates DLPack 1.0.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&options))?
        }
        capsule => capsule?,
    };
    let managed = take(&capsule)?;
    let tensor: &DlTensor = match &managed {
        // SAFETY: the tensor lives until its deleter is called.
        Managed::Legacy(tensor) => unsafe { &(**tensor).tensor },
        // SAFETY: as above.
        Managed::Versioned(tensor) => unsafe { &(**tensor).tensor },
    };
    let (ptr, layout) = read(tensor)?;
    Ok(Array { ptr, layout, stream, lender: Lender::Dlpack { _tensor: managed } })
}

/// Takes the tensor out of a capsule.
fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Managed> {
    let pointer = |name: &CStr, used: &CStr| -> PyResult<Option<*mut c_void>> {
        // SAFETY: these are Python calls with an object of this thread; both names are static in the callers.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 1 {
                return Ok(None);
            }
            let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
            if pointer.is_null() || ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
                return Err(PyErr::fetch(capsule.py()));
            }
            Ok(Some(pointer))
        }
    };
    if let Some(tensor) = pointer(VERSIONED_NAME, VERSIONED_USED)? {
        let tensor = tensor.cast::<DlManagedTensorVersioned>();
        // SAFETY: a capsule of this name holds such a tensor; the version comes first in every version.
        let (major, managed) = unsafe { ((*tensor).major, Managed::Versioned(tensor)) };
        if major != 1 {
            return Err(PyBufferError::new_err(format!(
                "version {major} of DLPack is not accepted; expected 1"
            )));
        }
        return Ok(managed);
    }
    match pointer(LEGACY_NAME, LEGACY_USED)? {
        Some(tensor) => Ok(Managed::Legacy(tensor.cast())),
        None => Err(PyValueError::new_err("__dlpack__ returned no capsule with a DLPack tensor")),
    }
}

/// Returns the address and layout of a tensor.
fn read(tensor: &DlTensor) -> PyResult<(u64, Layout)> {
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |from: *const i64| {
        if from.is_null() || dimensions == 0 {
            return Vec::new();
        }
        // SAFETY: DLPack guarantees `ndim` lengths and, unless null, `ndim` strides.
        unsafe { std::slice::from_raw_parts(from, dimensions) }.to_vec()
    };
    let layout = Layout::new(list(tensor.shape), Dtype::of_raw(tensor.dtype)?)?;
    let strides = list(tensor.strides);
    check_contiguous(&layout, (!strides.is_empty()).then_some(&strides[..]))?;
    Ok((tensor.data.addr() as u64 + tensor.byte_offset, layout))
}

fn check_contiguous(layout: &Layout, strides: Option<&[i64]>) -> PyResult<()> {
    match strides {
        Some(strides) if layout.bytes() > 0 && !layout.has_strides(strides) => {
            Err(PyBufferError::new_err(format!(
                "an array of shape {:?} with strides {strides:?} is not accepted; expected a contiguous one",
                layout.shape()
            )))
        }
        _ => Ok(()),
    }
}

fn from_interface(
    py: Python<'_>,
    runtime: &Arc<XlogDeviceRuntime>,
    object: &Bound<'_, PyAny>,
) -> PyResult<Array> {
    let interface = object.getattr("__cuda_array_interface__")?;
    let typestr: String = interface.get_item("typestr")?.extract()?;
    let shape: Vec<i64> = interface.get_item("shape")?.extract()?;
    let (ptr, _is_read_only): (u64, bool) = interface.get_item("data")?.extract()?;
    let layout = Layout::new(shape, Dtype::of_typestr(&typestr)?)?;
    let optional = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        let value = interface.call_method1("get", (name,))?;
        Ok((!value.is_none()).then_some(value))
    };
    if let Some(strides) = optional("strides")? {
        let size = layout.dtype().size() as i64;
        let strides: Vec<i64> = strides.cast::<PyTuple>()?.extract::<Vec<i64>>()?;
        let strides: Vec<i64> = strides.into_iter().map(|stride| stride / size).collect();
        check_contiguous(&layout, Some(&strides))?;
    }
    let version: u32 = interface.get_item("version")?.extract()?;
    let stream = optional("stream")?.map(|stream| stream.extract::<usize>()).transpose()?;
    if stream == Some(0) {
        return Err(PyValueError::new_err(
            "stream 0 of a CUDA array interface is ambiguous; expected 1, 2 or a handle",
        ));
    }
    if stream.is_none() && version < 3 {
        // Version 2 does not name the stream of the producer's work.
        without_gil(py, || By::Python.wait(runtime))?;
    }
    let lender = Lender::Object { _owner: object.clone().unbind() };
    Ok(Array { ptr, layout, stream: stream.unwrap_or(foreign::LEGACY), lender })
}

/// Queues an unannounced fill, as another library would. Only on a simulated device, which validates addresses.
pub(crate) fn queue_unannounced(stream: &Stream, ptr: u64, bytes: usize, value: u8) -> Result<()> {
    let stream = stream.stream();
    if stream.device().properties().kind == DeviceKind::Cuda {
        return Err(only_simulated());
    }
    // SAFETY: the simulated device validates the range and reports races.
    unsafe { stream.memset(ptr, value, bytes) }
}

/// Makes a simulated device report a stream as captured.
pub(crate) fn set_capturing(stream: &Stream, is_captured: bool) -> Result<()> {
    let stream = stream.stream();
    let sim = stream.device().sim().ok_or_else(only_simulated)?;
    Ok(sim.set_capturing(stream.handle(), is_captured)?)
}

/// Makes the next wait for a simulated device fail, as an open capture does.
pub(crate) fn fail_next_wait(device: &CudaDevice) -> Result<()> {
    let faults = device.sim().ok_or_else(only_simulated)?.faults();
    // The driver's code for a wait during a capture.
    faults.fail_nth(Call::Synchronize, 1, Fault::Code(900));
    Ok(())
}

fn only_simulated() -> XlogError {
    XlogError::Kernel("only on a simulated device".to_owned())
}
