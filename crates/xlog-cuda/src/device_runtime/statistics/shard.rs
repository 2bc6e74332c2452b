//! The counts of one shard: of one thread, as long as there are enough shards.
//!
//! An operation counts in four meters: total, tag, stream and query. A shard keeps the ids of the combinations that it met last.

use super::meter::{Meter, PublishedTotal};
use super::names::{Ids, Key, MAX_QUERIES, MAX_STREAMS, MAX_TAGS};
use super::snapshot::SizeHistogram;

/// Combinations of tag, stream and query whose ids a shard keeps.
pub(super) const RECENT: usize = 64;

/// What all shards have published, by id.
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
    pub(super) sizes: SizeHistogram,
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
            sizes: SizeHistogram::default(),
            requested_bytes: 0,
            unknown_frees: 0,
            failures: Vec::new(),
            until_trace: 0,
        }
    }
}

impl Counts {
    /// Applies `change` to the meters of the total, a tag, a stream and a query.
    #[inline(always)]
    fn for_each_meter(
        &mut self,
        ids: Ids,
        totals: &GlobalTotals,
        mut change: impl FnMut(&mut Meter, &PublishedTotal),
    ) {
        change(&mut self.total, &totals.total);
        for (meters, totals, id) in [
            (&mut self.tags, &totals.tags, ids.tag),
            (&mut self.streams, &totals.streams, ids.stream),
            (&mut self.queries, &totals.queries, ids.query),
        ] {
            let id = usize::from(id);
            if id >= meters.len() {
                meters.resize_with((id + 1).next_power_of_two(), Meter::default);
            }
            // Names issues no ids beyond the totals.
            change(&mut meters[id], &totals[id.min(totals.len() - 1)]);
        }
    }

    /// Returns the ids of a recent combination.
    #[inline(always)]
    pub(super) fn recent_ids(&self, key: &Key) -> Option<Ids> {
        let (known, ids) = self.recent[key.slot()].as_ref()?;
        // By the address of its text: a tag at another address is found under the lock of the names.
        let is_known = std::ptr::eq(known.tag.0, key.tag.0)
            && known.stream == key.stream
            && known.query == key.query;
        is_known.then_some(*ids)
    }

    pub(super) fn remember(&mut self, key: Key, ids: Ids) {
        self.recent[key.slot()] = Some((key, ids));
    }

    /// Forgets all combinations, since ids are recycled.
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
        self.sizes.add(requested);
        self.for_each_meter(ids, totals, |meter, all| meter.allocate(bytes as i64, all));
    }

    /// Counts a free.
    #[inline(always)]
    pub(super) fn free(&mut self, ids: Ids, bytes: u64, totals: &GlobalTotals) {
        self.for_each_meter(ids, totals, |meter, all| meter.free(bytes as i64, all));
    }

    /// Counts a failed allocation.
    pub(super) fn fail(&mut self, ids: Ids, kind: &'static str, totals: &GlobalTotals) {
        self.for_each_meter(ids, totals, |meter, _| meter.fail());
        match self.failures.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((kind, 1)),
        }
    }
}
