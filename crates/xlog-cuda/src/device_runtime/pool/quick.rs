//! The shortest way: allocating and freeing on a stream by the thread that mostly uses its memory.
//!
//! One visit of one arena, no locked instruction but the one that takes a block from its user. Whatever is not like that says so by
//! returning nothing, and the caller goes the general way. A simulated device goes that way always: its detector is told of every
//! block.

use super::PoolResource;
use super::arena::{MOST_CACHED, NO_PLACE, Path, Piece, UNIT};
use super::resource::MAX_BYTES;
use crate::device_runtime::ordering::record::Record;
use crate::device_runtime::resource::{AllocTag, DeviceBlock, Generation, StreamId};

impl PoolResource {
    /// A block of a stream whose memory this thread mostly uses: the shortest way there is.
    #[inline(always)]
    pub(super) fn serve_at_once(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> Option<DeviceBlock> {
        let size = (bytes as u64).wrapping_add(UNIT - 1) & !(UNIT - 1);
        if bytes.wrapping_sub(1) >= MAX_BYTES || !self.quick {
            return None;
        }
        let (home, cell) = self.tracker.streams.near(stream)?;
        if cell.is_exposed() {
            return None;
        }
        let piece = {
            let mut arena = self.arenas.get(home)?.0.enter()?;
            let ready = if size <= MOST_CACHED { arena.pop(size, UNIT) } else { None };
            match ready {
                Some(piece) => piece,
                None => arena.take_free(size, UNIT, Path::Own)?,
            }
        };
        let place = match piece.place {
            NO_PLACE => self.place_for(piece, home)?,
            place => place,
        };
        let memory = (piece.ptr, piece.bytes as usize);
        // Every place that a piece has is one of the table's.
        let table = &self.tracker.table;
        let generation = table.begin_at(place, memory, piece.node, (stream, home, cell.now()))?;
        Some(DeviceBlock::live(memory, self.ordinal, stream, tag, generation))
    }

    /// A record for a piece that has none; without one, the piece goes back.
    #[cold]
    fn place_for(&self, piece: Piece, home: u32) -> Option<u32> {
        let place = self.tracker.table.take_place();
        if place.is_none()
            && let (Ok(arena), Some(stream)) = (self.arena(home), self.tracker.streams.at(home))
        {
            arena.with(|arena| arena.undo(piece, stream.clock().now()));
        }
        place
    }

    /// Puts a retired block back to a stream whose memory this thread mostly uses.
    #[inline(always)]
    pub(super) fn put_at_once(&self, generation: Generation, record: &Record) -> bool {
        if !self.quick {
            return false;
        }
        let home = record.home();
        let piece = Piece::of(generation, record);
        let Some(cell) = self.tracker.near_cell(home).filter(|cell| !cell.is_exposed()) else {
            return false;
        };
        let Some(mut arena) = self.arenas.get(home).and_then(|place| place.0.enter()) else {
            return false;
        };
        // Nobody gets at the memory before this thread has left the arena, so the block may end before or after that.
        record.end();
        arena.counts.deallocations += 1;
        if arena.push(piece, self.magazine) {
            return true;
        }
        let place = arena.put(piece, cell.now(), self.magazine);
        drop(arena);
        if let Some(place) = place {
            self.tracker.table.give_places([place]);
        }
        true
    }
}
