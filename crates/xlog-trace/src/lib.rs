//! The allocation log as a file format.
//!
//! A log is a sequence of [`Record`]s: an allocation, a free, a use, or a segment that an allocator reserved or returned.
//! Each has its time, thread, stream and tag. This crate
//! - reads and writes logs as binary files, as CSV and as RMM's CSV ([`Reader`], [`LogWriter`]);
//! - imports PyTorch's memory snapshots ([`import`]) and exports to other tools' viewers ([`export`]);
//! - summarizes logs ([`Summary`]) and records them from a running program ([`Recorder`]).
//!
//! It does not depend on any allocator.
//!
//! ```
//! use xlog_trace::{Action, Reader, Record, Recorder, RecorderConfig, Summary, intern};
//!
//! # fn main() -> Result<(), xlog_trace::TraceError> {
//! let path = std::env::temp_dir().join(format!("example-{}.xtrace", std::process::id()));
//! let recorder = Recorder::create(&path, RecorderConfig::new())?;
//! let block = Record::new(Action::Allocate, 0, 1, 0).with_ptr(0x7f00).with_bytes(4096);
//! recorder.emit(block.with_stream(0).with_tag(intern("hash table")));
//! drop(recorder);
//!
//! let summary = Summary::of(&mut Reader::open(&path)?)?;
//! assert_eq!(summary.total.live_bytes, 4096);
//! assert_eq!(summary.leaks[0].tag, "hash table");
//! # std::fs::remove_file(&path).ok();
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod action;
mod binary;
mod convert;
mod csv;
mod encoder;
mod error;
pub mod export;
mod header;
pub mod import;
mod lines;
mod live;
mod names;
mod ordered;
mod reader;
mod record;
mod recorder;
mod reserved;
mod rmm;
mod stacks;
mod summary;
mod text_reader;
mod times;

pub use action::{Action, ServedBy, UseAccess};
pub use binary::{MAX_PAYLOAD_BYTES, VERSION};
pub use convert::{Converted, convert};
pub use csv::{COLUMNS, Column};
pub use encoder::{Encoder, Format, LogWriter, encoder};
pub use error::{BadInput, InputPosition, TraceError};
pub use header::Header;
pub use lines::MAX_LINE_BYTES;
pub use live::{LiveBlock, MAX_LIVE_BLOCKS, reserve_live};
pub use names::{MAX_NAME_BYTES, MAX_NAME_TABLE_BYTES, MAX_NAMES, MAX_STREAM_NAMES, NameId, Names};
pub use ordered::{DEFAULT_WINDOW, Ordered};
pub use reader::{LogState, ReadReport, Reader, Source, Strictness, rotated_files};
pub use record::{Failure, Fields, Record};
pub use recorder::{
    OnError, Overflow, Recorder, RecorderConfig, RecorderStats, at_exit, capture_stack,
    check_writable, intern, intern_site, intern_text, record_stack, resolve_stacks, stack_frames,
};
pub use reserved::{MAX_RESERVED_RANGES, Reserved, ReservedRange, ReservedUsage};
pub use rmm::RMM_HEADER;
pub use stacks::{MAX_FRAMES, MAX_STACKS, StackId};
pub use summary::{Leak, MAX_LISTED_LEAKS, Summarizer, Summary, Usage};
pub use times::{CallTimes, TimesReport};
