//! The memory of one stream: blocks ready to hand out in front, the index of its free memory behind.
//!
//! What lies here is free in the order of its stream: that stream takes it at once, another one only once it follows, or the host
//! has seen, the stamp that stands at the memory. Blocks in the magazine keep their place in the index and their record, so
//! handing one out again changes nothing but its generation.

use xlog_trace::ServedBy;

use super::index::{Index, Range};
use crate::device_runtime::logging::note_path;
use crate::device_runtime::ordering::record::Record;
use crate::device_runtime::resource::Generation;

/// Blocks up to this are kept in the magazine.
pub(super) const MOST_CACHED: u64 = 1 << 20;
pub(super) const UNIT: u64 = 256;
const BINS: usize = 288;
/// Blocks that a bin of one size keeps, and a bin of several.
const MOST_OF_A_SIZE: usize = 64;
const MOST_OF_SEVERAL: usize = 8;
/// Records without a block that are kept.
const MOST_PLACES: usize = 1024;

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

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArenaCounts {
    pub(super) allocations: u64,
    pub(super) deallocations: u64,
    pub(super) freed: u64,
    /// Live and retired.
    pub(super) outstanding: u64,
    pub(super) paths: PathCounts,
}

/// The memory of one stream, behind its lock.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) index: Index,
    bins: Box<[Vec<Piece>]>,
    /// Records without a block, for the next ones.
    places: Vec<u32>,
    pub(super) cached: u64,
    pub(super) counts: ArenaCounts,
}

impl Default for Arena {
    fn default() -> Self {
        Self {
            index: Index::default(),
            bins: (0..BINS).map(|_| Vec::new()).collect(),
            places: Vec::new(),
            cached: 0,
            counts: ArenaCounts::default(),
        }
    }
}

/// The bin of a size: one per unit up to 32, then 32 for each doubling.
#[inline]
fn bin_of(bytes: u64) -> usize {
    let units = (bytes / UNIT) as usize;
    if units < 32 {
        return units;
    }
    let doubling = units.ilog2() as usize;
    32 + (doubling - 5) * 32 + ((units >> (doubling - 5)) & 31)
}

impl Arena {
    /// A block of exactly `bytes` from the magazine.
    #[inline(always)]
    pub(super) fn pop(&mut self, bytes: u64, align: u64) -> Option<Piece> {
        let bin = self.bins.get_mut(bin_of(bytes))?;
        let piece = *bin.last()?;
        if piece.bytes != bytes || piece.ptr & (align - 1) != 0 {
            return None;
        }
        bin.pop();
        self.cached -= bytes;
        self.counted(bytes, Path::Magazine);
        Some(piece)
    }

    /// Puts a freed block into the magazine, if there is room.
    #[inline(always)]
    pub(super) fn push(&mut self, piece: Piece, magazine: u64) -> bool {
        let most = if piece.bytes < 32 * UNIT { MOST_OF_A_SIZE } else { MOST_OF_SEVERAL };
        let cached = self.cached + piece.bytes;
        let Some(bin) = self.bins.get_mut(bin_of(piece.bytes)) else { return false };
        if piece.bytes > MOST_CACHED || bin.len() >= most || cached > magazine {
            return false;
        }
        bin.push(piece);
        self.cached = cached;
        self.uncounted(piece.bytes);
        true
    }

    /// Memory of exactly `bytes`, a multiple of the unit, with what is at hand.
    #[inline]
    pub(super) fn take(&mut self, bytes: u64, align: u64) -> Option<Piece> {
        if bytes <= MOST_CACHED
            && let Some(piece) = self.pop(bytes, align)
        {
            return Some(piece);
        }
        self.take_free(bytes, align, Path::Own)
    }

    #[inline(never)]
    pub(super) fn take_free(&mut self, bytes: u64, align: u64, path: Path) -> Option<Piece> {
        let taken = self.index.take(bytes, align)?;
        let (ptr, bytes, node) = (taken.ptr, taken.bytes, taken.node);
        self.counted(bytes, path);
        let place = self.places.pop().unwrap_or(NO_PLACE);
        Some(Piece { ptr, bytes, node, place })
    }

    #[inline]
    fn uncounted(&mut self, bytes: u64) {
        self.counts.freed += 1;
        self.counts.outstanding = self.counts.outstanding.wrapping_sub(bytes);
    }

    #[inline]
    fn counted(&mut self, bytes: u64, path: Path) {
        note_path(path.logged());
        self.counts.allocations += 1;
        self.counts.outstanding = self.counts.outstanding.wrapping_add(bytes);
        self.counts.paths.count(path);
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

    /// Takes a freed block in; `Some` with the place of a record that is one too many.
    pub(super) fn put(&mut self, piece: Piece, stamp: u64, magazine: u64) -> Option<u32> {
        // A sixty-fourth of what is live may be worth keeping, if that is more.
        if self.push(piece, magazine.max(self.index.taken_bytes() / 64)) {
            return None;
        }
        self.put_rest(piece, stamp)
    }

    /// What the magazine has no room for.
    #[inline(never)]
    fn put_rest(&mut self, piece: Piece, stamp: u64) -> Option<u32> {
        self.uncounted(piece.bytes);
        let place = self.give(piece, stamp);
        if self.places.len() < MOST_PLACES {
            self.places.push(place);
            return None;
        }
        Some(place)
    }

    /// Gives a freed block, or one of the magazine that it takes the place of, to the index; returns the place of its record.
    #[inline]
    fn give(&mut self, piece: Piece, stamp: u64) -> u32 {
        // What was freed last is asked for next: it takes the place of a block of another size.
        if piece.bytes <= MOST_CACHED
            && let Some(top) = self.bins.get_mut(bin_of(piece.bytes)).and_then(|bin| bin.last_mut())
            && top.bytes != piece.bytes
        {
            let old = std::mem::replace(top, piece);
            self.cached = self.cached + piece.bytes - old.bytes;
            self.index.give(old.node, stamp);
            return old.place;
        }
        self.index.give(piece.node, stamp);
        piece.place
    }

    /// A block that was counted as handed out was not, after all.
    pub(super) fn undo(&mut self, piece: Piece, stamp: u64) {
        self.counts.allocations -= 1;
        self.counts.outstanding = self.counts.outstanding.wrapping_sub(piece.bytes);
        self.index.give(piece.node, stamp);
        if piece.place != NO_PLACE {
            self.places.push(piece.place);
        }
    }

    /// Empties the magazine into the index; the places of the records are added to `places`.
    pub(super) fn flush(&mut self, stamp: u64, places: &mut Vec<u32>) {
        if self.cached == 0 {
            return;
        }
        for bin in &mut self.bins {
            for piece in bin.drain(..) {
                self.index.give(piece.node, stamp);
                places.push(piece.place);
            }
        }
        self.cached = 0;
    }
}
