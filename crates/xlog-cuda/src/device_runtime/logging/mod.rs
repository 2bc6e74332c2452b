//! The log: one record per operation of a memory resource.
//!
//! [`LoggingResource`] wraps any resource. A [`LoggingSink`] receives the records: [`InMemorySink`], [`NullSink`], or with the feature
//! `trace` the files `BinarySink` and `CsvSink`. Sorted by [`order_counter`](LogRecord::order_counter), the records are a legal history
//! under any interleaving: a free takes its number before the inner call, an allocation after it. Failures of a sink are counted; they
//! never fail the operation.
//!
//! The crate `xlog-trace` defines the file formats.

pub(crate) mod clock;
#[cfg(feature = "trace")]
mod file;
mod query;
mod record;
mod resource;
mod segments;
mod served_by;
mod sink;
mod site;
mod stack;
mod unfinished;

#[cfg(feature = "trace")]
pub(super) use file::default_config;
#[cfg(feature = "trace")]
pub use file::{BinarySink, CsvSink};
pub(crate) use query::is_logging;
pub use query::{QueryScope, note_path};
pub use record::{LogAction, LogRecord, LogResult};
pub use resource::LoggingResource;
pub use served_by::ServedBy;
pub use sink::{InMemorySink, LoggingSink, NullSink, SinkError};
pub(crate) use site::SiteScope;
pub use stack::StackId;

#[cfg(feature = "trace")]
#[doc(inline)]
pub use xlog_trace::{Overflow, RecorderConfig, RecorderStats};
