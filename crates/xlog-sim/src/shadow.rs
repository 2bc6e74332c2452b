//! Shadow memory: for every byte range of one backing, the accesses that later ones must be compared with.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::clock::Epoch;
use crate::op::OpMeta;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Read,
    Write,
    Alloc,
    Free,
}

impl Mode {
    pub(crate) fn action(self) -> &'static str {
        match self {
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Alloc => "allocates",
            Self::Free => "frees",
        }
    }
}

/// One access to a range.
#[derive(Clone)]
pub(crate) struct AccessEntry {
    pub(crate) epoch: Epoch,
    pub(crate) mode: Mode,
    pub(crate) meta: Arc<OpMeta>,
    pub(crate) tag: Option<Arc<str>>,
    /// The mapping of the access, see `BackingRange::base`; `None` once it is unmapped.
    pub(crate) base: Option<u64>,
}

/// A range of bytes with a common history of accesses.
#[derive(Clone, Default)]
pub(crate) struct Cell {
    pub(crate) end: usize,
    pub(crate) entries: Vec<AccessEntry>,
    /// The allocation of the block that lives here. It is kept after its entry is replaced: work queued before it meant another block, even
    /// if it is ordered.
    pub(crate) born: Option<Arc<AccessEntry>>,
}

/// The cells of one backing by their first byte, without overlaps.
pub(crate) type Cells = BTreeMap<usize, Cell>;

/// Splits cells at `start` and `end`, and fills the gaps between them with empty cells.
pub(crate) fn split(cells: &mut Cells, start: usize, end: usize) {
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
        cells.insert(from, Cell { end: to, ..Cell::default() });
    }
}

/// Merges neighbouring cells of one block with the same single entry.
pub(crate) fn unite(cells: &mut Cells, start: usize, end: usize) {
    if cells.range(start..end).nth(1).is_none() {
        return;
    }
    let mut rest: Vec<(usize, usize)> = Vec::new();
    let mut last: Option<(usize, &Cell)> = None;
    for (&at, cell) in cells.range(start..end) {
        match last {
            Some((first, kept)) if joins(kept, cell) => rest.push((at, first)),
            _ => last = Some((at, cell)),
        }
    }
    for (at, first) in rest {
        let end = cells.remove(&at).map(|cell| cell.end);
        if let (Some(end), Some(cell)) = (end, cells.get_mut(&first)) {
            cell.end = end;
        }
    }
}

fn joins(one: &Cell, other: &Cell) -> bool {
    let same_block = match (&one.born, &other.born) {
        (Some(one), Some(other)) => Arc::ptr_eq(&one.meta, &other.meta),
        (None, None) => true,
        _ => false,
    };
    let same_entry = match (one.entries.as_slice(), other.entries.as_slice()) {
        ([one], [other]) => Arc::ptr_eq(&one.meta, &other.meta) && one.base == other.base,
        _ => false,
    };
    same_block && same_entry
}
