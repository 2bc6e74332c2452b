//! The cost of calls and work in simulated time.
//!
//! The model computes times and delays nothing. Host calls advance the host's clock, work advances its stream's clock, and a
//! synchronisation joins them. It does not model contention between streams.

/// Costs in nanoseconds, and bandwidths in bytes per nanosecond.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct LatencyModel {
    /// Recording an event.
    pub event_record: u64,
    /// Making a stream wait for an event.
    pub stream_wait: u64,
    /// Querying an event.
    pub event_query: u64,
    /// Querying a stream.
    pub stream_query: u64,
    /// Synchronising with an idle stream.
    pub synchronize: u64,
    /// Creating and destroying an event, each.
    pub event_create: u64,
    /// A stream-ordered allocation or free, each.
    pub async_alloc: u64,
    /// A plain allocation or free, each.
    pub alloc: u64,
    /// Creating, mapping or unmapping physical memory, each.
    pub map: u64,
    /// Queueing a memset, copy, kernel or host function.
    pub launch: u64,
    /// Querying free memory.
    pub memory_info: u64,
    /// The start-up time of device work.
    pub work_start: u64,
    /// Bytes per nanosecond inside the device.
    pub device_bandwidth: u64,
    /// Bytes per nanosecond between host and device.
    pub host_bandwidth: u64,
}

impl LatencyModel {
    /// The costs of one NVIDIA H200 (driver 580, CUDA 13.0); the bandwidths are rounded down.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            event_record: 369,
            stream_wait: 355,
            event_query: 285,
            stream_query: 298,
            synchronize: 644,
            event_create: 256,
            async_alloc: 613,
            alloc: 45_000,
            map: 26_000,
            launch: 1_208,
            memory_info: 6_800,
            work_start: 2_000,
            device_bandwidth: 4_000,
            host_bandwidth: 50,
        }
    }
}
