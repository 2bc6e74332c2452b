//! Fast path: the thread that owns the bias of an arena allocates and frees there.
//!
//! It enters one arena once and executes no locked instruction. If the fast path does not apply, nothing has changed
//! and the caller takes the general path. A pool whose device must be told of every block, or that records an event for
//! every use, never takes the fast path.

use xlog_driver::sync::BiasedGuard;

use super::PoolResource;
use super::arena::{Arena, FreedBlock, NO_SLOT, Source, UNIT};
use super::magazine::{MAX_CACHED, class_of};
use super::resource::MAX_BYTES;
use crate::device_runtime::ordering::block_meta::{BlockMeta, BlockOwner, generation_bits};
use crate::device_runtime::ordering::clock::ClockHeader;
use crate::device_runtime::resource::{
    AllocTag, BlockId, DeviceBlock, Generation, MIN_ALIGN, ResourceResult, StreamId,
};

/// The stream of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestStream<'a> {
    pub(super) id: StreamId,
    pub(super) slot: u32,
    pub(super) header: &'a ClockHeader,
}

/// The size of a request: the bytes requested, and the bytes that it takes.
#[derive(Clone, Copy, Debug)]
struct RequestSize {
    bytes: usize,
    size: u64,
}

/// A block that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunBlock {
    ptr: u64,
    bytes: usize,
    generation: Generation,
}

/// The outcome of a search in the magazine.
enum MagazineLookup {
    Hit(BegunBlock),
    /// The magazine has no such block. The TLSF has to allocate `size` bytes.
    Miss {
        size: u64,
    },
}

impl PoolResource {
    /// Allocates a block on a stream whose arena this thread owns.
    ///
    /// Every branch but the first ends in a call, so that the first one keeps its values in registers.
    #[inline(always)]
    pub(super) fn allocate_fast(
        &self,
        bytes: usize,
        id: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) >= MAX_CACHED as usize {
            return self.allocate_large(bytes, id, tag);
        }
        let Some((stream, mut arena)) = self.enter_arena(id) else {
            return self.allocate_general(bytes, UNIT as usize, id, tag);
        };
        match self.allocate_from_magazine(&mut arena, bytes as u64, stream) {
            MagazineLookup::Hit(block) => {
                drop(arena);
                Ok(self.live(block, id, tag))
            }
            MagazineLookup::Miss { size } => {
                self.allocate_uncached(arena, RequestSize { bytes, size }, stream, tag)
            }
        }
    }

    /// The block that the caller gets.
    #[inline(always)]
    pub(super) fn live(&self, block: BegunBlock, id: StreamId, tag: AllocTag) -> DeviceBlock {
        DeviceBlock::live(block.ptr, block.bytes, self.ordinal, id, tag, block.generation)
    }

    /// A stream with its arena, if this thread owns that.
    #[inline(always)]
    fn enter_arena(&self, id: StreamId) -> Option<(RequestStream<'_>, BiasedGuard<'_, Arena>)> {
        let (slot, header) = self.tracker.streams.inline_header(id)?;
        let arenas = self.fast_path_arenas().filter(|_| !header.handle_escaped())?;
        let arena = arenas.get(slot).and_then(|shard| shard.0.enter())?;
        Some((RequestStream { id, slot, header }, arena))
    }

    /// [`Self::allocate_fast`] for a size that no magazine caches, or that is refused.
    #[inline(never)]
    fn allocate_large(
        &self,
        bytes: usize,
        id: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) < MAX_BYTES
            && let Some((stream, arena)) = self.enter_arena(id)
        {
            let size = (bytes as u64).next_multiple_of(UNIT);
            return self.allocate_split::<true>(arena, RequestSize { bytes, size }, stream, tag);
        }
        self.allocate_general(bytes, UNIT as usize, id, tag)
    }

    #[inline(never)]
    fn allocate_uncached(
        &self,
        arena: BiasedGuard<'_, Arena>,
        size: RequestSize,
        stream: RequestStream<'_>,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.allocate_split::<false>(arena, size, stream, tag)
    }

    /// Allocates a block from the TLSF of its stream. Without `ANY` the code is laid out for sizes that are whole
    /// classes.
    #[inline(always)]
    fn allocate_split<const ANY: bool>(
        &self,
        mut arena: BiasedGuard<'_, Arena>,
        RequestSize { bytes, size }: RequestSize,
        stream: RequestStream<'_>,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let served = self.allocate_from_tlsf::<ANY>(&mut arena, size, stream);
        drop(arena);
        match served {
            Some(block) => Ok(self.live(block, stream.id, tag)),
            None => self.allocate_general(bytes, UNIT as usize, stream.id, tag),
        }
    }

    /// Allocates memory and begins a block there. The caller has entered the arena and checked the size.
    #[inline(always)]
    pub(super) fn allocate_inside(
        &self,
        arena: &mut Arena,
        bytes: usize,
        stream: RequestStream<'_>,
    ) -> Option<BegunBlock> {
        let bytes = bytes as u64;
        let size = if bytes > MAX_CACHED {
            bytes.next_multiple_of(UNIT)
        } else {
            match self.allocate_from_magazine(arena, bytes, stream) {
                MagazineLookup::Hit(block) => return Some(block),
                MagazineLookup::Miss { size } => size,
            }
        };
        self.allocate_from_tlsf::<false>(arena, size, stream)
    }

    /// [`Self::allocate_inside`] from the magazine.
    #[inline(always)]
    fn allocate_from_magazine(
        &self,
        arena: &mut Arena,
        size: u64,
        stream: RequestStream<'_>,
    ) -> MagazineLookup {
        let class = class_of(size);
        let Some((slot, meta)) = arena.magazine.pop(class, UNIT, &self.tracker.table) else {
            return MagazineLookup::Miss { size: class.bytes };
        };
        arena.count(Source::Magazine);
        let generation = Generation::next().at(slot);
        meta.begin_reused(generation, stream.id, stream.header.now());
        let (ptr, bytes) = (meta.ptr(), class.bytes as usize);
        MagazineLookup::Hit(BegunBlock { ptr, bytes, generation })
    }

    /// [`Self::allocate_inside`] from the TLSF, for whole units.
    #[inline(always)]
    fn allocate_from_tlsf<const ANY: bool>(
        &self,
        arena: &mut Arena,
        size: u64,
        stream: RequestStream<'_>,
    ) -> Option<BegunBlock> {
        let RequestStream { id, slot: slot_of_owner, header } = stream;
        let suballocation = arena.allocate_units::<ANY>(size)?;
        let slot = match suballocation.slot {
            NO_SLOT => arena.fresh_slot(&self.tracker.table),
            slot => Some(slot),
        };
        let memory = suballocation.memory();
        let owner = BlockOwner { id, slot: slot_of_owner, stamp: header.now() };
        let begun = slot.and_then(|slot| self.tracker.table.begin_unshared(slot, memory, owner));
        if begun.is_none() {
            arena.undo(suballocation, header.now());
        }
        begun.map(|generation| BegunBlock { ptr: memory.ptr, bytes: memory.bytes, generation })
    }

    /// Frees a block that was never shared, if this thread owns the arena of its stream. Returns false with nothing
    /// changed if the fast path does not apply.
    ///
    /// With many live blocks the metadata is a cache miss. So the arena and the size are taken from the block itself,
    /// and the metadata is only compared with them: a predicted comparison does not stall the processor.
    #[inline(always)]
    pub(super) fn free_fast(&self, block: &DeviceBlock) -> bool {
        let table = &self.tracker.table;
        let Some(meta) = table.lookup(BlockId::from_block(block)) else { return false };
        let owner = self.tracker.streams.slot_of(block.alloc_stream);
        const { assert!(UNIT == MIN_ALIGN as u64) };
        let units = (block.bytes as u64 / UNIT) as u32;
        if !meta.has_owner_and_units(owner, units) {
            return false;
        }
        let Some(arenas) = self.fast_path_arenas() else { return false };
        let Some(header) =
            self.tracker.inline_header(owner).filter(|header| !header.handle_escaped())
        else {
            return false;
        };
        let Some(mut arena) = arenas.get(owner).and_then(|shard| shard.0.enter()) else {
            return false;
        };
        // While this thread is inside the arena, no other thread changes the state of an unshared block.
        if !meta.state.is_live_and_unshared(generation_bits(block.generation)) {
            return false;
        }
        self.free_inside(&mut arena, block.generation, meta, units, header);
        true
    }

    /// [`Self::free_fast`] for a retired block that only its own stream used.
    pub(super) fn free_retired_fast(&self, generation: Generation, meta: &BlockMeta) -> bool {
        let Some(arenas) = self.fast_path_arenas() else { return false };
        let owner = meta.owner();
        let Some(header) =
            self.tracker.inline_header(owner).filter(|header| !header.handle_escaped())
        else {
            return false;
        };
        let Some(mut arena) = arenas.get(owner).and_then(|shard| shard.0.enter()) else {
            return false;
        };
        self.free_inside(&mut arena, generation, meta, meta.units(), header);
        true
    }

    /// Frees the memory of a block that has ended, of `units`. The caller has entered the arena.
    #[inline(always)]
    pub(super) fn free_inside(
        &self,
        arena: &mut Arena,
        generation: Generation,
        meta: &BlockMeta,
        units: u32,
        header: &ClockHeader,
    ) {
        meta.state.end();
        arena.counts.deallocations += 1;
        let freed = FreedBlock { slot: generation.slot(), meta, units };
        arena.free(freed, header.now(), self.magazine_capacity(), &self.tracker.table);
    }
}
