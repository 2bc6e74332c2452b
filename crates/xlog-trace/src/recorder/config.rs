//! The settings of a recorder, checked before anything is created.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::encoder::Format;
use crate::error::TraceError;
use crate::header::Header;

/// The treatment of a record whose ring is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// It is dropped and counted; emitting never waits.
    #[default]
    Drop,
    /// Emitting waits for room, at most [`RecorderConfig::block_limit`]; then it is dropped and counted.
    Block,
}

/// The handler of the first failure to write; the text names the file and the reason.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum OnError {
    /// A line on standard error.
    #[default]
    Stderr,
    /// A call, on the writer thread.
    Call(Arc<dyn Fn(&str) + Send + Sync>),
    /// Nothing; it is only counted.
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
    /// The header of the file. Times of records count from its epoch: set that to zero to
    /// emit wall-clock nanoseconds.
    pub header: Header,
    /// Records in each thread's ring. A record is 104 bytes: the default of 16,384 is 1.6 MiB a
    /// thread. A larger ring takes longer bursts and costs more per record, since a thread goes
    /// round the whole of it and it must fit a core's cache to be fast.
    pub ring_records: usize,
    /// The treatment of records when a ring is full.
    pub overflow: Overflow,
    /// Longest wait for room under [`Overflow::Block`]. After one wait that long no thread waits again
    /// until the writer moves on.
    pub block_limit: Duration,
    /// The interval of the writer's polls while no ring fills up.
    pub write_interval: Duration,
    /// Size at which a new file is begun; none for one file without end.
    pub rotate_bytes: Option<u64>,
    /// Finished files that are kept, as `name.1` (the newest) to `name.N`.
    pub keep_files: u32,
    /// The handler of the first failure to write.
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
    /// The defaults.
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
        /// Sets the maximum wait for room.
        with_block_limit(limit: Duration) { block_limit: limit }
        /// Sets the interval of the writer's polls.
        with_write_interval(interval: Duration) { write_interval: interval }
    }

    /// Sets rotation: a new file at `bytes`, with `keep` finished ones kept.
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
