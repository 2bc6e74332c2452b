//! One record per operation of a memory resource, to a sink of the user's choice.
//!
//! [`LoggingResource`] wraps any resource; a [`LoggingSink`] takes the records: in memory, nowhere, or to a file
//! (`BinarySink`, `CsvSink`, with the feature `trace`). Records are numbered so that sorting them by
//! [`order_counter`](LogRecord::order_counter) gives a legal history under any interleaving: a free takes its number before the
//! inner call, an allocation after it. Failures of a sink are counted and never fail the operation.
//!
//! It does not count blocks (see [`statistics`](super::statistics)), and does not define file formats (see the crate `xlog-trace`).

pub(crate) mod clock;
#[cfg(feature = "trace")]
mod file;
mod order;
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
