//! Open captures and arenas of one runtime.
//!
//! `routing` dispatches calls to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use xlog_driver::sync::Mutex;
use xlog_driver::{CaptureInfo, DriverError, Graphs};

use super::arena::{Arena, BlockOrigin};
use super::captured::{CapturedUse, Ended, OnStream, OpenOrder};
use super::{CaptureError, CaptureOptions};
use crate::CudaDevice;
use crate::device_runtime::resource::{
    Access, AllocRequest, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, MIN_ALIGN,
    ResourceError, ResourceResult, StreamId,
};
use crate::device_runtime::runtime::report_failed_free;
use crate::device_runtime::stream_pool::StreamPool;
use crate::memory::FailedFree;
use crate::stream::{RawStream, is_capture_refusal};

/// The reasons for which a call of the runtime does not go directly to its resource.
#[derive(Debug)]
pub(crate) struct Detour(AtomicU8);

impl Detour {
    /// Parts of the runtime belong to different devices or pools.
    pub(crate) const MISMATCH: u8 = 1;
    /// A log below needs the caller of an allocation.
    pub(crate) const LOG: u8 = 2;
    /// Captures are open, or graphs have memory.
    pub(crate) const GRAPHS: u8 = 4;

    pub(crate) fn new(reasons: u8) -> Self {
        Self(AtomicU8::new(reasons))
    }

    /// Whether one of these reasons applies. A thread that has learned of a capture or of a graph's block sees its reason.
    #[inline(always)]
    pub(crate) fn any(&self, reasons: u8) -> bool {
        self.0.load(Ordering::Relaxed) & reasons != 0
    }

    fn set(&self, reason: u8, is_given: bool) {
        match is_given {
            true => self.0.fetch_or(reason, Ordering::Release),
            false => self.0.fetch_and(!reason, Ordering::Release),
        };
    }
}

#[derive(Debug)]
pub(super) struct Capture {
    pub(super) id: u64,
    pub(super) arena: Arc<Arena>,
}

/// A chunk and its arena, by the end of the chunk.
#[derive(Clone, Debug)]
pub(super) struct ChunkRef {
    end: u64,
    pub(super) arena: Arc<Arena>,
    pub(super) index: usize,
}

#[derive(Debug, Default)]
struct Registered {
    captures: Vec<Arc<Capture>>,
    arenas: Vec<Arc<Arena>>,
    chunks: BTreeMap<u64, ChunkRef>,
}

impl Registered {
    /// Returns the first number that no arena has in its tag. Numbers are reused, so the tags stay few.
    fn unused_number(&self) -> u32 {
        let mut numbers: Vec<u32> = self.arenas.iter().filter_map(|arena| arena.number).collect();
        numbers.sort_unstable();
        numbers.into_iter().fold(1, |unused, number| unused + u32::from(number == unused))
    }
}

/// The captures and graphs of one runtime, and the resource below them.
pub(crate) struct GraphRegistry {
    pub(crate) detour: Detour,
    pub(super) inner: Arc<dyn DeviceMemoryResource + Send + Sync>,
    device: Arc<CudaDevice>,
    streams: Arc<StreamPool>,
    open_captures: AtomicUsize,
    /// The addresses from the first chunk to the end of the last, which exclude most other blocks.
    first_address: AtomicU64,
    end_address: AtomicU64,
    /// Whether a graph of other code has ended.
    has_stale: Arc<AtomicBool>,
    state: Mutex<Registered>,
}

impl GraphRegistry {
    pub(crate) fn new(
        detour: u8,
        inner: Arc<dyn DeviceMemoryResource + Send + Sync>,
        device: Arc<CudaDevice>,
        streams: Arc<StreamPool>,
    ) -> Self {
        Self {
            detour: Detour::new(detour),
            inner,
            device,
            streams,
            open_captures: AtomicUsize::new(0),
            first_address: AtomicU64::new(u64::MAX),
            end_address: AtomicU64::new(0),
            has_stale: Arc::default(),
            state: Mutex::default(),
        }
    }

    pub(super) fn has_stale(&self) -> &Arc<AtomicBool> {
        &self.has_stale
    }

    pub(super) fn graphs(&self) -> Result<&dyn Graphs, DriverError> {
        self.device.driver().graphs().ok_or(DriverError::Unsupported { call: "capture" })
    }

    fn update(&self, state: &Registered) {
        self.open_captures.store(state.captures.len(), Ordering::Release);
        let first = state.chunks.keys().next().copied().unwrap_or(u64::MAX);
        let end = state.chunks.values().map(|chunk| chunk.end).max().unwrap_or(0);
        self.first_address.store(first, Ordering::Release);
        self.end_address.store(end, Ordering::Release);
        let is_used = !state.captures.is_empty() || !state.arenas.is_empty();
        self.detour.set(Detour::GRAPHS, is_used);
    }

    // Arenas.

    /// Returns a new arena, or the one to share, with one more owner.
    pub(super) fn own_arena(&self, options: &CaptureOptions) -> Result<Arc<Arena>, CaptureError> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let mut state = self.state.lock();
        let arena = match options.shared() {
            Some(arena) => Arc::clone(arena),
            None => Arena::new(options, state.unused_number(), self.device.ordinal()),
        };
        {
            let mut inside = arena.state.lock();
            if inside.open.is_some() {
                return Err(CaptureError::ArenaBusy);
            }
            inside.owners += 1;
            inside.open = Some(OpenOrder::new(NUMBERS.fetch_add(1, Ordering::Relaxed)));
        }
        if !state.arenas.iter().any(|known| Arc::ptr_eq(known, &arena)) {
            state.arenas.push(Arc::clone(&arena));
        }
        self.update(&state);
        Ok(arena)
    }

    pub(super) fn disown(&self, arena: &Arc<Arena>) {
        {
            let mut inside = arena.state.lock();
            inside.owners = inside.owners.saturating_sub(1);
        }
        self.release_idle(arena);
    }

    /// Frees the chunks of an arena that is not needed any more.
    pub(super) fn release_idle(&self, arena: &Arc<Arena>) {
        let chunks = {
            let mut state = self.state.lock();
            let Some(chunks) = arena.take_idle() else { return };
            state.arenas.retain(|known| !Arc::ptr_eq(known, arena));
            chunks.iter().for_each(|chunk| drop(state.chunks.remove(&chunk.ptr)));
            self.update(&state);
            chunks
        };
        self.free_all(chunks);
    }

    fn free_all(&self, blocks: Vec<DeviceBlock>) {
        for block in blocks {
            let (id, bytes, tag) = (BlockId::from_block(&block), block.bytes, block.tag);
            if let Err(error) = self.inner.deallocate(block) {
                report_failed_free(&FailedFree { block: id, bytes, tag, error });
            }
        }
    }

    /// Frees the chunks that a failed capture has added and that contain no block.
    pub(super) fn release_unused(&self, arena: &Arc<Arena>, first: usize) {
        let chunks = {
            let mut state = self.state.lock();
            let chunks = arena.take_unused(first);
            chunks.iter().for_each(|chunk| drop(state.chunks.remove(&chunk.ptr)));
            self.update(&state);
            chunks
        };
        self.free_all(chunks);
    }

    /// Frees the memory of ended graphs of other code.
    pub(crate) fn sweep(&self) {
        if self.has_stale.load(Ordering::Acquire) && self.has_stale.swap(false, Ordering::AcqRel) {
            let arenas = self.state.lock().arenas.clone();
            arenas.iter().for_each(|arena| self.release_idle(arena));
        }
    }

    /// Adds a chunk for a request.
    pub(super) fn grow(
        &self,
        arena: &Arc<Arena>,
        bytes: usize,
        align: usize,
    ) -> ResourceResult<()> {
        let size = arena.next_chunk(bytes, align)?;
        // On a stream of its own the chunk is ordered after no running work.
        let lease = self.streams.lease().ok();
        let home = lease.as_ref().map_or(StreamId::DEFAULT, |lease| lease.id());
        if let Some(raw) = self.maybe_captured(home)
            && let Err(error) = raw.check_not_capturing("grow")
        {
            return Err(match lease {
                None if is_capture_refusal(&error) => {
                    CaptureError::NoStreamLeft { max: self.streams.max_streams() }.into()
                }
                _ => error.into(),
            });
        }
        let request = AllocRequest::new(size, home, arena.tag).aligned(align.max(MIN_ALIGN));
        let chunk = self.inner.allocate_request(request, None)?;
        let mut state = self.state.lock();
        if arena.open_capture().is_none() {
            // The capture ended meanwhile, perhaps with its arena.
            drop(state);
            self.free_all(vec![chunk]);
            return Err(CaptureError::Ended { stream: home }.into());
        }
        let (start, end) = (chunk.ptr, chunk.ptr + chunk.bytes as u64);
        let index = arena.add_chunk(chunk);
        state.chunks.insert(start, ChunkRef { end, arena: Arc::clone(arena), index });
        self.update(&state);
        Ok(())
    }

    pub(super) fn find(&self, ptr: u64) -> Option<ChunkRef> {
        let (first, end) = (&self.first_address, &self.end_address);
        if ptr < first.load(Ordering::Acquire) || ptr >= end.load(Ordering::Acquire) {
            return None;
        }
        let state = self.state.lock();
        let (_, chunk) = state.chunks.range(..=ptr).next_back()?;
        (ptr < chunk.end).then(|| chunk.clone())
    }

    // Captures.

    pub(super) fn open(&self, id: u64, arena: &Arc<Arena>) -> Arc<Capture> {
        let capture = Arc::new(Capture { id, arena: Arc::clone(arena) });
        let mut state = self.state.lock();
        state.captures.push(Arc::clone(&capture));
        self.update(&state);
        capture
    }

    /// Unregisters a capture. Its arena stays.
    pub(super) fn close(&self, arena: &Arc<Arena>) -> Ended {
        let mut ended = {
            let mut state = self.state.lock();
            state.captures.retain(|known| !Arc::ptr_eq(&known.arena, arena));
            let ended = arena.end_capture();
            self.update(&state);
            ended
        };
        self.free_all(std::mem::take(&mut ended.frees));
        ended
    }

    /// The driver stream of an id, if other code or this runtime may be capturing it.
    fn maybe_captured(&self, stream: StreamId) -> Option<&Arc<RawStream>> {
        self.streams.raw(stream).filter(|raw| raw.handle_escaped())
    }

    pub(super) fn info(&self, raw: &RawStream) -> Result<Option<CaptureInfo>, DriverError> {
        match self.device.driver().graphs() {
            Some(graphs) => graphs.capture_info(raw.handle()),
            None => Ok(None),
        }
    }

    /// Whether any code captures a stream.
    pub(crate) fn is_captured(&self, stream: StreamId) -> bool {
        self.maybe_captured(stream).is_some_and(|raw| raw.check_not_capturing("free").is_err())
    }

    /// Returns the capture of this runtime that a stream belongs to.
    pub(super) fn capture_of(&self, stream: StreamId) -> ResourceResult<Option<Arc<Capture>>> {
        if self.open_captures.load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let Some(raw) = self.maybe_captured(stream) else { return Ok(None) };
        let Some(info) = self.info(raw)? else { return Ok(None) };
        let state = self.state.lock();
        Ok(state.captures.iter().find(|capture| capture.id == info.id).cloned())
    }

    /// Returns the number of the capture of this runtime that records the work of a stream.
    pub(crate) fn capture_number(&self, stream: StreamId) -> ResourceResult<Option<u64>> {
        if !self.detour.any(Detour::GRAPHS) {
            return Ok(None);
        }
        Ok(self.capture_of(stream)?.and_then(|capture| capture.arena.open_capture()))
    }

    /// Returns the registered capture that has this use open, even if the capture is broken.
    pub(super) fn capture_with_use(
        &self,
        block: BlockId,
        stream: StreamId,
    ) -> Option<Arc<Capture>> {
        if self.open_captures.load(Ordering::Acquire) == 0 {
            return None;
        }
        let captures = self.state.lock().captures.clone();
        captures.into_iter().find(|capture| capture.arena.has_open_use(block, stream))
    }

    /// Closes uses where they were opened: in the capture of this number, or outside.
    pub(crate) fn finish_opened(
        &self,
        capture: Option<u64>,
        uses: &[(BlockId, Access)],
        stream: StreamId,
    ) -> ResourceResult<()> {
        let Some(number) = capture else { return self.finish_outside(uses, stream) };
        let captures = self.state.lock().captures.clone();
        let open = captures.iter().find(|known| known.arena.open_capture() == Some(number));
        let Some(open) = open else { return Err(CaptureError::Ended { stream }.into()) };
        let mut outcome = Ok(());
        for &(block, access) in uses {
            let used = CapturedUse { block, access, outside: None };
            outcome = outcome.and(open.arena.finish(used, stream));
        }
        outcome
    }

    /// Closes uses that were opened outside of captures.
    pub(super) fn finish_outside(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        let mut below: Vec<(BlockId, Access)> = Vec::with_capacity(uses.len());
        let mut closed: Vec<(Arc<Arena>, BlockId)> = Vec::new();
        for &(block, access) in uses {
            let chunk = self.find(block.ptr);
            match chunk.and_then(|chunk| Some((chunk.arena.chunk_of(block)?, chunk.arena))) {
                Some((chunk, arena)) => {
                    below.push((chunk, access));
                    closed.push((arena, block));
                }
                None => below.push((block, access)),
            }
        }
        let outcome = self.inner.finish_block_uses(&below, use_stream);
        for (arena, block) in closed {
            if arena.close_outside(block) {
                self.release_idle(&arena);
            }
        }
        outcome
    }

    /// Returns the registered capture that a stream belongs to, even if the capture is broken.
    pub(super) fn capture_of_member(&self, stream: StreamId) -> Option<Arc<Capture>> {
        if self.open_captures.load(Ordering::Acquire) == 0 {
            return None;
        }
        let captures = self.state.lock().captures.clone();
        captures.into_iter().find(|capture| capture.arena.has_member(stream))
    }

    /// Whether a capture of this runtime records the work of a stream.
    pub(crate) fn is_capturing(&self, stream: StreamId) -> ResourceResult<bool> {
        Ok(self.detour.any(Detour::GRAPHS) && self.capture_of(stream)?.is_some())
    }

    pub(super) fn on_stream(&self, stream: StreamId) -> ResourceResult<OnStream<'_>> {
        let raw = self.streams.raw(stream).ok_or_else(|| ResourceError::unknown_stream(stream))?;
        Ok(OnStream { id: stream, raw, driver: self.device.driver().as_ref() })
    }

    pub(super) fn allocate_captured(
        &self,
        capture: &Capture,
        AllocRequest { bytes, align, stream, tag, .. }: AllocRequest,
    ) -> ResourceResult<DeviceBlock> {
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let align = align.max(MIN_ALIGN);
        let arena = &capture.arena;
        let rounded = bytes.checked_next_multiple_of(MIN_ALIGN).ok_or_else(|| {
            CaptureError::ArenaLimit { requested: bytes, held: 0, limit: arena.limit }
        })?;
        let stream = self.on_stream(stream)?;
        let ask = |waits| arena.allocate(rounded, align, stream, tag, waits);
        if let Some(block) = ask(false)? {
            return Ok(block);
        }
        let refused = match self.grow(arena, rounded, align) {
            Ok(()) => return ask(false)?.ok_or_else(|| arena_limit(arena, bytes)),
            Err(refused) => refused,
        };
        ask(true)?.ok_or(refused)
    }

    /// Classifies a use of a block on a stream of a capture.
    pub(super) fn captured_use(
        &self,
        capture: &Capture,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<CapturedUse> {
        let Some(chunk) = self.find(block.ptr) else {
            let is_freed = capture.arena.has_deferred(block.generation);
            if is_freed || self.inner.block_state(block) != BlockState::Live {
                return Err(ResourceError::UseAfterFree { generation: block.generation });
            }
            return Ok(CapturedUse { block, access, outside: Some(block) });
        };
        let is_own = Arc::ptr_eq(&chunk.arena, &capture.arena);
        let outside = match chunk.arena.origin(block, chunk.index)? {
            BlockOrigin::Captured if is_own => None,
            BlockOrigin::Captured => {
                let other = format!("the block of {}", block.generation);
                return Err(CaptureError::OtherCapture { stream, other }.into());
            }
            // A block of an earlier capture. A launch uses its chunk, and is refused once the block is freed.
            BlockOrigin::Outside(_) | BlockOrigin::Chunk => Some(block),
        };
        Ok(CapturedUse { block, access, outside })
    }
}

fn arena_limit(arena: &Arena, requested: usize) -> ResourceError {
    CaptureError::ArenaLimit { requested, held: arena.held_bytes(), limit: arena.limit }.into()
}
