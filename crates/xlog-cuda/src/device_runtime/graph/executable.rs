//! A graph: its memory, the blocks that it uses, and its launches.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use xlog_driver::{DriverResult, EventHandle, GraphExecHandle, StreamHandle};

use super::CaptureError;
use super::arena::Arena;
use crate::device_runtime::resource::{Access, AllocTag, BlockId, ResourceError, StreamId};
use crate::device_runtime::runtime::XlogDeviceRuntime;
use crate::{LaunchRecorder, Result};

/// A share in an arena, by a graph or an open capture.
pub(super) struct ArenaOwner {
    pub(super) runtime: XlogDeviceRuntime,
    pub(super) arena: Arc<Arena>,
}

impl Drop for ArenaOwner {
    fn drop(&mut self) {
        self.runtime.graphs().disown(&self.arena);
    }
}

/// Events of work outside that every launch waits for.
pub(super) struct Followed {
    runtime: XlogDeviceRuntime,
    events: Vec<EventHandle>,
}

impl Followed {
    pub(super) fn new(runtime: &XlogDeviceRuntime) -> Self {
        Self { runtime: runtime.share(), events: Vec::new() }
    }

    /// Adds everything that is queued on a stream outside.
    pub(super) fn add(&mut self, stream: StreamHandle) -> DriverResult<()> {
        let driver = self.runtime.device().driver();
        let event = driver.event_create()?;
        self.events.push(event);
        driver.event_record(event, stream)
    }

    fn wait(&self, stream: StreamHandle) -> DriverResult<()> {
        let driver = self.runtime.device().driver();
        self.events.iter().try_for_each(|event| driver.stream_wait_event(stream, *event))
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // SAFETY: made by `add`, and not used any more. Queued waits outlive their event.
            let _ = unsafe { self.runtime.device().driver().event_destroy(event) };
        }
    }
}

/// The parts of a graph. Dropping the last handle gives its memory back, in the order of its launches.
pub(super) struct GraphCore {
    /// `None` where other code executes the graph.
    pub(super) exec: Option<GraphExecHandle>,
    /// What every launch uses: the chunks of the arena, and blocks from outside.
    pub(super) uses: Vec<(BlockId, Access)>,
    pub(super) chunks: usize,
    pub(super) chunk_bytes: usize,
    pub(super) followed: Followed,
    pub(super) stream: StreamId,
    pub(super) owner: Arc<ArenaOwner>,
}

impl Drop for GraphCore {
    fn drop(&mut self) {
        let driver = self.owner.runtime.device().driver();
        if let (Some(exec), Some(graphs)) = (self.exec, driver.graphs()) {
            // SAFETY: made by the capture, and this was its last handle. Queued launches still run; the arena's chunks are freed after them.
            let _ = unsafe { graphs.graph_exec_destroy(exec) };
        }
    }
}

/// Captured work with its memory, ready to be launched.
///
/// A launch uses every block that the captured work was announced to use, so other uses and frees of them are ordered by it. Blocks that were
/// allocated inside the capture stay the graph's: outside they can be used once the capture has ended, ordered by the launches. Clones are
/// handles on one graph.
#[derive(Clone)]
#[must_use = "dropping the graph destroys it"]
pub struct Graph {
    core: Arc<GraphCore>,
}

impl Graph {
    pub(super) fn new(core: GraphCore) -> Self {
        Self { core: Arc::new(core) }
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.core.owner.arena
    }

    /// Queues the captured work on `stream`, after everything that it must follow. A block from outside that was freed meanwhile is
    /// [`ResourceError::UseAfterFree`], and nothing is queued.
    ///
    /// The order of the captured work's own memory accesses was the capture's affair: what it promised there holds for every launch.
    pub fn launch(&self, stream: StreamId) -> Result<()> {
        let runtime = &self.core.owner.runtime;
        let Some(exec) = self.core.exec else {
            return Err(ResourceError::from(CaptureError::NotExecutable).into());
        };
        let queue = runtime.stream_pool().try_resolve(stream)?;
        queue.raw().check_not_capturing("graph_launch")?;
        let graphs = runtime.graphs().graphs()?;
        // Between preflight and commit another launch would not be ordered after this one, and CUDA wants launches of one graph one at a time.
        let _launching = self.core.owner.arena.launching.lock();
        let mut recorder = LaunchRecorder::new_strict(stream);
        recorder.graph(self);
        recorder.run(runtime, |queue| {
            // SAFETY: the uses of the recorder keep the chunks and the announced blocks alive; for the rest the work was promised to be sound when
            // it was captured.
            unsafe { graphs.graph_launch(exec, queue.raw().handle())? };
            Ok(())
        })
    }

    /// The bytes of the arena's chunks that a launch uses.
    #[must_use]
    pub fn arena_bytes(&self) -> usize {
        self.core.chunk_bytes
    }

    /// The label of its memory in logs, statistics, the budget and the ledger. Graphs that share an arena have one label.
    #[must_use]
    pub fn tag(&self) -> AllocTag {
        self.core.owner.arena.tag
    }

    /// The number of blocks from outside that a launch uses.
    #[must_use]
    pub fn outside_blocks(&self) -> usize {
        self.core.uses.len().saturating_sub(self.core.chunks)
    }

    /// The stream that the capture began on.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.core.stream
    }

    /// The runtime that it belongs to.
    #[must_use]
    pub fn runtime(&self) -> &XlogDeviceRuntime {
        &self.core.owner.runtime
    }

    /// What a launch uses.
    pub(crate) fn uses(&self) -> &[(BlockId, Access)] {
        &self.core.uses
    }

    /// Makes a stream wait for what the graph follows outside.
    pub(crate) fn wait_outside(&self, stream: StreamHandle) -> DriverResult<()> {
        self.core.followed.wait(stream)
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("stream", &self.core.stream)
            .field("arena_bytes", &self.arena_bytes())
            .field("outside_blocks", &self.outside_blocks())
            .field("is_executable", &self.core.exec.is_some())
            .finish()
    }
}
