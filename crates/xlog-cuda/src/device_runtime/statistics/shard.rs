//! What one thread counts, as far as there are enough shards.
//!
//! An operation is counted under a tag, a stream and a query: four meters. Touching them all for every operation would cost more
//! than the operation, so a shard has entries for the combinations it used last, and moves their sums to the meters now and then.
//! A peak cannot be missed meanwhile: an entry may only grow by the room it was given, and all room given under a meter lies below
//! that meter's peak. An allocation beyond its room settles everything and looks at the meters itself. What all entries together
//! have grown or shrunk, and others cannot see, stays below half a step.

use super::meter::{HALF_STEP_BLOCKS, HALF_STEP_BYTES, Meter, Published};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS};
use super::snapshot::{CLASSES, class_of};

/// Entries of a shard; their places are numbers below this in [`Ids`].
pub(super) const ENTRIES: usize = 64;
/// Times of settling after which a shard looks for room in its smallest segment again.
const LOOK_AGAIN: u64 = 16;

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

/// What was counted under one combination since the shard was settled last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    pub(super) allocated_bytes: u64,
    pub(super) allocated_blocks: u64,
    pub(super) freed_bytes: u64,
    pub(super) freed_blocks: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Option<Key>,
    /// [`Ids::NONE`] without a key.
    ids: Ids,
    /// Allocated minus freed since the shard was settled last.
    net_bytes: i64,
    net_blocks: i64,
    freed_bytes: u64,
    freed_blocks: u64,
    /// How far it may grow unseen.
    room_bytes: i64,
    room_blocks: i64,
}

impl Entry {
    const EMPTY: Self = Self::new(None, Ids::NONE);

    const fn new(key: Option<Key>, ids: Ids) -> Self {
        Self {
            key,
            ids,
            net_bytes: 0,
            net_blocks: 0,
            freed_bytes: 0,
            freed_blocks: 0,
            room_bytes: 0,
            room_blocks: 0,
        }
    }

    /// What was counted, which is zero afterwards, as is the room.
    fn take(&mut self) -> Moved {
        let moved = Moved {
            allocated_bytes: self.freed_bytes.wrapping_add(self.net_bytes as u64),
            allocated_blocks: self.freed_blocks.wrapping_add(self.net_blocks as u64),
            freed_bytes: self.freed_bytes,
            freed_blocks: self.freed_blocks,
        };
        *self = Self::new(self.key, self.ids);
        moved
    }
}

/// By how much more a sum is unseen when one of its parts goes from `before` to `after`.
#[inline(always)]
fn further(before: i64, after: i64) -> i64 {
    after.wrapping_abs().wrapping_sub(before.wrapping_abs())
}

#[derive(Debug)]
pub(super) struct Counts {
    entries: [Entry; ENTRIES],
    /// Entries with room or with something to move, by place.
    open: u64,
    /// By how much the entries have grown or shrunk, added up: what others cannot see stays bounded.
    unseen_bytes: i64,
    unseen_blocks: i64,
    /// Counts the times of settling; room given before the last one is void.
    epoch: u64,
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
    /// The segment of the table that had room last.
    pub(super) first_segment: usize,
    /// Allocations until one is remembered with its backtrace.
    pub(super) until_trace: u32,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            entries: [Entry::EMPTY; ENTRIES],
            open: 0,
            unseen_bytes: 0,
            unseen_blocks: 0,
            epoch: 1,
            total: Meter::default(),
            tags: Vec::new(),
            streams: Vec::new(),
            queries: Vec::new(),
            sizes: [0; CLASSES],
            requested_bytes: 0,
            unknown_frees: 0,
            failures: Vec::new(),
            first_segment: 0,
            until_trace: 0,
        }
    }
}

/// The meter of a number, in this shard and on the board.
#[inline]
fn meter<'a>(
    meters: &'a mut Vec<Meter>,
    board: &'a [Published],
    id: usize,
) -> Option<(&'a mut Meter, &'a Published)> {
    if id >= meters.len() {
        meters.resize_with((id + 1).next_power_of_two(), Meter::default);
    }
    Some((meters.get_mut(id)?, board.get(id)?))
}

impl Counts {
    /// Does the same to the meters of everything, of a tag, of a stream and of a query.
    #[inline(always)]
    fn each(&mut self, ids: Ids, board: &Board, mut change: impl FnMut(&mut Meter, &Published)) {
        change(&mut self.total, &board.total);
        for (meters, board, id) in [
            (&mut self.tags, &board.tags, ids.tag()),
            (&mut self.streams, &board.streams, ids.stream()),
            (&mut self.queries, &board.queries, ids.query()),
        ] {
            if let Some((meter, all)) = meter(meters, board, id) {
                change(meter, all);
            }
        }
    }

    /// The numbers of a combination that this shard used of late.
    #[inline(always)]
    pub(super) fn cached(&self, key: &Key) -> Option<Ids> {
        let entry = self.entries.get(key.place(ENTRIES))?;
        entry.key.as_ref().is_some_and(|known| known.is_same(key)).then_some(entry.ids)
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids, board: &Board) {
        self.settle(board);
        if let Some(entry) = self.entries.get_mut(ids.place()) {
            *entry = Entry::new(Some(key), ids);
        }
    }

    /// Forgets all combinations. Only after everything was settled.
    pub(super) fn forget_entries(&mut self) {
        self.entries = [Entry::EMPTY; ENTRIES];
        self.open = 0;
    }

    /// Counts a block under a combination that has an entry here.
    #[inline(always)]
    pub(super) fn allocate(&mut self, ids: Ids, requested: usize, bytes: u64, board: &Board) {
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        self.sizes[class_of(requested)] += 1;
        let entry = &mut self.entries[ids.place() % ENTRIES];
        let net_bytes = entry.net_bytes.wrapping_add(bytes as i64);
        let net_blocks = entry.net_blocks + 1;
        let unseen_bytes = self.unseen_bytes.wrapping_add(further(entry.net_bytes, net_bytes));
        let unseen_blocks = self.unseen_blocks + further(entry.net_blocks, net_blocks);
        let unseen_room = HALF_STEP_BYTES.wrapping_sub(unseen_bytes)
            | HALF_STEP_BLOCKS.wrapping_sub(unseen_blocks);
        let room = entry.room_bytes.wrapping_sub(net_bytes) | (entry.room_blocks - net_blocks);
        if (room | unseen_room) < 0 {
            return self.allocate_beyond(ids, bytes, unseen_room >= 0, board);
        }
        (entry.net_bytes, entry.net_blocks) = (net_bytes, net_blocks);
        (self.unseen_bytes, self.unseen_blocks) = (unseen_bytes, unseen_blocks);
    }

    /// An allocation that its entry has no room for, or that may not go unseen.
    #[cold]
    #[inline(never)]
    fn allocate_beyond(&mut self, ids: Ids, bytes: u64, may_go_unseen: bool, board: &Board) {
        let fits = |room: (i64, i64)| room.0 >= bytes as i64 && room.1 >= 1;
        let mut room = self.room(ids, board);
        if !may_go_unseen || !fits(room) {
            self.settle(board);
            self.each(ids, board, |meter, all| meter.allocate(bytes, all));
            room = self.room(ids, board);
            self.give_room(ids, (room.0 - room.0 / 2, room.1 - room.1 / 2), board);
            return;
        }
        // Nobody can be above a peak even if all grow as far as they may. Half of what is left goes here, the rest to others.
        let share = (bytes as i64).max(room.0 / 2);
        self.give_room(ids, (share, (room.1 / 2).max(1)), board);
        let entry = &mut self.entries[ids.place() % ENTRIES];
        let net = (entry.net_bytes.wrapping_add(bytes as i64), entry.net_blocks + 1);
        self.unseen_bytes = self.unseen_bytes.wrapping_add(further(entry.net_bytes, net.0));
        self.unseen_blocks += further(entry.net_blocks, net.1);
        (entry.net_bytes, entry.net_blocks) = net;
    }

    /// Bytes and blocks that lie below the peaks of all four meters and were given to nobody.
    fn room(&mut self, ids: Ids, board: &Board) -> (i64, i64) {
        let (mut room, epoch) = ((i64::MAX, i64::MAX), self.epoch);
        self.each(ids, board, |meter, all| {
            let own = meter.room(epoch, all);
            room = (room.0.min(own.0), room.1.min(own.1));
        });
        (room.0.max(0), room.1.max(0))
    }

    fn give_room(&mut self, ids: Ids, room: (i64, i64), board: &Board) {
        let epoch = self.epoch;
        self.each(ids, board, |meter, _| meter.give_room(epoch, room));
        let entry = &mut self.entries[ids.place() % ENTRIES];
        entry.room_bytes += room.0;
        entry.room_blocks += room.1;
        self.open |= 1 << ids.place();
    }

    #[inline(always)]
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, board: &Board) {
        let entry = &mut self.entries[ids.place() % ENTRIES];
        if entry.ids != ids.untraced() {
            return self.free_elsewhere(ids, bytes, board);
        }
        let net = (entry.net_bytes.wrapping_sub(bytes as i64), entry.net_blocks - 1);
        self.unseen_bytes = self.unseen_bytes.wrapping_add(further(entry.net_bytes, net.0));
        self.unseen_blocks += further(entry.net_blocks, net.1);
        (entry.net_bytes, entry.net_blocks) = net;
        entry.freed_bytes = entry.freed_bytes.wrapping_add(bytes);
        entry.freed_blocks += 1;
        self.open |= 1 << ids.place();
        if (HALF_STEP_BYTES.wrapping_sub(self.unseen_bytes)
            | HALF_STEP_BLOCKS.wrapping_sub(self.unseen_blocks))
            < 0
        {
            self.settle(board);
        }
    }

    /// A free of a block that was allocated under a combination this shard has no entry of.
    #[cold]
    #[inline(never)]
    fn free_elsewhere(&mut self, ids: Ids, bytes: u64, board: &Board) {
        let moved = Moved { freed_bytes: bytes, freed_blocks: 1, ..Moved::default() };
        self.each(ids, board, |meter, all| meter.settle(&moved, all));
    }

    pub(super) fn fail(&mut self, ids: Ids, kind: &'static str, board: &Board) {
        self.each(ids, board, |meter, _| meter.fail());
        match self.failures.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((kind, 1)),
        }
    }

    /// Moves all sums to the meters, and takes all room back.
    #[cold]
    #[inline(never)]
    pub(super) fn settle(&mut self, board: &Board) {
        while self.open != 0 {
            let place = self.open.trailing_zeros() as usize;
            self.open &= self.open - 1;
            let entry = &mut self.entries[place % ENTRIES];
            let (ids, moved) = (entry.ids, entry.take());
            self.each(ids, board, |meter, all| meter.settle(&moved, all));
        }
        self.epoch += 1;
        (self.unseen_bytes, self.unseen_blocks) = (0, 0);
        if self.epoch.is_multiple_of(LOOK_AGAIN) {
            self.first_segment = 0;
        }
    }
}
