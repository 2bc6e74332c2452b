//! Where records go, and the two sinks that need no file.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::LogRecord;

/// Why a sink did not take a record.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SinkError {
    /// The sink does not want it, or has no room.
    #[error("the sink refused a record: {0}")]
    Refused(String),
    /// The sink's file or connection failed.
    #[error("the sink failed to write: {0}")]
    Io(String),
}

/// Takes the records of a [`LoggingResource`](super::LoggingResource).
///
/// `emit` runs on the thread of the operation, before the operation returns: what it does is what the operation waits for. No
/// lock is held meanwhile, so it may use the resource itself, as long as it comes to an end.
pub trait LoggingSink: Send + Sync {
    /// Takes one record. An error is counted by the resource and goes no further.
    fn emit(&self, record: LogRecord) -> Result<(), SinkError>;

    /// Records that were taken without an error and then lost. Exact once the emitting threads and a flush are done.
    fn dropped_records(&self) -> u64 {
        0
    }

    /// Returns when everything taken before is where it should be.
    fn flush(&self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Takes everything and keeps nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullSink;

impl NullSink {
    /// A sink that keeps nothing.
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
    /// An empty sink.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// All records, in the order of the history: by their `order_counter`.
    #[must_use]
    pub fn snapshot(&self) -> Vec<LogRecord> {
        let mut records = self.records().clone();
        records.sort_by_key(|record| record.order_counter);
        records
    }

    /// Forgets all records.
    pub fn clear(&self) {
        self.records().clear();
    }

    /// How many records there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records().len()
    }

    /// True when there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records().is_empty()
    }

    fn records(&self) -> MutexGuard<'_, Vec<LogRecord>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LoggingSink for InMemorySink {
    fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
        self.records().push(record);
        Ok(())
    }
}

impl fmt::Debug for InMemorySink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InMemorySink").field("records", &self.len()).finish()
    }
}
