//! Stream capture and graphs, as an optional capability: queued work is recorded once and launched as one operation.

use std::fmt;

use crate::{DriverResult, GraphExecHandle, GraphHandle, HostFn, StreamHandle};

/// The calls that an open capture forbids. No call of this crate invalidates another stream's capture in any mode, except
/// [`Driver::synchronize`](crate::Driver::synchronize).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CaptureMode {
    /// No thread of the process may make a call that could wait for the device.
    Global,
    /// The capturing thread may not make a call that could wait for the device.
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
    /// The graph that records the work. It belongs to the capture: only [`Graphs::graph_retain`] accepts it while the capture is open.
    pub graph: GraphHandle,
}

/// Records the work of streams into graphs, and launches them.
///
/// A stream that waits for an event recorded in a capture joins that capture until it ends. A capture records
/// [`Driver::memset`](crate::Driver::memset), [`Driver::copy_dtod`](crate::Driver::copy_dtod), kernels, events and waits. It refuses copies
/// to and from the host, host functions and gates, because a graph would repeat them.
pub trait Graphs: Send + Sync {
    /// Starts to record the work queued on `stream`, instead of running it.
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()>;

    /// Ends the capture that began on `stream`. Only the thread that began it may do so, unless the mode is relaxed. An invalidated
    /// capture, or one with a joined stream that did not rejoin, ends with an error.
    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle>;

    /// Returns the open, valid capture that `stream` belongs to.
    fn capture_info(&self, stream: StreamHandle) -> DriverResult<Option<CaptureInfo>>;

    /// Makes an executable graph. `graph` stays valid.
    fn graph_instantiate(&self, graph: GraphHandle) -> DriverResult<GraphExecHandle>;

    /// Queues all recorded work as one operation of `stream`, which must not be captured. Launches of one executable graph run one after
    /// another.
    ///
    /// # Safety
    /// At each launch the requirements of the recorded work hold: the memory it touches is live when it runs.
    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Calls `release` once when the graph and all its executable forms are destroyed and none of their launches runs. `release` must not
    /// call the driver. After an error it was called or dropped.
    fn graph_retain(&self, graph: GraphHandle, release: HostFn) -> DriverResult<()>;

    /// Destroys a graph. Its executable forms stay valid.
    ///
    /// # Safety
    /// - The graph comes from [`Graphs::end_capture`] and is the caller's to destroy.
    /// - Once this has succeeded, no call names it, on any thread.
    unsafe fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()>;

    /// Destroys an executable graph. Launches that are queued still run.
    ///
    /// # Safety
    /// - The executable graph is the caller's to destroy.
    /// - Once this has succeeded, no call names it, on any thread.
    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> DriverResult<()>;
}
