//! The counts of one shard: of one thread, as long as there are enough shards.
//!
//! An operation counts in four meters: total, tag, stream and query. Updating all four for every operation would cost more than the
//! operation. So a shard has entries for recent combinations of tag, stream and query, and flushes their sums to the meters.
//!
//! Invariants:
//! - No peak is missed: an entry grows only by the room it was granted, and all granted room of a meter lies below its peak. An
//!   allocation beyond its room flushes all entries and updates the meters itself.
//! - The unpublished difference of all entries of a meter stays below their part of the meter's step: each entry reserves its part
//!   of that first.

use super::bytes_and_blocks::BytesAndBlocks;
use super::meter::{Meter, PublishedTotal};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS, RawKey};
use super::snapshot::SizeHistogram;

/// Entries of a shard. Their slots in [`Ids`] are below this.
pub(super) const ENTRIES: usize = 64;
/// Slow-path blocks after which a shard tries its smallest segment again.
const RECHECK_AFTER: u32 = 64;

/// The published totals of all shards, by id.
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
    /// [`RawKey::NONE`] for an empty entry.
    raw_key: RawKey,
    /// [`Ids::NONE`] for an empty entry.
    ids: Ids,
    /// Allocated minus freed since the shard was flushed last.
    net: BytesAndBlocks,
    freed_bytes: u64,
    freed_blocks: u64,
    /// The minimum of `room` and `aside`.
    top: BytesAndBlocks,
    /// The reserved unpublished difference, in both directions.
    aside: BytesAndBlocks,
    /// The granted room for growth below the peaks.
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

    /// Returns the counts, and resets them and the limits to zero.
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
    /// A bit for each entry that has limits or counts, by slot.
    open: u64,
    /// The number of flushes; room granted before the last one is void.
    epoch: u64,
    /// The number of times that reservations were reduced.
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
    /// The row of generations whose hint was stored last.
    pub(super) hinted: u64,
    /// The segment of the table that had room last.
    first_segment: usize,
    /// Requests since the smallest segment was tried.
    asked: u32,
    /// Allocations until the next backtrace.
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

/// The meter of an id, in this shard and in the global totals.
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
    /// Applies `change` to the meters of the total, a tag, a stream and a query.
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

    /// Returns the slot of a combination that has an entry.
    #[inline(always)]
    pub(super) fn entry_of(&self, raw_key: &RawKey) -> Option<usize> {
        let slot = raw_key.slot();
        (self.entries[slot % ENTRIES].raw_key == *raw_key).then_some(slot)
    }

    /// The ids of such a combination.
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

    /// Clears all entries, after a flush.
    pub(super) fn forget_entries(&mut self) {
        self.entries = [CombinationEntry::EMPTY; ENTRIES];
        self.open = 0;
    }

    #[inline(always)]
    fn request(&mut self, requested: usize) {
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        self.sizes.add(requested);
    }

    /// Counts a block in the entry at `slot`, within the entry's limits. Returns false, and counts nothing, beyond them.
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
        // First the other entries, which lie below the peaks in any order; then this entry together with the block.
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

    /// Returns whether a block is small enough for the total account to stay unpublished.
    #[inline]
    fn may_go_unseen(&self, bytes: u64) -> bool {
        self.total.step_of_entries().bytes >= bytes as i64
    }

    /// Grants an entry half of the room, and reserves the difference that the next such block or free needs.
    ///
    /// `first` is applied to the meters before that.
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
        // Without a reservation the next operation takes the slow path.
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

    /// Reserves an unpublished difference of `net`, and a little more. Returns false if that is too large.
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

    /// The number of entries that share the unpublished difference: the active ones, this one, and one more.
    fn sharers(&self, ids: Ids) -> i64 {
        i64::from((self.open | 1 << (ids.slot() % ENTRIES)).count_ones()) + 1
    }

    /// The unpublished difference that all four meters have left.
    fn unseen_left(&mut self, ids: Ids, totals: &GlobalTotals) -> BytesAndBlocks {
        let (mut left, epoch) = (BytesAndBlocks::ALL, self.aside_epoch);
        self.each(ids, totals, |meter, _| left = left.min(meter.unseen_left(epoch)));
        left
    }

    /// Reduces all reservations to what the entries need now.
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

    /// Grants an entry room up to `net`, if all granted room stays below the peaks.
    fn make_room(&mut self, ids: Ids, net: BytesAndBlocks, totals: &GlobalTotals) -> bool {
        let lacking = net.less(self.entries[ids.slot() % ENTRIES].room);
        if lacking.bytes <= 0 && lacking.blocks <= 0 {
            return true;
        }
        let room = self.room(ids, totals);
        if !room.holds(lacking) {
            return false;
        }
        // Half of what is left; the rest stays for other entries.
        self.give_room(ids, lacking.max(room.divided_by(2)), totals);
        true
    }

    /// The room below the peaks of all four meters that was granted to no entry.
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

    /// Counts a free in the entry of its combination, within the entry's limits. Returns false, and counts nothing, otherwise. A
    /// block with a backtrace has no entry.
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

    /// Counts a free whose combination has no entry in this shard.
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

    /// The segment of the table to try first; the caller advances it past full ones.
    #[inline]
    pub(super) fn segment(&mut self) -> &mut usize {
        self.asked += 1;
        if self.asked >= RECHECK_AFTER {
            (self.asked, self.first_segment) = (0, 0);
        }
        &mut self.first_segment
    }

    /// Flushes all entries to the meters, and revokes all room.
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
