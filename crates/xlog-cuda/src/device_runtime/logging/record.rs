//! The record of one operation. A record of a success allocates and formats nothing.

use std::fmt;
use std::panic::Location;

use super::{ServedBy, StackId};
use crate::device_runtime::resource::{Access, AllocTag, Generation, ResourceError, StreamId};

/// The operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LogAction {
    /// A block was requested.
    Allocate,
    /// A block was freed.
    Deallocate,
    /// Pending frees were waited for and counted.
    ReapPending,
    /// A use of a block was opened on a stream. Only if uses are logged.
    UsePrepare,
    /// A use of a block was closed, or recorded without an access. Only if uses are logged.
    UseFinish,
    /// A pool took a segment from the device. Only if segments are logged.
    SegmentTake,
    /// A pool returned a segment, or a part of one. Only if segments are logged.
    SegmentReturn,
}

impl fmt::Display for LogAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allocate => "allocate",
            Self::Deallocate => "deallocate",
            Self::ReapPending => "reap_pending",
            Self::UsePrepare => "use_prepare",
            Self::UseFinish => "use_finish",
            Self::SegmentTake => "segment_take",
            Self::SegmentReturn => "segment_return",
        })
    }
}

/// The outcome.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogResult {
    /// The operation succeeded.
    Ok,
    /// The operation was refused or failed.
    Err {
        /// The error's kind, one word: [`ResourceError::kind`].
        kind: &'static str,
        /// The error's text.
        message: String,
    },
}

impl LogResult {
    /// Returns whether this is [`LogResult::Ok`].
    pub fn is_ok(&self) -> bool {
        matches!(self, Self::Ok)
    }

    #[cold]
    pub(super) fn failed(error: &ResourceError) -> Self {
        Self::Err { kind: error.kind(), message: error.brief() }
    }
}

/// One operation of a resource.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LogRecord {
    /// The operation.
    pub action: LogAction,
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// The stream it was ordered on; `None` for an operation without a stream.
    pub stream_id: Option<StreamId>,
    /// The address of the block or segment; `None` if there is none.
    pub ptr: Option<u64>,
    /// Allocation: the requested bytes. Free: the bytes of the block as the caller passed it. Segment: its bytes.
    pub bytes: Option<usize>,
    /// The block's label.
    pub tag: Option<AllocTag>,
    /// Distinguishes the block from others at its address.
    pub generation: Option<Generation>,
    /// The number of the thread, unique in the process.
    pub thread_id: u64,
    /// The position in the history of the process: strictly increasing, with gaps.
    pub order_counter: u64,
    /// The begin of the call in nanoseconds since 1970. The clock of one resource never steps back.
    pub timestamp_nanos: u128,
    /// The outcome.
    pub result: LogResult,
    /// The query that the thread worked for; see [`QueryScope`](super::QueryScope).
    pub query_id: Option<u64>,
    /// Allocation: the bytes granted, which the block is charged.
    pub granted: Option<usize>,
    /// Allocation: the requested alignment, or the minimum. Free: the alignment of the passed block.
    pub align: Option<usize>,
    /// The duration of the call in nanoseconds. Each block of a batch has that of the whole call.
    pub latency_nanos: u64,
    /// The path that served the request, if the resource noted it; see [`note_path`](super::note_path).
    pub served_by: ServedBy,
    /// The access of a use.
    pub access: Option<Access>,
    /// The process.
    pub process_id: u32,
    /// Allocation: the source location of the caller, if the call went through a runtime or a memory manager.
    pub site: Option<&'static Location<'static>>,
    /// Allocation: the stack of the caller, if it was sampled; `xlog_trace::stack_frames` resolves it.
    pub stack: Option<StackId>,
}

impl LogRecord {
    /// Creates a record of a successful action on a device; all other fields are empty.
    #[inline(always)]
    #[must_use]
    pub fn new(action: LogAction, device_ordinal: u32) -> Self {
        Self {
            action,
            device_ordinal,
            stream_id: None,
            ptr: None,
            bytes: None,
            tag: None,
            generation: None,
            thread_id: 0,
            order_counter: 0,
            timestamp_nanos: 0,
            result: LogResult::Ok,
            query_id: None,
            granted: None,
            align: None,
            latency_nanos: 0,
            served_by: ServedBy::Unknown,
            access: None,
            process_id: 0,
            site: None,
            stack: None,
        }
    }
}
