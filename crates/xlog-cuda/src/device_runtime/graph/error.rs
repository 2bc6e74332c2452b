//! Errors of captures, with their remedies.

use crate::device_runtime::resource::{Generation, StreamId};

/// A call that a stream capture does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// A use that was opened inside a capture was closed after the capture had ended.
    #[error(
        "the capture in which {stream} opened this use has ended; commit recorders before the capture ends, and launch its graph to run the work"
    )]
    Ended {
        /// The stream of the use.
        stream: StreamId,
    },
    /// A stream of one capture would have to wait for work of another.
    #[error(
        "{stream} belongs to another capture than {other}, and a capture cannot wait for another; end that capture and launch its graph first"
    )]
    OtherCapture {
        /// The stream of the call.
        stream: StreamId,
        /// The stream or the block of the other capture.
        other: String,
    },
    /// A block of an open capture was used on a stream that is not captured.
    #[error(
        "{generation} was allocated in an open capture, which {stream} is not part of; bring the stream in by CaptureScope::fork, or end the capture and \
         launch its graph"
    )]
    NotCaptured {
        /// The stream of the call.
        stream: StreamId,
        /// The block.
        generation: Generation,
    },
    /// A captured stream would have to wait for work outside of the capture.
    #[error(
        "{stream} is being captured and cannot wait for {other}, which is not; name that stream in CaptureScope::follow, and every launch waits for it"
    )]
    OutsideWait {
        /// The captured stream.
        stream: StreamId,
        /// The stream outside.
        other: StreamId,
    },
    /// A block was freed on a stream of a capture that other code has begun and that the runtime has not joined.
    #[error(
        "{stream} is captured by other code, so the block is freed by the first reap after that capture has ended; join the capture by \
         XlogDeviceRuntime::join_capture to free inside it, or free before it begins"
    )]
    NotJoined {
        /// The stream of the block.
        stream: StreamId,
    },
    /// The host reads or writes memory, or waits, on a captured stream.
    #[error(
        "{call} on {stream} is not possible while the stream is being captured, because its work does not run; do it on the launch stream after the launch"
    )]
    HostAccess {
        /// The call.
        call: &'static str,
        /// The captured stream.
        stream: StreamId,
    },
    /// The call needs a stream that is not being captured.
    #[error(
        "{call}: {stream} is being captured; end that capture first, or use a stream that is not captured"
    )]
    AlreadyCaptured {
        /// The call.
        call: &'static str,
        /// The captured stream.
        stream: StreamId,
    },
    /// The arena cannot grow, because no stream is left that its memory can belong to.
    #[error(
        "the capture's arena cannot grow: all {max} streams are leased and the default stream is being captured; give a stream back, open the runtime with \
         more streams, or name the size before the capture by CaptureOptions::with_arena"
    )]
    NoStreamLeft {
        /// The maximum of leased streams.
        max: usize,
    },
    /// The arena of the capture has too little memory.
    #[error(
        "{requested} bytes do not fit the capture's arena, which holds {held} of at most {limit} bytes; free blocks inside the capture, or raise \
         CaptureOptions::with_limit"
    )]
    ArenaLimit {
        /// The requested bytes.
        requested: usize,
        /// The bytes that the arena holds.
        held: usize,
        /// The maximum of the arena.
        limit: usize,
    },
    /// The capture was broken: its work is lost, and its memory was freed.
    #[error(
        "the capture on {stream} was broken: {detail}; its memory was given back, capture again"
    )]
    Broken {
        /// The stream that the capture began on.
        stream: StreamId,
        /// The text of the driver's error.
        detail: String,
    },
    /// Another capture is open in the arena.
    #[error(
        "the arena to share has an open capture; end that capture first, or give this one an arena of its own"
    )]
    ArenaBusy,
    /// The graph was captured by other code, which launches it.
    #[error(
        "the graph was captured by other code, which launches it; name it in LaunchRecorder::graph and launch inside LaunchRecorder::run"
    )]
    NotExecutable,
}
