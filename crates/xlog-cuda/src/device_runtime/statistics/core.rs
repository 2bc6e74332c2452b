//! The counts of one resource, shared by the resource and its handles.
//!
//! Lock order: names, scopes, shards. Invariant: an id is given to another stream or query only under the lock of the names. An
//! operation that does not find its ids in its shard's cache counts under that lock.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use xlog_base::Mutex;
use xlog_driver::sync::{BiasedMutex, thread_index};

use super::bytes_and_blocks::BytesAndBlocks;
use super::names::{Ids, Key, Names};
use super::scope::{self, Peaks};
use super::shard::{Counts, GlobalTotals};
use super::snapshot::{SizeHistogram, StatisticsSnapshot, Usage};
use super::table::{LiveEntry, Table};
use crate::device_runtime::logging::{QueryScope, clock};
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, Generation, ResourceError, SLOT_BITS, StreamId,
};

const SHARDS: usize = 16;
/// Hints: generations of one thread come in rows of 4096, and the table has the shard of each row.
const HINTS: usize = 1024;
const HINT_SHIFT: u32 = SLOT_BITS + 12;

/// Which allocations get a backtrace.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Backtraces {
    /// None.
    #[default]
    Off,
    /// One in this number, in each shard.
    Sampled(NonZeroU32),
    /// All. Walking the stack takes microseconds.
    All,
}

/// Settings of a [`StatisticsResource`](super::StatisticsResource).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatisticsConfig {
    /// Which allocations get a backtrace.
    pub backtraces: Backtraces,
    /// Whether the time of each allocation is stored, for the ages of live blocks. It is by default.
    pub ages: bool,
}

impl Default for StatisticsConfig {
    fn default() -> Self {
        Self { backtraces: Backtraces::Off, ages: true }
    }
}

impl StatisticsConfig {
    /// Ages, and no backtraces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets which allocations get a backtrace.
    #[must_use]
    pub fn with_backtraces(mut self, backtraces: Backtraces) -> Self {
        self.backtraces = backtraces;
        self
    }

    /// Sets whether ages are stored. Without them an allocation does not read the clock, and every age is zero.
    #[must_use]
    pub fn with_ages(mut self, ages: bool) -> Self {
        self.ages = ages;
        self
    }
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct Shard {
    counts: BiasedMutex<Counts>,
    table: Table,
}

/// A handle that reads the counts of a [`StatisticsResource`](super::StatisticsResource), also after that was dropped.
#[derive(Clone)]
pub struct Statistics(pub(super) Arc<StatisticsCore>);

pub(super) struct StatisticsCore {
    pub(super) number: u64,
    device_ordinal: u32,
    config: StatisticsConfig,
    shards: [Shard; SHARDS],
    totals: GlobalTotals,
    hints: Box<[AtomicU8; HINTS]>,
    names: Mutex<Names>,
    pub(super) peaks: Mutex<Peaks>,
    traces: Mutex<HashMap<Generation, Arc<Backtrace>>>,
}

/// The row of a generation.
#[inline(always)]
fn hint_row(generation: Generation) -> u64 {
    generation.0 >> HINT_SHIFT
}

impl StatisticsCore {
    pub(super) fn new(device_ordinal: u32, config: StatisticsConfig) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device_ordinal,
            config,
            shards: std::array::from_fn(|_| Shard {
                counts: BiasedMutex::default(),
                table: Table::new(),
            }),
            totals: GlobalTotals::new(),
            hints: Box::new([const { AtomicU8::new(0) }; HINTS]),
            names: Mutex::new(Names::new()),
            peaks: Mutex::default(),
            traces: Mutex::default(),
        }
    }

    /// The shard of this thread. Threads beyond the number of shards share one.
    #[inline(always)]
    fn own_shard(&self) -> (usize, &Shard) {
        let at = thread_index() as usize % SHARDS;
        (at, &self.shards[at])
    }

    /// Counts a block that was handed out.
    #[inline(always)]
    pub(super) fn allocated(
        &self,
        requested: usize,
        stream: StreamId,
        tag: AllocTag,
        block: &DeviceBlock,
    ) {
        let born = if self.config.ages { clock::coarse() } else { u64::MAX };
        if self.config.backtraces != Backtraces::Off
            || scope::is_open()
            || !self.count_fast(requested, stream, tag, block, born)
        {
            self.count_slow(requested, stream, tag, block, born);
        }
    }

    /// Fast path of an allocation: the thread owns its shard's lock, the shard has an entry with room, and the block's direct slot
    /// is empty. Returns false, and counts nothing, if it does not apply.
    #[inline(always)]
    fn count_fast(
        &self,
        requested: usize,
        stream: StreamId,
        tag: AllocTag,
        block: &DeviceBlock,
        born: u64,
    ) -> bool {
        let (_, shard) = self.own_shard();
        let Some(mut counts) = shard.counts.enter() else { return false };
        let key = Key { tag, stream, query: QueryScope::current() };
        let Some(at) = counts.entry_of(&key.raw()) else { return false };
        let Some(slot) = shard.table.direct_slot(block.generation) else { return false };
        let bytes = block.bytes as u64;
        if counts.hinted != hint_row(block.generation)
            || !slot.is_empty()
            || !counts.allocate_within(at, requested, bytes)
        {
            return false;
        }
        let entry = LiveEntry { ptr: block.ptr, bytes, ids: counts.ids_at(at), born };
        slot.fill(block.generation, &entry);
        true
    }

    /// Slow path of an allocation.
    #[cold]
    #[inline(never)]
    fn count_slow(
        &self,
        requested: usize,
        stream: StreamId,
        tag: AllocTag,
        block: &DeviceBlock,
        born: u64,
    ) {
        let key = Key { tag, stream, query: QueryScope::current() };
        let (at, shard) = self.own_shard();
        let known = shard.counts.with(|counts| {
            let ids = counts.ids_at(counts.entry_of(&key.raw())?);
            Some(self.count(shard, counts, ids, requested, block, born))
        });
        let traced = known.unwrap_or_else(|| {
            self.with_ids(key, |counts, ids| self.count(shard, counts, ids, requested, block, born))
        });
        let hint = self.hint(block.generation);
        // Hints of current rows share cache lines: a redundant store would take the line from other threads.
        if hint.load(Ordering::Relaxed) != at as u8 {
            hint.store(at as u8, Ordering::Relaxed);
        }
        if traced {
            self.trace(block.generation);
        }
        scope::note(self.number, block.bytes, true);
    }

    /// Counts a block inside its shard. Returns whether it gets a backtrace.
    fn count(
        &self,
        shard: &Shard,
        counts: &mut Counts,
        ids: Ids,
        requested: usize,
        block: &DeviceBlock,
        born: u64,
    ) -> bool {
        let bytes = block.bytes as u64;
        counts.allocate(ids, requested, bytes, &self.totals);
        counts.hinted = hint_row(block.generation);
        let traced = match self.config.backtraces {
            Backtraces::Off => false,
            Backtraces::All => true,
            Backtraces::Sampled(every) => {
                let due = counts.until_trace == 0;
                counts.until_trace = if due { every.get() - 1 } else { counts.until_trace - 1 };
                due
            }
        };
        let ids = if traced { ids.traced() } else { ids };
        let entry = LiveEntry { ptr: block.ptr, bytes, ids, born };
        shard.table.insert(block.generation, &entry, counts.segment());
        traced
    }

    /// Slow path: finds the ids of `key`, and counts before they can be recycled.
    #[cold]
    #[inline(never)]
    fn with_ids<T>(&self, key: Key, count: impl FnOnce(&mut Counts, Ids) -> T) -> T {
        let mut names = self.names.lock();
        let ids = names.ids(&key, |names| self.recycle_ids(names));
        self.own_shard().1.counts.with(|counts| {
            counts.remember(key, ids, &self.totals);
            count(counts, ids)
        })
    }

    #[cold]
    #[inline(never)]
    fn trace(&self, generation: Generation) {
        let trace = Arc::new(Backtrace::force_capture());
        self.traces.lock().insert(generation, trace);
    }

    /// Counts an allocation that failed.
    #[cold]
    pub(super) fn failed(&self, stream: StreamId, tag: AllocTag, error: &ResourceError) {
        let key = Key { tag, stream, query: QueryScope::current() };
        self.with_ids(key, |counts, ids| counts.fail(ids, error.kind(), &self.totals));
    }

    /// Counts a block whose free has succeeded.
    #[inline(always)]
    pub(super) fn freed(&self, generation: Generation) {
        if scope::is_open() || !self.free_fast(generation) {
            self.free_slow(generation);
        }
    }

    /// Fast path of a free: the thread owns its shard's lock, and the block is in its direct slot there, under an entry that may
    /// shrink. Returns false, and counts nothing, if it does not apply.
    #[inline(always)]
    fn free_fast(&self, generation: Generation) -> bool {
        let (_, shard) = self.own_shard();
        let Some(mut counts) = shard.counts.enter() else { return false };
        let Some(slot) = shard.table.direct_slot(generation) else { return false };
        if !slot.holds(generation) {
            return false;
        }
        let (bytes, ids) = slot.bytes_and_ids();
        if !counts.free_within(ids, bytes) {
            return false;
        }
        slot.clear();
        true
    }

    /// Slow path of a free.
    #[cold]
    #[inline(never)]
    fn free_slow(&self, generation: Generation) {
        let likely = usize::from(self.hint(generation).load(Ordering::Relaxed)) % SHARDS;
        let found = self.shards[likely].table.remove(generation);
        let found = found.or_else(|| self.shards.iter().find_map(|s| s.table.remove(generation)));
        let counts = &self.own_shard().1.counts;
        let Some((bytes, ids)) = found else {
            return counts.with(|counts| counts.unknown_frees += 1);
        };
        counts.with(|counts| counts.free(ids, bytes, &self.totals));
        if ids.is_traced() {
            self.untrace(generation);
        }
        scope::note(self.number, bytes as usize, false);
    }

    #[cold]
    #[inline(never)]
    fn untrace(&self, generation: Generation) {
        self.traces.lock().remove(&generation);
    }

    /// Returns whether a block is known here.
    pub(super) fn knows(&self, generation: Generation) -> bool {
        self.shards.iter().any(|shard| shard.table.contains(generation))
    }

    /// The hint of the shard whose table has a block.
    fn hint(&self, generation: Generation) -> &AtomicU8 {
        &self.hints[hint_row(generation) as usize % HINTS]
    }

    /// Runs `body` on all shards at one instant, after a flush.
    fn with_all_shards<T>(&self, body: impl FnOnce(&mut [&mut Counts]) -> T) -> T {
        let all: [&BiasedMutex<Counts>; SHARDS] = std::array::from_fn(|at| &self.shards[at].counts);
        BiasedMutex::with_all(&all, |shards| {
            shards.iter_mut().for_each(|counts| counts.flush(&self.totals));
            body(shards)
        })
    }

    /// Recycles the ids of streams and queries without live blocks; their totals go to id 0.
    fn recycle_ids(&self, names: &mut Names) {
        self.with_all_shards(|shards| {
            let idle = |shards: &[&mut Counts], id: usize, queries: bool| {
                let meters = shards.iter().map(|c| if queries { &c.queries } else { &c.streams });
                meters.filter_map(|list| list.get(id)).map(|meter| meter.live().1).sum::<i64>() == 0
            };
            let streams = names.streams.recycle(|id| idle(shards, id, false));
            let queries = names.queries.recycle(|id| idle(shards, id, true));
            for counts in shards.iter_mut() {
                counts.forget_entries();
                for (meters, ids) in
                    [(&mut counts.streams, &streams), (&mut counts.queries, &queries)]
                {
                    for &id in ids {
                        if let Some((other, rest)) = meters.split_first_mut()
                            && let Some(ended) = id.checked_sub(1).and_then(|at| rest.get_mut(at))
                        {
                            other.absorb(ended);
                        }
                    }
                }
            }
            streams
                .iter()
                .filter_map(|&id| self.totals.streams.get(id))
                .for_each(|all| all.reset());
            queries
                .iter()
                .filter_map(|&id| self.totals.queries.get(id))
                .for_each(|all| all.reset());
        });
    }

    /// The total account at one instant. Folds the peaks since the last call into `peaks`.
    pub(super) fn fold(&self, peaks: &mut Peaks) -> Usage {
        self.with_all_shards(|shards| self.fold_shards(peaks, shards))
    }

    fn fold_shards(&self, peaks: &mut Peaks, shards: &mut [&mut Counts]) -> Usage {
        let mut now = Usage::default();
        let mut seen = BytesAndBlocks::NONE;
        for counts in shards.iter_mut() {
            counts.total.publish(&self.totals.total);
            counts.total.add_to(&mut now);
        }
        for counts in shards.iter_mut() {
            let live = BytesAndBlocks {
                bytes: now.current_bytes as i64,
                blocks: now.current_blocks as i64,
            };
            seen = seen.max(counts.total.reset_peak(live));
        }
        peaks.fold((seen.bytes as usize, seen.blocks as usize), &now);
        (now.peak_bytes, now.peak_blocks) = peaks.overall();
        now
    }

    fn snapshot(&self) -> StatisticsSnapshot {
        let names = self.names.lock();
        let mut peaks = self.peaks.lock();
        self.with_all_shards(|shards| {
            let total = self.fold_shards(&mut peaks, shards);
            let sum = |part: fn(&Counts) -> &Vec<super::meter::Meter>, id: usize| {
                let mut usage = Usage::default();
                for counts in shards.iter() {
                    if let Some(meter) = part(counts).get(id) {
                        meter.add_to(&mut usage);
                    }
                }
                usage.peak_bytes = usage.peak_bytes.max(usage.current_bytes);
                usage.peak_blocks = usage.peak_blocks.max(usage.current_blocks);
                usage
            };
            let (tags, streams, queries) = (&names.tags, &names.streams, &names.queries);
            let mut by_tag: Vec<_> = (1..tags.len())
                .filter_map(|id| Some((tags.key(id)?, sum(|counts| &counts.tags, id))))
                .collect();
            by_tag.sort_by_key(|(_, usage)| {
                std::cmp::Reverse((usage.current_bytes, usage.peak_bytes))
            });
            let mut by_stream: Vec<_> = (1..streams.len())
                .filter_map(|id| Some((streams.key(id)?, sum(|counts| &counts.streams, id))))
                .collect();
            by_stream.sort_by_key(|(stream, _)| *stream);
            let mut by_query: Vec<_> = (1..queries.len())
                .filter_map(|id| Some((queries.key(id)?, sum(|counts| &counts.queries, id))))
                .collect();
            by_query.sort_by_key(|(query, _)| *query);
            let mut sizes = SizeHistogram::default();
            let mut failures: Vec<(&'static str, u64)> = Vec::new();
            let (mut requested_bytes, mut unknown_frees) = (0_u64, 0);
            for counts in shards.iter() {
                sizes.merge(&counts.sizes);
                requested_bytes = requested_bytes.wrapping_add(counts.requested_bytes);
                unknown_frees += counts.unknown_frees;
                for &(kind, count) in &counts.failures {
                    match failures.iter_mut().find(|(known, _)| *known == kind) {
                        Some((_, sum)) => *sum += count,
                        None => failures.push((kind, count)),
                    }
                }
            }
            failures.sort_unstable();
            StatisticsSnapshot {
                device_ordinal: self.device_ordinal,
                total,
                by_tag,
                by_stream,
                by_query,
                other_tags: sum(|counts| &counts.tags, 0),
                other_streams: sum(|counts| &counts.streams, 0),
                other_queries: sum(|counts| &counts.queries, 0),
                requested_bytes,
                sizes,
                failures,
                unknown_frees,
            }
        })
    }

    /// Visits every live block with its key and its backtrace.
    pub(super) fn for_each_live(
        &self,
        mut see: impl FnMut(Generation, LiveEntry, Key, Option<Arc<Backtrace>>),
    ) {
        let names = self.names.lock();
        let traces = self.traces.lock();
        self.with_all_shards(|_| {
            for shard in &self.shards {
                shard.table.for_each(|generation, entry| {
                    let ids = entry.ids;
                    let key = Key {
                        tag: names.tags.key(ids.tag()).unwrap_or(AllocTag("(other tags)")),
                        stream: names.streams.key(ids.stream()).unwrap_or(StreamId(u32::MAX)),
                        query: names.queries.key(ids.query()).flatten(),
                    };
                    see(generation, entry, key, traces.get(&generation).cloned());
                });
            }
        });
    }
}

impl Statistics {
    pub(super) fn new(device_ordinal: u32, config: StatisticsConfig) -> Self {
        Self(Arc::new(StatisticsCore::new(device_ordinal, config)))
    }

    /// Returns all counts of one instant. Takes a few microseconds, and delays no thread for longer.
    #[must_use]
    pub fn snapshot(&self) -> StatisticsSnapshot {
        self.0.snapshot()
    }

    /// The device.
    #[must_use]
    pub fn device_ordinal(&self) -> u32 {
        self.0.device_ordinal
    }
}

impl fmt::Debug for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Statistics")
            .field("device_ordinal", &self.0.device_ordinal)
            .field("config", &self.0.config)
            .finish_non_exhaustive()
    }
}
