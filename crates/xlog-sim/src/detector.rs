//! The race detector.
//!
//! It sees operations in an order in which everything comes after what it is ordered after, and keeps, for every byte,
//! the accesses that later ones must still be compared with. Two accesses race when they conflict and the clock of the
//! later analysed one does not cover the other. That is decided by the program alone: when an operation ran, or whether
//! two overlapped in time, plays no part.
//!
//! Kept per byte range: the last writes and the reads since. A write that is ordered after an entry replaces it, since
//! whatever is ordered after the write is ordered after the entry too. Allocation and free are writes of the whole
//! block. Entries that raced stay, so that every partner of a race is seen.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use xlog_driver::StreamHandle;

use crate::clock::{Epoch, VectorClock};
use crate::memory::Piece;
use crate::op::OpMeta;
use crate::race::{RaceKind, RaceReport, RaceSide};

/// Reports kept; later ones are counted only.
const MAX_REPORTS: usize = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Read,
    Write,
    Alloc,
    Free,
}

impl Mode {
    fn action(self) -> &'static str {
        match self {
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Alloc => "allocates",
            Self::Free => "frees",
        }
    }
}

#[derive(Clone)]
struct Entry {
    epoch: Epoch,
    mode: Mode,
    meta: Arc<OpMeta>,
    tag: Option<Arc<str>>,
}

#[derive(Clone, Default)]
struct Cell {
    end: usize,
    entries: Vec<Entry>,
}

/// Shadow memory and the reports drawn from it.
#[derive(Default)]
pub(crate) struct Detector {
    shadow: HashMap<u64, BTreeMap<usize, Cell>>,
    reports: Vec<RaceReport>,
    seen: HashSet<(u64, u64)>,
    total: u64,
}

/// An access on its way through the detector.
pub(crate) struct Visit<'a> {
    pub(crate) mode: Mode,
    pub(crate) clock: &'a VectorClock,
    pub(crate) epoch: Epoch,
    pub(crate) meta: &'a Arc<OpMeta>,
    pub(crate) tag: Option<&'a Arc<str>>,
}

impl Detector {
    pub(crate) fn reports(&self) -> &[RaceReport] {
        &self.reports
    }

    /// Compares an access with what is there, remembers it, and returns the streams whose races it found.
    pub(crate) fn visit(&mut self, piece: &Piece, visit: &Visit<'_>) -> Vec<(StreamHandle, usize)> {
        let mut races: Vec<(Entry, usize, usize)> = Vec::new();
        let cells = self.shadow.entry(piece.backing_id()).or_default();
        let (start, end) = (piece.offset(), piece.offset() + piece.len());
        split(cells, start, end);
        for (&at, cell) in cells.range_mut(start..end) {
            for entry in &cell.entries {
                if conflict(entry, visit).is_some() {
                    races.push((entry.clone(), at, cell.end));
                }
            }
            cell.entries.retain(|entry| {
                let superseded = match visit.mode {
                    Mode::Read => entry.mode == Mode::Read,
                    Mode::Write | Mode::Alloc | Mode::Free => true,
                };
                !(superseded && visit.clock.covers(entry.epoch))
            });
            cell.entries.push(Entry {
                epoch: visit.epoch,
                mode: visit.mode,
                meta: Arc::clone(visit.meta),
                tag: visit.tag.cloned(),
            });
        }
        if visit.mode != Mode::Read {
            unite(cells, start, end);
        }
        self.report(piece, visit, races)
    }

    /// Forgets what is ordered before a free that has completed, for a new owner that is not ordered after it.
    pub(crate) fn retire(&mut self, piece: &Piece, clock: &VectorClock) {
        let Some(cells) = self.shadow.get_mut(&piece.backing_id()) else {
            return;
        };
        let (start, end) = (piece.offset(), piece.offset() + piece.len());
        split(cells, start, end);
        for (_, cell) in cells.range_mut(start..end) {
            cell.entries.retain(|entry| !clock.covers(entry.epoch));
        }
    }

    /// A host call that ends the life of a range: everything on it must have been seen to complete.
    pub(crate) fn end_by_host(
        &mut self,
        piece: &Piece,
        host: &VectorClock,
        meta: &Arc<OpMeta>,
        kind: RaceKind,
    ) -> Vec<(StreamHandle, usize)> {
        let Some(cells) = self.shadow.get_mut(&piece.backing_id()) else {
            return Vec::new();
        };
        let (start, end) = (piece.offset(), piece.offset() + piece.len());
        split(cells, start, end);
        let mut races = Vec::new();
        for (&at, cell) in cells.range(start..end) {
            for entry in &cell.entries {
                if !host.covers(entry.epoch) && entry.mode != Mode::Free {
                    races.push((entry.clone(), at, cell.end));
                }
            }
        }
        let mut notices = Vec::new();
        for (entry, from, to) in races {
            let side = RaceSide {
                operation: meta.label.to_string(),
                stream: None,
                stream_name: None,
                sequence: meta.sequence,
                action: "ends",
                tag: None,
            };
            let ptr = piece.address + (from - start) as u64;
            self.push(kind, &entry, side, ptr, (to - from) as u64, &mut notices);
        }
        notices
    }

    /// An operation that meant a block which is no longer the one at its address.
    pub(crate) fn stale(
        &mut self,
        meta: &Arc<OpMeta>,
        kind: RaceKind,
        ptr: u64,
        bytes: u64,
        tag: Option<&Arc<str>>,
    ) -> Vec<(StreamHandle, usize)> {
        let side = |operation: String, sequence, action| RaceSide {
            operation,
            stream: meta.stream,
            stream_name: meta.stream_name.as_deref().map(str::to_owned),
            sequence,
            action,
            tag: tag.map(|tag| tag.to_string()),
        };
        let host = RaceSide {
            stream: None,
            stream_name: None,
            ..side("the end of its block".to_owned(), meta.sequence, "ends")
        };
        let used = side(meta.label.to_string(), meta.sequence, "uses");
        self.total += 1;
        if self.reports.len() >= MAX_REPORTS {
            return Vec::new();
        }
        self.reports.push(RaceReport { kind, first: host, second: used, ptr, bytes });
        meta.stream.map(|stream| (stream, self.reports.len() - 1)).into_iter().collect()
    }

    /// Forgets a backing that is gone.
    pub(crate) fn forget(&mut self, backing: u64) {
        self.shadow.remove(&backing);
    }

    fn report(
        &mut self,
        piece: &Piece,
        visit: &Visit<'_>,
        races: Vec<(Entry, usize, usize)>,
    ) -> Vec<(StreamHandle, usize)> {
        let mut notices = Vec::new();
        for (entry, from, to) in races {
            let Some(kind) = conflict(&entry, visit) else {
                continue;
            };
            let side = side_of(visit.meta, visit.mode, visit.tag);
            let ptr = piece.address + (from - piece.offset()) as u64;
            self.push(kind, &entry, side, ptr, (to - from) as u64, &mut notices);
        }
        notices
    }

    fn push(
        &mut self,
        kind: RaceKind,
        entry: &Entry,
        second: RaceSide,
        ptr: u64,
        bytes: u64,
        notices: &mut Vec<(StreamHandle, usize)>,
    ) {
        if !self.seen.insert((entry.meta.sequence, second.sequence)) {
            return;
        }
        self.total += 1;
        if self.reports.len() >= MAX_REPORTS {
            return;
        }
        let first = side_of(&entry.meta, entry.mode, entry.tag.as_ref());
        let index = self.reports.len();
        notices.extend([first.stream, second.stream].into_iter().flatten().map(|s| (s, index)));
        self.reports.push(RaceReport { kind, first, second, ptr, bytes });
    }
}

fn side_of(meta: &OpMeta, mode: Mode, tag: Option<&Arc<str>>) -> RaceSide {
    RaceSide {
        operation: meta.label.to_string(),
        stream: meta.stream,
        stream_name: meta.stream_name.as_deref().map(str::to_owned),
        sequence: meta.sequence,
        action: mode.action(),
        tag: tag.map(|tag| tag.to_string()),
    }
}

/// Whether an earlier access and this one race, and how.
fn conflict(entry: &Entry, visit: &Visit<'_>) -> Option<RaceKind> {
    let ordered = visit.clock.covers(entry.epoch);
    match (entry.mode, visit.mode) {
        (Mode::Read, Mode::Read) => None,
        // Nothing may touch a block after its free, however well it is ordered.
        (Mode::Free, Mode::Read | Mode::Write) => Some(RaceKind::UseAfterFree),
        // Queued before this block existed, it meant the one before.
        (Mode::Alloc, Mode::Read | Mode::Write) if visit.meta.sequence < entry.meta.sequence => {
            Some(RaceKind::UseAcrossReuse)
        }
        _ if ordered => None,
        (Mode::Free, _) | (_, Mode::Alloc) => Some(RaceKind::UseAcrossReuse),
        (_, Mode::Free) => Some(RaceKind::UseAfterFree),
        (Mode::Alloc, _) => Some(RaceKind::UseBeforeAllocation),
        (Mode::Write, Mode::Write) => Some(RaceKind::WriteWrite),
        (Mode::Write, Mode::Read) | (Mode::Read, Mode::Write) => Some(RaceKind::ReadWrite),
    }
}

/// Makes `start` and `end` borders of cells and fills the gaps between them.
fn split(cells: &mut BTreeMap<usize, Cell>, start: usize, end: usize) {
    for border in [start, end] {
        let Some((&at, cell)) = cells.range_mut(..border).next_back() else {
            continue;
        };
        if at < border && border < cell.end {
            let tail = cell.clone();
            cell.end = border;
            cells.insert(border, tail);
        }
    }
    let mut at = start;
    let mut gaps = Vec::new();
    for (&from, cell) in cells.range(start..end) {
        if at < from {
            gaps.push((at, from));
        }
        at = cell.end;
    }
    if at < end {
        gaps.push((at, end));
    }
    for (from, to) in gaps {
        cells.insert(from, Cell { end: to, entries: Vec::new() });
    }
}

/// Joins neighbouring cells that hold the same single entry.
fn unite(cells: &mut BTreeMap<usize, Cell>, start: usize, end: usize) {
    let lone = |cell: &Cell| cell.entries.len() == 1;
    if cells.range(start..end).nth(1).is_none() || !cells.range(start..end).all(|(_, c)| lone(c)) {
        return;
    }
    let rest: Vec<usize> = cells.range(start..end).skip(1).map(|(&at, _)| at).collect();
    for at in rest {
        cells.remove(&at);
    }
    if let Some(cell) = cells.get_mut(&start) {
        cell.end = end;
    }
}
