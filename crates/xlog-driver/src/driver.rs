//! The driver seam: the trait that a device implements.

use std::ffi::c_void;
use std::fmt;

use crate::{
    AsyncPools, DeviceProperties, DriverError, DriverResult, EventHandle, Gate, Graphs, HostMemory,
    MemoryInfo, MemoryRange, StreamHandle, VirtualMemory,
};

/// A host function queued on a stream. It must not call the driver; releasing a [`Gate`] is allowed.
pub type HostFn = Box<dyn FnOnce() + Send>;

/// Whether work queued on a stream runs or is being recorded into a graph.
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
    /// All work that was queued before.
    ForAll,
    /// Work may still run of a stream that is being captured, or that was destroyed without an event.
    ForSome,
}

/// One open device.
///
/// The crate documentation defines which side validates what, and the rules of every implementation.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Facts that do not change while the device is open.
    fn properties(&self) -> &DeviceProperties;

    /// Free and total memory of the physical device now.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Waits until everything queued on the device has completed. On CUDA this breaks every stream capture that is open in the process.
    fn synchronize(&self) -> DriverResult<()>;

    /// Waits until everything queued on streams of [`Driver::stream_create`] has completed, also on those that were destroyed, and
    /// leaves captures alone. A stream that is being captured is left out, with what was queued on it before: the answer says so.
    /// A driver that leaves streams out waits for their work in `free` and `free_host`, as CUDA's calls do.
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

    /// Like [`Driver::stream_query`], for the housekeeping of the stream's owner: a simulated device draws no order
    /// from the answer.
    fn stream_is_idle(&self, stream: StreamHandle) -> DriverResult<bool> {
        self.stream_query(stream)
    }

    /// A number that no other stream of this process ever has, unlike the handle, which is reused.
    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64>;

    /// Whether `stream` is being captured into a graph.
    fn stream_capture(&self, stream: StreamHandle) -> DriverResult<CaptureStatus>;

    /// Makes later work of `stream` wait for the latest record of `event`. A never-recorded event is no wait.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;

    /// The raw `CUstream`, for kernels launched by other libraries; `None` on a device that has no such thing.
    fn raw_stream(&self, stream: StreamHandle) -> Option<*mut c_void>;

    /// The handle of a stream that other code made. On CUDA `raw` is a `CUstream`, where null is the legacy stream; on a device with a handle
    /// table it is a number. Default: [`DriverError::Unsupported`].
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

    /// Destroys an event. A record still pending completes unseen, and a wait that was queued for it stays.
    ///
    /// # Safety
    /// - The event is the caller's to destroy: no other owner uses it.
    /// - Once this has succeeded, no call names the event, on any thread. CUDA reuses the handle for another event.
    unsafe fn event_destroy(&self, event: EventHandle) -> DriverResult<()>;

    /// Captures what is queued on `stream` now; an earlier record of the event is forgotten.
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

    /// Returns the memory of this device around `ptr`, if the driver knows any: an allocation or a mapping, or the part of it within
    /// one unit of mapping.
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

    /// Queues a copy from the host. `src` may be reused when this returns. An error leaves the destination unspecified.
    ///
    /// # Safety
    /// The destination range is live memory of this device when the work runs.
    unsafe fn copy_htod(&self, dst: u64, src: &[u8], stream: StreamHandle) -> DriverResult<()>;

    /// Queues a copy to the host and waits until the bytes are there. An error leaves `dst` unspecified.
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

    /// Queues a host function. Later work of `stream` waits for it. A panic in it is swallowed. When the device is lost
    /// before the stream gets there, it may never be run.
    fn host_fn(&self, stream: StreamHandle, work: HostFn) -> DriverResult<()>;

    /// Holds `stream`: what is queued after this call runs only once the gate is released or dropped.
    fn hold(&self, stream: StreamHandle) -> DriverResult<Gate>;

    // Reports. A device that checks the order of accesses wants to know what it cannot see; every other one ignores these calls.

    /// Names a stream in the device's reports.
    fn name_stream(&self, stream: StreamHandle, name: &str) -> DriverResult<()> {
        let _ = (stream, name);
        Ok(())
    }

    /// Announces that a sub-allocator hands out this range, in the order of `stream`; reports name it by `tag`.
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

    /// Announces that a sub-allocator takes this range back, in the order of `stream`.
    fn end_range(&self, ptr: u64, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let _ = (ptr, bytes, stream);
        Ok(())
    }

    // Capabilities.

    /// Stream-ordered pools, where the device has them.
    fn async_pools(&self) -> Option<&dyn AsyncPools> {
        None
    }

    /// Stream capture and graphs, where the device has them.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Page-locked host memory, where the device has it.
    fn host_memory(&self) -> Option<&dyn HostMemory> {
        None
    }

    /// Virtual memory management, where the device has it.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }
}
