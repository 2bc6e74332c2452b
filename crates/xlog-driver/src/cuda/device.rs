//! [`CudaDriver`]: the [`Driver`] trait implemented by driver calls.
//!
//! Each method binds the context, makes one driver call, and translates its code. Copies through pinned buffers, gates, host functions,
//! pools and virtual memory have their own files.
//!
//! Invariant: a handle that this device did not make is refused before the driver sees it. That the object is alive follows from the
//! promise of its destroyer: no call names a destroyed handle.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::abi;
use super::api::{Api, Calls};
use super::capture::Relaxed;
use super::core::{DriverCore, Registry};
use super::{gates, host_fn, library, open};
use crate::{
    AsyncPools, CaptureStatus, DeviceProperties, Driver, DriverError, DriverResult, EventHandle,
    Gate, Graphs, HostFn, HostMemory, MemoryInfo, MemoryRange, StreamHandle, VirtualMemory, Waited,
};

/// A GPU behind the CUDA driver.
///
/// All drivers of one ordinal in this process share one primary context, also with other CUDA libraries. Dropping the last one, gates
/// included, waits for the device and releases the context.
pub struct CudaDriver {
    pub(super) core: Arc<DriverCore>,
}

impl CudaDriver {
    /// Opens the device that the CUDA driver shows as `ordinal`.
    ///
    /// # Errors
    /// [`DriverError::Unavailable`] names the missing part (libcuda, a recent driver or the device) and the remedy.
    pub fn open(ordinal: usize) -> DriverResult<Arc<Self>> {
        static OPEN: Registry = Registry::new();
        let api = library::api()?;
        let core = OPEN.share(ordinal, || open::open_with(api, ordinal))?;
        Ok(Arc::new(Self { core }))
    }

    /// Opens a device of the given driver, outside the process-wide registry.
    #[cfg(test)]
    pub(super) fn open_with(api: Arc<Api>, ordinal: usize) -> DriverResult<Arc<Self>> {
        Ok(Arc::new(Self { core: Arc::new(open::open_with(api, ordinal)?) }))
    }

    pub(super) fn api(&self) -> &Api {
        &self.core.context.api
    }

    pub(super) fn calls(&self) -> &Calls {
        &self.api().calls
    }

    /// Refuses a stream that is being captured, for work that a graph launch must not repeat.
    pub(super) fn refuse_capture(&self, call: &'static str, stream: CUstream) -> DriverResult<()> {
        if self.core.context.capture_status(stream)? != abi::CAPTURE_NONE {
            let value = "a stream that is being captured";
            return Err(DriverError::invalid(
                call,
                value,
                "a stream whose work is run, not recorded",
            ));
        }
        Ok(())
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let properties = &self.core.properties;
        f.debug_struct("CudaDriver")
            .field("ordinal", &properties.ordinal)
            .field("name", &properties.name)
            .field("uuid", &properties.uuid)
            .finish_non_exhaustive()
    }
}

#[inline]
pub(super) fn refuse_zero(call: &'static str, bytes: usize) -> DriverResult<()> {
    if bytes == 0 {
        return Err(DriverError::invalid(call, "0 bytes", "at least 1 byte"));
    }
    Ok(())
}

impl Driver for CudaDriver {
    fn properties(&self) -> &DeviceProperties {
        &self.core.properties
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let _bound = self.core.context.bind("memory_info")?;
        let (mut free, mut total): (usize, usize) = (0, 0);
        // SAFETY: both out pointers are valid, and the context is current.
        let code = unsafe { (self.calls().mem_get_info)(&raw mut free, &raw mut total) };
        self.core.context.check("cuMemGetInfo", code)?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn memory_at(&self, ptr: u64) -> DriverResult<Option<MemoryRange>> {
        /// Memory type, device, first address, size, whether memory is mapped there.
        const ATTRIBUTES: [c_uint; 5] = [2, 9, 11, 12, 13];
        const DEVICE_MEMORY: c_uint = 2;
        let _bound = self.core.context.bind("memory_at")?;
        let mut attributes = ATTRIBUTES;
        // An address that the driver does not know leaves zeros.
        let (mut kind, mut ordinal, mut start, mut bytes, mut mapped) =
            (0 as c_uint, -1 as c_int, 0_u64, 0_usize, 0 as c_uint);
        let mut data: [*mut c_void; 5] = [
            (&raw mut kind).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
            (&raw mut mapped).cast(),
        ];
        // SAFETY: there are as many pointers as attributes, each to a value of its attribute's type; the context is current.
        let code = unsafe {
            (self.calls().pointer_get_attributes)(
                ATTRIBUTES.len() as c_uint,
                attributes.as_mut_ptr(),
                data.as_mut_ptr(),
                ptr,
            )
        };
        self.core.context.check("cuPointerGetAttributes", code)?;
        let own = i64::from(ordinal) == i64::from(self.core.properties.ordinal);
        let is_known = kind == DEVICE_MEMORY && own && mapped != 0 && bytes > 0;
        if !is_known {
            return Ok(None);
        }
        // For mapped memory the driver reports the whole reservation, so only the mapping unit around the address is known to be mapped.
        let unit = self.core.properties.granularity as u64;
        let (first, end) = (start, start.saturating_add(bytes as u64));
        let (first, end) = match ptr.checked_rem(unit) {
            Some(inside) => (first.max(ptr - inside), end.min((ptr - inside).saturating_add(unit))),
            None => (first, end),
        };
        Ok(Some(MemoryRange { start: first, bytes: end.saturating_sub(first) }))
    }

    fn synchronize(&self) -> DriverResult<()> {
        let context = &self.core.context;
        let _bound = context.bind("synchronize")?;
        let wait = || context.synchronize().map(|()| Waited::ForAll);
        let _all = self.core.staging.around_wait(wait)?;
        let _relaxed = Relaxed::enter(self.api());
        self.core.staging.trim(context);
        Ok(())
    }

    fn synchronize_streams(&self) -> DriverResult<Waited> {
        let context = &self.core.context;
        let _bound = context.bind_relaxed("synchronize_streams")?;
        let waited = self.core.staging.around_wait(|| self.core.streams.synchronize(context))?;
        self.core.staging.trim(context);
        Ok(waited)
    }

    fn stream_create(&self, priority: i32) -> DriverResult<StreamHandle> {
        let context = &self.core.context;
        let _bound = context.bind_relaxed("stream_create")?;
        let range = &self.core.properties;
        let priority = priority.max(range.greatest_priority).min(range.least_priority);
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the out pointer is valid, and the context is current.
        let code = unsafe {
            (self.calls().stream_create)(&raw mut stream, abi::STREAM_NON_BLOCKING, priority)
        };
        context.check("cuStreamCreateWithPriority", code)?;
        self.core.streams.add(stream);
        self.core.stream_handle(stream)
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("stream_destroy", stream)?;
        let _bound = self.core.context.bind_relaxed("stream_destroy")?;
        self.core.streams.depart(&self.core.context, stream);
        // SAFETY: the caller promises that the stream is its own, and gives it up.
        let code = unsafe { (self.calls().stream_destroy)(stream) };
        self.core.context.check("cuStreamDestroy", code)
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("stream_synchronize", stream)?;
        let _bound = self.core.context.bind_relaxed("stream_synchronize")?;
        // SAFETY: the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (self.calls().stream_synchronize)(stream) };
        self.core.context.check("cuStreamSynchronize", code)
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        let stream = self.core.raw_stream("stream_query", stream)?;
        let _bound = self.core.context.bind_relaxed("stream_query")?;
        // SAFETY: the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (self.calls().stream_query)(stream) };
        self.core.context.check_query("cuStreamQuery", code)
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        let stream = self.core.raw_stream("stream_id", stream)?;
        let _bound = self.core.context.bind("stream_id")?;
        let mut id = 0;
        // SAFETY: the out pointer is valid; the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (self.calls().stream_get_id)(stream, &raw mut id) };
        self.core.context.check("cuStreamGetId", code)?;
        Ok(id)
    }

    fn stream_capture(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let stream = self.core.raw_stream("stream_capture", stream)?;
        let _bound = self.core.context.bind("stream_capture")?;
        Ok(match self.core.context.capture_status(stream)? {
            abi::CAPTURE_NONE => CaptureStatus::None,
            abi::CAPTURE_ACTIVE => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        })
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("stream_wait_event", stream)?;
        let _bound = self.core.context.bind("stream_wait_event")?;
        let event = self.core.raw_event("stream_wait_event", event)?;
        // SAFETY: both handles are of this device, and no call names one once it is destroyed.
        let code = unsafe { (self.calls().stream_wait_event)(stream, event, 0) };
        self.core.context.check("cuStreamWaitEvent", code)
    }

    fn raw_stream(&self, stream: StreamHandle) -> Option<*mut c_void> {
        self.core.raw_stream("raw_stream", stream).ok().map(|stream| stream.cast())
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> DriverResult<StreamHandle> {
        // CU_STREAM_LEGACY: in code compiled for per-thread default streams, null would name the thread's stream.
        let raw = if raw.is_null() { ptr::without_provenance_mut(1) } else { raw };
        self.core.stream_handle(raw.cast())
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        let _bound = self.core.context.bind_relaxed("event_create")?;
        self.core.event_handle(self.core.context.create_event()?)
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        let _bound = self.core.context.bind_relaxed("event_destroy")?;
        let event = self.core.raw_event("event_destroy", event)?;
        // SAFETY: the caller promises that the event is its own, and gives it up.
        let code = unsafe { (self.calls().event_destroy)(event) };
        self.core.context.check("cuEventDestroy", code)
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("event_record", stream)?;
        let _bound = self.core.context.bind("event_record")?;
        let event = self.core.raw_event("event_record", event)?;
        // SAFETY: both handles are of this device, and no call names one once it is destroyed.
        let code = unsafe { (self.calls().event_record)(event, stream) };
        self.core.context.check("cuEventRecord", code)
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let _bound = self.core.context.bind_relaxed("event_query")?;
        let event = self.core.raw_event("event_query", event)?;
        // SAFETY: the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (self.calls().event_query)(event) };
        self.core.context.check_query("cuEventQuery", code)
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        let _bound = self.core.context.bind_relaxed("event_synchronize")?;
        let event = self.core.raw_event("event_synchronize", event)?;
        // SAFETY: the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (self.calls().event_synchronize)(event) };
        self.core.context.check("cuEventSynchronize", code)
    }

    fn alloc(&self, bytes: usize) -> DriverResult<u64> {
        refuse_zero("alloc", bytes)?;
        let _bound = self.core.context.bind_relaxed("alloc")?;
        let mut block = 0;
        // SAFETY: the out pointer is valid, and the context is current.
        let code = unsafe { (self.calls().mem_alloc)(&raw mut block, bytes) };
        self.core.context.check_allocation("cuMemAlloc", code, bytes as u64)?;
        Ok(block)
    }

    unsafe fn free(&self, ptr: u64) -> DriverResult<()> {
        let context = &self.core.context;
        let _bound = context.bind_relaxed("free")?;
        // SAFETY: the caller promises a live block on which all work has completed.
        let code = unsafe { (self.calls().mem_free)(ptr) };
        context.check("cuMemFree", code)?;
        self.core.staging.trim(context);
        Ok(())
    }

    unsafe fn memset(
        &self,
        dst: u64,
        value: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let stream = self.core.raw_stream("memset", stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.core.context.bind("memset")?;
        // SAFETY: the caller promises that the range is live when the work runs.
        let code = unsafe { (self.calls().memset_d8_async)(dst, value, bytes, stream) };
        self.core.context.check("cuMemsetD8Async", code)
    }

    unsafe fn copy_htod(&self, dst: u64, src: &[u8], stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("copy_htod", stream)?;
        if src.is_empty() {
            return Ok(());
        }
        let context = &self.core.context;
        let _bound = context.bind_relaxed("copy_htod")?;
        self.refuse_capture("copy_htod", stream)?;
        // SAFETY: the caller promises that the destination is live when the work runs.
        unsafe { self.core.staging.copy_in(context, dst, src, stream) }
    }

    unsafe fn copy_dtoh(&self, dst: &mut [u8], src: u64, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.core.raw_stream("copy_dtoh", stream)?;
        if dst.is_empty() {
            return Ok(());
        }
        let context = &self.core.context;
        let _bound = context.bind_relaxed("copy_dtoh")?;
        self.refuse_capture("copy_dtoh", stream)?;
        // SAFETY: the caller promises that the source is live when the work runs.
        unsafe { self.core.staging.copy_out(context, dst, src, stream) }
    }

    unsafe fn copy_dtod(
        &self,
        dst: u64,
        src: u64,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let stream = self.core.raw_stream("copy_dtod", stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.core.context.bind("copy_dtod")?;
        // SAFETY: the caller promises that both ranges are live when the work runs.
        let code = unsafe { (self.calls().memcpy_dtod_async)(dst, src, bytes, stream) };
        self.core.context.check("cuMemcpyDtoDAsync", code)
    }

    fn host_fn(&self, stream: StreamHandle, work: HostFn) -> DriverResult<()> {
        let stream = self.core.raw_stream("host_fn", stream)?;
        let context = &self.core.context;
        let _bound = context.bind("host_fn")?;
        self.refuse_capture("host_fn", stream)?;
        host_fn::queue(context, stream, work)
    }

    fn hold(&self, stream: StreamHandle) -> DriverResult<Gate> {
        let stream = self.core.raw_stream("hold", stream)?;
        let _bound = self.core.context.bind_relaxed("hold")?;
        self.refuse_capture("hold", stream)?;
        gates::hold(&self.core, stream)
    }

    fn async_pools(&self) -> Option<&dyn AsyncPools> {
        self.core.properties.async_pools.then_some(self as &dyn AsyncPools)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        self.api().graphs.is_some().then_some(self as &dyn Graphs)
    }

    fn host_memory(&self) -> Option<&dyn HostMemory> {
        Some(self)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.core.properties.virtual_memory.then_some(self as &dyn VirtualMemory)
    }
}
