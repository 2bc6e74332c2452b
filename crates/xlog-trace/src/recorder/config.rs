//! The settings of a recorder, checked before it creates anything.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::encoder::Format;
use crate::error::TraceError;
use crate::header::Header;

/// How a recorder treats a record whose ring is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// Drops and counts it; emitting never waits.
    #[default]
    Drop,
    /// Waits for space, at most [`RecorderConfig::block_limit`]; then drops and counts it.
    Block,
}

/// The handler of the first failed write; its text names the file and the reason.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum OnError {
    /// Prints a line to standard error.
    #[default]
    Stderr,
    /// Calls a function on the writer thread.
    Call(Arc<dyn Fn(&str) + Send + Sync>),
    /// Only counts the failure.
    Silent,
}

impl fmt::Debug for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stderr => "Stderr",
            Self::Call(_) => "Call(..)",
            Self::Silent => "Silent",
        })
    }
}

/// Settings of a [`Recorder`](crate::Recorder).
///
/// ```
/// use xlog_trace::{Overflow, RecorderConfig};
///
/// let config = RecorderConfig::new().with_overflow(Overflow::Block).with_rotation(64 << 20, 4);
/// # let _ = config;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RecorderConfig {
    /// The file's format.
    pub format: Format,
    /// The header of the file. Times of records count from its epoch; with an epoch of zero they are wall-clock
    /// nanoseconds.
    pub header: Header,
    /// Records in each thread's ring, 104 bytes each: the default of 16,384 takes 1.6 MiB per thread. A larger ring
    /// absorbs longer bursts but costs more per record once it no longer fits in a core's cache.
    pub ring_records: usize,
    /// The policy for a full ring.
    pub overflow: Overflow,
    /// The maximum wait under [`Overflow::Block`]. After a wait that timed out, no thread waits until the writer progresses.
    pub block_limit: Duration,
    /// The interval of the writer's polls while no ring fills up.
    pub write_interval: Duration,
    /// Size at which a new file is begun; `None` for one unbounded file.
    pub rotate_bytes: Option<u64>,
    /// The number of finished files kept, as `name.1` (the newest) to `name.N`.
    pub keep_files: u32,
    /// The handler of the first failed write.
    pub on_error: OnError,
}

impl Default for RecorderConfig {
    fn default() -> Self {
        Self {
            format: Format::Binary,
            header: Header::of_this_process(),
            ring_records: 1 << 14,
            overflow: Overflow::Drop,
            block_limit: Duration::from_secs(5),
            write_interval: Duration::from_millis(10),
            rotate_bytes: None,
            keep_files: 4,
            on_error: OnError::Stderr,
        }
    }
}

impl RecorderConfig {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    xlog_base::setters! {
        /// Sets the format.
        with_format(format: Format) { format: format }
        /// Sets the header.
        with_header(header: Header) { header: header }
        /// Sets the number of records in a ring.
        with_ring_records(records: usize) { ring_records: records }
        /// Sets the overflow policy.
        with_overflow(overflow: Overflow) { overflow: overflow }
        /// Sets the maximum wait for space.
        with_block_limit(limit: Duration) { block_limit: limit }
        /// Sets the interval of the writer's polls.
        with_write_interval(interval: Duration) { write_interval: interval }
    }

    /// Sets rotation: a new file at `bytes`, with `keep` finished files kept.
    #[must_use]
    pub fn with_rotation(mut self, bytes: u64, keep: u32) -> Self {
        self.rotate_bytes = Some(bytes);
        self.keep_files = keep;
        self
    }

    /// Sets the handler of the first failure.
    #[must_use]
    pub fn with_on_error(mut self, on_error: OnError) -> Self {
        self.on_error = on_error;
        self
    }

    pub(super) fn check(&self) -> Result<(), TraceError> {
        let refuse = |setting, value: String, expected| {
            Err(TraceError::BadSetting { setting, value, expected })
        };
        if !(16..=1 << 24).contains(&self.ring_records) {
            let expected = "16 to 16777216 records";
            return refuse("ring_records", self.ring_records.to_string(), expected);
        }
        if self.write_interval.is_zero() || self.write_interval > Duration::from_secs(60) {
            let expected = "more than zero and at most 60 s";
            return refuse("write_interval", format!("{:?}", self.write_interval), expected);
        }
        if self.rotate_bytes.is_some_and(|bytes| bytes < 4096) {
            let bytes = self.rotate_bytes.unwrap_or(0);
            return refuse("rotate_bytes", bytes.to_string(), "at least 4096 bytes");
        }
        if self.keep_files > 10_000 {
            return refuse("keep_files", self.keep_files.to_string(), "at most 10000 files");
        }
        Ok(())
    }
}
