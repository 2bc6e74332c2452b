//! Captures that are begun here, or begun by other code and joined.
//!
//! A capture is registered before its work is queued. It is unregistered when it ends, by a graph, an error or a panic.
//! Ending a failed capture frees its arena, except blocks that the caller still holds.

#![allow(unsafe_code)]

use std::sync::Arc;

use xlog_base::debug_fields;
use xlog_driver::sync::Mutex;
use xlog_driver::{CaptureMode, CaptureStatus, DriverError, GraphHandle};

use super::CaptureError;
use super::arena::Arena;
use super::captured::Ended;
use super::executable::{ArenaOwner, Followed, Graph, GraphCore};
use crate::device_runtime::resource::{AllocTag, ResourceError, ResourceResult, StreamId};
use crate::device_runtime::runtime::XlogDeviceRuntime;
use crate::stream::RawStream;
use crate::{DeviceStream, Result};

/// Options of a capture: its memory and its mode.
#[derive(Clone, Debug)]
#[must_use = "options have no effect until a capture takes them"]
pub struct CaptureOptions {
    pub(super) mode: CaptureMode,
    /// `None` for a tag that no other arena has.
    pub(super) tag: Option<AllocTag>,
    pub(super) arena_bytes: usize,
    pub(super) limit: usize,
    shared: Option<Graph>,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self {
            mode: CaptureMode::default(),
            tag: None,
            arena_bytes: 0,
            limit: usize::MAX,
            shared: None,
        }
    }
}

impl CaptureOptions {
    /// Sets the mode: which calls of other code the capture forbids. Every mode allows the runtime's own calls.
    pub fn with_mode(self, mode: CaptureMode) -> Self {
        Self { mode, ..self }
    }

    /// Sets the label of the arena in logs, statistics, the budget and the ledger. By default each arena has its own, "graph 1"
    /// or the first number that no living arena has, so that the memory of a graph is one entry: [`Graph::tag`].
    pub fn with_tag(self, tag: AllocTag) -> Self {
        Self { tag: Some(tag), ..self }
    }

    /// Sets the size to which the arena grows before the capture begins, by one chunk.
    pub fn with_arena(self, bytes: usize) -> Self {
        Self { arena_bytes: bytes, ..self }
    }

    /// Sets the maximum size of the arena. A request beyond it is [`CaptureError::ArenaLimit`].
    pub fn with_limit(self, bytes: usize) -> Self {
        Self { limit: bytes, ..self }
    }

    /// Uses the arena of another graph, for graphs that never run concurrently: launches of the two follow each other. This
    /// capture reuses memory that the other one has freed, so a launch of either may overwrite data that the other left there.
    /// Live blocks of the other graph are kept. The arena keeps its limit and label.
    pub fn sharing(self, graph: &Graph) -> Self {
        Self { shared: Some(graph.clone()), ..self }
    }

    pub(super) fn shared(&self) -> Option<&Arc<Arena>> {
        self.shared.as_ref().map(Graph::arena)
    }
}

impl XlogDeviceRuntime {
    /// Captures the work that `work` queues on `stream` into a graph. It runs only in [`Graph::launch`].
    ///
    /// Inside, memory is allocated, used through recorders and freed as usual, on the captured stream and on streams of
    /// [`CaptureScope::fork`]. It comes from an arena that belongs to the graph. A recorder must announce every use of memory
    /// from outside: a launch orders only announced uses. If `work` fails or panics, the capture ends and its memory is freed.
    ///
    /// ```
    /// use xlog_cuda::prelude::*;
    ///
    /// let runtime = XlogDeviceRuntime::open("sim")?;
    /// let memory = GpuMemoryManager::with_runtime(runtime.clone());
    /// let stream = runtime.stream_pool().lease()?;
    /// let input = memory.alloc_zeroed::<u8>(64)?;
    /// let mut output = None;
    /// let graph = runtime.capture(stream.id(), |scope| {
    ///     let mut copy = memory.on_stream(scope.id()).alloc::<u8>(64)?;
    ///     copy.copy_from(&input)?; // recorded, not run
    ///     output = Some(copy);
    ///     Ok(())
    /// })?;
    /// for value in 1..4 {
    ///     let mut recorder = LaunchRecorder::new_strict(StreamId::DEFAULT);
    ///     recorder.write(&input);
    ///     // SAFETY: the buffer is live, and the recorder orders the fill.
    ///     recorder.run(&runtime, |stream| unsafe { stream.memset(input.ptr(), value, 64) })?;
    ///     graph.launch(stream.id())?; // after the fill
    ///     assert_eq!(output.as_ref().map(|copy| copy.to_vec()).transpose()?, Some(vec![value; 64]));
    /// }
    /// # Ok::<(), XlogError>(())
    /// ```
    pub fn capture(
        &self,
        stream: StreamId,
        work: impl FnOnce(&CaptureScope<'_>) -> Result<()>,
    ) -> Result<Graph> {
        self.capture_with(stream, &CaptureOptions::default(), work)
    }

    /// [`XlogDeviceRuntime::capture`] with options.
    pub fn capture_with(
        &self,
        stream: StreamId,
        options: &CaptureOptions,
        work: impl FnOnce(&CaptureScope<'_>) -> Result<()>,
    ) -> Result<Graph> {
        let mut open = OpenCapture::begin(self, stream, options)?;
        work(&CaptureScope { open: &open })?;
        open.end()
    }

    /// Joins a capture that other code has begun on `stream`, or on the stream that it represents
    /// ([`StreamPool::adopt`](crate::device_runtime::StreamPool::adopt)): later allocations and uses there belong to the capture.
    ///
    /// The memory stays until the driver reports that the graph and all its executable forms are gone, even if the returned
    /// object is dropped. Other code ends the capture and launches the graph; [`JoinedCapture::finish`] describes the graph for
    /// recorders.
    pub fn join_capture(
        &self,
        stream: StreamId,
        options: &CaptureOptions,
    ) -> Result<JoinedCapture> {
        let (runtime, queue) = checked(self, stream)?;
        let graphs = runtime.graphs().graphs()?;
        let Some(info) = graphs.capture_info(queue.raw().handle())? else {
            return Err(ResourceError::invalid(
                format!("{stream}, which is not being captured"),
                "a stream of a capture that other code has begun",
            )
            .into());
        };
        if runtime.graphs().capture_of(stream)?.is_some() {
            return Err(ResourceError::from(CaptureError::ArenaBusy).into());
        }
        let members = Members::new(&runtime, &queue, options)?;
        let members = members.of_other_code();
        let joined = JoinedCapture { members, followed: Followed::new(&runtime) };
        joined.members.add();
        joined.members.take_first_chunk(options)?;
        let release =
            joined.members.owner.arena.retain_foreign(Arc::clone(runtime.graphs().has_stale()));
        graphs.graph_retain(info.graph, Box::new(release))?;
        joined.members.register(info.id);
        Ok(joined)
    }
}

/// Returns the runtime and the stream of a capture, if captures are possible.
fn checked(
    runtime: &XlogDeviceRuntime,
    stream: StreamId,
) -> Result<(XlogDeviceRuntime, Arc<DeviceStream>)> {
    runtime.checked()?;
    if !runtime.supports_block_use_tracking() {
        return Err(ResourceError::untracked("capture").into());
    }
    runtime.graphs().graphs()?;
    Ok((runtime.share(), runtime.stream_pool().try_resolve(stream)?))
}

/// Refuses a stream under capture by a typed error.
pub(crate) fn check_not_captured(
    call: &'static str,
    stream: StreamId,
    raw: &RawStream,
) -> ResourceResult<()> {
    raw.check_not_capturing(call).map_err(|error| match error {
        DriverError::Invalid { .. } => CaptureError::AlreadyCaptured { call, stream }.into(),
        error => error.into(),
    })
}

/// The arena and the streams of an open capture. Unregisters the capture when dropped.
struct Members {
    owner: Arc<ArenaOwner>,
    stream: Arc<DeviceStream>,
    is_open: bool,
    /// The number of earlier chunks of the arena; `None` if other code captures, whose graph may use all chunks.
    chunks_before: Option<usize>,
}

impl Members {
    fn new(
        runtime: &XlogDeviceRuntime,
        stream: &Arc<DeviceStream>,
        options: &CaptureOptions,
    ) -> Result<Self> {
        if let Some(other) =
            options.shared.as_ref().filter(|graph| !graph.runtime().is_same(runtime))
        {
            return Err(ResourceError::invalid(
                format!("the arena of {other:?}, a graph of another runtime"),
                "a graph of this runtime",
            )
            .into());
        }
        let arena = runtime.graphs().own_arena(options).map_err(ResourceError::from)?;
        let owner = Arc::new(ArenaOwner { runtime: runtime.share(), arena });
        let chunks_before = Some(owner.arena.state.lock().chunks.len());
        Ok(Self { owner, stream: Arc::clone(stream), is_open: true, chunks_before })
    }

    fn of_other_code(mut self) -> Self {
        self.chunks_before = None;
        self
    }

    fn runtime(&self) -> &XlogDeviceRuntime {
        &self.owner.runtime
    }

    fn take_first_chunk(&self, options: &CaptureOptions) -> Result<()> {
        let missing = options.arena_bytes.saturating_sub(self.owner.arena.held_bytes());
        if missing > 0 {
            self.runtime().graphs().grow(&self.owner.arena, missing, 1)?;
        }
        Ok(())
    }

    fn register(&self, id: u64) {
        self.runtime().graphs().open(id, &self.owner.arena);
    }

    /// Adds the stream to a capture that other code has begun.
    fn add(&self) {
        if let Some(open) = &mut self.owner.arena.state.lock().open {
            open.order().member(self.stream.id(), self.stream.raw());
        }
    }

    /// Announces that the runtime is about to capture a stream, or to bring it into its capture.
    fn begin(&self, stream: &DeviceStream) -> Result<()> {
        if let Some(open) = &mut self.owner.arena.state.lock().open {
            open.order().begin(stream.id(), stream.raw())?;
        }
        Ok(())
    }

    /// Makes `waiting` wait for `other`; both are in the capture or about to join it.
    fn wait(&self, waiting: &DeviceStream, other: &DeviceStream) -> Result<()> {
        let driver = self.runtime().device().driver();
        if let Some(open) = &mut self.owner.arena.state.lock().open {
            let order = open.order();
            let waiting = order.member(waiting.id(), waiting.raw());
            let other = order.member(other.id(), other.raw());
            order.wait(driver.as_ref(), waiting, other)?;
        }
        Ok(())
    }

    /// Makes the stream of the capture wait for all others.
    fn rejoin(&self) -> Result<()> {
        let driver = self.runtime().device().driver();
        let registry = self.runtime().graphs();
        let own = registry.info(self.stream.raw())?.map(|info| info.id);
        if let Some(open) = &mut self.owner.arena.state.lock().open {
            let order = open.order();
            let origin = order.member(self.stream.id(), self.stream.raw());
            let others: Vec<_> =
                order.members().map(|(member, raw)| (member, Arc::clone(raw))).collect();
            for (member, raw) in others.into_iter().filter(|(member, _)| *member != origin) {
                if registry.info(&raw)?.map(|info| info.id) == own {
                    order.wait(driver.as_ref(), origin, member)?;
                }
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Ended {
        match std::mem::replace(&mut self.is_open, false) {
            true => self.runtime().graphs().close(&self.owner.arena),
            false => Ended::default(),
        }
    }

    /// Returns the stream of an id, which may join the capture or be followed by it.
    fn resolve(&self, stream: StreamId) -> Result<Arc<DeviceStream>> {
        self.runtime().stream_pool().try_resolve(stream)
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        if !self.is_open {
            return;
        }
        self.close();
        if let Some(before) = self.chunks_before {
            self.runtime().graphs().release_unused(&self.owner.arena, before);
        }
    }
}

/// A capture that the runtime has begun.
struct OpenCapture {
    members: Members,
    followed: Mutex<Option<Followed>>,
    /// Whether the driver records.
    is_begun: bool,
}

impl OpenCapture {
    fn begin(
        runtime: &XlogDeviceRuntime,
        stream: StreamId,
        options: &CaptureOptions,
    ) -> Result<Self> {
        let (runtime, queue) = checked(runtime, stream)?;
        check_not_captured("capture", stream, queue.raw())?;
        let members = Members::new(&runtime, &queue, options)?;
        members.take_first_chunk(options)?;
        members.begin(&queue)?;
        let followed = Mutex::new(Some(Followed::new(&runtime)));
        let mut this = Self { members, followed, is_begun: false };
        let graphs = runtime.graphs().graphs()?;
        graphs.begin_capture(queue.raw().handle(), options.mode)?;
        this.is_begun = true;
        match graphs.capture_info(queue.raw().handle())? {
            Some(info) => this.members.register(info.id),
            None => return Err(broken(stream, "it is not open").into()),
        }
        Ok(this)
    }

    /// Ends the capture and makes its graph executable.
    fn end(&mut self) -> Result<Graph> {
        let stream = self.members.stream.id();
        let runtime = self.members.runtime().share();
        let rejoined = self.members.rejoin();
        let graph = self.end_recording().map_err(|error| broken(stream, &error.to_string()))?;
        let graphs = runtime.graphs().graphs()?;
        let exec = rejoined.and_then(|()| Ok(graphs.graph_instantiate(graph)?));
        // SAFETY: made by the capture, and not used any more.
        let destroyed = unsafe { graphs.graph_destroy(graph) };
        let exec = exec?;
        let followed = self.followed.lock().take();
        let followed = followed.unwrap_or_else(|| Followed::new(&runtime));
        let ended = self.members.close();
        let graph = finished(&self.members, followed, ended, Some(exec));
        destroyed?;
        Ok(graph)
    }

    fn end_recording(&mut self) -> Result<GraphHandle, DriverError> {
        let members = &self.members;
        let (runtime, handle) = (members.runtime().share(), members.stream.raw().handle());
        let ended = runtime.graphs().graphs()?.end_capture(handle);
        let status = runtime.device().driver().stream_capture(handle);
        self.is_begun = ended.is_err() && !matches!(status, Ok(CaptureStatus::None));
        ended
    }
}

/// Builds the graph of a capture that has ended.
fn finished(
    members: &Members,
    followed: Followed,
    ended: Ended,
    exec: Option<xlog_driver::GraphExecHandle>,
) -> Graph {
    let stream = members.stream.id();
    Graph::new(GraphCore {
        exec,
        chunks: ended.chunks,
        chunk_bytes: ended.chunk_bytes,
        uses: ended.uses,
        followed,
        stream,
        owner: Arc::clone(&members.owner),
    })
}

impl Drop for OpenCapture {
    fn drop(&mut self) {
        // A failed driver call is retried once: a stream that stays captured is unusable.
        for _ in 0..2 {
            if !self.is_begun {
                return;
            }
            let runtime = self.members.runtime().share();
            if let (Ok(graph), Ok(graphs)) = (self.end_recording(), runtime.graphs().graphs()) {
                // SAFETY: made by the capture, and not used any more.
                let _ = unsafe { graphs.graph_destroy(graph) };
            }
        }
    }
}

fn broken(stream: StreamId, detail: &str) -> ResourceError {
    CaptureError::Broken { stream, detail: detail.to_owned() }.into()
}

/// An open capture, for the work that it records.
pub struct CaptureScope<'a> {
    open: &'a OpenCapture,
}

impl CaptureScope<'_> {
    /// The stream that is being captured.
    #[must_use]
    pub fn stream(&self) -> &DeviceStream {
        &self.open.members.stream
    }

    /// Returns the id of that stream, for managers and recorders.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.stream().id()
    }

    /// Brings another stream into the capture: its later work follows the work queued on the captured stream so far. The
    /// runtime rejoins it when the capture ends.
    pub fn fork(&self, stream: StreamId) -> Result<()> {
        let members = &self.open.members;
        let forked = members.resolve(stream)?;
        if forked.raw().handle() == members.stream.raw().handle() {
            return Ok(());
        }
        let registry = members.runtime().graphs();
        let (own, theirs) = (registry.info(members.stream.raw())?, registry.info(forked.raw())?);
        if theirs.is_some() && theirs.map(|info| info.id) != own.map(|info| info.id) {
            let other = self.id().to_string();
            return Err(ResourceError::from(CaptureError::OtherCapture { stream, other }).into());
        }
        if theirs.is_none() {
            check_not_captured("CaptureScope::fork", stream, forked.raw())?;
            members.begin(&forked)?;
        }
        members.wait(&forked, &members.stream)
    }

    /// Makes the captured stream follow the work queued on another stream of the capture.
    pub fn join(&self, stream: StreamId) -> Result<()> {
        let members = &self.open.members;
        let joined = members.resolve(stream)?;
        let registry = members.runtime().graphs();
        let (own, theirs) = (registry.info(members.stream.raw())?, registry.info(joined.raw())?);
        let Some(theirs) = theirs else {
            let outside = CaptureError::OutsideWait { stream: self.id(), other: stream };
            return Err(ResourceError::from(outside).into());
        };
        if own.is_none_or(|own| own.id != theirs.id) {
            let (stream, other) = (self.id(), stream.to_string());
            return Err(ResourceError::from(CaptureError::OtherCapture { stream, other }).into());
        }
        members.wait(&members.stream, &joined)
    }

    /// Makes every launch follow the work queued so far on a stream outside. A captured stream itself cannot wait for it.
    pub fn follow(&self, stream: StreamId) -> Result<()> {
        let outside = self.open.members.resolve(stream)?;
        // No capture of the stream begins between the check and the record.
        let _entered = outside.raw().enter_call();
        check_not_captured("CaptureScope::follow", stream, outside.raw())?;
        match &mut *self.open.followed.lock() {
            Some(followed) => Ok(followed.add(outside.raw().handle())?),
            None => Ok(()),
        }
    }

    /// Returns the bytes that the arena has allocated so far.
    #[must_use]
    pub fn arena_bytes(&self) -> usize {
        self.open.members.owner.arena.held_bytes()
    }
}

debug_fields!(self: CaptureScope<'_> { stream: self.id(), arena_bytes: self.arena_bytes() });

/// Membership in a capture that other code has begun. See [`XlogDeviceRuntime::join_capture`].
#[must_use = "dropping it ends the part in the capture"]
pub struct JoinedCapture {
    members: Members,
    followed: Followed,
}

impl JoinedCapture {
    /// Makes every launch follow the work queued so far on a stream outside, as [`CaptureScope::follow`].
    pub fn follow(&mut self, stream: StreamId) -> Result<()> {
        let outside = self.members.resolve(stream)?;
        let _entered = outside.raw().enter_call();
        check_not_captured("JoinedCapture::follow", stream, outside.raw())?;
        Ok(self.followed.add(outside.raw().handle())?)
    }

    /// Ends the membership. The result describes the uses of a launch: other code launches its graph inside
    /// [`LaunchRecorder::run`](crate::LaunchRecorder::run) of a recorder with [`LaunchRecorder::graph`](crate::LaunchRecorder::graph).
    pub fn finish(mut self) -> Result<Graph> {
        let ended = self.members.close();
        Ok(finished(&self.members, self.followed, ended, None))
    }
}

debug_fields!(self: JoinedCapture {
    stream: self.members.stream.id(), arena_bytes: self.members.owner.arena.held_bytes(),
});
