//! The record of one operation. Plain values: a record of a success allocates and formats nothing.

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
    /// A use of a block was opened on a stream. Only where uses are logged.
    UsePrepare,
    /// A use of a block was closed, or recorded after the fact, then without an access. Only where uses are logged.
    UseFinish,
    /// A pool took a segment from the device. Only where segments are logged.
    SegmentTake,
    /// A pool returned a segment, or a part of one. Only where segments are logged.
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
    /// It succeeded.
    Ok,
    /// It was refused or failed.
    Err {
        /// The error's kind, one word: [`ResourceError::kind`].
        kind: &'static str,
        /// The error's text.
        message: String,
    },
}

impl LogResult {
    /// True for [`LogResult::Ok`].
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
    /// The device.
    pub device_ordinal: u32,
    /// The stream it was ordered on; none for what has no stream.
    pub stream_id: Option<StreamId>,
    /// The block's address; none when there is no block.
    pub ptr: Option<u64>,
    /// Allocation: the requested bytes. Free: the bytes of the block as its owner passed it.
    pub bytes: Option<usize>,
    /// The block's label.
    pub tag: Option<AllocTag>,
    /// Distinguishes the block from others at its address.
    pub generation: Option<Generation>,
    /// The thread, by a number that no other thread of the process has had.
    pub thread_id: u64,
    /// Position in the history of the process: strictly increasing, with gaps.
    pub order_counter: u64,
    /// When the call began, in nanoseconds since 1970. It never steps back within one resource.
    pub timestamp_nanos: u128,
    /// The outcome.
    pub result: LogResult,
    /// The query the thread worked for; see [`QueryScope`](super::QueryScope).
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
    /// A record of an action on a device with all other fields absent.
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
