//! The shortest way: allocating and freeing on a stream by the thread that mostly uses its memory.
//!
//! One visit of one arena, no locked instruction. Whatever is not like that says so by returning nothing, and the caller goes the
//! general way. A simulated device goes that way always: its detector is told of every block.

use xlog_driver::sync::BiasedGuard;

use super::PoolResource;
use super::arena::{Arena, NO_SLOT, Source, UNIT};
use super::coalesce_queue::CoalesceQueue;
use super::magazine::{MAX_CACHED, class_of};
use super::prefetch::prefetch;
use super::resource::MAX_BYTES;
use crate::device_runtime::ordering::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::clock::ClockHeader;
use crate::device_runtime::resource::{
    AllocTag, BlockId, DeviceBlock, Generation, MIN_ALIGN, ResourceResult, StreamId,
};

impl PoolResource {
    /// A block for a stream whose memory this thread mostly uses.
    ///
    /// All ways but the first end in a call of their own, so that the first one keeps what it has in registers.
    #[inline(always)]
    pub(super) fn allocate_fast(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) >= MAX_CACHED as usize {
            return self.allocate_large(bytes, stream, tag);
        }
        let Some((owner, header, mut arena)) = self.enter_arena(stream) else {
            return self.allocate_general(bytes, UNIT as usize, stream, tag);
        };
        match self.allocate_from_magazine(&mut arena, bytes as u64, (stream, header)) {
            Ok((ptr, bytes, generation)) => {
                drop(arena);
                Ok(DeviceBlock::live((ptr, bytes), self.ordinal, stream, tag, generation))
            }
            Err(size) => self.allocate_uncached(arena, (bytes, size), (stream, owner, header), tag),
        }
    }

    /// The place and the cell of a stream, and its memory, if this thread mostly uses that.
    #[inline(always)]
    fn enter_arena(&self, stream: StreamId) -> Option<(u32, &ClockHeader, BiasedGuard<'_, Arena>)> {
        let (owner, header) = self.tracker.streams.inline_header(stream)?;
        let arenas = self.fast_path_arenas().filter(|_| !header.handle_escaped())?;
        let arena = arenas.get(owner).and_then(|shard| shard.0.enter())?;
        Some((owner, header, arena))
    }

    /// The same for a size that is never ready, or that cannot be.
    #[inline(never)]
    fn allocate_large(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) < MAX_BYTES
            && let Some((owner, header, arena)) = self.enter_arena(stream)
        {
            let size = (bytes as u64).next_multiple_of(UNIT);
            return self.allocate_split::<true>(arena, (bytes, size), (stream, owner, header), tag);
        }
        self.allocate_general(bytes, UNIT as usize, stream, tag)
    }

    #[inline(never)]
    fn allocate_uncached(
        &self,
        arena: BiasedGuard<'_, Arena>,
        sizes: (usize, u64),
        owner: (StreamId, u32, &ClockHeader),
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.allocate_split::<false>(arena, sizes, owner, tag)
    }

    /// A block that is cut from the free memory of its stream; of a size that is mostly a whole class, unless it is `ANY`.
    #[inline(always)]
    fn allocate_split<const ANY: bool>(
        &self,
        mut arena: BiasedGuard<'_, Arena>,
        (bytes, size): (usize, u64),
        (stream, owner, header): (StreamId, u32, &ClockHeader),
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let served = self.allocate_from_tlsf::<ANY>(&mut arena, size, (stream, owner, header));
        drop(arena);
        match served {
            Some((ptr, bytes, generation)) => {
                Ok(DeviceBlock::live((ptr, bytes), self.ordinal, stream, tag, generation))
            }
            None => self.allocate_general(bytes, UNIT as usize, stream, tag),
        }
    }

    /// Memory, and the generation of a live block there, for who holds the memory of the stream. The size is one that can be.
    #[inline(always)]
    pub(super) fn allocate_inside(
        &self,
        arena: &mut Arena,
        bytes: usize,
        (stream, owner, header): (StreamId, u32, &ClockHeader),
    ) -> Option<(u64, usize, Generation)> {
        let bytes = bytes as u64;
        let size = if bytes > MAX_CACHED {
            bytes.next_multiple_of(UNIT)
        } else {
            match self.allocate_from_magazine(arena, bytes, (stream, header)) {
                Ok(served) => return Some(served),
                Err(size) => size,
            }
        };
        self.allocate_from_tlsf::<false>(arena, size, (stream, owner, header))
    }

    /// The same from what is ready, for a size that can be; `Err` says in what size it is to be cut from free memory.
    #[inline(always)]
    fn allocate_from_magazine(
        &self,
        arena: &mut Arena,
        size: u64,
        (stream, header): (StreamId, &ClockHeader),
    ) -> Result<(u64, usize, Generation), u64> {
        let class = class_of(size);
        let Some((slot, meta)) = arena.magazine.pop(class, UNIT, &self.tracker.table) else {
            return Err(class.0);
        };
        arena.count(Source::Magazine);
        let generation = Generation::next().at(slot);
        meta.begin_reused(generation, stream, header.now());
        Ok((meta.ptr(), class.0 as usize, generation))
    }

    /// The same from the free memory of the stream, for whole units.
    #[inline(always)]
    fn allocate_from_tlsf<const ANY: bool>(
        &self,
        arena: &mut Arena,
        size: u64,
        (stream, owner, header): (StreamId, u32, &ClockHeader),
    ) -> Option<(u64, usize, Generation)> {
        let suballocation = arena.allocate_units::<ANY>(size)?;
        let slot = match suballocation.slot {
            NO_SLOT => arena.fresh_slot(&self.tracker.table),
            slot => Some(slot),
        };
        let (ptr, bytes) = (suballocation.ptr, suballocation.bytes as usize);
        let of = (stream, owner, header.now());
        let begun = slot.and_then(|slot| {
            self.tracker.table.begin_unshared(slot, (ptr, bytes), suballocation.node, of)
        });
        if begun.is_none() {
            arena.undo(suballocation, header.now());
        }
        // While there come to be more blocks, the record of the next one was last touched long ago.
        let next = arena.next_slot().and_then(|slot| self.tracker.table.at_slot(slot));
        if let Some(meta) = next {
            prefetch(meta);
        }
        begun.map(|generation| (ptr, bytes, generation))
    }

    /// Takes a block back that nobody has used, to a stream whose memory this thread mostly uses. False says nothing.
    ///
    /// The record decides, and after many blocks it is in no near cache. So where the memory goes is taken from what the block says
    /// of itself, and the record is only compared with it: the processor goes on while the record is on its way.
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
        // Nobody else changes the word of such a block while this thread is inside.
        if !meta.state.is_live_and_unshared(generation_bits(block.generation)) {
            return false;
        }
        self.free_inside(&mut arena, block.generation, (meta, units), header);
        true
    }

    /// The same for a block that was used on its own stream only, and is retired.
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
        self.free_inside(&mut arena, generation, (meta, meta.units()), header);
        true
    }

    /// Takes back the memory of a block that nobody has any more, of so many units. The caller holds the memory of its stream.
    #[inline(always)]
    pub(super) fn free_inside(
        &self,
        arena: &mut Arena,
        generation: Generation,
        (meta, units): (&BlockMeta, u32),
        header: &ClockHeader,
    ) {
        meta.state.end();
        arena.counts.deallocations += 1;
        let capacity = self.magazine_capacity();
        if arena.magazine.push(generation.slot(), (meta, units), capacity) {
            return;
        }
        if CoalesceQueue::accepts(units, capacity) {
            self.free_coalescing_later(arena, generation, meta, header);
        } else {
            self.free_coalescing_now(arena, generation, meta, header);
        }
    }

    /// What the magazine has no room for, and is merged a few blocks later.
    #[inline(never)]
    fn free_coalescing_later(
        &self,
        arena: &mut Arena,
        generation: Generation,
        meta: &BlockMeta,
        header: &ClockHeader,
    ) {
        meta.forget();
        arena.coalesce_later(generation.slot(), meta, header.now(), &self.tracker.table);
    }

    /// The same for what is merged at once.
    #[inline(never)]
    fn free_coalescing_now(
        &self,
        arena: &mut Arena,
        generation: Generation,
        meta: &BlockMeta,
        header: &ClockHeader,
    ) {
        meta.forget();
        arena.coalesce_now(generation.slot(), meta, header.now(), &self.tracker.table);
    }
}
