//! A stream of the runtime that cudarc borrows.
//!
//! cudarc shares its stream by `Arc`, and its buffers keep one to free themselves on that stream. The driver stream must outlive every
//! such `Arc`, and cudarc's type has no field for the runtime's handle. So if a [`CudarcStream`] is dropped while such references exist,
//! the handle moves into a process-wide list until the last `Arc` is dropped.
//!
//! Invariant: while a strong reference to a wrapped cudarc stream exists, the driver stream behind it is alive.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};

use cudarc::driver::{self as cudarc_driver, CudaContext, CudaStream};
use xlog_base::{Mutex, debug_fields};
use xlog_driver::{DeviceKind, DriverError};

use crate::device_runtime::{Access, ResourceResult, StreamId};
use crate::interop::{OpenView, ReadView, WriteView};
use crate::{DeviceRepr, DeviceStream, Result, TrackedCudaSlice, XlogError};

/// A stream of the runtime that cudarc can launch on.
///
/// It keeps the stream alive, but not its lease: once the lease is dropped, the pool may lease the stream again.
pub struct CudarcStream {
    lent: ManuallyDrop<Arc<CudaStream>>,
    stream: Arc<DeviceStream>,
}

impl CudarcStream {
    /// Wraps `stream` for cudarc; [`DriverError::Unsupported`] on a device that is not a GPU.
    pub fn new(stream: Arc<DeviceStream>) -> Result<Self> {
        let ordinal = cuda_ordinal(&stream)?;
        let context = CudaContext::new(ordinal)
            .map_err(|error| XlogError::Driver(translate("CudaContext::new", error)))?;
        Self::with_context(stream, &context)
    }

    /// [`CudarcStream::new`] in an existing context.
    ///
    /// It must be the primary context of the stream's device, in which the stream was created; otherwise this is
    /// [`XlogError::DifferentDevices`].
    pub fn with_context(stream: Arc<DeviceStream>, context: &Arc<CudaContext>) -> Result<Self> {
        let ordinal = cuda_ordinal(&stream)?;
        if context.ordinal() != ordinal || !context.is_primary() {
            let kind = if context.is_primary() { "the primary context" } else { "a context" };
            return Err(XlogError::DifferentDevices {
                call: "CudarcStream::with_context",
                left: format!("{} of {}", stream.id(), stream.device().spec()),
                right: format!("{kind} of cuda:{}", context.ordinal()),
            });
        }
        let Some(raw) = stream.cu_stream() else {
            return Err(DriverError::Unsupported { call: "CudarcStream::with_context" }.into());
        };
        // SAFETY: the stream was created in the primary context of this device, which `context` is. `stream` owns it and lives as
        // long as the wrapper: see the drop below. The hooks of the runtime order work on it.
        let lent = unsafe { context.wrap_borrowed_stream(raw.cast()) };
        Ok(Self { lent: ManuallyDrop::new(lent), stream })
    }

    /// Returns cudarc's stream.
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.lent
    }

    /// Returns cudarc's context, for loading modules.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.lent.context()
    }

    /// Returns the runtime's stream.
    pub fn stream(&self) -> &Arc<DeviceStream> {
        &self.stream
    }

    /// Returns the id of the stream, for a [`LaunchRecorder`](crate::LaunchRecorder).
    pub fn id(&self) -> StreamId {
        self.stream.id()
    }

    /// Opens a read of `slice` on this stream, for cudarc calls that take a `DevicePtr`.
    ///
    /// It fails like [`prepare_block_use`](crate::device_runtime::DeviceMemoryResource::prepare_block_use), and with
    /// [`StreamMisuse`](crate::device_runtime::ResourceError::StreamMisuse) if this is not a stream of the slice's runtime.
    pub fn read<'a, T: DeviceRepr>(
        &'a self,
        slice: &'a TrackedCudaSlice<T>,
    ) -> ResourceResult<ReadView<'a, T>> {
        OpenView::open(self, slice, Access::Read)
    }

    /// Opens a read and write of `slice` on this stream, for cudarc calls that take a `DevicePtrMut`.
    pub fn write<'a, T: DeviceRepr>(
        &'a self,
        slice: &'a mut TrackedCudaSlice<T>,
    ) -> ResourceResult<WriteView<'a, T>> {
        OpenView::open(self, slice, Access::ReadWrite)
    }
}

fn cuda_ordinal(stream: &DeviceStream) -> Result<usize> {
    let properties = stream.device().properties();
    match properties.kind {
        DeviceKind::Cuda => Ok(properties.ordinal as usize),
        _ => Err(DriverError::Unsupported { call: "CudarcStream" }.into()),
    }
}

fn translate(call: &'static str, error: cudarc_driver::DriverError) -> DriverError {
    DriverError::Code { call, code: error.0 as u32, name: format!("{:?}", error.0) }
}

/// The runtime's handles of streams that cudarc still references.
static KEPT: Mutex<Vec<(Weak<CudaStream>, Arc<DeviceStream>)>> = Mutex::new(Vec::new());

impl Drop for CudarcStream {
    fn drop(&mut self) {
        // SAFETY: only this drop takes the value; it runs once, and nothing reads the value afterwards.
        let lent = unsafe { ManuallyDrop::take(&mut self.lent) };
        let watched = Arc::downgrade(&lent);
        // The check and the drop are one atomic step: after the last reference nothing can create another.
        let others = Arc::into_inner(lent).is_none();
        let mut gone = Vec::new();
        {
            let mut kept = KEPT.lock();
            let mut at = 0;
            while at < kept.len() {
                if kept[at].0.strong_count() == 0 {
                    gone.push(kept.swap_remove(at));
                } else {
                    at += 1;
                }
            }
            if others {
                kept.push((watched, Arc::clone(&self.stream)));
            }
        }
        // Outside the lock: the drop of a stream's last handle calls the driver.
        drop(gone);
    }
}

debug_fields!(self: CudarcStream { stream: self.stream, cudarc: *self.lent });
