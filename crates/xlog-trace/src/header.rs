//! The header of a log, before its first record.

use std::time::{SystemTime, UNIX_EPOCH};

/// The writer's process, the epoch of the records' times, and the device.
///
/// ```
/// let header = xlog_trace::Header::new().with_epoch_unix_nanos(1_000).with_device_name("H200");
/// assert_eq!(header.unix_nanos(5), 1_005);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The process that wrote the log; zero when unknown.
    pub process: u32,
    /// Wall clock at time zero of the records, in nanoseconds since 1970. Zero if the records carry wall-clock time
    /// themselves or their date is unknown.
    pub epoch_unix_nanos: u64,
    /// The device's name; empty when unknown.
    pub device_name: String,
}

impl Header {
    /// Creates an empty header.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a header of this process whose epoch is now.
    pub fn of_this_process() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            process: std::process::id(),
            epoch_unix_nanos: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            device_name: String::new(),
        }
    }

    xlog_base::setters! {
        /// Sets the epoch.
        with_epoch_unix_nanos(nanos: u64) { epoch_unix_nanos: nanos }
        /// Sets the device name.
        with_device_name(name: impl Into<String>) { device_name: name.into() }
        /// Sets the process.
        with_process(process: u32) { process: process }
    }

    /// Converts a record's time to wall-clock nanoseconds since 1970, saturating.
    pub fn unix_nanos(&self, record_nanos: u64) -> u64 {
        self.epoch_unix_nanos.saturating_add(record_nanos)
    }
}
