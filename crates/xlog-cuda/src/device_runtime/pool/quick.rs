//! The shortest way: allocating and freeing on a stream by the thread that mostly uses its memory.
//!
//! One visit of one arena, no locked instruction. Whatever is not like that says so by returning nothing, and the caller goes the
//! general way. A simulated device goes that way always: its detector is told of every block.

use xlog_driver::sync::Inside;

use super::PoolResource;
use super::arena::{Arena, NO_PLACE, Path, UNIT};
use super::leaving::Leaving;
use super::magazine::{MOST_CACHED, class_of};
use super::prefetch::prefetch;
use super::resource::MAX_BYTES;
use crate::device_runtime::ordering::clock::ClockCell;
use crate::device_runtime::ordering::record::{Record, tag_of};
use crate::device_runtime::resource::{
    AllocTag, BlockId, DeviceBlock, Generation, MIN_ALIGN, ResourceResult, StreamId,
};

impl PoolResource {
    /// A block for a stream whose memory this thread mostly uses.
    ///
    /// All ways but the first end in a call of their own, so that the first one keeps what it has in registers.
    #[inline(always)]
    pub(super) fn serve_at_once(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) >= MOST_CACHED as usize {
            return self.serve_large(bytes, stream, tag);
        }
        let Some((home, cell, mut arena)) = self.enter_home(stream) else {
            return self.serve(bytes, UNIT as usize, stream, tag);
        };
        match self.serve_ready(&mut arena, bytes as u64, (stream, cell)) {
            Ok((ptr, bytes, generation)) => {
                drop(arena);
                Ok(DeviceBlock::live((ptr, bytes), self.ordinal, stream, tag, generation))
            }
            Err(size) => self.serve_other(arena, (bytes, size), (stream, home, cell), tag),
        }
    }

    /// The place and the cell of a stream, and its memory, if this thread mostly uses that.
    #[inline(always)]
    fn enter_home(&self, stream: StreamId) -> Option<(u32, &ClockCell, Inside<'_, Arena>)> {
        let (home, cell) = self.tracker.streams.near(stream)?;
        let arenas = self.quick_arenas().filter(|_| !cell.is_exposed())?;
        let arena = arenas.get(home).and_then(|place| place.0.enter())?;
        Some((home, cell, arena))
    }

    /// The same for a size that is never ready, or that cannot be.
    #[inline(never)]
    fn serve_large(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes.wrapping_sub(1) < MAX_BYTES
            && let Some((home, cell, arena)) = self.enter_home(stream)
        {
            let size = (bytes as u64).next_multiple_of(UNIT);
            return self.serve_cut::<true>(arena, (bytes, size), (stream, home, cell), tag);
        }
        self.serve(bytes, UNIT as usize, stream, tag)
    }

    #[inline(never)]
    fn serve_other(
        &self,
        arena: Inside<'_, Arena>,
        sizes: (usize, u64),
        home: (StreamId, u32, &ClockCell),
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.serve_cut::<false>(arena, sizes, home, tag)
    }

    /// A block that is cut from the free memory of its stream; of a size that is mostly a whole class, unless it is `ANY`.
    #[inline(always)]
    fn serve_cut<const ANY: bool>(
        &self,
        mut arena: Inside<'_, Arena>,
        (bytes, size): (usize, u64),
        (stream, home, cell): (StreamId, u32, &ClockCell),
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let served = self.serve_free::<ANY>(&mut arena, size, (stream, home, cell));
        drop(arena);
        match served {
            Some((ptr, bytes, generation)) => {
                Ok(DeviceBlock::live((ptr, bytes), self.ordinal, stream, tag, generation))
            }
            None => self.serve(bytes, UNIT as usize, stream, tag),
        }
    }

    /// Memory, and the generation of a live block there, for who holds the memory of the stream. The size is one that can be.
    #[inline(always)]
    pub(super) fn serve_inside(
        &self,
        arena: &mut Arena,
        bytes: usize,
        (stream, home, cell): (StreamId, u32, &ClockCell),
    ) -> Option<(u64, usize, Generation)> {
        let bytes = bytes as u64;
        let size = if bytes > MOST_CACHED {
            bytes.next_multiple_of(UNIT)
        } else {
            match self.serve_ready(arena, bytes, (stream, cell)) {
                Ok(served) => return Some(served),
                Err(size) => size,
            }
        };
        self.serve_free::<false>(arena, size, (stream, home, cell))
    }

    /// The same from what is ready, for a size that can be; `Err` says in what size it is to be cut from free memory.
    #[inline(always)]
    fn serve_ready(
        &self,
        arena: &mut Arena,
        size: u64,
        (stream, cell): (StreamId, &ClockCell),
    ) -> Result<(u64, usize, Generation), u64> {
        let class = class_of(size);
        let Some((place, record)) = arena.magazine.pop(class, UNIT, &self.tracker.table) else {
            return Err(class.0);
        };
        arena.counted(Path::Magazine);
        let generation = Generation::next().at(place);
        record.begin_again(generation, stream, cell.now());
        Ok((record.ptr(), class.0 as usize, generation))
    }

    /// The same from the free memory of the stream, for whole units.
    #[inline(always)]
    fn serve_free<const ANY: bool>(
        &self,
        arena: &mut Arena,
        size: u64,
        (stream, home, cell): (StreamId, u32, &ClockCell),
    ) -> Option<(u64, usize, Generation)> {
        let piece = arena.take_units::<ANY>(size)?;
        let place = match piece.place {
            NO_PLACE => arena.find_place(&self.tracker.table),
            place => Some(place),
        };
        let (ptr, bytes) = (piece.ptr, piece.bytes as usize);
        let of = (stream, home, cell.now());
        let begun = place.and_then(|place| {
            self.tracker.table.begin_at_home(place, (ptr, bytes), piece.node, of)
        });
        if begun.is_none() {
            arena.undo(piece, cell.now());
        }
        // While there come to be more blocks, the record of the next one was last touched long ago.
        let next = arena.next_place().and_then(|place| self.tracker.table.at_place(place));
        if let Some(record) = next {
            prefetch(record);
        }
        begun.map(|generation| (ptr, bytes, generation))
    }

    /// Takes a block back that nobody has used, to a stream whose memory this thread mostly uses. False says nothing.
    ///
    /// The record decides, and after many blocks it is in no near cache. So where the memory goes is taken from what the block says
    /// of itself, and the record is only compared with it: the processor goes on while the record is on its way.
    #[inline(always)]
    pub(super) fn put_at_once(&self, block: &DeviceBlock) -> bool {
        let table = &self.tracker.table;
        let Some(record) = table.look(BlockId::from_block(block)) else { return false };
        let home = self.tracker.streams.place_of(block.alloc_stream);
        const { assert!(UNIT == MIN_ALIGN as u64) };
        let units = (block.bytes as u64 / UNIT) as u32;
        if !record.is_of(home, units) {
            return false;
        }
        let Some(arenas) = self.quick_arenas() else { return false };
        let Some(cell) = self.tracker.near_cell(home).filter(|cell| !cell.is_exposed()) else {
            return false;
        };
        let Some(mut arena) = arenas.get(home).and_then(|place| place.0.enter()) else {
            return false;
        };
        // Nobody else changes the word of such a block while this thread is inside.
        if !record.gate.is_live_at_home(tag_of(block.generation)) {
            return false;
        }
        self.take_back(&mut arena, block.generation, (record, units), cell);
        true
    }

    /// The same for a block that was used on its own stream only, and is retired.
    pub(super) fn put_retired_at_once(&self, generation: Generation, record: &Record) -> bool {
        let Some(arenas) = self.quick_arenas() else { return false };
        let home = record.home();
        let Some(cell) = self.tracker.near_cell(home).filter(|cell| !cell.is_exposed()) else {
            return false;
        };
        let Some(mut arena) = arenas.get(home).and_then(|place| place.0.enter()) else {
            return false;
        };
        self.take_back(&mut arena, generation, (record, record.units()), cell);
        true
    }

    /// Takes back the memory of a block that nobody has any more, of so many units. The caller holds the memory of its stream.
    #[inline(always)]
    pub(super) fn take_back(
        &self,
        arena: &mut Arena,
        generation: Generation,
        (record, units): (&Record, u32),
        cell: &ClockCell,
    ) {
        record.gate.end();
        arena.counts.deallocations += 1;
        let room = self.room();
        if arena.magazine.push(generation.slot(), (record, units), room) {
            return;
        }
        if Leaving::takes(units, room) {
            self.take_back_later(arena, generation, record, cell);
        } else {
            self.take_back_now(arena, generation, record, cell);
        }
    }

    /// What the magazine has no room for, and is merged a few blocks later.
    #[inline(never)]
    fn take_back_later(
        &self,
        arena: &mut Arena,
        generation: Generation,
        record: &Record,
        cell: &ClockCell,
    ) {
        record.forget();
        arena.put_later(generation.slot(), record, cell.now(), &self.tracker.table);
    }

    /// The same for what is merged at once.
    #[inline(never)]
    fn take_back_now(
        &self,
        arena: &mut Arena,
        generation: Generation,
        record: &Record,
        cell: &ClockCell,
    ) {
        record.forget();
        arena.put_now(generation.slot(), record, cell.now(), &self.tracker.table);
    }
}
