//! Stream capture and graphs, as an optional capability: queued work is recorded once and launched as one operation.

use std::fmt;

use crate::{DriverResult, GraphExecHandle, GraphHandle, HostFn, StreamHandle};

/// The calls that a capture forbids while it is open. None of the calls of this crate breaks a capture of another stream in any mode,
/// except [`Driver::synchronize`](crate::Driver::synchronize).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CaptureMode {
    /// No thread of the process may make a call that could wait for the device.
    Global,
    /// The capturing thread may not.
    #[default]
    ThreadLocal,
    /// Every call is allowed, and any thread may end the capture.
    Relaxed,
}

impl fmt::Display for CaptureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Global => "global",
            Self::ThreadLocal => "thread-local",
            Self::Relaxed => "relaxed",
        })
    }
}

/// The open capture that a stream belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaptureInfo {
    /// A number that no other capture of this process has.
    pub id: u64,
    /// The graph that the work is recorded into. It belongs to the capture: only [`Graphs::graph_retain`] takes it while the capture is open.
    pub graph: GraphHandle,
}

/// Records the work of streams into graphs, and launches them.
///
/// A stream that waits for an event recorded in a capture joins that capture, and leaves it when the capture ends. In a capture
/// [`Driver::memset`](crate::Driver::memset), [`Driver::copy_dtod`](crate::Driver::copy_dtod), kernels, events and waits are recorded. Copies to and
/// from the host, host functions and gates are refused: a graph would repeat them.
pub trait Graphs: Send + Sync {
    /// Begins to record what is queued on `stream`. Nothing of it runs.
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()>;

    /// Ends the capture that began on `stream`, by the thread that began it unless the mode is relaxed. A capture that was broken, or that other
    /// streams joined and did not rejoin, is an error and has ended all the same.
    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle>;

    /// The open capture that `stream` belongs to. `None` where there is none, or it was broken.
    fn capture_info(&self, stream: StreamHandle) -> DriverResult<Option<CaptureInfo>>;

    /// Makes an executable form of a graph. The graph stays.
    fn graph_instantiate(&self, graph: GraphHandle) -> DriverResult<GraphExecHandle>;

    /// Queues all recorded work as one operation of `stream`. Launches of one executable graph follow each other. A stream that is being
    /// captured is refused.
    ///
    /// # Safety
    /// As for the work that was recorded, at each launch: the memory it touches is live when it runs.
    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Calls `release` once when the graph and every executable form of it are destroyed and no launch of them runs. It must not call the driver.
    /// After an error it was called or dropped.
    fn graph_retain(&self, graph: GraphHandle, release: HostFn) -> DriverResult<()>;

    /// Destroys a graph. Its executable forms stay.
    ///
    /// # Safety
    /// - The graph comes from [`Graphs::end_capture`] and is the caller's to destroy.
    /// - Once this has succeeded, no call names it, on any thread.
    unsafe fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()>;

    /// Destroys an executable graph. Launches that are queued still run.
    ///
    /// # Safety
    /// - It is the caller's to destroy.
    /// - Once this has succeeded, no call names it, on any thread.
    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> DriverResult<()>;
}
