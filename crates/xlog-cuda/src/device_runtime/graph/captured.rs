//! Uses of blocks inside an open capture.
//!
//! Blocks of the arena and blocks from outside are ordered alike between the streams of the capture. Every launch of the
//! graph also uses each block from outside. A captured stream cannot wait for dependencies outside, so the launch waits.

use std::sync::Arc;

use xlog_driver::Driver;

use super::arena::{Arena, ArenaState, InsideBlock, release};
use super::order::{CapturedOrder, CapturedUses, Member, Points, add_point};
use super::ranges::FreeRange;
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, DeviceBlock, Generation, ResourceError, ResourceResult, StreamId,
};
use crate::stream::RawStream;

/// A stream of the capture, with its id and driver.
#[derive(Clone, Copy)]
pub(super) struct OnStream<'a> {
    pub(super) id: StreamId,
    pub(super) raw: &'a Arc<RawStream>,
    pub(super) driver: &'a dyn Driver,
}

#[derive(Clone, Copy)]
pub(super) struct CapturedUse {
    pub(super) block: BlockId,
    pub(super) access: Access,
    /// The block that a launch uses; `None` for a block of this capture.
    pub(super) outside: Option<BlockId>,
}

/// A use that is open in the capture. Its stream may be given back before the use is closed.
#[derive(Debug)]
struct OpenUse {
    generation: Generation,
    stream: StreamId,
    member: Member,
}

impl OpenUse {
    fn is(&self, generation: Generation, stream: StreamId) -> bool {
        self.generation == generation && self.stream == stream
    }
}

/// A block from outside that the captured work uses.
#[derive(Debug)]
struct OutsideBlock {
    /// The block that a launch uses.
    launch: Option<BlockId>,
    access: Access,
    generation: Generation,
    uses: CapturedUses,
}

#[derive(Debug)]
pub(super) struct OpenOrder {
    pub(super) number: u64,
    order: CapturedOrder,
    outside: Vec<OutsideBlock>,
    open_uses: Vec<OpenUse>,
    /// Blocks from outside that were freed inside the capture, on one of its streams.
    frees: Vec<DeviceBlock>,
}

/// The result of a capture that ends.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The blocks that a launch uses, chunks first.
    pub(super) uses: Vec<(BlockId, Access)>,
    /// The number of chunks, and their bytes.
    pub(super) chunks: usize,
    pub(super) chunk_bytes: usize,
    /// Blocks from outside to free now.
    pub(super) frees: Vec<DeviceBlock>,
}

impl OpenOrder {
    pub(super) fn new(number: u64) -> Self {
        Self {
            number,
            order: CapturedOrder::default(),
            outside: Vec::new(),
            open_uses: Vec::new(),
            frees: Vec::new(),
        }
    }

    pub(super) fn member(&mut self, stream: OnStream<'_>) -> Member {
        self.order.member(stream.id, stream.raw)
    }

    pub(super) fn order(&mut self) -> &mut CapturedOrder {
        &mut self.order
    }

    /// Returns the points that the next owner of a freed range follows: all uses, and the work queued on its own stream.
    pub(super) fn points_of_free(&mut self, stream: StreamId, uses: &CapturedUses) -> Points {
        let mut points = uses.before(Access::Write);
        if let Some(own) = self.order.member_of(stream) {
            let point = self.order.point(own);
            add_point(&mut points, point);
        }
        points
    }

    /// Returns the points of the captured uses of a block from outside.
    pub(super) fn points_of_outside(&self, generation: Generation) -> Points {
        let known = self.outside.iter().find(|known| known.generation == generation);
        known.map(|known| known.uses.before(Access::ReadWrite)).unwrap_or_default()
    }

    fn outside_block(&mut self, used: CapturedUse) -> &mut OutsideBlock {
        let generation = used.block.generation;
        let known = self.outside.iter().position(|each| each.generation == generation);
        let index = known.unwrap_or_else(|| {
            let (launch, uses) = (used.outside, CapturedUses::default());
            self.outside.push(OutsideBlock { launch, access: used.access, generation, uses });
            self.outside.len() - 1
        });
        let outside = &mut self.outside[index];
        if outside.access != used.access {
            outside.access = Access::ReadWrite;
        }
        outside
    }
}

impl Arena {
    /// Allocates a block for `stream` from memory that needs no wait, or from any with `waits`; `None` if there is none.
    pub(super) fn allocate(
        &self,
        bytes: usize,
        align: usize,
        stream: OnStream<'_>,
        tag: AllocTag,
        waits: bool,
    ) -> ResourceResult<Option<DeviceBlock>> {
        let mut state = self.state.lock();
        let ArenaState { free, blocks, open, .. } = &mut *state;
        let Some(open) = open else { return Ok(None) };
        let member = open.member(stream);
        let order = &mut open.order;
        let (bytes, align) = (bytes as u64, align as u64);
        let taken = free.take(bytes, align, |after| waits || order.covers(member, after));
        let Some(range) = taken else { return Ok(None) };
        if let Err(error) = order.follow(stream.driver, member, &range.after) {
            free.insert(range);
            return Err(error.into());
        }
        let generation = Generation::next();
        let block = DeviceBlock::live(
            range.start,
            range.bytes as usize,
            self.ordinal,
            stream.id,
            tag,
            generation,
        );
        let range = FreeRange { after: Points::new(), ..range };
        let uses = CapturedUses::since(order.point(member));
        let inside = InsideBlock {
            range,
            stream: stream.id,
            capture: open.number,
            is_retired: false,
            open_uses: 0,
            outside_uses: 0,
            is_announced: false,
            uses,
        };
        blocks.insert(generation, inside);
        Ok(Some(block))
    }

    /// Opens a use on a stream of the open capture, after all work that it must follow there.
    pub(super) fn prepare(&self, used: CapturedUse, stream: OnStream<'_>) -> ResourceResult<()> {
        let mut state = self.state.lock();
        let ArenaState { blocks, open, .. } = &mut *state;
        let gone = ResourceError::UseAfterFree { generation: used.block.generation };
        let Some(open) = open else { return Err(gone) };
        let member = open.member(stream);
        let inside = blocks.get_mut(&used.block.generation);
        match inside.filter(|inside| inside.capture == open.number) {
            Some(inside) => {
                if inside.is_retired || inside.range.start != used.block.ptr {
                    return Err(gone);
                }
                if !inside.is_announced
                    && inside.stream != stream.id
                    && let Some(own) = open.order.member_of(inside.stream)
                {
                    inside.uses.add_write(open.order.point(own));
                }
                let before = inside.uses.before(used.access);
                open.order.follow(stream.driver, member, &before)?;
                inside.is_announced = true;
                inside.open_uses += 1;
            }
            None => {
                let before = open.outside_block(used).uses.before(used.access);
                open.order.follow(stream.driver, member, &before)?;
            }
        }
        let generation = used.block.generation;
        open.open_uses.push(OpenUse { generation, stream: stream.id, member });
        Ok(())
    }

    /// Closes a use, and orders the work queued on its stream so far before what follows the use.
    pub(super) fn finish(&self, used: CapturedUse, stream: StreamId) -> ResourceResult<()> {
        let mut state = self.state.lock();
        let ArenaState { blocks, free, open, .. } = &mut *state;
        let generation = used.block.generation;
        let misuse = || {
            ResourceError::StreamMisuse(format!(
                "{generation} has no open use on {stream} in this capture"
            ))
        };
        let Some(open) = open else { return Err(misuse()) };
        let index = open.open_uses.iter().position(|known| known.is(generation, stream));
        let OpenUse { member, .. } = open.open_uses.swap_remove(index.ok_or_else(misuse)?);
        let point = open.order.point(member);
        match blocks.get_mut(&generation).filter(|inside| inside.capture == open.number) {
            Some(inside) => {
                inside.uses.finish(&open.order, member, point, used.access);
                inside.open_uses = inside.open_uses.saturating_sub(1);
                if inside.is_retired
                    && inside.open_uses == 0
                    && let Some(inside) = blocks.remove(&generation)
                {
                    release(free, Some(open), inside);
                }
            }
            None => {
                if let Some(index) =
                    open.outside.iter().position(|known| known.generation == generation)
                {
                    let OpenOrder { outside, order, .. } = open;
                    outside[index].uses.finish(order, member, point, used.access);
                }
            }
        }
        Ok(())
    }

    /// Keeps a block from outside that was freed on a stream of the capture, until the capture ends. Returns the block if the capture
    /// has ended.
    pub(super) fn defer_free(&self, block: DeviceBlock) -> ResourceResult<Option<DeviceBlock>> {
        let mut state = self.state.lock();
        let generation = block.generation;
        let Some(open) = &mut state.open else { return Ok(Some(block)) };
        if open.frees.iter().any(|known| known.generation == generation) {
            return Err(ResourceError::UseAfterFree { generation });
        }
        open.frees.push(block);
        Ok(None)
    }

    pub(super) fn has_open_use(&self, block: BlockId, stream: StreamId) -> bool {
        let state = self.state.lock();
        let is_this = |known: &OpenUse| known.is(block.generation, stream);
        state.open.as_ref().is_some_and(|open| open.open_uses.iter().any(is_this))
    }

    pub(super) fn open_capture(&self) -> Option<u64> {
        self.state.lock().open.as_ref().map(|open| open.number)
    }

    /// Whether a stream belongs to the open capture, even if the capture is broken.
    pub(super) fn has_member(&self, stream: StreamId) -> bool {
        let state = self.state.lock();
        state.open.as_ref().is_some_and(|open| open.order.member_of(stream).is_some())
    }

    /// Whether a block from outside was freed inside the open capture.
    pub(super) fn has_deferred(&self, generation: Generation) -> bool {
        let state = self.state.lock();
        state
            .open
            .as_ref()
            .is_some_and(|open| open.frees.iter().any(|block| block.generation == generation))
    }

    /// Ends the order of the open capture.
    pub(super) fn end_capture(&self) -> Ended {
        let mut state = self.state.lock();
        let Some(open) = state.open.take() else { return Ended::default() };
        open.order.end();
        let ArenaState { blocks, free, chunks, .. } = &mut *state;
        free.forget_order();
        let retired: Vec<Generation> = blocks
            .iter_mut()
            .filter(|(_, inside)| inside.capture == open.number)
            .filter_map(|(generation, inside)| {
                inside.open_uses = 0;
                inside.uses = CapturedUses::default();
                inside.is_retired.then_some(*generation)
            })
            .collect();
        for generation in retired {
            if let Some(inside) = blocks.remove(&generation) {
                release(free, None, inside);
            }
        }
        let chunk_bytes = chunks.iter().map(|chunk| chunk.bytes).sum();
        let all = chunks.iter().map(|chunk| (BlockId::from_block(chunk), Access::ReadWrite));
        let mut uses: Vec<(BlockId, Access)> = all.collect();
        let chunks = uses.len();
        for outside in &open.outside {
            let Some(launch) = outside.launch else { continue };
            match uses.iter_mut().find(|(known, _)| *known == launch) {
                Some((_, access)) if *access != outside.access => *access = Access::ReadWrite,
                Some(_) => {}
                None => uses.push((launch, outside.access)),
            }
        }
        Ended { uses, chunks, chunk_bytes, frees: open.frees }
    }
}
