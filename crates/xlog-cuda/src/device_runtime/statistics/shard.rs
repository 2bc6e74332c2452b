//! The counts of one shard, which one thread uses if there are enough shards.
//!
//! An operation counts in four meters: total, tag, stream and query. A shard caches the ids of recent combinations.
//!
//! A [`Meter`] is one account of one shard: sums that are exact over all shards, and a peak that is exact while only one shard changes
//! the account. The sums of one shard may be negative, since one thread may free what another allocated. Differences wrap.
//!
//! For the peak a shard adds its unpublished difference to the sum that all shards have published. It publishes the difference when that
//! reaches its step. Between two bounds it does neither: there a change can neither raise the known peak nor reach the step. If several
//! shards change an account, each has half a step, so the peak is off by at most the whole steps of the other shards.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use xlog_base::PowerHistogram;

use super::names::{MAX_QUERIES, MAX_STREAMS, MAX_TAGS};
use super::snapshot::Usage;
use crate::device_runtime::resource::{AllocTag, StreamId};

/// The minimum step in bytes, for small accounts.
pub const PEAK_STEP_BYTES: usize = 64 << 10;
/// The minimum step in blocks, for small accounts.
pub const PEAK_STEP_BLOCKS: usize = 64;
/// The step of a shard that alone changes an account, below the peak. Shards that join later see the difference when it is published.
pub const PEAK_STEP_ALONE_BYTES: usize = 8 << 20;
/// The steps of all shards together are an account's peak divided by this number.
pub const PEAK_STEP_PART: usize = 8;

/// An amount of bytes and blocks, or a bound for one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct BytesAndBlocks {
    pub(super) bytes: i64,
    pub(super) blocks: i64,
}

impl BytesAndBlocks {
    #[inline(always)]
    fn add(&mut self, bytes: i64, blocks: i64) {
        self.bytes = self.bytes.wrapping_add(bytes);
        self.blocks = self.blocks.wrapping_add(blocks);
    }
}

/// The published sum of one account, on its own cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct PublishedTotal {
    bytes: AtomicI64,
    blocks: AtomicI64,
    /// The number of shards that have changed the account.
    shards: AtomicU32,
}

/// A reference to the published sum of one account, resolved when a meter publishes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Published<'a> {
    pub(super) accounts: &'a [PublishedTotal],
    pub(super) id: usize,
}

/// One shard's part of an account.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    /// Allocated minus freed, not yet published.
    pending: BytesAndBlocks,
    /// The difference that this shard has published.
    published: BytesAndBlocks,
    freed: BytesAndBlocks,
    failures: u64,
    peak: BytesAndBlocks,
    /// Above this pending difference the shard may raise the peak, or must publish.
    ceiling: BytesAndBlocks,
    /// Below this pending difference it must publish.
    floor: BytesAndBlocks,
    /// Whether this shard is counted in [`PublishedTotal::shards`].
    has_joined: bool,
}

impl Meter {
    /// Counts a block.
    #[inline(always)]
    pub(super) fn allocate(&mut self, bytes: i64, all: Published<'_>) {
        self.pending.add(bytes, 1);
        if self.pending.bytes > self.ceiling.bytes || self.pending.blocks > self.ceiling.blocks {
            self.update(all);
        }
    }

    /// Counts a free.
    #[inline(always)]
    pub(super) fn free(&mut self, bytes: i64, all: Published<'_>) {
        self.pending.add(bytes.wrapping_neg(), -1);
        self.freed.add(bytes, 1);
        if self.pending.bytes < self.floor.bytes || self.pending.blocks < self.floor.blocks {
            self.update(all);
        }
    }

    /// Raises the peak, publishes if the difference has reached its step, and recomputes the bounds.
    #[inline(never)]
    fn update(&mut self, Published { accounts, id }: Published<'_>) {
        // There is no id beyond the accounts.
        let Some(all) = accounts.get(id) else { return };
        if !self.has_joined {
            all.shards.fetch_add(1, Ordering::Relaxed);
            self.has_joined = true;
        }
        let shards = all.shards.load(Ordering::Relaxed).max(1);
        let live = all.plus(self.pending);
        let is_peak = live.bytes > self.peak.bytes || live.blocks > self.peak.blocks;
        self.peak.bytes = self.peak.bytes.max(live.bytes);
        self.peak.blocks = self.peak.blocks.max(live.blocks);
        // Powers of two need no division.
        let part = PEAK_STEP_PART.ilog2() + shards.next_power_of_two().ilog2();
        let (halved, alone_bytes) = if shards > 1 { (1, 0) } else { (0, PEAK_STEP_ALONE_BYTES) };
        let step = BytesAndBlocks {
            bytes: (self.peak.bytes >> part).max(PEAK_STEP_BYTES as i64) >> halved,
            blocks: (self.peak.blocks >> part).max(PEAK_STEP_BLOCKS as i64) >> halved,
        };
        let slack = BytesAndBlocks { bytes: step.bytes.max(alone_bytes as i64), ..step };
        let bound = if is_peak { step } else { slack };
        let BytesAndBlocks { bytes, blocks } = self.pending;
        if bytes.wrapping_abs() > bound.bytes || blocks.wrapping_abs() > bound.blocks {
            self.publish(all);
        }
        let published = all.plus(BytesAndBlocks::default());
        self.ceiling = BytesAndBlocks {
            bytes: self.peak.bytes.wrapping_sub(published.bytes).min(slack.bytes),
            blocks: self.peak.blocks.wrapping_sub(published.blocks).min(slack.blocks),
        };
        self.floor = BytesAndBlocks { bytes: -slack.bytes, blocks: -slack.blocks };
    }

    pub(super) fn publish(&mut self, all: &PublishedTotal) {
        let BytesAndBlocks { bytes, blocks } = std::mem::take(&mut self.pending);
        self.published.add(bytes, blocks);
        all.bytes.fetch_add(bytes, Ordering::Relaxed);
        all.blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Returns the peak since the last call, and resets it to `live`.
    pub(super) fn reset_peak(&mut self, live: BytesAndBlocks) -> BytesAndBlocks {
        (self.ceiling, self.floor) = Default::default();
        std::mem::replace(&mut self.peak, live)
    }

    /// Returns allocated minus freed of this shard.
    pub(super) fn live(&self) -> BytesAndBlocks {
        let mut live = self.published;
        live.add(self.pending.bytes, self.pending.blocks);
        live
    }

    /// Adds the totals of an ended account, which has no live blocks over all shards.
    pub(super) fn absorb(&mut self, ended: &mut Self) {
        let live = ended.live();
        self.published.add(live.bytes, live.blocks);
        self.freed.add(ended.freed.bytes, ended.freed.blocks);
        self.failures += ended.failures;
        self.peak.bytes = self.peak.bytes.max(ended.peak.bytes);
        self.peak.blocks = self.peak.blocks.max(ended.peak.blocks);
        *ended = Self::default();
    }

    /// Adds this shard's sums to `sum`. The peak is the maximum over shards.
    pub(super) fn add_to(&self, sum: &mut Usage) {
        let (live, freed) = (self.live(), self.freed);
        sum.current_bytes = sum.current_bytes.wrapping_add(live.bytes as usize);
        sum.current_blocks = sum.current_blocks.wrapping_add(live.blocks as usize);
        sum.peak_bytes = sum.peak_bytes.max(self.peak.bytes.max(0) as usize);
        sum.peak_blocks = sum.peak_blocks.max(self.peak.blocks.max(0) as usize);
        sum.total_bytes = sum.total_bytes.wrapping_add(live.bytes.wrapping_add(freed.bytes) as u64);
        sum.freed_bytes = sum.freed_bytes.wrapping_add(freed.bytes as u64);
        sum.allocations =
            sum.allocations.wrapping_add(live.blocks.wrapping_add(freed.blocks) as u64);
        sum.deallocations = sum.deallocations.wrapping_add(freed.blocks as u64);
        sum.failures += self.failures;
    }
}

impl PublishedTotal {
    /// Returns the published sum plus an unpublished difference.
    fn plus(&self, pending: BytesAndBlocks) -> BytesAndBlocks {
        let mut sum = pending;
        sum.add(self.bytes.load(Ordering::Relaxed), self.blocks.load(Ordering::Relaxed));
        sum
    }

    /// Resets an ended account.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.blocks.store(0, Ordering::Relaxed);
        self.shards.store(0, Ordering::Relaxed);
    }
}

/// The number of combinations whose ids a shard caches.
const RECENT: usize = 64;

/// The tag, stream and query that an operation counts for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Key {
    pub(super) tag: AllocTag,
    pub(super) stream: StreamId,
    pub(super) query: Option<u64>,
}

impl Key {
    /// Returns the index in [`Counts::recent`].
    #[inline(always)]
    pub(super) fn slot(&self) -> usize {
        let text = self.tag.0.as_ptr().addr();
        let query = self.query.map_or(0, |query| query.wrapping_mul(0x9e37_79b9) as usize + 1);
        ((text >> 3) ^ (text >> 9) ^ self.stream.0 as usize ^ query) % RECENT
    }
}

/// The ids of a tag, a stream and a query, and whether there is a backtrace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ids {
    pub(super) tag: u16,
    pub(super) stream: u16,
    pub(super) query: u16,
    pub(super) is_traced: bool,
}

impl Ids {
    /// Packs the ids into a word of the side table.
    #[inline(always)]
    pub(super) fn to_word(self) -> u64 {
        let ids = u64::from(self.tag) | u64::from(self.stream) << 16 | u64::from(self.query) << 32;
        ids | u64::from(self.is_traced) << 48
    }

    /// Unpacks the ids from a word of the side table.
    #[inline(always)]
    pub(super) fn from_word(word: u64) -> Self {
        let (tag, stream, query) = (word as u16, (word >> 16) as u16, (word >> 32) as u16);
        Self { tag, stream, query, is_traced: word >> 48 != 0 }
    }
}

/// The published sums, by id.
#[derive(Debug)]
pub(super) struct GlobalTotals {
    pub(super) total: PublishedTotal,
    pub(super) tags: Box<[PublishedTotal]>,
    pub(super) streams: Box<[PublishedTotal]>,
    pub(super) queries: Box<[PublishedTotal]>,
}

impl GlobalTotals {
    pub(super) fn new() -> Self {
        let totals_of = |ids: usize| (0..ids).map(|_| PublishedTotal::default()).collect();
        Self {
            total: PublishedTotal::default(),
            tags: totals_of(MAX_TAGS),
            streams: totals_of(MAX_STREAMS),
            queries: totals_of(MAX_QUERIES),
        }
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    /// The ids of recent combinations, by [`Key::slot`].
    recent: [Option<(Key, Ids)>; RECENT],
    pub(super) total: Meter,
    pub(super) tags: Vec<Meter>,
    pub(super) streams: Vec<Meter>,
    pub(super) queries: Vec<Meter>,
    pub(super) sizes: PowerHistogram,
    pub(super) requested_bytes: u64,
    /// Frees of blocks that were not allocated here.
    pub(super) unknown_frees: u64,
    /// Failed allocations by the kind of their error.
    pub(super) failures: Vec<(&'static str, u64)>,
    /// Allocations until the next backtrace.
    pub(super) until_trace: u32,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            recent: [None; RECENT],
            total: Meter::default(),
            tags: Vec::new(),
            streams: Vec::new(),
            queries: Vec::new(),
            sizes: PowerHistogram::default(),
            requested_bytes: 0,
            unknown_frees: 0,
            failures: Vec::new(),
            until_trace: 0,
        }
    }
}

#[cold]
#[inline(never)]
fn add_accounts(meters: &mut Vec<Meter>, id: usize) {
    meters.resize_with((id + 1).next_power_of_two(), Meter::default);
}

impl Counts {
    /// Applies `change` to the meters of the total, a tag, a stream and a query.
    #[inline(always)]
    fn for_each_meter(
        &mut self,
        ids: Ids,
        totals: &GlobalTotals,
        mut change: impl FnMut(&mut Meter, Published<'_>),
    ) {
        let total = std::slice::from_ref(&totals.total);
        change(&mut self.total, Published { accounts: total, id: 0 });
        for (meters, accounts, id) in [
            (&mut self.tags, &totals.tags, ids.tag),
            (&mut self.streams, &totals.streams, ids.stream),
            (&mut self.queries, &totals.queries, ids.query),
        ] {
            let id = usize::from(id);
            if id >= meters.len() {
                add_accounts(meters, id);
            }
            change(&mut meters[id], Published { accounts, id });
        }
    }

    /// Returns the ids of a recent combination.
    #[inline(always)]
    pub(super) fn recent_ids(&self, key: &Key) -> Option<Ids> {
        let (known, ids) = self.recent[key.slot()].as_ref()?;
        // Compares the address of the text: a tag at another address is looked up under the lock of the names.
        let is_known = std::ptr::eq(known.tag.0, key.tag.0)
            && known.stream.0 == key.stream.0
            && known.query == key.query;
        is_known.then_some(*ids)
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids) {
        self.recent[key.slot()] = Some((key, ids));
    }

    /// Clears the cached ids, since ids are recycled.
    pub(super) fn forget(&mut self) {
        self.recent = [None; RECENT];
    }

    /// Counts a block.
    #[inline(always)]
    pub(super) fn allocate(
        &mut self,
        ids: Ids,
        requested: usize,
        bytes: usize,
        totals: &GlobalTotals,
    ) {
        self.requested_bytes = self.requested_bytes.wrapping_add(requested as u64);
        // A power of two is the largest size of its class.
        self.sizes.add(requested.saturating_sub(1) as u64);
        self.for_each_meter(ids, totals, |meter, all| meter.allocate(bytes as i64, all));
    }

    /// Counts a free.
    #[inline(always)]
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, totals: &GlobalTotals) {
        self.for_each_meter(ids, totals, |meter, all| meter.free(bytes as i64, all));
    }

    /// Counts a failed allocation.
    pub(super) fn fail(&mut self, ids: Ids, kind: &'static str, totals: &GlobalTotals) {
        self.for_each_meter(ids, totals, |meter, _| meter.failures += 1);
        match self.failures.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((kind, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_of_sizes_ends_at_its_power_of_two() {
        let totals = GlobalTotals::new();
        for (class, bytes) in [
            (0, 0),
            (0, 1),
            (1, 2),
            (2, 3),
            (2, 4),
            (3, 5),
            (10, 1024),
            (11, 1025),
            (64, usize::MAX),
        ] {
            let mut counts = Counts::default();
            counts.allocate(Ids::default(), bytes, 256, &totals);
            assert_eq!(counts.sizes.classes().collect::<Vec<_>>(), [(class, 1)], "{bytes}");
        }
    }
}
