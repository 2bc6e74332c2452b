//! The header of a log, before its first record.

use std::time::{SystemTime, UNIX_EPOCH};

/// The frame of a log: whose it is and what its clock counts from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The process that wrote the log; zero when unknown.
    pub process: u32,
    /// Wall clock at time zero of the records, nanoseconds since 1970; zero when the records
    /// carry wall-clock time themselves or when their date is unknown.
    pub epoch_unix_nanos: u64,
    /// The device's name; empty when unknown.
    pub device_name: String,
}

impl Header {
    /// An empty header.
    pub fn new() -> Self {
        Self::default()
    }

    /// A header of this process with its epoch at the present time.
    pub fn of_this_process() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            process: std::process::id(),
            epoch_unix_nanos: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            device_name: String::new(),
        }
    }

    /// Sets the epoch.
    #[must_use]
    pub fn with_epoch_unix_nanos(mut self, nanos: u64) -> Self {
        self.epoch_unix_nanos = nanos;
        self
    }

    /// Sets the device name.
    #[must_use]
    pub fn with_device_name(mut self, name: impl Into<String>) -> Self {
        self.device_name = name.into();
        self
    }

    /// Sets the process.
    #[must_use]
    pub fn with_process(mut self, process: u32) -> Self {
        self.process = process;
        self
    }

    /// Wall-clock nanoseconds since 1970 of a record's time, saturating.
    pub fn unix_nanos(&self, record_nanos: u64) -> u64 {
        self.epoch_unix_nanos.saturating_add(record_nanos)
    }
}
