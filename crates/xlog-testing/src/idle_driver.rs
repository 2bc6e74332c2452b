//! A driver without a device.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_cuda::driver::{
    CaptureStatus, DeviceKind, DeviceProperties, DeviceUuid, Driver, DriverError, DriverResult,
    EventHandle, Gate, HostFn, MemoryInfo, MemoryRange, StreamHandle,
};

const TOTAL: u64 = 1 << 40;

/// A driver that runs and stores nothing: all queued work counts as complete. Its calls take constant time and no memory, so a program's
/// cost on it is the runtime's cost.
///
/// Addresses increase and are never reused. Memory has no bytes, so copies to the host are refused.
#[derive(Debug)]
pub struct IdleDriver {
    properties: DeviceProperties,
    /// The last number of a stream or an event.
    last: AtomicU64,
    /// The end of the allocated addresses.
    end: AtomicU64,
}

impl IdleDriver {
    /// Makes a device of 1 TiB without pools and virtual memory.
    #[must_use]
    pub fn new() -> Self {
        let properties = DeviceProperties {
            kind: DeviceKind::Simulated,
            ordinal: 0,
            name: "idle".to_owned(),
            uuid: DeviceUuid([0; 16]),
            total_bytes: TOTAL,
            driver_version: 12_000,
            compute_capability: (0, 0),
            multiprocessors: 0,
            least_priority: 0,
            greatest_priority: 0,
            async_pools: false,
            virtual_memory: false,
            granularity: 0,
            peak_bandwidth: None,
            allocation_alignment: 256,
        };
        Self { properties, last: AtomicU64::new(0), end: AtomicU64::new(1 << 20) }
    }

    fn number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }
}

fn refuse(call: &'static str, accepted: &'static str) -> DriverError {
    DriverError::invalid(call, "a call of an idle driver", accepted)
}

impl Default for IdleDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl Driver for IdleDriver {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        Ok(MemoryInfo { free: TOTAL - self.end.load(Ordering::Relaxed), total: TOTAL })
    }

    fn synchronize(&self) -> DriverResult<()> {
        Ok(())
    }

    fn stream_create(&self, _priority: i32) -> DriverResult<StreamHandle> {
        Ok(StreamHandle::numbered(self.number()))
    }

    unsafe fn stream_destroy(&self, _stream: StreamHandle) -> DriverResult<()> {
        Ok(())
    }

    fn stream_synchronize(&self, _stream: StreamHandle) -> DriverResult<()> {
        Ok(())
    }

    fn stream_query(&self, _stream: StreamHandle) -> DriverResult<bool> {
        Ok(true)
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        Ok(stream.number())
    }

    fn stream_capture(&self, _stream: StreamHandle) -> DriverResult<CaptureStatus> {
        Ok(CaptureStatus::None)
    }

    fn stream_wait_event(&self, _stream: StreamHandle, _event: EventHandle) -> DriverResult<()> {
        Ok(())
    }

    fn raw_stream(&self, _stream: StreamHandle) -> Option<*mut c_void> {
        None
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        Ok(EventHandle::numbered(self.number()))
    }

    unsafe fn event_destroy(&self, _event: EventHandle) -> DriverResult<()> {
        Ok(())
    }

    fn event_record(&self, _event: EventHandle, _stream: StreamHandle) -> DriverResult<()> {
        Ok(())
    }

    fn event_query(&self, _event: EventHandle) -> DriverResult<bool> {
        Ok(true)
    }

    fn event_synchronize(&self, _event: EventHandle) -> DriverResult<()> {
        Ok(())
    }

    fn alloc(&self, bytes: usize) -> DriverResult<u64> {
        Ok(self.end.fetch_add((bytes as u64).next_multiple_of(1 << 20), Ordering::Relaxed))
    }

    unsafe fn free(&self, _ptr: u64) -> DriverResult<()> {
        Ok(())
    }

    fn memory_at(&self, _ptr: u64) -> DriverResult<Option<MemoryRange>> {
        Ok(None)
    }

    unsafe fn memset(
        &self,
        _dst: u64,
        _value: u8,
        _bytes: usize,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn copy_htod(&self, _dst: u64, _src: &[u8], _stream: StreamHandle) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn copy_dtoh(
        &self,
        _dst: &mut [u8],
        _src: u64,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Err(refuse("copy_dtoh", "no copies to the host: its memory has no bytes"))
    }

    unsafe fn copy_dtod(
        &self,
        _dst: u64,
        _src: u64,
        _bytes: usize,
        _stream: StreamHandle,
    ) -> DriverResult<()> {
        Ok(())
    }

    fn host_fn(&self, _stream: StreamHandle, work: HostFn) -> DriverResult<()> {
        work();
        Ok(())
    }

    fn hold(&self, _stream: StreamHandle) -> DriverResult<Gate> {
        Err(refuse("hold", "no holds: it queues nothing"))
    }
}
