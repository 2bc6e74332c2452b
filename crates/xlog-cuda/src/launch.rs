//! The uses of the buffers of one launch.
//!
//! A [`LaunchRecorder`] collects the buffers that a launch reads and writes. `preflight` opens a use of every block, which makes the
//! launch's stream wait for what the launch depends on. The caller queues the launch. `commit` closes all uses at once, so that they
//! share one event. [`LaunchRecorder::run`] does all three.
//!
//! Invariants:
//! - No wait is queued before every buffer is accepted.
//! - An opened use is closed exactly once, on the runtime that it was opened on, by commit, an error, a panic or the drop. A use that
//!   stayed open would keep its block from ever being freed.

use smallvec::SmallVec;

use xlog_base::debug_fields;

use crate::device_runtime::graph::{Graph, check_not_captured};
use crate::device_runtime::resource::{
    Access, BlockId, BlockState, ResourceError, ResourceResult, StreamId,
};
use crate::device_runtime::runtime::{XlogDeviceRuntime, catch_panic};
use crate::memory::{Shown, TrackedCudaSlice};
use crate::{DeviceStream, Result};

/// The number of buffers that a recorder stores inline.
const INLINE_USES: usize = 8;

type Uses = SmallVec<[(BlockId, Access); INLINE_USES]>;

/// Collects the buffers of one launch, and orders the launch against all other uses of them.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let manager = GpuMemoryManager::with_runtime(runtime.clone());
/// let stream = runtime.stream_pool().lease()?;
/// let mut source = manager.alloc::<u8>(64)?;
/// let copy = manager.alloc::<u8>(64)?;
/// source.fill_bytes(5)?;
///
/// let mut recorder = LaunchRecorder::new_strict(stream.id());
/// recorder.read(&source).write(&copy);
/// recorder.preflight(&runtime)?;
/// // SAFETY: both buffers are live, and the recorder orders the copy against all other work on them.
/// unsafe { stream.copy_dtod(copy.ptr(), source.ptr(), 64)? };
/// recorder.commit(&runtime)?;
///
/// drop(source); // freed after the copy
/// assert_eq!(copy.to_vec()?, [5; 64]);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[must_use = "a recorder that is not committed protects nothing that is launched after it"]
pub struct LaunchRecorder {
    stream: StreamId,
    strict: bool,
    wanted: SmallVec<[Wanted; INLINE_USES]>,
    /// Memory that no runtime backs: how many buffers, and the address of the first.
    foreign: Option<(usize, u64)>,
    graphs: SmallVec<[Graph; 1]>,
    skipped: usize,
    opened: Option<Opened>,
    /// Buffers whose address becomes visible after preflight.
    hidden: SmallVec<[Shown; INLINE_USES]>,
    /// A buffer or graph that was named after preflight; returned by the next fallible call.
    late: Option<ResourceError>,
}

/// One block and what the launch does to it.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    block: BlockId,
    access: Access,
    /// The address of the block's runtime. It may be reused after the runtime's end, but a block's identity is not.
    runtime: usize,
    order: usize,
}

/// Open uses, and the runtime that they were opened on.
struct Opened {
    runtime: XlogDeviceRuntime,
    uses: Uses,
    /// The capture that they were opened in.
    capture: Option<u64>,
}

impl LaunchRecorder {
    /// Creates a recorder for a launch on `stream`. It refuses memory that the runtime does not track.
    pub fn new_strict(stream: StreamId) -> Self {
        Self::new(stream, true)
    }

    /// Creates a recorder for a launch on `stream`. It skips memory that the runtime does not track, which the caller has to order.
    pub fn new_permissive(stream: StreamId) -> Self {
        Self::new(stream, false)
    }

    fn new(stream: StreamId, strict: bool) -> Self {
        Self {
            stream,
            strict,
            wanted: SmallVec::new(),
            foreign: None,
            graphs: SmallVec::new(),
            skipped: 0,
            opened: None,
            hidden: SmallVec::new(),
            late: None,
        }
    }

    /// Adds a buffer that the launch reads.
    pub fn read<T>(&mut self, slice: &TrackedCudaSlice<T>) -> &mut Self {
        self.add(slice, Access::Read)
    }

    /// Adds a buffer that the launch writes without reading it.
    pub fn write<T>(&mut self, slice: &TrackedCudaSlice<T>) -> &mut Self {
        self.add(slice, Access::Write)
    }

    /// Adds a buffer that the launch reads and writes.
    pub fn read_write<T>(&mut self, slice: &TrackedCudaSlice<T>) -> &mut Self {
        self.add(slice, Access::ReadWrite)
    }

    /// Adds a graph that the launch runs: all blocks that the graph uses, and the outside work that it depends on.
    ///
    /// It is for graphs that other code launches; [`Graph::launch`] does this by itself. Between preflight and commit the caller must not
    /// queue another launch of the graph, or of one that shares its arena: the recorder does not order the two.
    pub fn graph(&mut self, graph: &Graph) -> &mut Self {
        if self.opened.is_some() {
            self.late.get_or_insert_with(|| {
                ResourceError::StreamMisuse(
                    "a graph was named after preflight, so its launch is not ordered; name it before preflight".to_owned(),
                )
            });
            return self;
        }
        let runtime = graph.runtime().address();
        for &(block, access) in graph.uses() {
            let order = self.wanted.len();
            self.wanted.push(Wanted { block, access, runtime, order });
        }
        self.graphs.push(graph.clone());
        self
    }

    fn add<T>(&mut self, slice: &TrackedCudaSlice<T>, access: Access) -> &mut Self {
        if self.opened.is_some() {
            self.late.get_or_insert_with(|| {
                ResourceError::StreamMisuse(format!(
                    "the buffer at {:#x} was named after preflight, so the launch is not ordered against its other uses; \
                     name every buffer before preflight",
                    slice.ptr()
                ))
            });
            return self;
        }
        match (slice.id(), slice.runtime()) {
            (Some(block), Some(runtime)) => {
                self.hidden.extend(slice.shown().cloned());
                let (order, runtime) = (self.wanted.len(), runtime.address());
                self.wanted.push(Wanted { block, access, runtime, order });
            }
            _ if slice.is_foreign() => self.foreign.get_or_insert((0, slice.ptr())).0 += 1,
            // An empty buffer has no bytes to order.
            _ => {}
        }
        self
    }

    /// Returns the stream of the launch.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Returns the number of buffers that the last preflight of a permissive recorder skipped.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Checks every buffer, then makes the stream wait for what the launch depends on. Call it before the launch is queued.
    ///
    /// After an error no use is open, and it may be called again; after success it may not.
    pub fn preflight(&mut self, runtime: &XlogDeviceRuntime) -> ResourceResult<()> {
        if let Some(late) = &self.late {
            return Err(late.clone());
        }
        if self.opened.is_some() {
            return Err(ResourceError::StreamMisuse(
                "preflight was called twice; its uses are open, commit or drop the recorder"
                    .to_owned(),
            ));
        }
        let uses = self.tracked(runtime)?;
        self.check_graphs(runtime)?;
        // Stored in the recorder before the first use is opened, so that a panic below closes the open uses.
        let capture = runtime.graphs().capture_number(self.stream)?;
        let (runtime_share, open) = (runtime.share(), Uses::with_capacity(uses.len()));
        let opened = self.opened.insert(Opened { runtime: runtime_share, uses: open, capture });
        for (block, access) in uses {
            if let Err(error) = runtime.prepare_block_use(block, self.stream, access) {
                // The error of the prepare is more useful than one of the close.
                let _ = self.close();
                return Err(error);
            }
            opened.uses.push((block, access));
        }
        self.wait_for_graphs(runtime).inspect_err(|_| {
            let _ = self.close();
        })?;
        self.hidden.iter().for_each(Shown::set);
        Ok(())
    }

    /// Refuses to launch a graph on a stream that is being captured.
    fn check_graphs(&self, runtime: &XlogDeviceRuntime) -> ResourceResult<()> {
        if self.graphs.is_empty() {
            return Ok(());
        }
        let stream = runtime.stream_pool().raw(self.stream);
        let stream = stream.ok_or_else(|| ResourceError::unknown_stream(self.stream))?;
        check_not_captured("the launch of a graph", self.stream, stream)
    }

    /// Makes the stream wait for the outside work that the graphs depend on.
    fn wait_for_graphs(&self, runtime: &XlogDeviceRuntime) -> ResourceResult<()> {
        for graph in &self.graphs {
            let stream = runtime.stream_pool().raw(self.stream);
            let stream = stream.ok_or_else(|| ResourceError::unknown_stream(self.stream))?;
            graph.wait_outside(stream.handle())?;
        }
        Ok(())
    }

    /// Closes all uses after the launch was queued, or failed to be.
    ///
    /// Returns the first error. No use is left open, even after an error.
    pub fn commit(mut self, runtime: &XlogDeviceRuntime) -> ResourceResult<()> {
        let Some(opened) = &self.opened else {
            return Err(ResourceError::StreamMisuse(
                "commit without a preflight that succeeded; the launch is not ordered".to_owned(),
            ));
        };
        let elsewhere = (!opened.runtime.is_same(runtime)).then(|| {
            ResourceError::StreamMisuse(format!(
                "commit on another runtime (device {:?}) than preflight (device {:?}); the uses were closed where they were \
                 opened",
                runtime.device().spec(),
                opened.runtime.device().spec()
            ))
        });
        let closed = self.close();
        match self.late.take().or(elsewhere) {
            Some(misuse) => Err(misuse),
            None => closed,
        }
    }

    /// Runs preflight, `launch` and commit. If `launch` fails or panics, the uses are closed; its error takes precedence.
    pub fn run<R>(
        mut self,
        runtime: &XlogDeviceRuntime,
        launch: impl FnOnce(&DeviceStream) -> Result<R>,
    ) -> Result<R> {
        let stream = runtime.stream_pool().try_resolve(self.stream)?;
        self.preflight(runtime)?;
        let launched = launch(&stream);
        let committed = self.commit(runtime);
        let value = launched?;
        committed?;
        Ok(value)
    }

    /// Returns the uses to open on `runtime`, each block once. Refuses or skips memory that it does not track.
    fn tracked(&mut self, runtime: &XlogDeviceRuntime) -> ResourceResult<Uses> {
        self.merge();
        let refuse = |ptr: u64, why: &str| {
            Err(ResourceError::StreamMisuse(format!(
                "a strict launch cannot use the buffer at {ptr:#x}: {why}, so its uses cannot be ordered (unsupported)"
            )))
        };
        self.skipped = 0;
        if let Some((count, ptr)) = self.foreign {
            if self.strict {
                return refuse(ptr, "no runtime backs it");
            }
            self.skipped += count;
        }
        let supported = runtime.supports_block_use_tracking();
        let mut uses = Uses::with_capacity(self.wanted.len());
        for wanted in &self.wanted {
            let known = wanted.runtime == runtime.address()
                || runtime.block_state(wanted.block) == BlockState::Live;
            match (supported && known, self.strict) {
                (true, _) => uses.push((wanted.block, wanted.access)),
                (false, false) => self.skipped += 1,
                (false, true) if known => {
                    return refuse(wanted.block.ptr, "the runtime's resource tracks no uses");
                }
                (false, true) => return refuse(wanted.block.ptr, "it belongs to another runtime"),
            }
        }
        Ok(uses)
    }

    /// Merges the uses of each block into one with the union of their accesses. It keeps the order of first mention, which determines the
    /// order of driver calls, so that a run replays.
    fn merge(&mut self) {
        let identity = |wanted: &Wanted| {
            let BlockId { ptr, generation, device_ordinal, .. } = wanted.block;
            (generation, ptr, device_ordinal)
        };
        self.wanted.sort_by_key(identity);
        self.wanted.dedup_by(|later, first| {
            let same = identity(later) == identity(first);
            if same && later.access != first.access {
                first.access = Access::ReadWrite;
            }
            same
        });
        self.wanted.sort_unstable_by_key(|wanted| wanted.order);
    }

    /// Closes the open uses, once.
    fn close(&mut self) -> ResourceResult<()> {
        match self.opened.take() {
            Some(Opened { runtime, uses, capture }) if !uses.is_empty() => {
                runtime.finish_opened_uses(capture, &uses, self.stream)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for LaunchRecorder {
    fn drop(&mut self) {
        // The launch may have been queued. To record a use without a launch is harmless.
        catch_panic(|| self.close());
    }
}

debug_fields!(self: LaunchRecorder {
    stream: self.stream, strict: self.strict, wanted: self.wanted, foreign: self.foreign,
    graphs: self.graphs, open_uses: self.opened.as_ref().map(|opened| &opened.uses),
    late: self.late,
});
