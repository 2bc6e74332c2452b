//! The runtime's pool as PyTorch's allocator: `xlogmem.torch.enable()`.
//!
//! PyTorch's streams are enlisted in the runtime's stream pool. So work on a block's own stream needs no announcement, and memory
//! freed on a stream serves its next request without a driver call. `record_stream` names further streams, and the free waits for
//! everything queued on them by then.
//!
//! Invariants:
//! - No function here calls Python or PyTorch: PyTorch may hold its own locks.
//! - A block that cannot be freed in order because a stream is being captured is freed after the capture.
//! - State is never dropped: PyTorch frees tensors until the process ends.
//! - The lock of the [`State`] of a device is not held over a call of the runtime, which may wait for the device. No thread holds two.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use xlog_base::{IntMap, Mutex};
use xlog_cuda::device_runtime::{
    AllocRequest, AllocTag, DeviceBlock, ResourceError, ResourceResult, XlogDeviceRuntime,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{Result, StreamId, XlogError};

use super::counters::Counters;
use super::graph_memory::{GraphMemory, UNIT};
use crate::foreign;
use crate::idle::{By, is_short, open_captures};
use crate::scope::current_tag;

/// The maximum number of devices of a process.
pub(super) const DEVICES: usize = 16;
/// The number of streams of a device that are found without a lock.
const FIRST_STREAMS: usize = 8;

/// PyTorch's id of a graph pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct GraphPoolId(pub(super) [u64; 2]);

impl GraphPoolId {
    /// The pool of captures that cannot be distinguished. It is never released.
    const UNKNOWN: Self = Self([u64::MAX; 2]);
}

struct OpenCapture {
    /// Each capture of the process has its own number, later ones a higher one.
    number: u64,
    pool: GraphPoolId,
    thread: ThreadId,
}

/// The number of the last capture.
static LAST_CAPTURE: AtomicU64 = AtomicU64::new(0);

/// The memory at an address.
enum Live {
    /// A block of the runtime, and the streams that `record_stream` named.
    Block { block: DeviceBlock, used_on: Vec<usize> },
    /// A block whose stream another thread cannot name: its free waits for the device.
    Unordered { block: DeviceBlock },
    /// A block of graph memory.
    Graph { pool: GraphPoolId, is_shared: bool },
}

struct Entry {
    live: Live,
    bytes: usize,
    requested: usize,
}

/// What every allocation and free of a device changes.
#[derive(Default)]
struct State {
    /// By address.
    live: IntMap<u64, Entry>,
    counters: Counters,
}

pub(super) struct Device {
    pub(super) runtime: Arc<XlogDeviceRuntime>,
    is_gpu: bool,
    state: Mutex<State>,
    /// The ids of all known streams.
    streams: Mutex<IntMap<usize, StreamId>>,
    /// The first of them, without the lock.
    first_streams: [OnceLock<(usize, StreamId)>; FIRST_STREAMS],
    graphs: Mutex<HashMap<GraphPoolId, GraphMemory>>,
    captures: Mutex<Vec<OpenCapture>>,
    /// The number of all announced captures.
    capturing: &'static AtomicUsize,
    /// Blocks whose free waits for the end of a capture.
    deferred: Mutex<Vec<Entry>>,
    has_deferred: AtomicBool,
}

impl Device {
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        let runtime = XlogDeviceRuntime::try_get_arc(ordinal as u32)?;
        // Created now, since a capture permits few driver calls.
        runtime.stream_pool().default_stream()?;
        Ok(Self {
            capturing: open_captures(&runtime),
            is_gpu: runtime.device().properties().kind == DeviceKind::Cuda,
            runtime,
            state: Mutex::default(),
            streams: Mutex::default(),
            first_streams: [const { OnceLock::new() }; FIRST_STREAMS],
            graphs: Mutex::default(),
            captures: Mutex::default(),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
        })
    }

    /// Returns the id of a PyTorch stream.
    fn stream_id(&self, stream: usize) -> Result<StreamId> {
        let mut first = self.first_streams.iter().map_while(OnceLock::get);
        match first.find(|(known, _)| *known == stream) {
            Some((_, id)) => Ok(*id),
            None => self.other_stream_id(stream),
        }
    }

    #[cold]
    fn other_stream_id(&self, stream: usize) -> Result<StreamId> {
        let mut streams = self.streams.lock();
        if let Some(id) = streams.get(&stream) {
            return Ok(*id);
        }
        // SAFETY: PyTorch names its own stream and never destroys one; docs/python.md requires the latter of external streams.
        let id = unsafe { self.runtime.stream_pool().enlist(ptr::without_provenance_mut(stream))? };
        if let Some(first) = self.first_streams.get(streams.len()) {
            first.get_or_init(|| (stream, id));
        }
        streams.insert(stream, id);
        Ok(id)
    }

    /// Maps both numbers of the legacy default stream to one.
    fn known_as(&self, stream: usize) -> usize {
        if stream == 0 && self.is_gpu { foreign::LEGACY } else { stream }
    }

    fn is_captured(&self, stream: usize) -> bool {
        // SAFETY: PyTorch names its own live stream.
        unsafe { foreign::is_captured(&self.runtime, stream) }
    }

    /// Calls `work` with the counters.
    pub(super) fn with_counters<T>(&self, work: impl FnOnce(&mut Counters) -> T) -> T {
        work(&mut self.state.lock().counters)
    }

    /// Allocates, and counts refusals.
    pub(super) fn allocate(&self, requested: usize, stream: usize) -> Result<u64> {
        match self.try_allocate(requested, stream) {
            Ok(ptr) => Ok(ptr),
            Err(refused) => self.allocate_again(refused, requested, stream),
        }
    }

    /// Allocates after a refusal, if memory was short and more could be freed.
    #[cold]
    fn allocate_again(&self, refused: XlogError, requested: usize, stream: usize) -> Result<u64> {
        let allocate = || self.try_allocate(requested, stream);
        let allocated = By::Torch.make_room(&self.runtime, refused, allocate).or_else(|refused| {
            match is_short(&refused) && self.return_deferred() {
                true => allocate(),
                false => Err(refused),
            }
        });
        allocated.inspect_err(|_| self.with_counters(|counters| counters.refusals += 1))
    }

    /// Counts an allocation and inserts its address, which is returned.
    #[inline]
    fn insert(&self, ptr: u64, entry: Entry) -> u64 {
        let reserved = self.runtime.physical_bytes();
        let state = &mut *self.state.lock();
        state.counters.add(entry.bytes, entry.requested);
        state.counters.set_reserved(reserved);
        state.live.insert(ptr, entry);
        ptr
    }

    /// Updates the reserved bytes.
    fn measure(&self) {
        let reserved = self.runtime.physical_bytes();
        self.with_counters(|counters| counters.set_reserved(reserved));
    }

    fn try_allocate(&self, requested: usize, stream: usize) -> Result<u64> {
        let stream = self.known_as(stream);
        let bytes = requested.checked_next_multiple_of(UNIT).ok_or_else(|| {
            ResourceError::InvalidRequest {
                value: format!("{requested} bytes"),
                accepted: "a size that can be rounded to 512 bytes".to_owned(),
            }
        })?;
        let tag = torch_tag();
        if self.capturing.load(Ordering::Acquire) > 0 && self.is_captured(stream) {
            return self.allocate_captured(requested, stream);
        }
        if foreign::is_per_thread(&self.runtime, stream) {
            let block = self.allocate_idle(bytes, tag)?;
            let (ptr, bytes) = (block.ptr, block.bytes);
            return Ok(
                self.insert(ptr, Entry { bytes, requested, live: Live::Unordered { block } })
            );
        }
        match self.allocate_on(bytes, self.stream_id(stream)?, tag) {
            Ok(block) => {
                let (ptr, bytes) = (block.ptr, block.bytes);
                let live = Live::Block { block, used_on: Vec::new() };
                Ok(self.insert(ptr, Entry { bytes, requested, live }))
            }
            // A capture that PyTorch did not announce.
            Err(_) if self.is_captured(stream) => self.allocate_captured(requested, stream),
            Err(error) => Err(error.into()),
        }
    }

    /// Allocates a block aligned to [`UNIT`]. All requests are multiples of it, so pool blocks are aligned unless others share the runtime.
    #[inline]
    fn allocate_on(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let allocated = self.runtime.allocate(bytes, stream, tag);
        if allocated.as_ref().map_or(true, |block| block.ptr.is_multiple_of(UNIT as u64)) {
            return allocated;
        }
        self.runtime.deallocate(allocated?)?;
        let request = AllocRequest::new(bytes, stream, tag).aligned(UNIT);
        self.runtime.resource().allocate_request(request, None)
    }

    /// Allocates a block without pending work.
    fn allocate_idle(&self, bytes: usize, tag: AllocTag) -> ResourceResult<DeviceBlock> {
        let block = self.allocate_on(bytes, StreamId::DEFAULT, tag)?;
        let stream = self.runtime.stream_pool().try_resolve(StreamId::DEFAULT);
        match stream.and_then(|stream| stream.synchronize()) {
            Ok(()) => Ok(block),
            Err(error) => {
                self.runtime.deallocate(block)?;
                Err(ResourceError::Driver(error.to_string()))
            }
        }
    }

    fn allocate_captured(&self, requested: usize, stream: usize) -> Result<u64> {
        let pool = self.open_pool();
        let mut graphs = self.graphs.lock();
        let memory = graphs.entry(pool).or_default();
        let grow = |bytes, tag| self.allocate_idle(bytes, tag);
        let (ptr, bytes) = memory.allocate(requested, stream, grow)?;
        let live = Live::Graph { pool, is_shared: false };
        Ok(self.insert(ptr, Entry { bytes, requested, live }))
    }

    /// Returns the pool of a captured allocation: that of the only capture, or of the one that this thread has begun.
    fn open_pool(&self) -> GraphPoolId {
        let captures = self.captures.lock();
        let this = thread::current().id();
        match &captures[..] {
            [only] => only.pool,
            several => several
                .iter()
                .rev()
                .find(|capture| capture.thread == this)
                .map_or(GraphPoolId::UNKNOWN, |capture| capture.pool),
        }
    }

    pub(super) fn begin_capture(&self, pool: GraphPoolId) {
        self.graphs.lock().entry(pool).or_default().uses += 1;
        let mut captures = self.captures.lock();
        let number = LAST_CAPTURE.fetch_add(1, Ordering::Relaxed) + 1;
        captures.push(OpenCapture { number, pool, thread: thread::current().id() });
        self.capturing.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends the last capture into a pool, of this thread if it has one.
    pub(super) fn end_capture(&self, pool: GraphPoolId) {
        let this = thread::current().id();
        let number = {
            let captures = self.captures.lock();
            let last = |own: bool| {
                let mut into = captures.iter().rev().filter(|capture| capture.pool == pool);
                into.find(|capture| !own || capture.thread == this)
            };
            last(true).or_else(|| last(false)).map(|capture| capture.number)
        };
        if let Some(number) = number {
            self.end_numbered(number);
        }
    }

    /// Ends a capture, and returns its pool; `None` if it is not open.
    fn end_numbered(&self, number: u64) -> Option<GraphPoolId> {
        let ended = {
            let mut captures = self.captures.lock();
            let at = captures.iter().position(|capture| capture.number == number)?;
            captures.remove(at)
        };
        self.capturing.fetch_sub(1, Ordering::AcqRel);
        if let Some(memory) = self.graphs.lock().get_mut(&ended.pool) {
            memory.end_capture();
        }
        Some(ended.pool)
    }

    /// Returns the number of the last open capture that this thread has begun.
    pub(super) fn last_capture(&self) -> Option<u64> {
        let this = thread::current().id();
        let captures = self.captures.lock();
        captures.iter().filter(|capture| capture.thread == this).map(|own| own.number).max()
    }

    /// Ends a capture that PyTorch has abandoned, with its graph, unless it has ended.
    pub(super) fn abandon_capture(&self, number: u64) {
        if let Some(pool) = self.end_numbered(number) {
            self.release_pool(pool);
        }
    }

    /// Records that PyTorch has destroyed a graph of a pool.
    pub(super) fn release_pool(&self, pool: GraphPoolId) {
        if let Some(memory) = self.graphs.lock().get_mut(&pool) {
            memory.uses = memory.uses.saturating_sub(1);
        }
        self.return_graph_memory();
    }

    /// Returns the memory of destroyed graphs to the runtime. Their last launch may still run, so the host waits for the device. That
    /// would break a capture, so the return waits for the end of captures.
    fn return_graph_memory(&self) {
        if self.capturing.load(Ordering::Acquire) > 0 {
            return;
        }
        let over: Vec<_> = {
            let mut graphs = self.graphs.lock();
            let over: Vec<_> = graphs
                .iter()
                .filter(|(pool, memory)| **pool != GraphPoolId::UNKNOWN && memory.is_over())
                .map(|(pool, _)| *pool)
                .collect();
            over.iter()
                .filter_map(|pool| graphs.remove(pool))
                .flat_map(GraphMemory::into_segments)
                .collect()
        };
        self.free_when_idle(over);
        self.measure();
    }

    /// Frees blocks whose last use is on an unknown stream.
    fn free_when_idle(&self, blocks: Vec<DeviceBlock>) {
        if blocks.is_empty() {
            return;
        }
        let runtime = self.runtime.clone();
        let free = move || {
            for block in blocks {
                // The runtime keeps a block whose free failed, and a later reap frees it.
                let _ = runtime.deallocate(block);
            }
        };
        By::Torch.free(&self.runtime, free);
    }

    /// Removes an address, and counts its free; `None` if it is of another device.
    fn remove(&self, ptr: u64) -> Option<Entry> {
        let state = &mut *self.state.lock();
        let entry = state.live.remove(&ptr)?;
        state.counters.remove(entry.bytes, entry.requested);
        Some(entry)
    }

    /// Frees an address; returns false for an address of another device. On a failure the runtime keeps the block and tries again,
    /// since there is no caller to report it to.
    fn free(&self, ptr: u64) -> bool {
        let Some(entry) = self.remove(ptr) else { return false };
        if let Live::Graph { pool, is_shared } = entry.live {
            let is_open = self.captures.lock().iter().any(|capture| capture.pool == pool);
            if let Some(memory) = self.graphs.lock().get_mut(&pool) {
                match is_shared && is_open {
                    true => memory.free_after_capture(ptr),
                    false => memory.free(ptr),
                }
            }
            self.return_graph_memory();
            return true;
        }
        self.free_deferred();
        if !self.try_free(&entry) {
            let mut deferred = self.deferred.lock();
            deferred.push(entry);
            self.has_deferred.store(true, Ordering::Release);
        }
        true
    }

    /// Frees a block; returns false if a stream that used it is being captured.
    fn try_free(&self, entry: &Entry) -> bool {
        let (block, is_recorded) = match &entry.live {
            Live::Graph { .. } => return true,
            Live::Unordered { .. } if self.capturing.load(Ordering::Acquire) > 0 => return false,
            Live::Unordered { block } => (copy(block), false),
            Live::Block { block, used_on } => {
                let mut is_recorded = true;
                for stream in used_on {
                    let recorded = self
                        .stream_id(*stream)
                        .and_then(|id| Ok(self.runtime.record_block_use(block, id)?));
                    match recorded {
                        Ok(()) => {}
                        Err(_) if self.is_captured(*stream) => return false,
                        // The work on that stream cannot be named, so the free waits for all work.
                        Err(_) => is_recorded = false,
                    }
                }
                (copy(block), is_recorded)
            }
        };
        match is_recorded {
            // The runtime keeps a block whose free failed, and a later reap frees it.
            true => drop(self.runtime.deallocate(block)),
            false => self.free_when_idle(vec![block]),
        }
        true
    }

    fn free_deferred(&self) {
        if !self.has_deferred.load(Ordering::Acquire) || self.capturing.load(Ordering::Acquire) > 0
        {
            return;
        }
        let Some(mut deferred) = self.deferred.try_lock() else { return };
        let entries = std::mem::take(&mut *deferred);
        deferred.extend(entries.into_iter().filter(|entry| !self.try_free(entry)));
        self.has_deferred.store(!deferred.is_empty(), Ordering::Release);
    }

    /// Records the use of an address; returns false for an address of another device.
    fn record_stream(&self, ptr: u64, stream: usize) -> bool {
        let state = &mut *self.state.lock();
        let Some(entry) = state.live.get_mut(&ptr) else { return false };
        let stream = self.known_as(stream);
        match &mut entry.live {
            Live::Block { block, .. } if foreign::is_per_thread(&self.runtime, stream) => {
                entry.live = Live::Unordered { block: copy(block) };
            }
            Live::Block { used_on, .. } if !used_on.contains(&stream) => used_on.push(stream),
            Live::Graph { is_shared, .. } => *is_shared = true,
            _ => {}
        }
        true
    }

    /// Frees what had to wait for the end of captures; returns false while one is open.
    fn return_deferred(&self) -> bool {
        let is_capturing = self.capturing.load(Ordering::Acquire) > 0;
        if !is_capturing {
            self.free_deferred();
            self.return_graph_memory();
        }
        !is_capturing
    }

    /// Returns cached memory to the device, for `torch.cuda.empty_cache()`. Waits for queued work, as PyTorch's own allocator does
    /// by `cudaFree`.
    pub(super) fn empty_cache(&self) {
        self.return_deferred();
        let _ = By::Torch.sweep(&self.runtime);
        let _ = self.runtime.reap_pending();
        let _ = self.runtime.trim();
        self.measure();
    }
}

/// The devices in use. Callers do not always name the right one, but no address is in use on two of them.
pub(super) type Devices = [OnceLock<Device>; DEVICES];

/// Frees an address, usually of the device with index `likely`.
pub(super) fn free(devices: &Devices, likely: usize, ptr: u64) {
    let likely = devices.get(likely).into_iter();
    let _ = likely.chain(devices).filter_map(OnceLock::get).any(|device| device.free(ptr));
}

/// Records that work on a stream uses an address. The free waits for the work queued there by then.
pub(super) fn record_stream(devices: &Devices, ptr: u64, stream: usize) {
    let _ =
        devices.iter().filter_map(OnceLock::get).any(|device| device.record_stream(ptr, stream));
}

/// Returns the size of the block at an address.
pub(super) fn size_at(devices: &Devices, ptr: u64) -> Option<usize> {
    let mut devices = devices.iter().filter_map(OnceLock::get);
    devices.find_map(|device| Some(device.state.lock().live.get(&ptr)?.bytes))
}

/// Returns this thread's tag, or the framework's name.
pub(super) fn torch_tag() -> AllocTag {
    match current_tag() {
        AllocTag::UNTAGGED => AllocTag("torch"),
        tag => tag,
    }
}

/// Copies the block; the original is dropped unused with its entry.
fn copy(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { ..*block }
}
