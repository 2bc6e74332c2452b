//! The memory of one stream: blocks ready to hand out in front, the index of its free memory behind.
//!
//! What lies here is free in the order of its stream: that stream takes it at once, another one only once it follows, or the host
//! has seen, the stamp that stands at the memory. Blocks in the magazine keep their place in the index and their record, so
//! handing one out again changes nothing but its generation.

use xlog_trace::ServedBy;

use super::index::{Index, Range, Taken};
use super::leaving::{self, Leaving};
use super::magazine::{MOST_CACHED, Magazine, class_of};
use crate::device_runtime::logging::note_path;
use crate::device_runtime::ordering::record::{BlockTable, Record};
use crate::device_runtime::resource::Generation;

pub(super) const UNIT: u64 = 256;
/// Records without a block that are kept, and how many are kept when some are given away, or are taken when there are none.
const MOST_PLACES: usize = 1024;
const SOME_PLACES: usize = 256;

/// What served a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Path {
    Magazine,
    Own,
    Covered,
    Completed,
    Grown,
    Waited,
}

impl Path {
    /// The name of the path in a log.
    #[inline]
    pub(super) fn logged(self) -> ServedBy {
        match self {
            Self::Magazine => ServedBy::Magazine,
            Self::Own => ServedBy::Own,
            Self::Covered => ServedBy::Covered,
            Self::Completed => ServedBy::Completed,
            Self::Grown => ServedBy::Grown,
            Self::Waited => ServedBy::Waited,
        }
    }
}

/// How often each path served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PathCounts(pub(super) [u64; 6]);

impl PathCounts {
    #[inline]
    pub(super) fn count(&mut self, path: Path) {
        self.0[path as usize] += 1;
    }
}

/// A piece of memory that the index knows as taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    pub(super) node: u32,
    /// The record it has, or [`NO_PLACE`].
    pub(super) place: u32,
}

impl Piece {
    /// The memory of a retired block.
    #[inline(always)]
    pub(super) fn of(generation: Generation, record: &Record) -> Self {
        Self {
            ptr: record.ptr(),
            bytes: record.bytes() as u64,
            node: record.node(),
            place: generation.slot(),
        }
    }
}

/// A piece without a record.
pub(super) const NO_PLACE: u32 = u32::MAX;

/// What was counted. How many blocks were handed out, and how many bytes are, follows from this and from the index.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArenaCounts {
    pub(super) deallocations: u64,
    /// Blocks that were returned while other streams used them, and are not free yet.
    pub(super) retired: u64,
    /// Blocks that were taken and not handed out, after all.
    pub(super) undone: u64,
    pub(super) paths: PathCounts,
}

impl ArenaCounts {
    /// Blocks that were handed out.
    pub(super) fn allocations(&self) -> u64 {
        self.paths.0.iter().sum::<u64>() - self.undone
    }
}

/// The memory of one stream, behind its lock.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub(super) index: Index,
    pub(super) magazine: Magazine,
    leaving: Leaving,
    /// Records without a block, for the next ones.
    places: Vec<u32>,
    pub(super) counts: ArenaCounts,
}

impl Arena {
    /// Bytes of live blocks, and of retired ones.
    pub(super) fn outstanding(&self) -> u64 {
        self.index.taken_bytes() - self.ready_bytes()
    }

    /// Bytes of blocks that are free and not merged.
    pub(super) fn ready_bytes(&self) -> u64 {
        self.magazine.bytes() + self.leaving.bytes()
    }

    /// True when there is more in the magazine, or beside it, than may be now.
    pub(super) fn has_more_than(&self, room: u64) -> bool {
        self.magazine.bytes() > room || self.leaving.bytes() > room / leaving::PART
    }

    /// Memory of exactly `bytes`, whole classes, with what is at hand.
    #[inline]
    pub(super) fn take(&mut self, bytes: u64, align: u64, table: &BlockTable) -> Option<Piece> {
        let class = class_of(bytes);
        if bytes <= MOST_CACHED
            && let Some((place, record)) = self.magazine.pop(class, align, table)
        {
            self.counted(Path::Magazine);
            return Some(Piece { ptr: record.ptr(), bytes, node: record.node(), place });
        }
        self.take_free(bytes, align, Path::Own)
    }

    #[inline(never)]
    pub(super) fn take_free(&mut self, bytes: u64, align: u64, path: Path) -> Option<Piece> {
        let taken = self.index.take(bytes, align)?;
        Some(self.taken(taken, path))
    }

    /// The same for whole units, and no alignment beyond that; mostly whole classes, unless it is `ANY`.
    #[inline(always)]
    pub(super) fn take_units<const ANY: bool>(&mut self, bytes: u64) -> Option<Piece> {
        let taken = self.index.take_units::<ANY>(bytes)?;
        Some(self.taken(taken, Path::Own))
    }

    #[inline(always)]
    fn taken(&mut self, taken: Taken, path: Path) -> Piece {
        let (ptr, bytes, node) = (taken.ptr, taken.bytes, taken.node);
        self.counted(path);
        let place = self.places.pop().unwrap_or(NO_PLACE);
        Piece { ptr, bytes, node, place }
    }

    /// The place that the next block gets.
    #[inline(always)]
    pub(super) fn next_place(&self) -> Option<u32> {
        self.places.last().copied()
    }

    #[inline]
    pub(super) fn counted(&mut self, path: Path) {
        note_path(path.logged());
        self.counts.paths.count(path);
    }

    /// Adds memory.
    pub(super) fn keep(&mut self, range: Range) {
        self.index.add(range, true);
    }

    /// Adds memory and takes from it at once, so that nobody else gets it in between.
    pub(super) fn add_and_take(
        &mut self,
        range: Range,
        bytes: u64,
        align: u64,
        path: Path,
    ) -> Option<Piece> {
        self.index.add(range, true);
        self.take_free(bytes, align, path)
    }

    /// Takes a freed block in, whose record has ended.
    #[inline(never)]
    pub(super) fn put(
        &mut self,
        piece: Piece,
        record: &Record,
        stamp: u64,
        room: u64,
        table: &BlockTable,
    ) {
        if !self.magazine.push(piece.place, (record, record.units()), room) {
            if Leaving::takes(record.units(), room) {
                self.put_later(piece.place, record, stamp, table);
            } else {
                self.put_now(piece.place, record, stamp, table);
            }
        }
    }

    /// What the magazine has no room for, and is merged at once.
    #[inline(always)]
    pub(super) fn put_now(&mut self, place: u32, record: &Record, stamp: u64, table: &BlockTable) {
        self.spare_places(table);
        self.index.give(record.node(), stamp);
        self.places.push(place);
    }

    /// What [`Leaving::takes`], and is merged a few blocks later.
    #[inline(always)]
    pub(super) fn put_later(
        &mut self,
        place: u32,
        record: &Record,
        stamp: u64,
        table: &BlockTable,
    ) {
        self.spare_places(table);
        let bytes = u64::from(record.units()) * UNIT;
        self.leaving.push((record.node(), bytes), &mut self.index, stamp);
        self.places.push(place);
    }

    /// A place for a record, and some more for the next ones; `None` when there are too many blocks.
    #[cold]
    #[inline(never)]
    pub(super) fn find_place(&mut self, table: &BlockTable) -> Option<u32> {
        table.take_places(&mut self.places, SOME_PLACES);
        self.places.pop().or_else(|| table.take_place())
    }

    /// Leaves no more places for records than may be kept, and room for another one.
    #[inline(always)]
    fn spare_places(&mut self, table: &BlockTable) {
        if self.places.len() >= MOST_PLACES {
            self.give_places(table);
        }
    }

    #[cold]
    #[inline(never)]
    fn give_places(&mut self, table: &BlockTable) {
        // Those that were used last stay: they are in the cache.
        table.give_places(self.places.drain(..MOST_PLACES - SOME_PLACES));
    }

    /// A block that was counted as handed out was not, after all.
    #[cold]
    pub(super) fn undo(&mut self, piece: Piece, stamp: u64) {
        self.counts.undone += 1;
        self.index.give(piece.node, stamp);
        if piece.place != NO_PLACE {
            self.places.push(piece.place);
        }
    }

    /// Empties the magazine into the index; the places of records that are too many are added to `places`.
    pub(super) fn flush(&mut self, stamp: u64, table: &BlockTable, places: &mut Vec<u32>) {
        let (index, kept) = (&mut self.index, &mut self.places);
        self.leaving.drain(index, stamp);
        self.magazine.drain(table, |place, record| {
            index.give(record.node(), stamp);
            let to = if kept.len() < MOST_PLACES { &mut *kept } else { &mut *places };
            to.push(place);
        });
    }
}
