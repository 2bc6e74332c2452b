//! A stream, and the work that can be queued on it.
//!
//! A [`DeviceStream`] is one lease's view of a driver stream. The driver stream may serve a later lease under another
//! [`StreamId`]. It is destroyed with its last owner: the pool, a lease or a resolved handle. A handle stays valid
//! without its pool.
//!
//! Invariants: work of one stream runs in the order it was queued; a call that queues work returns while an earlier
//! operation of its stream is held. This file validates no pointer and tracks no use: the caller of the `unsafe` calls
//! promises that ranges are live and ordered.

mod completion;
mod done;
mod raw;

use std::ffi::c_void;
use std::sync::Arc;

use xlog_base::debug_fields;
use xlog_driver::{CaptureInfo, Driver, DriverError, DriverResult, Gate, StreamHandle};
#[cfg(feature = "sim")]
use xlog_sim::SimKernel;

use crate::device_runtime::stream_ids::IssuedId;
use crate::device_runtime::{CaptureError, ResourceError, StreamId};
use crate::{CudaDevice, Result, XlogError};

pub(crate) use completion::Completion;
pub use done::StreamDone;
pub(crate) use raw::{CallGuard, RawStream, is_capture_refusal};

/// A stream of one device, from a [`StreamPool`](crate::device_runtime::StreamPool).
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use xlog_cuda::{CudaDevice, device_runtime::StreamPool};
///
/// let pool = StreamPool::with_defaults(Arc::new(CudaDevice::open("sim")?));
/// let stream = pool.lease()?;
/// let done = Arc::new(AtomicBool::new(false));
///
/// let gate = stream.hold()?;
/// let flag = done.clone();
/// stream.host_fn(move || flag.store(true, Ordering::Release))?;
/// assert!(!stream.query()?);
///
/// gate.release();
/// stream.synchronize()?;
/// assert!(done.load(Ordering::Acquire));
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct DeviceStream {
    id: IssuedId,
    raw: Arc<RawStream>,
}

impl DeviceStream {
    pub(crate) fn new(id: IssuedId, raw: Arc<RawStream>) -> Self {
        let stream = Self { id, raw };
        stream.raw.clock().header().set_leased(Some(stream.id().0));
        if let Some(observer) = stream.device().observer() {
            // The name only makes race reports readable, so a failure is ignored.
            let _ = observer.name_stream(stream.raw.handle(), &stream.id().to_string());
        }
        stream
    }

    pub(crate) fn raw(&self) -> &Arc<RawStream> {
        &self.raw
    }

    fn driver(&self) -> &dyn Driver {
        self.raw.device.driver().as_ref()
    }

    /// The id under which the pool knows this stream.
    pub fn id(&self) -> StreamId {
        self.id.id()
    }

    /// The device this stream belongs to.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.raw.device
    }

    /// Returns the driver's handle of the stream. A later lease may run on the same driver stream.
    ///
    /// It is valid as long as this object lives; it must not be destroyed. On CUDA it is the raw `CUstream`: from now on each use
    /// first checks whether the stream is being captured, as after [`DeviceStream::cu_stream`].
    pub fn handle(&self) -> StreamHandle {
        self.raw.mark_handle_escaped();
        self.raw.handle()
    }

    /// Returns the raw `CUstream`, for kernels of other libraries; `None` on the simulated devices.
    ///
    /// It is valid as long as this object lives; it must not be destroyed.
    pub fn cu_stream(&self) -> Option<*mut c_void> {
        self.raw.mark_handle_escaped();
        self.driver().raw_stream(self.raw.handle())
    }

    /// Queues a fill of `bytes` bytes at `ptr` with `value`.
    ///
    /// # Safety
    /// The range is live memory of this device when the work runs, and the work is ordered against all other work on it.
    pub unsafe fn memset(&self, ptr: u64, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller promises that the range is live when the work runs.
        unsafe { self.driver().memset(ptr, value, bytes, self.raw.handle())? };
        Ok(())
    }

    /// Queues a copy from the host. `src` may be reused when this returns.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with the range of `src.len()` bytes at `dst`.
    pub unsafe fn copy_htod(&self, dst: u64, src: &[u8]) -> Result<()> {
        // SAFETY: the caller promises that the range is live when the work runs.
        let copy = |raw: &RawStream| unsafe { raw.driver().copy_htod(dst, src, raw.handle()) };
        self.host_access("copy_htod", copy)
    }

    /// Queues a copy to the host and waits for the bytes. After an error `dst` is unspecified.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with the range of `dst.len()` bytes at `src`.
    pub unsafe fn copy_dtoh(&self, dst: &mut [u8], src: u64) -> Result<()> {
        // SAFETY: the caller promises that the range is live when the work runs.
        let copy = |raw: &RawStream| unsafe { raw.driver().copy_dtoh(dst, src, raw.handle()) };
        self.host_access("copy_dtoh", copy)
    }

    /// Queues a copy inside the device. The ranges must not overlap.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with both ranges.
    pub unsafe fn copy_dtod(&self, dst: u64, src: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller promises that both ranges are live when the work runs.
        unsafe { self.driver().copy_dtod(dst, src, bytes, self.raw.handle())? };
        Ok(())
    }

    /// Queues a host function; later work of this stream waits for it.
    ///
    /// It must not call the driver, and so must not own the last handle of a stream or device. It may release a [`Gate`]. A
    /// panic in it is swallowed.
    pub fn host_fn(&self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.host_access("host_fn", |raw| raw.driver().host_fn(raw.handle(), Box::new(work)))
    }

    /// Holds the stream: work queued after this call runs only once the gate is released or dropped.
    pub fn hold(&self) -> Result<Gate> {
        self.host_access("hold", |raw| raw.driver().hold(raw.handle()))
    }

    /// Waits until all work queued on this stream has completed. On the thread that uses the stream, later uses then need no wait
    /// for that work.
    pub fn synchronize(&self) -> Result<()> {
        self.host_access("synchronize", RawStream::synchronize_queued)
    }

    /// Returns true if all work queued on this stream has completed. Never waits.
    pub fn query(&self) -> Result<bool> {
        self.host_access("query", RawStream::query)
    }

    /// Makes later work of this stream wait for all work queued on `other` so far. The host does not wait.
    ///
    /// Both streams belong to the same open device, otherwise [`XlogError::DifferentDevices`].
    pub fn wait_for(&self, other: &DeviceStream) -> Result<()> {
        if !self.device().is_same(other.device()) {
            return Err(XlogError::DifferentDevices {
                call: "wait_for",
                left: format!("{} of {}", self.id(), self.device().spec()),
                right: format!("{} of {}", other.id(), other.device().spec()),
            });
        }
        if self.raw.handle() == other.raw.handle() {
            return Ok(());
        }
        // A stream that waits for captured work joins the capture.
        let may_join = || other.raw.handle_escaped();
        // The runtime begins no capture of either stream between the check and the wait.
        let _entered = loop {
            if may_join() {
                self.raw.mark_handle_escaped();
            }
            let entered = [self.raw.enter_call(), other.raw.enter_call()];
            if !may_join() || self.raw.handle_escaped() {
                break entered;
            }
        };
        self.check_one_capture(other)?;
        let driver = self.driver();
        let event = driver.event_create()?;
        let queued = driver
            .event_record(event, other.raw.handle())
            .and_then(|()| driver.stream_wait_event(self.raw.handle(), event));
        #[allow(unsafe_code)]
        // SAFETY: created here, and not used any more. A queued wait outlives its event.
        let destroyed = unsafe { driver.event_destroy(event) };
        queued?;
        Ok(destroyed?)
    }

    /// Refuses a call that needs the host while the stream is being captured: the work of the stream does not run.
    pub(crate) fn refuse_capture(&self, call: &'static str) -> Result<()> {
        self.host_access(call, |raw| raw.check_not_capturing(call))
    }

    /// Makes a call that needs the host; the driver refuses it while the stream is being captured.
    fn host_access<T>(
        &self,
        call: &'static str,
        ask: impl FnOnce(&RawStream) -> DriverResult<T>,
    ) -> Result<T> {
        ask(&self.raw).map_err(|error| match error {
            DriverError::Invalid { .. } if self.raw.check_not_capturing(call).is_err() => {
                ResourceError::from(CaptureError::HostAccess { call, stream: self.id() }).into()
            }
            other => other.into(),
        })
    }

    /// Refuses a wait that would break a capture: a captured stream may not wait for work outside, or for another capture.
    fn check_one_capture(&self, other: &DeviceStream) -> Result<()> {
        let may_be = |stream: &DeviceStream| stream.raw.handle_escaped();
        let either = may_be(self) || may_be(other);
        let Some(graphs) = self.driver().graphs().filter(|_| either) else { return Ok(()) };
        let info = |stream: &DeviceStream| match may_be(stream) {
            true => graphs.capture_info(stream.raw.handle()),
            false => Ok(None),
        };
        let (own, theirs, stream) = (info(self)?, info(other)?, self.id());
        // Another thread is about to begin a capture there, or has just ended one.
        let is_changing = |stream: &DeviceStream, info: &Option<CaptureInfo>| {
            info.is_none() && stream.raw.clock().header().is_captured()
        };
        if is_changing(self, &own) || is_changing(other, &theirs) {
            let refused = CaptureError::OtherCapture { stream, other: other.id().to_string() };
            return Err(ResourceError::from(refused).into());
        }
        let Some(own) = own else { return Ok(()) };
        let refused = match theirs {
            Some(theirs) if theirs.id == own.id => return Ok(()),
            Some(_) => CaptureError::OtherCapture { stream, other: other.id().to_string() },
            None => CaptureError::OutsideWait { stream, other: other.id() },
        };
        Err(ResourceError::from(refused).into())
    }

    /// Queues a simulated kernel; [`DriverError::Unsupported`] on a device that is not simulated.
    #[cfg(feature = "sim")]
    pub fn launch_sim(&self, kernel: SimKernel) -> Result<()> {
        match self.device().sim() {
            Some(sim) => Ok(sim.launch(self.raw.handle(), kernel)?),
            None => Err(DriverError::Unsupported { call: "launch_sim" }.into()),
        }
    }
}

debug_fields!(self: DeviceStream {
    id: self.id(), handle: self.raw.handle(), priority: self.raw.priority(),
    device: self.device().spec(),
});
