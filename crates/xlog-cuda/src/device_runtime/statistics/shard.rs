//! What one thread counts, as far as there are enough shards.
//!
//! An operation is counted under a tag, a stream and a query: four meters. Touching them all for every operation would cost more
//! than the operation, so a shard has entries for the combinations it used last, and moves their sums to the meters now and then.
//! A peak cannot be missed meanwhile: an entry may only grow by the room it was given, and all room given under a meter lies below
//! that meter's peak. An allocation beyond its room settles everything and looks at the meters itself. What all entries together
//! have grown or shrunk under a meter, and others cannot see, stays below their part of that meter's step: each may only do so by what
//! it has set aside of that.

use super::extent::Extent;
use super::meter::{Meter, Published};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS, Mark};
use super::snapshot::{CLASSES, class_of};

/// Entries of a shard; their places are numbers below this in [`Ids`].
pub(super) const ENTRIES: usize = 64;
/// Blocks that were not counted at once after which a shard looks for room in its smallest segment again.
const LOOK_AGAIN: u32 = 64;

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
#[repr(align(64))]
struct Entry {
    /// [`Mark::NONE`] where there is none.
    mark: Mark,
    /// [`Ids::NONE`] where there is none.
    ids: Ids,
    /// Allocated minus freed since the shard was settled last.
    net: Extent,
    freed_bytes: u64,
    freed_blocks: u64,
    /// The least of `room` and `aside`.
    top: Extent,
    /// How far it may be from 0 as far as others need not see it.
    aside: Extent,
    /// How far it may grow as far as no peak can be missed.
    room: Extent,
}

impl Entry {
    const EMPTY: Self = Self::new(Mark::NONE, Ids::NONE);

    const fn new(mark: Mark, ids: Ids) -> Self {
        Self {
            mark,
            ids,
            net: Extent::NONE,
            freed_bytes: 0,
            freed_blocks: 0,
            top: Extent::NONE,
            aside: Extent::NONE,
            room: Extent::NONE,
        }
    }

    fn set_top(&mut self) {
        self.top = self.room.least(self.aside);
    }

    /// What was counted, which is zero afterwards, as are the limits.
    fn take(&mut self) -> Moved {
        let moved = Moved {
            allocated_bytes: self.freed_bytes.wrapping_add(self.net.bytes as u64),
            allocated_blocks: self.freed_blocks.wrapping_add(self.net.blocks as u64),
            freed_bytes: self.freed_bytes,
            freed_blocks: self.freed_blocks,
        };
        *self = Self::new(self.mark, self.ids);
        moved
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    entries: [Entry; ENTRIES],
    /// Entries with limits or with something to move, by place.
    open: u64,
    /// Counts the times of settling; room given before the last one is void.
    epoch: u64,
    /// Counts the times that entries gave back what they had set aside.
    aside_epoch: u64,
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
    /// The row of generations that was hinted at last.
    pub(super) hinted: u64,
    /// The segment of the table that had room last.
    first_segment: usize,
    /// Times it was asked for since it was the smallest.
    asked: u32,
    /// Allocations until one is remembered with its backtrace.
    pub(super) until_trace: u32,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            entries: [Entry::EMPTY; ENTRIES],
            open: 0,
            epoch: 1,
            aside_epoch: 1,
            total: Meter::default(),
            tags: Vec::new(),
            streams: Vec::new(),
            queries: Vec::new(),
            sizes: [0; CLASSES],
            requested_bytes: 0,
            unknown_frees: 0,
            failures: Vec::new(),
            hinted: 0,
            first_segment: 0,
            asked: 0,
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

    /// Where the entry of a combination is that this shard used of late.
    #[inline(always)]
    pub(super) fn entry_of(&self, mark: &Mark) -> Option<usize> {
        let place = mark.place();
        (self.entries[place % ENTRIES].mark == *mark).then_some(place)
    }

    /// The numbers of such a combination.
    #[inline(always)]
    pub(super) fn ids_at(&self, place: usize) -> Ids {
        self.entries[place % ENTRIES].ids
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids, board: &Board) {
        self.settle(board);
        if let Some(entry) = self.entries.get_mut(ids.place()) {
            *entry = Entry::new(key.mark(), ids);
        }
    }

    /// Forgets all combinations. Only after everything was settled.
    pub(super) fn forget_entries(&mut self) {
        self.entries = [Entry::EMPTY; ENTRIES];
        self.open = 0;
    }

    #[inline(always)]
    fn request(&mut self, requested: usize) {
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        self.sizes[class_of(requested)] += 1;
    }

    /// Counts a block under the combination whose entry is at `place`, if it stays within the entry's limits. False: nothing is
    /// counted.
    #[inline(always)]
    pub(super) fn allocate_within(&mut self, place: usize, requested: usize, bytes: u64) -> bool {
        let entry = &mut self.entries[place % ENTRIES];
        let net = entry.net.plus(bytes as i64, 1);
        if !entry.top.less(net).is_room() {
            return false;
        }
        entry.net = net;
        self.request(requested);
        true
    }

    /// Counts a block under a combination that has an entry here.
    pub(super) fn allocate(&mut self, ids: Ids, requested: usize, bytes: u64, board: &Board) {
        let place = ids.place() % ENTRIES;
        if self.allocate_within(place, requested, bytes) {
            return;
        }
        self.request(requested);
        let net = self.entries[place].net.plus(bytes as i64, 1);
        let may_go_unseen = self.may_go_unseen(bytes);
        if may_go_unseen && self.set_aside(ids, net, board) && self.make_room(ids, net, board) {
            self.entries[place].net = net;
            return;
        }
        // First what lies below the peaks for certain, in whatever order it is settled; then, at one go, its own entry with the block.
        self.open &= !(1 << place);
        self.settle(board);
        let mut moved = self.entries[place].take();
        moved.allocated_bytes = moved.allocated_bytes.wrapping_add(bytes);
        moved.allocated_blocks = moved.allocated_blocks.wrapping_add(1);
        if may_go_unseen {
            self.give_half(ids, bytes, board, |meter, all| meter.settle(&moved, all));
        } else {
            self.each(ids, board, |meter, all| meter.settle(&moved, all));
        }
    }

    /// Whether a block is small enough, for the account of everything, to come or go without being told.
    #[inline]
    fn may_go_unseen(&self, bytes: u64) -> bool {
        self.total.step_of_entries().bytes >= bytes as i64
    }

    /// Gives an entry half the room there is, and sets aside what the next block or free like this one needs.
    ///
    /// `first` is done to the meters before.
    #[inline]
    fn give_half(
        &mut self,
        ids: Ids,
        bytes: u64,
        board: &Board,
        mut first: impl FnMut(&mut Meter, &Published),
    ) {
        let (epoch, aside_epoch) = (self.epoch, self.aside_epoch);
        let (mut room, mut unseen) = (Extent::ALL, Extent::ALL);
        self.each(ids, board, |meter, all| {
            first(meter, all);
            room = room.least(meter.room(epoch, all));
            unseen = unseen.least(meter.unseen_left(aside_epoch));
        });
        let room = room.most(Extent::NONE);
        let room = room.less(room.part(2));
        let wanted = Extent { bytes: bytes as i64, blocks: 1 };
        // Without it the next one finds out itself.
        let share = unseen.part(self.sharers(ids));
        let aside = if unseen.holds(wanted) { wanted.most(share) } else { Extent::NONE };
        self.each(ids, board, |meter, _| {
            meter.give_room(epoch, room);
            meter.set_aside(aside_epoch, aside);
        });
        let entry = &mut self.entries[ids.place() % ENTRIES];
        (entry.room, entry.aside) = (room, aside);
        entry.set_top();
        self.open |= 1 << (ids.place() % ENTRIES);
    }

    /// Lets an entry go as far from 0 as `net`, and a little further, unseen. False when that is too far.
    fn set_aside(&mut self, ids: Ids, net: Extent, board: &Board) -> bool {
        let (place, wanted) = (ids.place() % ENTRIES, net.distance());
        let mut left = self.unseen_left(ids, board);
        if !left.holds(wanted.less(self.entries[place].aside)) {
            self.take_back_aside(board);
            left = self.unseen_left(ids, board);
        }
        let lacking = wanted.less(self.entries[place].aside);
        if !left.holds(lacking) {
            return false;
        }
        let share = left.part(self.sharers(ids));
        let more = |lacking: i64, share: i64| if lacking > 0 { lacking.max(share) } else { 0 };
        let more = Extent {
            bytes: more(lacking.bytes, share.bytes),
            blocks: more(lacking.blocks, share.blocks),
        };
        let epoch = self.aside_epoch;
        self.each(ids, board, |meter, _| meter.set_aside(epoch, more));
        let entry = &mut self.entries[place];
        entry.aside = entry.aside.and(more);
        entry.set_top();
        self.open |= 1 << place;
        true
    }

    /// Among how many what may go unseen is shared out: the entries that move now, this one among them, and one that may come.
    fn sharers(&self, ids: Ids) -> i64 {
        i64::from((self.open | 1 << (ids.place() % ENTRIES)).count_ones()) + 1
    }

    /// How far an entry may move unseen as far as all four meters are concerned.
    fn unseen_left(&mut self, ids: Ids, board: &Board) -> Extent {
        let (mut left, epoch) = (Extent::ALL, self.aside_epoch);
        self.each(ids, board, |meter, _| left = left.least(meter.unseen_left(epoch)));
        left
    }

    /// Entries keep aside only what they need now.
    fn take_back_aside(&mut self, board: &Board) {
        self.aside_epoch += 1;
        let (mut open, epoch) = (self.open, self.aside_epoch);
        while open != 0 {
            let entry = &mut self.entries[open.trailing_zeros() as usize % ENTRIES];
            open &= open - 1;
            entry.aside = entry.net.distance();
            entry.set_top();
            let (ids, aside) = (entry.ids, entry.aside);
            self.each(ids, board, |meter, _| meter.set_aside(epoch, aside));
        }
    }

    /// Gives an entry room up to `net`, if nobody can be above a peak even when all grow as far as they may.
    fn make_room(&mut self, ids: Ids, net: Extent, board: &Board) -> bool {
        let lacking = net.less(self.entries[ids.place() % ENTRIES].room);
        if lacking.bytes <= 0 && lacking.blocks <= 0 {
            return true;
        }
        let room = self.room(ids, board);
        if !room.holds(lacking) {
            return false;
        }
        // Half of what is left goes here, the rest to others.
        self.give_room(ids, lacking.most(room.part(2)), board);
        true
    }

    /// Bytes and blocks that lie below the peaks of all four meters and were given to nobody.
    fn room(&mut self, ids: Ids, board: &Board) -> Extent {
        let (mut room, epoch) = (Extent::ALL, self.epoch);
        self.each(ids, board, |meter, all| room = room.least(meter.room(epoch, all)));
        room.most(Extent::NONE)
    }

    fn give_room(&mut self, ids: Ids, room: Extent, board: &Board) {
        let epoch = self.epoch;
        self.each(ids, board, |meter, _| meter.give_room(epoch, room));
        let entry = &mut self.entries[ids.place() % ENTRIES];
        entry.room = entry.room.and(room);
        entry.set_top();
        self.open |= 1 << ids.place();
    }

    /// Counts a free, if this shard has an entry for its combination and it stays within the entry's limits. False: nothing is
    /// counted. A block with a backtrace has no entry here.
    #[inline(always)]
    pub(super) fn free_within(&mut self, ids: Ids, bytes: u64) -> bool {
        let entry = &mut self.entries[ids.place() % ENTRIES];
        let net = entry.net.plus((bytes as i64).wrapping_neg(), -1);
        if entry.ids != ids || !entry.aside.plus(net.bytes, net.blocks).is_room() {
            return false;
        }
        entry.net = net;
        entry.freed_bytes = entry.freed_bytes.wrapping_add(bytes);
        entry.freed_blocks += 1;
        true
    }

    /// Counts a free.
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, board: &Board) {
        let (ids, place) = (ids.untraced(), ids.place() % ENTRIES);
        if self.free_within(ids, bytes) {
            return;
        }
        if self.entries[place].ids != ids {
            return self.free_elsewhere(ids, bytes, board);
        }
        let net = self.entries[place].net.plus((bytes as i64).wrapping_neg(), -1);
        let may_go_unseen = self.may_go_unseen(bytes);
        let is_aside = may_go_unseen && self.set_aside(ids, net, board);
        let entry = &mut self.entries[place];
        entry.net = net;
        entry.freed_bytes = entry.freed_bytes.wrapping_add(bytes);
        entry.freed_blocks += 1;
        if !is_aside {
            self.open |= 1 << place;
            self.settle(board);
            if may_go_unseen {
                self.give_half(ids, bytes, board, |_, _| {});
            }
        }
    }

    /// A free of a block that was allocated under a combination this shard has no entry of.
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

    /// The segment of the table to begin with, and to be moved on past full ones.
    #[inline]
    pub(super) fn segment(&mut self) -> &mut usize {
        self.asked += 1;
        if self.asked >= LOOK_AGAIN {
            (self.asked, self.first_segment) = (0, 0);
        }
        &mut self.first_segment
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
        self.aside_epoch += 1;
    }
}
