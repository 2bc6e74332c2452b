//! One of our streams, lent to cudarc.
//!
//! cudarc hands out its stream by `Arc`, also inside buffers that it frees on that stream later. The driver stream below must
//! outlive every such `Arc`, and cudarc has no place for our handle. So if a [`CudarcStream`] is dropped while references to
//! cudarc's stream exist, our handle moves into a process-wide list until the last `Arc` is dropped.
//!
//! Invariant: while a strong reference to a wrapped cudarc stream exists, the driver stream behind it is alive.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};

use cudarc::driver::{self as cudarc_driver, CudaContext, CudaStream};
use xlog_base::Mutex;
use xlog_driver::{DeviceKind, DriverError};

use crate::device_runtime::{ResourceResult, StreamId};
use crate::interop::{ReadView, WriteView};
use crate::{DeviceRepr, DeviceStream, Result, TrackedCudaSlice, XlogError};

/// A stream of ours that cudarc can launch on.
///
/// ```no_run
/// use std::sync::Arc;
/// use xlog_cuda::interop::CudarcStream;
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("cuda:0")?;
/// let lease = runtime.stream_pool().lease()?;
/// let stream = CudarcStream::new(Arc::clone(lease.stream()))?;
/// let copy = stream.cudarc().clone_htod(&[1_u32, 2, 3]); // a slice of cudarc on our stream
/// # drop(copy);
/// # Ok::<(), XlogError>(())
/// ```
///
/// It keeps the stream alive; a lease still goes back to its pool when the lease is dropped, so hold the lease as long as
/// nobody else is to run work on the same stream.
pub struct CudarcStream {
    lent: ManuallyDrop<Arc<CudaStream>>,
    stream: Arc<DeviceStream>,
}

impl CudarcStream {
    /// Lends `stream` to cudarc; [`DriverError::Unsupported`] on a device that is not a GPU.
    pub fn new(stream: Arc<DeviceStream>) -> Result<Self> {
        let ordinal = cuda_ordinal(&stream)?;
        let context = CudaContext::new(ordinal)
            .map_err(|error| XlogError::Driver(translate("CudaContext::new", error)))?;
        Self::with_context(stream, &context)
    }

    /// [`CudarcStream::new`] in a context that the program has already.
    ///
    /// It must be the primary context of the stream's device, in which the stream was made:
    /// [`XlogError::DifferentDevices`] otherwise.
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
        // SAFETY: the stream was made in the primary context of this device, which `context` is. Its owner is `stream`, which
        // is kept as long as anybody has the wrapper: see the drop below. Work on it is ordered by the hooks of the runtime.
        let lent = unsafe { context.wrap_borrowed_stream(raw.cast()) };
        Ok(Self { lent: ManuallyDrop::new(lent), stream })
    }

    /// The stream as cudarc knows it.
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.lent
    }

    /// The context as cudarc knows it, to load modules in.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.lent.context()
    }

    /// The stream as the runtime knows it.
    pub fn stream(&self) -> &Arc<DeviceStream> {
        &self.stream
    }

    /// The id of the stream, for a [`LaunchRecorder`](crate::LaunchRecorder).
    pub fn id(&self) -> StreamId {
        self.stream.id()
    }

    /// Opens a read of `slice` on this stream, for cudarc calls that take a `DevicePtr`.
    ///
    /// Refused like [`prepare_block_use`](crate::device_runtime::DeviceMemoryResource::prepare_block_use), and with
    /// [`StreamMisuse`](crate::device_runtime::ResourceError::StreamMisuse) when this is no stream of the slice's runtime.
    pub fn read<'a, T: DeviceRepr>(
        &'a self,
        slice: &'a TrackedCudaSlice<T>,
    ) -> ResourceResult<ReadView<'a, T>> {
        ReadView::open(self, slice)
    }

    /// Opens a use of `slice` on this stream that reads and writes, for cudarc calls that take a `DevicePtrMut`.
    pub fn write<'a, T: DeviceRepr>(
        &'a self,
        slice: &'a mut TrackedCudaSlice<T>,
    ) -> ResourceResult<WriteView<'a, T>> {
        WriteView::open(self, slice)
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

/// Streams that cudarc still has, with our handles that keep them alive.
static KEPT: Mutex<Vec<(Weak<CudaStream>, Arc<DeviceStream>)>> = Mutex::new(Vec::new());

impl Drop for CudarcStream {
    fn drop(&mut self) {
        // SAFETY: this is the only place that takes the value, it runs once, and nothing reads it afterwards.
        let lent = unsafe { ManuallyDrop::take(&mut self.lent) };
        let watched = Arc::downgrade(&lent);
        // The check and the drop are one step: after the last reference no code can make another.
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
        // Outside the lock: the last handle of a stream destroys it, which is a driver call.
        drop(gone);
    }
}

impl fmt::Debug for CudarcStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudarcStream")
            .field("stream", &self.stream)
            .field("cudarc", &*self.lent)
            .finish()
    }
}
