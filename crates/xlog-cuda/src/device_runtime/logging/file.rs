//! Sinks that write files: `emit` copies a record into its thread's ring, and a writer thread writes it.
//!
//! [`xlog_trace::Recorder`] has the rings, the writer, rotation and the handling of a full disk; this module converts a
//! [`LogRecord`]. By default a full ring drops and counts records. No failure of the file fails the operation.

use std::path::Path;

use xlog_trace::{
    Action, Failure, Fields, Format, NameId, Recorder, RecorderConfig, RecorderStats, TraceError,
    UseAccess, intern, intern_site, intern_text,
};

use super::{LogAction, LogRecord, LogResult, LoggingSink, SinkError};
use crate::device_runtime::resource::Access;

impl From<TraceError> for SinkError {
    fn from(error: TraceError) -> Self {
        match error {
            TraceError::BadSetting { .. } | TraceError::InUse { .. } => {
                Self::Refused(error.to_string())
            }
            other => Self::Io(other.to_string()),
        }
    }
}

#[derive(Debug)]
struct FileSink {
    recorder: Recorder,
    /// The epoch of the times in the file.
    epoch: u64,
}

impl FileSink {
    fn create(path: &Path, format: Format, config: RecorderConfig) -> Result<Self, SinkError> {
        let epoch = config.header.epoch_unix_nanos;
        let recorder = Recorder::create(path, config.with_format(format))?;
        Ok(Self { recorder, epoch })
    }

    #[inline]
    fn emit(&self, record: &LogRecord) {
        let tag = record.tag.map(|tag| intern(tag.0));
        let failure = match &record.result {
            LogResult::Ok => None,
            LogResult::Err { kind, message } => Some(failure(kind, message)),
        };
        self.recorder.emit_fields(fields(record, tag, failure, self.epoch));
    }
}

/// Settings with the epoch 1970, so that no record is older than the epoch.
pub(in crate::device_runtime) fn default_config() -> RecorderConfig {
    let config = RecorderConfig::new();
    let header = config.header.clone().with_epoch_unix_nanos(0);
    config.with_header(header)
}

#[inline(always)]
fn fields(record: &LogRecord, tag: Option<NameId>, failure: Option<Failure>, epoch: u64) -> Fields {
    let action = match record.action {
        LogAction::Allocate => Action::Allocate,
        LogAction::Deallocate => Action::Deallocate,
        LogAction::ReapPending => Action::ReapPending,
        LogAction::UsePrepare => Action::UsePrepare,
        LogAction::UseFinish => Action::UseFinish,
        LogAction::SegmentTake => Action::SegmentTake,
        LogAction::SegmentReturn => Action::SegmentReturn,
    };
    let access = record.access.map(|access| match access {
        Access::Read => UseAccess::Read,
        Access::Write => UseAccess::Write,
        Access::ReadWrite => UseAccess::ReadWrite,
    });
    Fields {
        action,
        device: record.device_ordinal,
        order: record.order_counter,
        // Nanoseconds fill 64 bits in the year 2554.
        time_nanos: (record.timestamp_nanos as u64).saturating_sub(epoch),
        thread: record.thread_id,
        process: record.process_id,
        stream: record.stream_id.map(|stream| stream.0),
        ptr: record.ptr,
        bytes: record.bytes.map(|bytes| bytes as u64),
        granted: record.granted.map(|granted| granted as u64),
        alignment: record.align.map(|align| align as u64),
        tag,
        query_id: record.query_id,
        generation: record.generation.map(|generation| generation.0),
        latency_nanos: record.latency_nanos,
        served_by: record.served_by.into(),
        access,
        failure,
        site: record.site.map(intern_site),
        stack: record.stack,
    }
}

#[cold]
fn failure(kind: &'static str, message: &str) -> Failure {
    Failure { kind: intern(kind), message: intern_text(message) }
}

macro_rules! file_sink {
    ($(#[$meta:meta])* $name:ident, $format:expr) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $name(FileSink);

        impl $name {
            /// Creates the file, or replaces an existing one, and starts its writer. A file that has a writer is refused.
            pub fn create(path: impl AsRef<Path>) -> Result<Self, SinkError> {
                Self::with_config(path, default_config())
            }

            /// [`create`](Self::create) with settings for the rings, overflow, rotation and errors. Their format is ignored.
            pub fn with_config(
                path: impl AsRef<Path>,
                config: RecorderConfig,
            ) -> Result<Self, SinkError> {
                FileSink::create(path.as_ref(), $format, config).map(Self)
            }

            /// Returns the counts of written, dropped and failed records.
            #[must_use]
            pub fn stats(&self) -> RecorderStats {
                self.0.recorder.stats()
            }
        }

        impl LoggingSink for $name {
            #[inline]
            fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
                self.0.emit(&record);
                Ok(())
            }

            fn dropped_records(&self) -> u64 {
                self.0.recorder.dropped_records()
            }

            fn flush(&self) -> Result<(), SinkError> {
                Ok(self.0.recorder.flush()?)
            }
        }
    };
}

file_sink!(
    /// Writes a compact binary file (`.xtrace`), which `xlogmem` and the crate `xlog-trace` read.
    ///
    /// Dropping it writes what is left.
    BinarySink,
    Format::Binary
);
file_sink!(
    /// Writes CSV with a header line. Its first columns are thread, time, action, pointer, bytes, stream, device, tag and query id.
    ///
    /// Dropping it writes what is left.
    CsvSink,
    Format::Csv
);
