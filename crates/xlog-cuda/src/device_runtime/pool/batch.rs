//! Several blocks at once: one visit of the memory of their stream, one stamp.

use super::PoolResource;
use super::arena::{Piece, UNIT};
use super::resource::{MAX_BYTES, size_of};
use crate::device_runtime::ordering::record::{Record, tag_of};
use crate::device_runtime::ordering::tracker::Retired;
use crate::device_runtime::ordering::tracks::Tracks;
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, Generation, ResourceResult, StreamId,
};
use crate::stream::RawStream;

impl PoolResource {
    pub(super) fn serve_batch(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(blocks) = self.serve_batch_at_once(sizes, stream, tag) {
            return Ok(blocks);
        }
        let home = self.tracker.stream(stream)?;
        let requested = sizes;
        let sizes =
            sizes.iter().map(|bytes| size_of(*bytes)).collect::<ResourceResult<Vec<_>>>()?;
        home.check_not_capturing("pool allocate")?;
        let arena = self.arena(home.clock().key())?;
        let mut pieces: Vec<Option<Piece>> = Vec::with_capacity(sizes.len());
        arena.with(|arena| {
            pieces.extend(sizes.iter().map(|size| arena.take(*size, UNIT, &self.tracker.table)));
        });
        for (at, size) in sizes.iter().enumerate() {
            if pieces[at].is_some() {
                continue;
            }
            match self.serve_from_elsewhere(stream, home, arena, (*size, UNIT)) {
                Ok(piece) => pieces[at] = Some(piece),
                Err(error) => {
                    self.hand_back_all(pieces.into_iter().flatten(), home);
                    return Err(error);
                }
            }
        }
        let mut pieces = pieces.into_iter().flatten().zip(requested);
        let mut blocks = Vec::with_capacity(sizes.len());
        while let Some((piece, bytes)) = pieces.next() {
            match self.hand_out(piece, *bytes, home, stream, tag) {
                Ok(block) => blocks.push(block),
                Err(error) => {
                    self.hand_back_all(pieces.map(|(piece, _)| piece), home);
                    let _ = self.deallocate_batch(blocks);
                    return Err(error);
                }
            }
        }
        Ok(blocks)
    }

    /// From what the stream has at hand, if that is enough for all.
    fn serve_batch_at_once(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> Option<Vec<DeviceBlock>> {
        if sizes.iter().any(|bytes| bytes.wrapping_sub(1) >= MAX_BYTES) {
            return None;
        }
        let (home, cell) = self.tracker.streams.near(stream)?;
        let place = self.quick_arenas()?.get(home).filter(|_| !cell.is_exposed())?;
        let mut blocks = Vec::with_capacity(sizes.len());
        place.0.with(|arena| {
            for bytes in sizes {
                let served = self.serve_inside(arena, *bytes, (stream, home, cell));
                let Some((ptr, bytes, generation)) = served else { break };
                let memory = (ptr, bytes);
                blocks.push(DeviceBlock::live(memory, self.ordinal, stream, tag, generation));
            }
            if blocks.len() == sizes.len() {
                return Some(());
            }
            for block in &blocks {
                if let Some(record) = self.tracker.table.at(block.generation) {
                    self.take_back(arena, block.generation, (record, record.units()), cell);
                    arena.counts.deallocations -= 1;
                    arena.counts.undone += 1;
                }
            }
            None
        })?;
        Some(blocks)
    }

    fn hand_back_all(&self, pieces: impl Iterator<Item = Piece>, home: &RawStream) {
        if let Ok(arena) = self.arena(home.clock().key()) {
            let stamp = home.clock().now();
            arena.with(|arena| pieces.for_each(|piece| arena.undo(piece, stamp)));
        }
    }

    pub(super) fn take_back_batch(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let rest = self.take_back_from_home(blocks);
        let mut quiet: Vec<(Generation, &Record)> = Vec::with_capacity(rest.len());
        for block in rest {
            let generation = block.generation;
            let this = self.tracker.table.find_block(&block).and_then(|record| {
                self.take_from_home(record);
                let home = record.home();
                match self.tracker.retire(record, generation)? {
                    Retired::Quiet if self.sanitizer.is_none() => {
                        quiet.push((generation, record));
                        Ok(())
                    }
                    Retired::Quiet | Retired::Used => self.free_used(generation, record),
                    Retired::Open => self.count_return(home),
                }
            });
            outcome = outcome.and(this);
        }
        for run in quiet.chunk_by(|one, other| one.1.home() == other.1.home()) {
            let this = self.put_run(run);
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Takes back those that are at home; returns the others.
    fn take_back_from_home(&self, blocks: Vec<DeviceBlock>) -> Vec<DeviceBlock> {
        let Some(arenas) = self.quick_arenas() else { return blocks };
        let table = &self.tracker.table;
        let home_of = |block: &DeviceBlock| table.look(block.into()).map(Record::home);
        let mut rest = Vec::new();
        let mut blocks = blocks.into_iter().peekable();
        while let Some(first) = blocks.next() {
            let home = home_of(&first);
            let cell = home.and_then(|home| self.tracker.near_cell(home));
            let arena = home.and_then(|home| arenas.get(home));
            let (Some(cell), Some(arena)) = (cell.filter(|cell| !cell.is_exposed()), arena) else {
                rest.push(first);
                continue;
            };
            arena.0.with(|arena| {
                let mut next = Some(first);
                while let Some(block) = next {
                    match table.look((&block).into()) {
                        Some(record) if record.gate.is_live_at_home(tag_of(block.generation)) => {
                            self.take_back(arena, block.generation, (record, record.units()), cell);
                        }
                        _ => rest.push(block),
                    }
                    next = blocks.next_if(|block| home_of(block) == home);
                }
            });
        }
        rest
    }

    /// Puts back retired blocks of one stream, which nothing else has used.
    fn put_run(&self, run: &[(Generation, &Record)]) -> ResourceResult<()> {
        let Some((_, first)) = run.first() else { return Ok(()) };
        let home = self.tracker.home(first)?;
        if home.check_not_capturing("pool free").is_err() {
            // Each for itself is refused, and kept.
            let put =
                |(generation, record): &(Generation, &Record)| self.put(*generation, record, true);
            return run.iter().map(put).fold(Ok(()), Result::and);
        }
        for (_, record) in run {
            if let Some(observer) = &self.observer {
                let _ = observer.end_range(record.ptr(), record.bytes(), home.handle());
            }
            record.end();
        }
        let table = &self.tracker.table;
        self.arena(home.clock().key())?.with(|arena| {
            let (stamp, room) = (home.clock().now(), self.room());
            for (generation, record) in run {
                arena.counts.deallocations += 1;
                arena.put(Piece::of(*generation, record), record, stamp, room, table);
            }
        });
        Ok(())
    }
}
