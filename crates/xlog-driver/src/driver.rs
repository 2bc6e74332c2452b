//! The [`Driver`] trait, which a device implements.

use std::ffi::c_void;
use std::fmt;

use crate::{
    AsyncPools, DeviceProperties, DriverError, DriverResult, EventHandle, Gate, Graphs, HostMemory,
    MemoryInfo, MemoryRange, StreamHandle, VirtualMemory,
};

/// A host function queued on a stream. It must not call the driver; releasing a [`Gate`] is allowed.
pub type HostFn = Box<dyn FnOnce() + Send>;

/// The capture state of a stream: its work runs, or is recorded into a graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// Work is run.
    None,
    /// Work is recorded into a graph.
    Active,
    /// A capture was broken and must be ended.
    Invalidated,
}

/// The extent of a wait by [`Driver::synchronize_streams`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Waited {
    /// The wait covered all work queued before it.
    ForAll,
    /// Work may still run on a stream that is being captured, or that was destroyed without an event.
    ForSome,
}

/// One open device.
///
/// The crate documentation defines who validates what, and the rules of every implementation.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Facts that do not change while the device is open.
    fn properties(&self) -> &DeviceProperties;

    /// Free and total memory of the physical device now.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Waits until everything queued on the device has completed. On CUDA this invalidates every open stream capture of the process.
    fn synchronize(&self) -> DriverResult<()>;

    /// Waits for everything queued on streams of [`Driver::stream_create`], including destroyed ones, and leaves captures valid. A stream
    /// that is being captured is left out with its earlier work; the result is then [`Waited::ForSome`]. A driver that leaves streams out
    /// waits for their work in `free` and `free_host`, as CUDA's calls do.
    fn synchronize_streams(&self) -> DriverResult<Waited> {
        self.synchronize().map(|()| Waited::ForAll)
    }

    // Streams.

    /// Creates a non-blocking stream. The priority is clamped to the device's range; 0 is normal, less is more urgent.
    fn stream_create(&self, priority: i32) -> DriverResult<StreamHandle>;

    /// Destroys a stream. Work already queued still runs.
    ///
    /// ```compile_fail
    /// fn destroy(driver: &dyn xlog_driver::Driver, stream: xlog_driver::StreamHandle) {
    ///     let _ = driver.stream_destroy(stream);
    /// }
    /// ```
    ///
    /// # Safety
    /// - The stream is the caller's to destroy: no other owner uses it.
    /// - Once this has succeeded, no call names the stream, on any thread. CUDA reuses the handle for another stream.
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()>;

    /// Waits until everything queued on `stream` has completed.
    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()>;

    /// True when everything queued on `stream` has completed.
    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool>;

    /// [`Driver::stream_query`] for a stream's own bookkeeping: the simulated device derives no happens-before order from the result.
    fn stream_is_idle(&self, stream: StreamHandle) -> DriverResult<bool> {
        self.stream_query(stream)
    }

    /// Returns a number that no other stream of this process ever has. The handle, in contrast, is reused.
    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64>;

    /// Returns the capture state of `stream`.
    fn stream_capture(&self, stream: StreamHandle) -> DriverResult<CaptureStatus>;

    /// Makes later work of `stream` wait for the latest record of `event`. An event that was never recorded causes no wait.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;

    /// Returns the raw `CUstream`, for kernels launched by other libraries; `None` on a device without one.
    fn raw_stream(&self, stream: StreamHandle) -> Option<*mut c_void>;

    /// Returns the handle of a stream that other code made. On CUDA `raw` is a `CUstream`, and null is the legacy stream. On a device with
    /// a handle table it is a number. Default: [`DriverError::Unsupported`].
    ///
    /// # Safety
    /// `raw` is a live stream of this device's context, and no call names the handle once the stream is destroyed.
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> DriverResult<StreamHandle> {
        let _ = raw;
        Err(DriverError::Unsupported { call: "foreign_stream" })
    }

    // Events.

    /// Creates an event without timing.
    fn event_create(&self) -> DriverResult<EventHandle>;

    /// Destroys an event. A pending record completes unobserved, and a queued wait for it stays.
    ///
    /// # Safety
    /// - The event is the caller's to destroy: no other owner uses it.
    /// - Once this has succeeded, no call names the event, on any thread. CUDA reuses the handle for another event.
    unsafe fn event_destroy(&self, event: EventHandle) -> DriverResult<()>;

    /// Captures what is queued on `stream` now, and replaces an earlier record of the event.
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()>;

    /// True when the latest record has completed, or there is none.
    fn event_query(&self, event: EventHandle) -> DriverResult<bool>;

    /// Waits until the latest record has completed.
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()>;

    // Memory.

    /// Allocates `bytes`, usable by work queued on any stream after this call.
    fn alloc(&self, bytes: usize) -> DriverResult<u64>;

    /// Frees a block of [`Driver::alloc`]. May wait for the device.
    ///
    /// # Safety
    /// `ptr` is a live block of this device, and the host has seen all work on it complete.
    unsafe fn free(&self, ptr: u64) -> DriverResult<()>;

    /// Returns the allocation or mapping of this device that contains `ptr`, or the part of it within one mapping unit.
    fn memory_at(&self, ptr: u64) -> DriverResult<Option<MemoryRange>>;

    // Work.

    /// Queues a fill of `bytes` bytes with `value`.
    ///
    /// # Safety
    /// The range is live memory of this device when the work runs.
    unsafe fn memset(
        &self,
        dst: u64,
        value: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()>;

    /// Queues a copy from the host. `src` may be reused on return. An error leaves the destination unspecified.
    ///
    /// # Safety
    /// The destination range is live memory of this device when the work runs.
    unsafe fn copy_htod(&self, dst: u64, src: &[u8], stream: StreamHandle) -> DriverResult<()>;

    /// Copies to the host in stream order, and waits for completion. An error leaves `dst` unspecified.
    ///
    /// # Safety
    /// The source range is live memory of this device when the work runs.
    unsafe fn copy_dtoh(&self, dst: &mut [u8], src: u64, stream: StreamHandle) -> DriverResult<()>;

    /// Queues a copy inside the device, or between two devices of the same kind. The ranges must not overlap.
    ///
    /// # Safety
    /// Both ranges are live memory when the work runs.
    unsafe fn copy_dtod(
        &self,
        dst: u64,
        src: u64,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()>;

    /// Queues a host function, for which later work of `stream` waits. A panic in it is caught and discarded. On a device that is lost
    /// before `stream` reaches it, the function may never run.
    fn host_fn(&self, stream: StreamHandle, work: HostFn) -> DriverResult<()>;

    /// Holds `stream`: work queued after this call runs only once the gate is released or dropped.
    fn hold(&self, stream: StreamHandle) -> DriverResult<Gate>;

    // Reports for a device that checks the order of accesses; other devices ignore these calls.

    /// Names a stream in the device's reports.
    fn name_stream(&self, stream: StreamHandle, name: &str) -> DriverResult<()> {
        let _ = (stream, name);
        Ok(())
    }

    /// Announces that a sub-allocator allocates this range, in the order of `stream`. Reports name the range by `tag`.
    fn begin_range(
        &self,
        ptr: u64,
        bytes: usize,
        stream: StreamHandle,
        tag: &str,
    ) -> DriverResult<()> {
        let _ = (ptr, bytes, stream, tag);
        Ok(())
    }

    /// Announces that a sub-allocator frees this range, in the order of `stream`.
    fn end_range(&self, ptr: u64, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let _ = (ptr, bytes, stream);
        Ok(())
    }

    // Capabilities.

    /// Returns stream-ordered pools, if the device has them.
    fn async_pools(&self) -> Option<&dyn AsyncPools> {
        None
    }

    /// Returns stream capture and graphs, if the device has them.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Returns page-locked host memory, if the device has it.
    fn host_memory(&self) -> Option<&dyn HostMemory> {
        None
    }

    /// Returns virtual memory management, if the device has it.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }
}
