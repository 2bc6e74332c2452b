//! Fast path: the thread that owns the bias of an arena allocates and frees there.
//!
//! A call enters one arena and executes no locked instruction. If the fast path does not apply, it declines with no block
//! handed out, and the caller takes the slow path; only the magazine may have been flushed, before a large request. Never on
//! the fast path: a pool with an observer, exact events or a memory checker, and a stream whose handle escaped.
//! Unshared blocks of such a stream begin in `allocate_general` and end in `free_escaped`, after the driver was asked for captures.

use super::PoolResource;
use super::arena::{Arena, FLUSHING_BYTES, FreedBlock, NO_SLOT, UNIT};
use super::magazine::{MAX_CACHED, class_of};
use super::resource::MAX_BYTES;
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::ordering::{
    BlockMeta, BlockOwner, BlockTable, ClockHeader, Lock, generation_bits,
};
use crate::device_runtime::resource::{
    AllocTag, BlockId, DeviceBlock, Generation, MIN_ALIGN, StreamId,
};

#[derive(Clone, Copy, Debug)]
pub(super) struct RequestStream<'a> {
    pub(super) id: StreamId,
    pub(super) slot: u32,
    pub(super) header: &'a ClockHeader,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BegunBlock {
    pub(super) ptr: u64,
    pub(super) bytes: usize,
    pub(super) generation: Generation,
}

impl BegunBlock {
    #[inline(always)]
    pub(super) fn live(self, ordinal: u32, id: StreamId, tag: AllocTag) -> DeviceBlock {
        DeviceBlock::live(self.ptr, self.bytes, ordinal, id, tag, self.generation)
    }
}

impl Arena {
    /// Allocates memory and begins an unshared block there. The caller has checked the size.
    #[inline(always)]
    pub(super) fn begin_block(
        &mut self,
        bytes: usize,
        stream: RequestStream<'_>,
        table: &BlockTable,
    ) -> Option<BegunBlock> {
        let bytes = bytes as u64;
        if bytes > MAX_CACHED {
            let size = bytes.next_multiple_of(UNIT);
            return match bytes > FLUSHING_BYTES {
                true => self.begin_large(size, stream, table),
                false => self.begin_split(size, stream, table),
            };
        }
        let class = class_of(bytes);
        let Some((slot, meta)) = self.magazine.pop(class, UNIT, table) else {
            return self.begin_split(class.bytes, stream, table);
        };
        self.count(ServedBy::Magazine);
        let generation = Generation::next().at(slot);
        meta.begin_reused(generation, stream.id, stream.header.now());
        Some(BegunBlock { ptr: meta.ptr(), bytes: class.bytes as usize, generation })
    }

    /// [`Self::begin_split`] for a request that may flush the magazine. It is apart so that smaller requests pay nothing.
    #[cold]
    #[inline(never)]
    fn begin_large(
        &mut self,
        size: u64,
        stream: RequestStream<'_>,
        table: &BlockTable,
    ) -> Option<BegunBlock> {
        self.flush_magazine_for(size, table);
        self.begin_split(size, stream, table)
    }

    /// [`Self::begin_block`] from the TLSF, for whole units.
    #[inline(never)]
    fn begin_split(
        &mut self,
        size: u64,
        stream: RequestStream<'_>,
        table: &BlockTable,
    ) -> Option<BegunBlock> {
        let suballocation = self.allocate_units(size)?;
        let slot = match suballocation.slot {
            NO_SLOT => self.fresh_slot(table),
            slot => Some(slot),
        };
        let memory = suballocation.memory();
        let stamp = stream.header.now();
        let owner = BlockOwner { id: stream.id, slot: stream.slot, stamp };
        let begun = slot.and_then(|slot| table.begin_unshared(slot, memory, owner));
        if begun.is_none() {
            self.undo(suballocation, stamp);
        }
        begun.map(|generation| BegunBlock { ptr: memory.ptr, bytes: memory.bytes, generation })
    }

    /// Ends a live or retired block and frees its memory.
    #[inline(always)]
    pub(super) fn end_block(
        &mut self,
        freed: FreedBlock<'_>,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        freed.meta.state.end();
        self.counts.deallocations += 1;
        self.free(freed, stamp, capacity, table);
    }
}

impl PoolResource {
    /// Allocates a block on a stream whose arena this thread owns.
    #[inline(always)]
    pub(super) fn allocate_fast(&self, bytes: usize, id: StreamId) -> Option<BegunBlock> {
        if bytes.wrapping_sub(1) >= MAX_BYTES {
            return None;
        }
        let (slot, header) = self.tracker.stream_table.inline_header(id)?;
        let mut arena = self.fast_arena(slot, header)?.enter()?;
        arena.begin_block(bytes, RequestStream { id, slot, header }, &self.tracker.table)
    }

    /// Returns the arena of a slot if blocks may take the fast path there.
    #[inline(always)]
    pub(super) fn fast_arena(&self, slot: u32, header: &ClockHeader) -> Option<&Lock<Arena>> {
        if self.fast_path && !header.handle_escaped() { self.arenas.get(slot) } else { None }
    }

    /// Frees a block that was never shared, if this thread owns the arena of its stream. Returns false with nothing
    /// changed if the fast path does not apply.
    ///
    /// With many live blocks the metadata is a cache miss. Arena and size therefore come from the block itself, and are only
    /// compared with the metadata: a predicted comparison does not stall the processor.
    #[inline(always)]
    pub(super) fn free_fast(&self, block: &DeviceBlock) -> bool {
        let table = &self.tracker.table;
        let Some(meta) = table.lookup(BlockId::from_block(block)) else { return false };
        let owner = self.tracker.stream_table.slot_of(block.alloc_stream);
        const { assert!(UNIT == MIN_ALIGN as u64) };
        let units = (block.bytes as u64 / UNIT) as u32;
        if !meta.has_owner_and_units(owner, units) {
            return false;
        }
        let Some(header) = self.tracker.headers.inline.get(owner as usize) else { return false };
        let entered = self.fast_arena(owner, header).and_then(Lock::enter);
        let Some(mut arena) = entered else { return false };
        // While this thread is inside the arena, no other thread changes the state of an unshared block.
        if !meta.state.is_live_and_unshared(generation_bits(block.generation)) {
            return false;
        }
        let freed = FreedBlock { slot: block.generation.slot(), meta, units };
        arena.end_block(freed, header.now(), self.arenas.magazine_capacity(), table);
        true
    }

    /// [`Self::free_fast`] for a retired block that only its own stream used.
    pub(super) fn free_retired_fast(&self, generation: Generation, meta: &BlockMeta) -> bool {
        let Some(header) = self.tracker.headers.inline.get(meta.owner() as usize) else {
            return false;
        };
        let entered = self.fast_arena(meta.owner(), header).and_then(Lock::enter);
        let Some(mut arena) = entered else { return false };
        let (freed, capacity) = (FreedBlock::of(generation, meta), self.arenas.magazine_capacity());
        arena.end_block(freed, header.now(), capacity, &self.tracker.table);
        true
    }
}
