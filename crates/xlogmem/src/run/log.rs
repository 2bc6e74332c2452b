//! The log of a run and its lost records.
//!
//! A record that did not reach the file affects the run's status and is reported in its JSON and text.
use std::sync::Arc;

use serde::Serialize;
use xlog_cuda::device_runtime::LoggingSink;
use xlog_report::text_report::TextReport;
use xlog_workloads::stack::StackOptions;

use super::arguments::StackArguments;

pub(crate) struct RunLog {
    file: String,
    sink: Arc<dyn LoggingSink>,
}

/// The result of a log, as it appears in JSON.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct LogReport {
    /// The file as requested.
    file: String,
    /// Records that are not in the file.
    dropped_records: u64,
    /// The reason why the last write failed.
    error: Option<String>,
}

impl RunLog {
    /// Returns the log of a stack that is about to be built.
    pub(crate) fn of(arguments: &StackArguments, options: &StackOptions) -> Option<Self> {
        let file = arguments.log.as_deref()?.display().to_string();
        Some(Self { file, sink: Arc::clone(options.log.as_ref()?) })
    }

    /// Flushes the log and counts lost records, after the logged work is done.
    pub(crate) fn end(self) -> LogReport {
        let error = self.sink.flush().err().map(|error| error.to_string());
        LogReport { file: self.file, dropped_records: self.sink.dropped_records(), error }
    }
}

impl LogReport {
    /// Returns why the log is incomplete, in one line.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.dropped_records == 0 && self.error.is_none() {
            return None;
        }
        let reason = self.error.as_deref().unwrap_or("they came faster than they could be written");
        Some(format!(
            "--log {}: {} records are missing from the log: {reason}",
            self.file, self.dropped_records
        ))
    }

    pub(crate) fn render(&self, page: &mut TextReport) {
        let missing = match self.problem() {
            None => String::new(),
            Some(_) => format!(", {} records are missing from it", self.dropped_records),
        };
        page.line("log", &format!("{}{missing}", self.file));
    }
}
