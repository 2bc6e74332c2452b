//! Memory of one capture, or of several captures whose graphs never run concurrently.
//!
//! Invariants:
//! - At most one capture is open in an arena.
//! - A block lies in one chunk. Freeing the block, inside or outside of the capture, frees its range.
//! - Every launch is a write of all chunks that its graph may access, so launches in one arena follow each other.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use xlog_driver::sync::Mutex;

use super::captured::OpenOrder;
use super::order::CapturedUses;
use super::ranges::{FreeRange, FreeRanges};
use super::{CaptureError, CaptureOptions};
use crate::device_runtime::resource::{
    AllocTag, BlockId, BlockState, DeviceBlock, Generation, MIN_ALIGN, ResourceError,
    ResourceResult, StreamId,
};

/// The unit in which an arena grows.
const GRANULE: usize = 2 << 20;
/// An arena grows by at least 1/GROWTH_PART of its size.
const GROWTH_PART: usize = 4;

#[derive(Debug)]
pub(super) struct InsideBlock {
    pub(super) range: FreeRange,
    pub(super) stream: StreamId,
    /// The capture in which the block was allocated.
    pub(super) capture: u64,
    pub(super) is_retired: bool,
    /// Uses that are open inside the capture.
    pub(super) open_uses: u32,
    /// Uses that are open outside, after the capture has ended.
    pub(super) outside_uses: u32,
    /// Whether a use was announced. Until then the block's own stream may use it without announcements.
    pub(super) is_announced: bool,
    pub(super) uses: CapturedUses,
}

#[derive(Debug, Default)]
pub(super) struct ArenaState {
    pub(super) chunks: Vec<DeviceBlock>,
    pub(super) free: FreeRanges,
    pub(super) blocks: HashMap<Generation, InsideBlock>,
    /// Graphs and open captures that need the memory.
    pub(super) owners: usize,
    pub(super) open: Option<OpenOrder>,
}

/// Chunks of memory and the blocks in them.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) tag: AllocTag,
    /// The number in the tag, if the tag is the arena's own.
    pub(super) number: Option<u32>,
    pub(super) limit: usize,
    pub(super) first_bytes: usize,
    pub(super) ordinal: u32,
    /// Graphs that other code executes; the driver reports their end.
    foreign_graphs: AtomicUsize,
    /// Held while a graph of the arena is launched.
    pub(super) launching: Mutex<()>,
    pub(super) state: Mutex<ArenaState>,
}

/// The origin of a block, which decides what orders its uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BlockOrigin {
    /// The block belongs to the arena and may be used outside, as a use of its chunk.
    Outside(BlockId),
    /// The id names a chunk, which belongs to the resource below.
    Chunk,
    /// The block belongs to the open capture.
    Captured,
}

impl Arena {
    /// Creates an arena with the tag of the options, or with its own tag of `number`.
    pub(super) fn new(options: &CaptureOptions, number: u32, ordinal: u32) -> Arc<Self> {
        let own = || AllocTag::intern(&format!("graph {number}"));
        Arc::new(Self {
            tag: options.tag.unwrap_or_else(own),
            number: options.tag.is_none().then_some(number),
            limit: options.limit,
            first_bytes: options.arena_bytes,
            ordinal,
            foreign_graphs: AtomicUsize::new(0),
            launching: Mutex::default(),
            state: Mutex::default(),
        })
    }

    /// Counts a graph that other code executes. The driver calls the result at the graph's end; it calls no driver.
    pub(super) fn retain_foreign(
        self: &Arc<Self>,
        has_stale: Arc<AtomicBool>,
    ) -> impl FnOnce() + Send + 'static {
        self.foreign_graphs.fetch_add(1, Ordering::AcqRel);
        let hold = ForeignHold { arena: Arc::clone(self), has_stale };
        move || drop(hold)
    }

    /// Returns the size of the next chunk for a request.
    pub(super) fn next_chunk(&self, bytes: usize, align: usize) -> Result<usize, CaptureError> {
        let state = self.state.lock();
        let held: usize = state.chunks.iter().map(|chunk| chunk.bytes).sum();
        let slack = if align > GRANULE { align } else { 0 };
        let refuse = || CaptureError::ArenaLimit { requested: bytes, held, limit: self.limit };
        let least = bytes
            .checked_add(slack)
            .and_then(|bytes| bytes.checked_next_multiple_of(GRANULE))
            .ok_or_else(refuse)?;
        let room = self.limit.saturating_sub(held);
        let exact = bytes.saturating_add(slack).next_multiple_of(MIN_ALIGN);
        let wanted = match held {
            // The first chunk has the size that the caller configured.
            0 if self.first_bytes > 0 => exact.max(self.first_bytes.next_multiple_of(MIN_ALIGN)),
            held => least.max((held / GROWTH_PART).next_multiple_of(GRANULE)),
        };
        // Near the limit only the exact size may fit.
        [wanted, least, exact].into_iter().find(|&size| size <= room).ok_or_else(refuse)
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.state.lock().chunks.iter().map(|chunk| chunk.bytes).sum()
    }

    /// Adds a chunk; returns its index.
    pub(super) fn add_chunk(&self, chunk: DeviceBlock) -> usize {
        let mut state = self.state.lock();
        let index = state.chunks.len();
        let range = FreeRange {
            start: chunk.ptr,
            bytes: chunk.bytes as u64,
            chunk: index,
            after: Default::default(),
        };
        state.free.insert(range);
        state.chunks.push(chunk);
        index
    }

    /// Removes the chunks if no graph, capture or block needs them.
    pub(super) fn take_idle(&self) -> Option<Vec<DeviceBlock>> {
        let mut state = self.state.lock();
        let is_idle = state.owners == 0
            && state.blocks.is_empty()
            && self.foreign_graphs.load(Ordering::Acquire) == 0;
        is_idle.then(|| {
            state.free = FreeRanges::default();
            std::mem::take(&mut state.chunks)
        })
    }

    /// Returns the origin of a block, and `UseAfterFree` if the block is not live.
    pub(super) fn origin(&self, block: BlockId, chunk: usize) -> ResourceResult<BlockOrigin> {
        if block.device_ordinal != self.ordinal {
            return Err(ResourceError::Driver(format!(
                "a block of device {} was passed to device {}",
                block.device_ordinal, self.ordinal
            )));
        }
        let state = self.state.lock();
        let gone = ResourceError::UseAfterFree { generation: block.generation };
        let chunk = state.chunks.get(chunk).ok_or_else(|| gone.clone())?;
        let Some(inside) = state.blocks.get(&block.generation) else {
            let is_chunk = chunk.generation == block.generation && chunk.ptr == block.ptr;
            return if is_chunk { Ok(BlockOrigin::Chunk) } else { Err(gone) };
        };
        if inside.range.start != block.ptr {
            return Err(gone);
        }
        if state.open.as_ref().is_some_and(|open| open.number == inside.capture) {
            return Ok(BlockOrigin::Captured);
        }
        match inside.is_retired {
            true => Err(gone),
            false => Ok(BlockOrigin::Outside(BlockId::from_block(chunk))),
        }
    }

    /// Counts an open use of a block outside of a capture.
    pub(super) fn open_outside(&self, block: BlockId) -> ResourceResult<()> {
        let mut state = self.state.lock();
        match state.blocks.get_mut(&block.generation).filter(|inside| !inside.is_retired) {
            Some(inside) => {
                inside.outside_uses += 1;
                Ok(())
            }
            None => Err(ResourceError::UseAfterFree { generation: block.generation }),
        }
    }

    /// Returns the chunk of a block, which may be retired.
    pub(super) fn chunk_of(&self, block: BlockId) -> Option<BlockId> {
        let state = self.state.lock();
        let inside = state.blocks.get(&block.generation)?;
        state.chunks.get(inside.range.chunk).map(BlockId::from_block)
    }

    /// Closes a use. Returns true if that freed the arena's last block.
    pub(super) fn close_outside(&self, block: BlockId) -> bool {
        let mut state = self.state.lock();
        let ArenaState { blocks, free, .. } = &mut *state;
        let Some(inside) = blocks.get_mut(&block.generation) else { return false };
        inside.outside_uses = inside.outside_uses.saturating_sub(1);
        if !inside.is_retired || inside.outside_uses > 0 {
            return false;
        }
        if let Some(inside) = blocks.remove(&block.generation) {
            release(free, None, inside);
        }
        blocks.is_empty()
    }

    pub(super) fn block_state(&self, block: BlockId) -> Option<BlockState> {
        let state = self.state.lock();
        if let Some(inside) = state.blocks.get(&block.generation) {
            let is_here = inside.range.start == block.ptr;
            return Some(match (is_here, inside.is_retired) {
                (false, _) => BlockState::Freed,
                (true, false) => BlockState::Live,
                (true, true) => BlockState::Retired,
            });
        }
        let is_chunk = state.chunks.iter().any(|chunk| chunk.generation == block.generation);
        (!is_chunk).then_some(BlockState::Freed)
    }

    /// Frees a block of the arena; refuses a chunk. Returns true if it was the last block.
    pub(super) fn free(&self, block: BlockId) -> ResourceResult<bool> {
        let mut state = self.state.lock();
        let gone = ResourceError::UseAfterFree { generation: block.generation };
        let ArenaState { blocks, free, open, .. } = &mut *state;
        let inside = blocks.get_mut(&block.generation).ok_or_else(|| gone.clone())?;
        if inside.range.start != block.ptr || inside.is_retired {
            return Err(gone);
        }
        let is_captured = open.as_ref().is_some_and(|open| open.number == inside.capture);
        if inside.open_uses > 0 || inside.outside_uses > 0 {
            inside.is_retired = true;
            return Ok(false);
        }
        if let Some(inside) = blocks.remove(&block.generation) {
            match (is_captured, open) {
                // A block of an earlier capture, which the open one may have used.
                (false, Some(open)) => {
                    let after = open.points_of_outside(block.generation);
                    free.insert(FreeRange { after, ..inside.range });
                }
                (_, open) => release(free, open.as_mut().filter(|_| is_captured), inside),
            }
        }
        Ok(blocks.is_empty())
    }

    /// Removes the unused chunks of a failed capture, from the last one down to `first`.
    pub(super) fn take_unused(&self, first: usize) -> Vec<DeviceBlock> {
        let mut state = self.state.lock();
        let ArenaState { chunks, free, .. } = &mut *state;
        let mut taken = Vec::new();
        while chunks.len() > first
            && let Some(last) = chunks.last()
            && free.remove_whole(last.ptr, last.bytes as u64)
        {
            taken.extend(chunks.pop());
        }
        taken
    }
}

pub(super) fn release(
    free: &mut FreeRanges,
    captured: Option<&mut OpenOrder>,
    inside: InsideBlock,
) {
    let mut range = inside.range;
    range.after.clear();
    if let Some(open) = captured {
        range.after = open.points_of_free(inside.stream, &inside.uses);
    }
    free.insert(range);
}

/// A graph that other code executes.
struct ForeignHold {
    arena: Arc<Arena>,
    has_stale: Arc<AtomicBool>,
}

impl Drop for ForeignHold {
    fn drop(&mut self) {
        // The driver makes this call, so the next call of the runtime frees the memory.
        self.arena.foreign_graphs.fetch_sub(1, Ordering::AcqRel);
        self.has_stale.store(true, Ordering::Release);
    }
}
