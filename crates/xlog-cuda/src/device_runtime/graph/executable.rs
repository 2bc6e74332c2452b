//! A graph: its memory, the blocks that it uses, and its launches.

#![allow(unsafe_code)]

use std::sync::Arc;

use xlog_base::debug_fields;
use xlog_driver::{DriverResult, EventHandle, GraphExecHandle, StreamHandle};

use super::CaptureError;
use super::arena::Arena;
use super::scope::check_not_captured;
use crate::device_runtime::resource::{Access, AllocTag, BlockId, ResourceError, StreamId};
use crate::device_runtime::runtime::XlogDeviceRuntime;
use crate::{LaunchRecorder, Result};

/// An owner of an arena: a graph or an open capture.
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

    /// Adds the work that is queued on a stream outside.
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
            // SAFETY: created by `add`, and not used any more. Queued waits outlive their event.
            let _ = unsafe { self.runtime.device().driver().event_destroy(event) };
        }
    }
}

/// The parts of a graph. Dropping the last handle frees its memory after its launches.
pub(super) struct GraphCore {
    /// `None` if other code executes the graph.
    pub(super) exec: Option<GraphExecHandle>,
    /// The uses of every launch: the chunks of the arena, and blocks from outside.
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
            // SAFETY: created by the capture, and this was its last handle. Queued launches still run; the chunks are freed after them.
            let _ = unsafe { graphs.graph_exec_destroy(exec) };
        }
    }
}

/// Captured work with its memory, ready to be launched.
///
/// A launch uses every block that the captured work was announced to use, which orders it with other uses and frees. Blocks
/// that were allocated inside the capture belong to the graph: after the capture they can also be used outside, ordered by
/// the launches. Clones are handles on one graph.
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

    /// Queues the captured work on `stream`, after all work that it must follow. If a block from outside was freed meanwhile,
    /// queues nothing and returns [`ResourceError::UseAfterFree`].
    ///
    /// The safety promises of the captured work must hold for every launch.
    pub fn launch(&self, stream: StreamId) -> Result<()> {
        let runtime = &self.core.owner.runtime;
        let Some(exec) = self.core.exec else {
            return Err(ResourceError::from(CaptureError::NotExecutable).into());
        };
        let queue = runtime.stream_pool().try_resolve(stream)?;
        check_not_captured("Graph::launch", stream, queue.raw())?;
        let graphs = runtime.graphs().graphs()?;
        // Otherwise a concurrent launch would not be ordered after this one. CUDA also requires that launches of a graph do not overlap.
        let _launching = self.core.owner.arena.launching.lock();
        let mut recorder = LaunchRecorder::new_strict(stream);
        recorder.graph(self);
        recorder.run(runtime, |queue| {
            // SAFETY: the uses of the recorder keep the chunks and the announced blocks alive; the capturing code promised that the
            // rest of the work is sound.
            unsafe { graphs.graph_launch(exec, queue.raw().handle())? };
            Ok(())
        })
    }

    /// Returns the bytes of the arena's chunks that a launch uses.
    #[must_use]
    pub fn arena_bytes(&self) -> usize {
        self.core.chunk_bytes
    }

    /// Returns the label of the graph's memory in logs, statistics, the budget and the ledger. Graphs that share an arena share it.
    #[must_use]
    pub fn tag(&self) -> AllocTag {
        self.core.owner.arena.tag
    }

    /// Returns the number of blocks from outside that a launch uses.
    #[must_use]
    pub fn outside_blocks(&self) -> usize {
        self.core.uses.len().saturating_sub(self.core.chunks)
    }

    /// Returns the stream that the capture began on.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.core.stream
    }

    /// Returns the runtime of the graph.
    #[must_use]
    pub fn runtime(&self) -> &XlogDeviceRuntime {
        &self.core.owner.runtime
    }

    pub(crate) fn uses(&self) -> &[(BlockId, Access)] {
        &self.core.uses
    }

    /// Makes a stream wait for the outside work that the graph follows.
    pub(crate) fn wait_outside(&self, stream: StreamHandle) -> DriverResult<()> {
        self.core.followed.wait(stream)
    }
}

debug_fields!(self: Graph {
    stream: self.core.stream, arena_bytes: self.arena_bytes(),
    outside_blocks: self.outside_blocks(), is_executable: self.core.exec.is_some(),
});
