//! What one thread counts, as far as there are enough shards.
//!
//! An operation is counted under a tag, a stream and a query: four meters. Touching them all for every operation would cost more
//! than the operation, so a shard has entries for the combinations it used last, and moves their sums to the meters now and then.
//! A peak cannot be missed meanwhile: an entry may only grow by the room it was given, and all room given under a meter lies below
//! that meter's peak. An allocation beyond its room flushes everything and looks at the meters itself. What all entries together
//! have grown or shrunk under a meter, and others cannot see, stays below their part of that meter's step: each may only do so by what
//! it has set aside of that.

use super::bytes_and_blocks::BytesAndBlocks;
use super::meter::{Meter, PublishedTotal};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS, RawKey};
use super::snapshot::SizeHistogram;

/// Entries of a shard; their places are numbers below this in [`Ids`].
pub(super) const ENTRIES: usize = 64;
/// Blocks that were not counted at once after which a shard looks for room in its smallest segment again.
const RECHECK_AFTER: u32 = 64;

/// What all shards have published, by number.
#[derive(Debug)]
pub(super) struct GlobalTotals {
    pub(super) total: PublishedTotal,
    pub(super) tags: Box<[PublishedTotal]>,
    pub(super) streams: Box<[PublishedTotal]>,
    pub(super) queries: Box<[PublishedTotal]>,
}

impl GlobalTotals {
    pub(super) fn new() -> Self {
        let totals_of = |places: usize| (0..places).map(|_| PublishedTotal::default()).collect();
        Self {
            total: PublishedTotal::default(),
            tags: totals_of(MAX_TAGS),
            streams: totals_of(MAX_STREAMS),
            queries: totals_of(MAX_QUERIES),
        }
    }
}

/// What was counted under one combination since the shard was flushed last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CountDelta {
    pub(super) allocated_bytes: u64,
    pub(super) allocated_blocks: u64,
    pub(super) freed_bytes: u64,
    pub(super) freed_blocks: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct CombinationEntry {
    /// [`RawKey::NONE`] where there is none.
    raw_key: RawKey,
    /// [`Ids::NONE`] where there is none.
    ids: Ids,
    /// Allocated minus freed since the shard was flushed last.
    net: BytesAndBlocks,
    freed_bytes: u64,
    freed_blocks: u64,
    /// The least of `room` and `aside`.
    top: BytesAndBlocks,
    /// How far it may be from 0 as far as others need not see it.
    aside: BytesAndBlocks,
    /// How far it may grow as far as no peak can be missed.
    room: BytesAndBlocks,
}

impl CombinationEntry {
    const EMPTY: Self = Self::new(RawKey::NONE, Ids::NONE);

    const fn new(raw_key: RawKey, ids: Ids) -> Self {
        Self {
            raw_key,
            ids,
            net: BytesAndBlocks::NONE,
            freed_bytes: 0,
            freed_blocks: 0,
            top: BytesAndBlocks::NONE,
            aside: BytesAndBlocks::NONE,
            room: BytesAndBlocks::NONE,
        }
    }

    fn set_top(&mut self) {
        self.top = self.room.min(self.aside);
    }

    /// What was counted, which is zero afterwards, as are the limits.
    fn drain(&mut self) -> CountDelta {
        let delta = CountDelta {
            allocated_bytes: self.freed_bytes.wrapping_add(self.net.bytes as u64),
            allocated_blocks: self.freed_blocks.wrapping_add(self.net.blocks as u64),
            freed_bytes: self.freed_bytes,
            freed_blocks: self.freed_blocks,
        };
        *self = Self::new(self.raw_key, self.ids);
        delta
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    entries: [CombinationEntry; ENTRIES],
    /// Entries with limits or with something to move, by slot.
    open: u64,
    /// Counts the times of flushing; room given before the last one is void.
    epoch: u64,
    /// Counts the times that entries gave back what they had set aside.
    aside_epoch: u64,
    pub(super) total: Meter,
    pub(super) tags: Vec<Meter>,
    pub(super) streams: Vec<Meter>,
    pub(super) queries: Vec<Meter>,
    pub(super) sizes: SizeHistogram,
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
            entries: [CombinationEntry::EMPTY; ENTRIES],
            open: 0,
            epoch: 1,
            aside_epoch: 1,
            total: Meter::default(),
            tags: Vec::new(),
            streams: Vec::new(),
            queries: Vec::new(),
            sizes: SizeHistogram::default(),
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

/// The meter of a number, in this shard and in the global totals.
#[inline]
fn meter<'a>(
    meters: &'a mut Vec<Meter>,
    totals: &'a [PublishedTotal],
    id: usize,
) -> Option<(&'a mut Meter, &'a PublishedTotal)> {
    if id >= meters.len() {
        meters.resize_with((id + 1).next_power_of_two(), Meter::default);
    }
    Some((meters.get_mut(id)?, totals.get(id)?))
}

impl Counts {
    /// Does the same to the meters of everything, of a tag, of a stream and of a query.
    #[inline(always)]
    fn each(
        &mut self,
        ids: Ids,
        totals: &GlobalTotals,
        mut change: impl FnMut(&mut Meter, &PublishedTotal),
    ) {
        change(&mut self.total, &totals.total);
        for (meters, totals, id) in [
            (&mut self.tags, &totals.tags, ids.tag()),
            (&mut self.streams, &totals.streams, ids.stream()),
            (&mut self.queries, &totals.queries, ids.query()),
        ] {
            if let Some((meter, all)) = meter(meters, totals, id) {
                change(meter, all);
            }
        }
    }

    /// Where the entry of a combination is that this shard used of late.
    #[inline(always)]
    pub(super) fn entry_of(&self, raw_key: &RawKey) -> Option<usize> {
        let slot = raw_key.slot();
        (self.entries[slot % ENTRIES].raw_key == *raw_key).then_some(slot)
    }

    /// The numbers of such a combination.
    #[inline(always)]
    pub(super) fn ids_at(&self, slot: usize) -> Ids {
        self.entries[slot % ENTRIES].ids
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids, totals: &GlobalTotals) {
        self.flush(totals);
        if let Some(entry) = self.entries.get_mut(ids.slot()) {
            *entry = CombinationEntry::new(key.raw(), ids);
        }
    }

    /// Forgets all combinations. Only after everything was flushed.
    pub(super) fn forget_entries(&mut self) {
        self.entries = [CombinationEntry::EMPTY; ENTRIES];
        self.open = 0;
    }

    #[inline(always)]
    fn request(&mut self, requested: usize) {
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        self.sizes.add(requested);
    }

    /// Counts a block under the combination whose entry is at `slot`, if it stays within the entry's limits. False: nothing is
    /// counted.
    #[inline(always)]
    pub(super) fn allocate_within(&mut self, slot: usize, requested: usize, bytes: u64) -> bool {
        let entry = &mut self.entries[slot % ENTRIES];
        let net = entry.net.plus(bytes as i64, 1);
        if !entry.top.less(net).is_room() {
            return false;
        }
        entry.net = net;
        self.request(requested);
        true
    }

    /// Counts a block under a combination that has an entry here.
    pub(super) fn allocate(
        &mut self,
        ids: Ids,
        requested: usize,
        bytes: u64,
        totals: &GlobalTotals,
    ) {
        let slot = ids.slot() % ENTRIES;
        if self.allocate_within(slot, requested, bytes) {
            return;
        }
        self.request(requested);
        let net = self.entries[slot].net.plus(bytes as i64, 1);
        let may_go_unseen = self.may_go_unseen(bytes);
        if may_go_unseen && self.set_aside(ids, net, totals) && self.make_room(ids, net, totals) {
            self.entries[slot].net = net;
            return;
        }
        // First what lies below the peaks for certain, in whatever order it is flushed; then, at one go, its own entry with the block.
        self.open &= !(1 << slot);
        self.flush(totals);
        let mut delta = self.entries[slot].drain();
        delta.allocated_bytes = delta.allocated_bytes.wrapping_add(bytes);
        delta.allocated_blocks = delta.allocated_blocks.wrapping_add(1);
        if may_go_unseen {
            self.give_half(ids, bytes, totals, |meter, all| meter.flush(&delta, all));
        } else {
            self.each(ids, totals, |meter, all| meter.flush(&delta, all));
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
        totals: &GlobalTotals,
        mut first: impl FnMut(&mut Meter, &PublishedTotal),
    ) {
        let (epoch, aside_epoch) = (self.epoch, self.aside_epoch);
        let (mut room, mut unseen) = (BytesAndBlocks::ALL, BytesAndBlocks::ALL);
        self.each(ids, totals, |meter, all| {
            first(meter, all);
            room = room.min(meter.room(epoch, all));
            unseen = unseen.min(meter.unseen_left(aside_epoch));
        });
        let room = room.max(BytesAndBlocks::NONE);
        let room = room.less(room.divided_by(2));
        let wanted = BytesAndBlocks { bytes: bytes as i64, blocks: 1 };
        // Without it the next one finds out itself.
        let share = unseen.divided_by(self.sharers(ids));
        let aside = if unseen.holds(wanted) { wanted.max(share) } else { BytesAndBlocks::NONE };
        self.each(ids, totals, |meter, _| {
            meter.give_room(epoch, room);
            meter.set_aside(aside_epoch, aside);
        });
        let entry = &mut self.entries[ids.slot() % ENTRIES];
        (entry.room, entry.aside) = (room, aside);
        entry.set_top();
        self.open |= 1 << (ids.slot() % ENTRIES);
    }

    /// Lets an entry go as far from 0 as `net`, and a little further, unseen. False when that is too far.
    fn set_aside(&mut self, ids: Ids, net: BytesAndBlocks, totals: &GlobalTotals) -> bool {
        let (slot, wanted) = (ids.slot() % ENTRIES, net.distance());
        let mut left = self.unseen_left(ids, totals);
        if !left.holds(wanted.less(self.entries[slot].aside)) {
            self.shrink_reserves(totals);
            left = self.unseen_left(ids, totals);
        }
        let lacking = wanted.less(self.entries[slot].aside);
        if !left.holds(lacking) {
            return false;
        }
        let share = left.divided_by(self.sharers(ids));
        let more = |lacking: i64, share: i64| if lacking > 0 { lacking.max(share) } else { 0 };
        let more = BytesAndBlocks {
            bytes: more(lacking.bytes, share.bytes),
            blocks: more(lacking.blocks, share.blocks),
        };
        let epoch = self.aside_epoch;
        self.each(ids, totals, |meter, _| meter.set_aside(epoch, more));
        let entry = &mut self.entries[slot];
        entry.aside = entry.aside.and(more);
        entry.set_top();
        self.open |= 1 << slot;
        true
    }

    /// Among how many what may go unseen is shared out: the entries that move now, this one among them, and one that may come.
    fn sharers(&self, ids: Ids) -> i64 {
        i64::from((self.open | 1 << (ids.slot() % ENTRIES)).count_ones()) + 1
    }

    /// How far an entry may move unseen as far as all four meters are concerned.
    fn unseen_left(&mut self, ids: Ids, totals: &GlobalTotals) -> BytesAndBlocks {
        let (mut left, epoch) = (BytesAndBlocks::ALL, self.aside_epoch);
        self.each(ids, totals, |meter, _| left = left.min(meter.unseen_left(epoch)));
        left
    }

    /// Entries keep aside only what they need now.
    fn shrink_reserves(&mut self, totals: &GlobalTotals) {
        self.aside_epoch += 1;
        let (mut open, epoch) = (self.open, self.aside_epoch);
        while open != 0 {
            let entry = &mut self.entries[open.trailing_zeros() as usize % ENTRIES];
            open &= open - 1;
            entry.aside = entry.net.distance();
            entry.set_top();
            let (ids, aside) = (entry.ids, entry.aside);
            self.each(ids, totals, |meter, _| meter.set_aside(epoch, aside));
        }
    }

    /// Gives an entry room up to `net`, if nobody can be above a peak even when all grow as far as they may.
    fn make_room(&mut self, ids: Ids, net: BytesAndBlocks, totals: &GlobalTotals) -> bool {
        let lacking = net.less(self.entries[ids.slot() % ENTRIES].room);
        if lacking.bytes <= 0 && lacking.blocks <= 0 {
            return true;
        }
        let room = self.room(ids, totals);
        if !room.holds(lacking) {
            return false;
        }
        // Half of what is left goes here, the rest to others.
        self.give_room(ids, lacking.max(room.divided_by(2)), totals);
        true
    }

    /// Bytes and blocks that lie below the peaks of all four meters and were given to nobody.
    fn room(&mut self, ids: Ids, totals: &GlobalTotals) -> BytesAndBlocks {
        let (mut room, epoch) = (BytesAndBlocks::ALL, self.epoch);
        self.each(ids, totals, |meter, all| room = room.min(meter.room(epoch, all)));
        room.max(BytesAndBlocks::NONE)
    }

    fn give_room(&mut self, ids: Ids, room: BytesAndBlocks, totals: &GlobalTotals) {
        let epoch = self.epoch;
        self.each(ids, totals, |meter, _| meter.give_room(epoch, room));
        let entry = &mut self.entries[ids.slot() % ENTRIES];
        entry.room = entry.room.and(room);
        entry.set_top();
        self.open |= 1 << ids.slot();
    }

    /// Counts a free, if this shard has an entry for its combination and it stays within the entry's limits. False: nothing is
    /// counted. A block with a backtrace has no entry here.
    #[inline(always)]
    pub(super) fn free_within(&mut self, ids: Ids, bytes: u64) -> bool {
        let entry = &mut self.entries[ids.slot() % ENTRIES];
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
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, totals: &GlobalTotals) {
        let (ids, slot) = (ids.untraced(), ids.slot() % ENTRIES);
        if self.free_within(ids, bytes) {
            return;
        }
        if self.entries[slot].ids != ids {
            return self.free_elsewhere(ids, bytes, totals);
        }
        let net = self.entries[slot].net.plus((bytes as i64).wrapping_neg(), -1);
        let may_go_unseen = self.may_go_unseen(bytes);
        let is_aside = may_go_unseen && self.set_aside(ids, net, totals);
        let entry = &mut self.entries[slot];
        entry.net = net;
        entry.freed_bytes = entry.freed_bytes.wrapping_add(bytes);
        entry.freed_blocks += 1;
        if !is_aside {
            self.open |= 1 << slot;
            self.flush(totals);
            if may_go_unseen {
                self.give_half(ids, bytes, totals, |_, _| {});
            }
        }
    }

    /// A free of a block that was allocated under a combination this shard has no entry of.
    fn free_elsewhere(&mut self, ids: Ids, bytes: u64, totals: &GlobalTotals) {
        let delta = CountDelta { freed_bytes: bytes, freed_blocks: 1, ..CountDelta::default() };
        self.each(ids, totals, |meter, all| meter.flush(&delta, all));
    }

    pub(super) fn fail(&mut self, ids: Ids, kind: &'static str, totals: &GlobalTotals) {
        self.each(ids, totals, |meter, _| meter.fail());
        match self.failures.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((kind, 1)),
        }
    }

    /// The segment of the table to begin with, and to be moved on past full ones.
    #[inline]
    pub(super) fn segment(&mut self) -> &mut usize {
        self.asked += 1;
        if self.asked >= RECHECK_AFTER {
            (self.asked, self.first_segment) = (0, 0);
        }
        &mut self.first_segment
    }

    /// Moves all sums to the meters, and takes all room back.
    #[cold]
    #[inline(never)]
    pub(super) fn flush(&mut self, totals: &GlobalTotals) {
        while self.open != 0 {
            let slot = self.open.trailing_zeros() as usize;
            self.open &= self.open - 1;
            let entry = &mut self.entries[slot % ENTRIES];
            let (ids, delta) = (entry.ids, entry.drain());
            self.each(ids, totals, |meter, all| meter.flush(&delta, all));
        }
        self.epoch += 1;
        self.aside_epoch += 1;
    }
}
