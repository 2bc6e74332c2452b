//! What one thread counts, as far as there are enough shards: meters by number, and a cache of the numbers it used last.

use super::meter::{Meter, Published};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS};
use super::snapshot::{CLASSES, class_of};

const CACHE: usize = 64;
/// Allocations after which a shard looks for room in its smallest segment again.
const LOOK_AGAIN: u32 = 1024;

/// What all shards have published, by number.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) total: Published,
    pub(super) tags: Box<[Published]>,
    pub(super) streams: Box<[Published]>,
    pub(super) queries: Box<[Published]>,
}

impl Board {
    pub(super) fn new() -> Self {
        let board = |places: usize| (0..places).map(|_| Published::default()).collect();
        Self {
            total: Published::default(),
            tags: board(MAX_TAGS),
            streams: board(MAX_STREAMS),
            queries: board(MAX_QUERIES),
        }
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    pub(super) total: Meter,
    pub(super) tags: Vec<Meter>,
    pub(super) streams: Vec<Meter>,
    pub(super) queries: Vec<Meter>,
    pub(super) sizes: [u64; CLASSES],
    pub(super) requested_bytes: u64,
    /// Frees of blocks that were not allocated here.
    pub(super) unknown_frees: u64,
    /// Failed allocations by the kind of their error.
    pub(super) failures: Vec<(&'static str, u64)>,
    cache: [Option<(Key, Ids)>; CACHE],
    /// The segment of the table that had room last.
    pub(super) first_segment: usize,
    until_look: u32,
    /// Allocations until one is remembered with its backtrace.
    pub(super) until_trace: u32,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            total: Meter::default(),
            tags: Vec::new(),
            streams: Vec::new(),
            queries: Vec::new(),
            sizes: [0; CLASSES],
            requested_bytes: 0,
            unknown_frees: 0,
            failures: Vec::new(),
            cache: [None; CACHE],
            first_segment: 0,
            until_look: LOOK_AGAIN,
            until_trace: 0,
        }
    }
}

#[cold]
#[inline(never)]
fn grown(meters: &mut Vec<Meter>, id: usize) {
    meters.resize_with((id + 1).next_power_of_two(), Meter::default);
}

/// The account of a number, in this shard and on the board.
#[inline(always)]
fn account<'a>(
    meters: &'a mut Vec<Meter>,
    board: &'a [Published],
    id: usize,
) -> Option<(&'a mut Meter, &'a Published)> {
    if id >= meters.len() {
        grown(meters, id);
    }
    Some((meters.get_mut(id)?, board.get(id)?))
}

/// Does the same to the accounts of everything, of a tag, of a stream and of a query.
macro_rules! each {
    ($counts:ident, $ids:ident, $board:ident, $method:ident($($argument:expr),*)) => {
        $counts.total.$method($($argument,)* &$board.total);
        if let Some((meter, all)) = account(&mut $counts.tags, &$board.tags, $ids.tag()) {
            meter.$method($($argument,)* all);
        }
        if let Some((meter, all)) = account(&mut $counts.streams, &$board.streams, $ids.stream()) {
            meter.$method($($argument,)* all);
        }
        if let Some((meter, all)) = account(&mut $counts.queries, &$board.queries, $ids.query()) {
            meter.$method($($argument,)* all);
        }
    };
}

impl Counts {
    #[inline(always)]
    pub(super) fn cached(&self, key: &Key) -> Option<Ids> {
        match &self.cache[key.place(CACHE)] {
            Some((known, ids)) if known.is_same(key) => Some(*ids),
            _ => None,
        }
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids) {
        self.cache[key.place(CACHE)] = Some((key, ids));
    }

    pub(super) fn forget_cache(&mut self) {
        self.cache = [None; CACHE];
    }

    #[inline(always)]
    pub(super) fn allocate(&mut self, ids: Ids, requested: usize, bytes: u64, board: &Board) {
        each!(self, ids, board, allocate(bytes));
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        self.sizes[class_of(requested)] += 1;
        self.until_look -= 1;
        if self.until_look == 0 {
            self.until_look = LOOK_AGAIN;
            self.first_segment = 0;
        }
    }

    #[inline(always)]
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, board: &Board) {
        each!(self, ids, board, free(bytes));
    }

    pub(super) fn fail(&mut self, ids: Ids, kind: &'static str, board: &Board) {
        each!(self, ids, board, fail());
        match self.failures.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((kind, 1)),
        }
    }
}
