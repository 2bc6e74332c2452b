//! Buffers as cudarc's `DevicePtr` and `DevicePtrMut`.
//!
//! A view is one open use of a buffer on one stream, from its creation to its drop. The use orders all work that cudarc queues on that
//! stream with the view's pointer. If cudarc requests the pointer for another stream, that stream waits for the view's stream, and the
//! host waits for that stream afterwards, because cudarc's guard can do nothing else. Work on the view's stream avoids these waits.
//!
//! If a view is forgotten, its use stays open, and the memory is never freed.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, SyncOnDrop};

use super::CudarcStream;
use crate::device_runtime::{Access, ResourceError, ResourceResult};
use crate::{DeviceRepr, TrackedCudaSlice, XlogError};

/// An open read of a buffer on a stream, until this is dropped.
pub type ReadView<'a, T> = OpenView<'a, T, &'a TrackedCudaSlice<T>>;

/// An open read and write of a buffer on a stream, until this is dropped.
pub type WriteView<'a, T> = OpenView<'a, T, &'a mut TrackedCudaSlice<T>>;

/// An open use of the buffer that `S` borrows, until this is dropped; see [`ReadView`] and [`WriteView`].
#[must_use = "dropping the view closes its use at once"]
pub struct OpenView<'a, T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> {
    slice: S,
    opened: Opened<'a>,
}

/// The open use of a view.
struct Opened<'a> {
    stream: &'a CudarcStream,
    ptr: CUdeviceptr,
    access: Access,
    is_open: bool,
}

impl<'a> Opened<'a> {
    fn prepare<T: DeviceRepr>(
        stream: &'a CudarcStream,
        slice: &TrackedCudaSlice<T>,
        access: Access,
    ) -> ResourceResult<Self> {
        let ptr = slice.address();
        if slice.is_empty() {
            return Ok(Self { stream, ptr, access, is_open: false });
        }
        let Some(runtime) = slice.runtime() else {
            return Err(ResourceError::StreamMisuse(format!(
                "no runtime backs the slice at {ptr:#x}, so its uses cannot be ordered"
            )));
        };
        // The default stream has the same id in every pool, so the id alone does not identify the pool.
        let known = runtime.stream_pool().resolve(stream.id());
        if known.is_none_or(|known| known.raw().handle() != stream.stream().raw().handle()) {
            return Err(ResourceError::unknown_stream(stream.id()));
        }
        runtime.prepare_first_use(slice, stream.id(), access)?;
        Ok(Self { stream, ptr, access, is_open: true })
    }

    fn finish<T: DeviceRepr>(&mut self, slice: &TrackedCudaSlice<T>) -> ResourceResult<()> {
        match slice.runtime() {
            Some(runtime) if std::mem::take(&mut self.is_open) => {
                runtime.finish_first_use(slice, self.stream.id(), self.access)
            }
            _ => Ok(()),
        }
    }

    /// Returns the pointer for work on `user`, and cudarc's guard that orders that work.
    fn pointer_for<'b>(&self, user: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        let ours = self.stream.cudarc();
        if user.cu_stream() == ours.cu_stream() {
            return (self.ptr, SyncOnDrop::Sync(None));
        }
        if user.join(ours).is_err() {
            // Without an event the host waits, without harm to captures; cudarc stores the error for the next fallible call.
            match self.stream.stream().synchronize() {
                Ok(()) => {}
                Err(XlogError::Resource(ResourceError::Capture(_))) => {
                    let refused = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                    user.context().record_err::<()>(Err(DriverError(refused)));
                }
                Err(_) => user.context().record_err(ours.synchronize()),
            }
        }
        (self.ptr, SyncOnDrop::sync_stream(user))
    }
}

impl<'a, T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> OpenView<'a, T, S> {
    pub(super) fn open(stream: &'a CudarcStream, slice: S, access: Access) -> ResourceResult<Self> {
        let opened = Opened::prepare(stream, &slice, access)?;
        Ok(Self { slice, opened })
    }

    /// Closes the use, as the drop does, and returns the error.
    pub fn close(mut self) -> ResourceResult<()> {
        self.opened.finish(&self.slice)
    }

    pub(super) fn ptr(&self) -> &CUdeviceptr {
        &self.opened.ptr
    }
}

impl<T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> Drop for OpenView<'_, T, S> {
    fn drop(&mut self) {
        // A drop cannot return the error; `close` does.
        let _ = self.opened.finish(&self.slice);
    }
}

impl<T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> DeviceSlice<T> for OpenView<'_, T, S> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.opened.stream.cudarc()
    }
}

impl<T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> DevicePtr<T> for OpenView<'_, T, S> {
    fn device_ptr<'b>(&'b self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        self.opened.pointer_for(stream)
    }
}

impl<T: DeviceRepr> DevicePtrMut<T> for WriteView<'_, T> {
    fn device_ptr_mut<'b>(&'b mut self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        self.opened.pointer_for(stream)
    }
}

impl<T: DeviceRepr, S: Deref<Target = TrackedCudaSlice<T>>> fmt::Debug for OpenView<'_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenView")
            .field("slice", &*self.slice)
            .field("stream", &self.opened.stream.id())
            .field("access", &self.opened.access)
            .field("is_open", &self.opened.is_open)
            .finish()
    }
}
