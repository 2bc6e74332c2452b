//! Sinks that write files: a copy into the thread's ring, and a thread that writes.
//!
//! The rings, the writer, rotation and what happens on a full disk are [`xlog_trace::Recorder`]'s; this turns a [`LogRecord`] into
//! its record. A full ring drops and counts by default; no failure of the file reaches the operation.

use std::path::Path;

use xlog_trace::{
    Action, Failure, Format, Record, Recorder, RecorderConfig, RecorderStats, TraceError,
    UseAccess, intern, intern_text,
};

use super::{LogAction, LogRecord, LogResult, LoggingSink, SinkError};
use crate::device_runtime::resource::Access;

impl From<TraceError> for SinkError {
    fn from(error: TraceError) -> Self {
        match error {
            TraceError::BadSetting { .. } => Self::Refused(error.to_string()),
            other => Self::Io(other.to_string()),
        }
    }
}

#[derive(Debug)]
struct FileSink {
    recorder: Recorder,
    /// What the times in the file count from.
    epoch: u64,
}

impl FileSink {
    fn create(path: &Path, format: Format, config: RecorderConfig) -> Result<Self, SinkError> {
        let epoch = config.header.epoch_unix_nanos;
        let recorder = Recorder::create(path, config.with_format(format)).map_err(|error| {
            match SinkError::from(error) {
                SinkError::Io(text) => SinkError::Io(format!("{}: {text}", path.display())),
                refused => refused,
            }
        })?;
        Ok(Self { recorder, epoch })
    }

    #[inline]
    fn emit(&self, record: &LogRecord) {
        self.recorder.emit(to_trace(record, self.epoch));
    }
}

/// Settings whose times are wall clock: no record can be older than the file.
fn default_config() -> RecorderConfig {
    let config = RecorderConfig::new();
    let header = config.header.clone().with_epoch_unix_nanos(0);
    config.with_header(header)
}

#[inline]
fn to_trace(record: &LogRecord, epoch: u64) -> Record {
    let action = match record.action {
        LogAction::Allocate => Action::Allocate,
        LogAction::Deallocate => Action::Deallocate,
        LogAction::ReapPending => Action::ReapPending,
        LogAction::UsePrepare => Action::UsePrepare,
        LogAction::UseFinish => Action::UseFinish,
    };
    // Nanoseconds fill 64 bits in the year 2554.
    let time = (record.timestamp_nanos as u64).saturating_sub(epoch);
    let mut out = Record::new(action, record.device_ordinal, record.order_counter, time)
        .with_thread(record.thread_id)
        .with_process(record.process_id)
        .with_latency_nanos(record.latency_nanos)
        .with_served_by(record.served_by);
    if let Some(stream) = record.stream_id {
        out = out.with_stream(stream.0);
    }
    if let Some(ptr) = record.ptr {
        out = out.with_ptr(ptr);
    }
    if let Some(bytes) = record.bytes {
        out = out.with_bytes(bytes as u64);
    }
    if let Some(granted) = record.granted {
        out = out.with_granted(granted as u64);
    }
    if let Some(align) = record.align {
        out = out.with_alignment(align as u64);
    }
    if let Some(generation) = record.generation {
        out = out.with_generation(generation.0);
    }
    if let Some(query) = record.query_id {
        out = out.with_query_id(query);
    }
    if let Some(tag) = record.tag {
        out = out.with_tag(intern(tag.0));
    }
    if let Some(access) = record.access {
        out = out.with_access(match access {
            Access::Read => UseAccess::Read,
            Access::Write => UseAccess::Write,
            Access::ReadWrite => UseAccess::ReadWrite,
        });
    }
    match &record.result {
        LogResult::Ok => out,
        LogResult::Err { kind, message } => out.with_failure(failure(kind, message)),
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
            /// Creates the file, replacing one that is there, and starts its writer.
            pub fn create(path: impl AsRef<Path>) -> Result<Self, SinkError> {
                Self::with_config(path, default_config())
            }

            /// The same with settings for the rings, overflow, rotation and errors. The format in them is not looked at.
            pub fn with_config(
                path: impl AsRef<Path>,
                config: RecorderConfig,
            ) -> Result<Self, SinkError> {
                FileSink::create(path.as_ref(), $format, config).map(Self)
            }

            /// What has been written, dropped and failed so far.
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
