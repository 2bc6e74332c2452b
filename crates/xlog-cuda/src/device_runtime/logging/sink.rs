//! Sinks: the trait, and the two sinks without a file.

use xlog_base::{Mutex, MutexGuard, debug_fields};

use super::LogRecord;

/// The reason why a sink did not accept a record.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SinkError {
    /// The sink refused the record, or is full.
    #[error("the sink refused a record: {0}")]
    Refused(String),
    /// The sink's file or connection failed.
    #[error("the sink failed to write: {0}")]
    Io(String),
}

/// Receives the records of a [`LoggingResource`](super::LoggingResource).
///
/// `emit` runs on the operation's thread before the operation returns, and delays it. No lock is held, so it may use the resource itself,
/// as long as that recursion ends.
pub trait LoggingSink: Send + Sync {
    /// Receives one record. The resource counts an error and ignores it otherwise.
    fn emit(&self, record: LogRecord) -> Result<(), SinkError>;

    /// Records that were accepted and then lost. Exact after the emitting threads have ended and a flush.
    fn dropped_records(&self) -> u64 {
        0
    }

    /// Waits until all records accepted before are written.
    fn flush(&self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Discards all records.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullSink;

impl NullSink {
    /// Creates the sink.
    #[must_use]
    pub fn new() -> Self {
        Self
    }
}

impl LoggingSink for NullSink {
    fn emit(&self, _record: LogRecord) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Keeps every record, for tests. Grows without bound, under one lock.
#[derive(Default)]
pub struct InMemorySink(Mutex<Vec<LogRecord>>);

impl InMemorySink {
    /// Creates an empty sink.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all records, sorted by their `order_counter`.
    pub fn snapshot(&self) -> Vec<LogRecord> {
        let mut records = self.records().clone();
        records.sort_by_key(|record| record.order_counter);
        records
    }

    /// Removes all records.
    pub fn clear(&self) {
        self.records().clear();
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.records().len()
    }

    /// Returns whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.records().is_empty()
    }

    fn records(&self) -> MutexGuard<'_, Vec<LogRecord>> {
        self.0.lock()
    }
}

impl LoggingSink for InMemorySink {
    fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
        self.records().push(record);
        Ok(())
    }
}

debug_fields!(self: InMemorySink { records: self.len() });
