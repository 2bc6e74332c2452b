//! Orders streams and memory of other libraries with a runtime.
//!
//! A leased stream of the pool, the proxy, represents a foreign stream. Before foreign work is queued, the foreign stream waits
//! for the proxy; afterwards the proxy waits for the foreign stream. For the runtime the work is on the proxy, where its uses
//! close with an exact event. A small block of the runtime represents foreign memory: uses of the memory are uses of that block.
//!
//! Invariants:
//! - Only calls on an [`AdoptedStream`] access its foreign handle, and nothing is cached by handle. A handle that the driver
//!   reuses is never mistaken for the earlier stream, and the legacy and per-thread default streams need no special care.
//! - A proxy is in the capture of its foreign stream, or neither is captured. A stream whose capture cannot be joined is
//!   refused before anything is recorded on it.

use std::ffi::c_void;
use std::marker::PhantomData;

use xlog_base::debug_fields;
use xlog_driver::{
    CaptureStatus, DeviceKind, Driver, DriverError, DriverResult, EventHandle, StreamHandle,
};

use super::graph::CaptureError;
use super::resource::{Access, ResourceError, StreamId};
use super::stream_pool::{StreamLease, StreamPool};
use crate::{DeviceRepr, GpuMemoryManager, Result, TrackedCudaSlice};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// A stream of another library, such as a `CUstream` of cudarc, for work that uses buffers of a runtime.
///
/// Name [`AdoptedStream::id`] in a [`LaunchRecorder`](crate::LaunchRecorder), and queue the work in [`AdoptedStream::run`]. The
/// object stays on its thread, because a thread's default stream does. docs/cudarc.md has an example.
#[must_use = "dropping it ends the adoption"]
pub struct AdoptedStream {
    proxy: StreamLease,
    foreign: StreamHandle,
    event: EventHandle,
    _of_this_thread: PhantomData<*const ()>,
}

impl StreamPool {
    /// Adopts a stream of another library, until the returned object is dropped. Takes a lease for its proxy.
    ///
    /// On CUDA `stream` is a `CUstream`; null and the constants for the legacy stream and the thread's default stream are
    /// accepted. On the simulated device it is the number of a [`StreamHandle`]. If other code captures it, the proxy joins the
    /// capture, and [`XlogDeviceRuntime::join_capture`](super::XlogDeviceRuntime::join_capture) serves allocations and uses on it.
    /// Drop the returned object before that capture ends.
    ///
    /// # Safety
    /// `stream` is a stream of this device's primary context, and is not destroyed before the returned object is dropped.
    ///
    /// ```
    /// use xlog_cuda::driver::Driver;
    /// use xlog_cuda::prelude::*;
    ///
    /// let runtime = XlogDeviceRuntime::open("sim")?;
    /// let driver = runtime.device().driver().clone();
    /// let (stream, ptr) = (driver.stream_create(0)?, driver.alloc(64)?); // of another library
    /// let memory = GpuMemoryManager::with_runtime(runtime.clone());
    /// // SAFETY: the stream and the memory live until the end of this example.
    /// unsafe {
    ///     driver.memset(ptr, 7, 64, stream)?; // the other library's work
    ///     let adopted = runtime.stream_pool().adopt(stream.number() as *mut _)?;
    ///     let theirs = adopted.adopt::<u8>(&memory, ptr, 64)?;
    ///     assert_eq!(theirs.to_vec_on(StreamId::DEFAULT)?, [7; 64]); // after the other library's work
    ///     adopted.give_back(theirs)?;
    ///     driver.memset(ptr, 8, 64, stream)?; // after the read
    /// }
    /// assert!(runtime.device().races().is_empty());
    /// # Ok::<(), XlogError>(())
    /// ```
    pub unsafe fn adopt(&self, stream: *mut c_void) -> Result<AdoptedStream> {
        let driver = self.device().driver();
        // SAFETY: the caller promises that it is a stream of this device.
        let foreign = unsafe { driver.foreign_stream(stream)? };
        let is_captured = joins_capture(&**driver, foreign)?;
        let proxy = self.lease()?;
        // A stream that waits for captured work joins the capture, and other code may capture the foreign stream.
        proxy.stream().raw().mark_handle_escaped();
        let event = driver.event_create()?;
        let adopted = AdoptedStream { proxy, foreign, event, _of_this_thread: PhantomData };
        if is_captured {
            adopted.order(adopted.proxy.stream().raw().handle(), foreign)?;
        }
        Ok(adopted)
    }
}

impl StreamPool {
    /// Issues an id of this pool for a stream of another library, for the life of the pool. Blocks can be allocated on it. Work
    /// that the library queues there needs no announcement, as on any block's own stream. No limit of the pool counts it.
    ///
    /// Use it for streams that are never destroyed, such as those of PyTorch, and [`StreamPool::adopt`] for all others. `stream` is
    /// as there, except that the constant for the thread's default stream is refused: it names another stream in each thread.
    ///
    /// # Safety
    /// `stream` is a stream of this device's primary context, and is not destroyed while this pool, its leases or its handles live.
    ///
    /// ```
    /// use xlog_cuda::driver::Driver;
    /// use xlog_cuda::prelude::*;
    ///
    /// let runtime = XlogDeviceRuntime::open("sim")?;
    /// let driver = runtime.device().driver().clone();
    /// let stream = driver.stream_create(0)?; // of another library
    /// // SAFETY: the stream is not destroyed.
    /// let id = unsafe { runtime.stream_pool().enlist(stream.number() as *mut _)? };
    /// let block = runtime.allocate(64, id, AllocTag("rows"))?;
    /// // SAFETY: the block is live, and its own stream needs no announcement.
    /// unsafe { driver.memset(block.ptr, 7, 64, stream)? };
    /// runtime.deallocate(block)?;
    /// assert!(runtime.device().races().is_empty());
    /// # Ok::<(), XlogError>(())
    /// ```
    pub unsafe fn enlist(&self, stream: *mut c_void) -> Result<StreamId> {
        let driver = self.device().driver();
        if self.device().properties().kind == DeviceKind::Cuda && stream.addr() == PER_THREAD {
            return Err(DriverError::invalid(
                "enlist",
                "the thread's default stream",
                "a stream that is the same in every thread",
            )
            .into());
        }
        // SAFETY: the caller promises that it is a stream of this device.
        let foreign = unsafe { driver.foreign_stream(stream)? };
        // Also refuses a handle without a stream.
        driver.stream_capture(foreign)?;
        Ok(self.enlist_handle(foreign)?)
    }
}

impl AdoptedStream {
    /// Returns the id that represents this stream in recorders and copies.
    pub fn id(&self) -> StreamId {
        self.proxy.id()
    }

    /// Runs `work`, which queues on the foreign stream, ordered as if on the stream [`AdoptedStream::id`].
    ///
    /// Call it inside [`LaunchRecorder::run`](crate::LaunchRecorder::run), or between a preflight and its commit.
    pub fn run<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.check_one_capture()?;
        self.order(self.foreign, self.proxy.stream().raw().handle())?;
        let back = Rejoin(Some(self));
        let worked = work();
        let joined = back.now();
        let value = worked?;
        joined?;
        Ok(value)
    }

    /// Adopts `len` elements at `ptr`, which this stream may have pending work on, as a buffer of the runtime.
    ///
    /// The manager's limit counts it; the runtime's budget counts only the small block that represents it. Dropping the buffer does
    /// not free the memory: [`AdoptedStream::give_back`] orders this stream after all uses. Memory unknown to the driver is refused.
    ///
    /// # Safety
    /// The memory stays until all work with this buffer has completed. Other work on it is ordered: before this call on this
    /// stream, or after [`AdoptedStream::give_back`].
    #[track_caller]
    pub unsafe fn adopt<T: DeviceRepr>(
        &self,
        memory: &GpuMemoryManager,
        ptr: u64,
        len: usize,
    ) -> Result<TrackedCudaSlice<T>> {
        self.refuse_capture("adopt")?;
        self.rejoin()?;
        memory.on_stream(self.id()).alloc_adopted(ptr, len)
    }

    /// Makes this stream wait for every use of a buffer, and drops the buffer. The owner of adopted memory may then free it in
    /// the order of this stream.
    pub fn give_back<T: DeviceRepr>(&self, buffer: TrackedCudaSlice<T>) -> Result<()> {
        self.refuse_capture("give_back")?;
        let (Some(runtime), Some(block)) = (buffer.runtime(), buffer.id()) else { return Ok(()) };
        runtime.prepare_block_use(block, self.id(), Access::Write)?;
        let ordered = self.order(self.foreign, self.proxy.stream().raw().handle());
        let finished = runtime.finish_block_use(block, self.id(), Access::Write);
        ordered?;
        Ok(finished?)
    }

    fn driver(&self) -> &dyn Driver {
        &**self.proxy.device().driver()
    }

    /// Refuses a call while other code captures the stream.
    fn refuse_capture(&self, call: &'static str) -> Result<()> {
        match self.driver().stream_capture(self.foreign)? {
            CaptureStatus::None => Ok(()),
            _ => {
                Err(ResourceError::from(CaptureError::AlreadyCaptured { call, stream: self.id() })
                    .into())
            }
        }
    }

    /// Refuses work on a foreign stream whose capture has begun or ended since it was adopted.
    fn check_one_capture(&self) -> Result<()> {
        let Err(refused) = check_not_capturing(self.driver(), self.foreign) else { return Ok(()) };
        match self.is_in_one_capture() {
            true => Ok(()),
            false => Err(refused),
        }
    }

    /// Whether the proxy and the foreign stream belong to one capture.
    fn is_in_one_capture(&self) -> bool {
        let Some(graphs) = self.driver().graphs() else { return false };
        let id = |stream| graphs.capture_info(stream).ok().flatten().map(|info| info.id);
        let own = id(self.proxy.stream().raw().handle());
        own.is_some() && own == id(self.foreign)
    }

    /// Makes later work of `waiting` wait for the work queued on `other`.
    fn order(&self, waiting: StreamHandle, other: StreamHandle) -> DriverResult<()> {
        let driver = self.driver();
        driver.event_record(self.event, other)?;
        driver.stream_wait_event(waiting, self.event)
    }

    /// Makes the proxy wait for the foreign stream; if no wait can be queued, the host waits.
    fn rejoin(&self) -> Result<()> {
        let ordered = self.order(self.proxy.stream().raw().handle(), self.foreign);
        Ok(ordered.or_else(|_| self.driver().stream_synchronize(self.foreign))?)
    }
}

/// Rejoins, even if the work panics: the recorder then closes its uses on the proxy.
struct Rejoin<'a>(Option<&'a AdoptedStream>);

impl Rejoin<'_> {
    fn now(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), AdoptedStream::rejoin)
    }
}

impl Drop for Rejoin<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            let _ = stream.rejoin();
        }
    }
}

/// Whether other code captures the stream, so that a proxy can join.
fn joins_capture(driver: &dyn Driver, stream: StreamHandle) -> Result<bool> {
    let info = driver.graphs().map(|graphs| graphs.capture_info(stream)).transpose()?;
    if info.flatten().is_some() {
        return Ok(true);
    }
    check_not_capturing(driver, stream).map(|()| false)
}

fn check_not_capturing(driver: &dyn Driver, stream: StreamHandle) -> Result<()> {
    match driver.stream_capture(stream)? {
        CaptureStatus::None => Ok(()),
        status => Err(ResourceError::from(DriverError::invalid(
            "adopt",
            format!("{stream}, whose capture is {status:?}"),
            "a stream that is not being captured into a graph",
        ))
        .into()),
    }
}

impl Drop for AdoptedStream {
    fn drop(&mut self) {
        if self.is_in_one_capture() {
            // A capture ends without error only if all its streams have rejoined.
            let _ = self.order(self.foreign, self.proxy.stream().raw().handle());
        }
        // SAFETY: created by `adopt`, and not used any more.
        let _ = unsafe { self.driver().event_destroy(self.event) };
    }
}

debug_fields!(self: AdoptedStream { proxy: self.proxy, foreign: self.foreign, .. });
