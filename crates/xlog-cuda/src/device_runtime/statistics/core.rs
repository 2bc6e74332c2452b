//! The counts of one resource, shared by the resource and its handles.
//!
//! Lock order: names, peaks, shards. Invariant: an id is recycled only under the lock of the names, with all shards locked, and only if
//! it has no live blocks. An operation whose ids its shard has not cached counts under the lock of the names.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_base::{Mutex, PowerHistogram, debug_fields};
use xlog_driver::sync::Sharded;

use super::names::Names;
use super::scope::{self, Peaks};
use super::shard::{BytesAndBlocks, Counts, GlobalTotals, Ids, Key, Meter};
use super::snapshot::{StatisticsSnapshot, Usage};
use crate::XlogError;
use crate::device_runtime::logging::{QueryScope, clock};
use crate::device_runtime::resource::{AllocTag, DeviceBlock, Generation, ResourceError, StreamId};
use crate::device_runtime::side_table::{SideTable, TakenEntry};

const SHARDS: usize = 16;

/// The allocations that get a backtrace.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Backtraces {
    /// None.
    #[default]
    Off,
    /// One in this number, counted in each shard.
    Sampled(NonZeroU32),
    /// Every allocation. Walking the stack takes microseconds.
    All,
}

impl FromStr for Backtraces {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self, XlogError> {
        let accepted = "off, all, or sampled:N for one in N allocations";
        let refuse = |reason| Err(XlogError::bad_setting("the stacks", text, reason, accepted));
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "all" => Ok(Self::All),
            Some(("sampled", count)) => match count.parse() {
                Ok(count) => Ok(Self::Sampled(count)),
                Err(_) => refuse("what stands after the colon is no number above 0"),
            },
            _ => refuse("there is no such setting"),
        }
    }
}

/// Settings of a [`StatisticsResource`](super::StatisticsResource).
///
/// ```
/// use xlog_cuda::device_runtime::{Backtraces, StatisticsConfig};
/// use xlog_cuda::prelude::*;
///
/// let statistics = StatisticsConfig::new().with_backtraces(Backtraces::All);
/// let config = RuntimeConfig::default().with_device("sim".parse()?).with_statistics(statistics);
/// let runtime = config.open()?;
/// let _rows = GpuMemoryManager::with_runtime(runtime.clone()).alloc::<u32>(8)?;
/// let live = runtime.usage().expect("a configured runtime has statistics").live_blocks();
/// assert!(live[0].backtrace.is_some());
/// # Ok::<(), XlogError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatisticsConfig {
    /// The allocations that get a backtrace.
    pub backtraces: Backtraces,
    /// Whether the time of each allocation is stored, for the ages of live blocks; true by default.
    pub ages: bool,
}

impl Default for StatisticsConfig {
    fn default() -> Self {
        Self { backtraces: Backtraces::Off, ages: true }
    }
}

impl StatisticsConfig {
    /// Returns the default: ages, and no backtraces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    xlog_base::setters! {
        /// Sets which allocations get a backtrace.
        with_backtraces(backtraces: Backtraces) { backtraces: backtraces }
        /// Sets whether ages are stored. Without them an allocation does not read the clock, and every age is zero.
        with_ages(ages: bool) { ages: ages }
    }
}

/// A handle that reads the counts of a [`StatisticsResource`](super::StatisticsResource), even after that was dropped.
#[derive(Clone)]
pub struct Statistics(pub(super) Arc<StatisticsCore>);

pub(super) struct StatisticsCore {
    pub(super) number: u64,
    device_ordinal: u32,
    config: StatisticsConfig,
    shards: Sharded<Counts, SHARDS>,
    totals: GlobalTotals,
    /// The live blocks: their address, their bytes, their ids, and the time of their allocation by the coarse clock.
    pub(super) live: SideTable<4>,
    names: Mutex<Names>,
    pub(super) peaks: Mutex<Peaks>,
    traces: Mutex<HashMap<Generation, Arc<Backtrace>>>,
}

/// The entry of a live block in [`StatisticsCore::live`].
pub(super) type LiveWords = [u64; 4];

impl StatisticsCore {
    fn new(device_ordinal: u32, places_blocks: bool, config: StatisticsConfig) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device_ordinal,
            config,
            shards: Sharded::new(Counts::default),
            totals: GlobalTotals::new(),
            live: SideTable::new(places_blocks),
            names: Mutex::new(Names::new()),
            peaks: Mutex::default(),
            traces: Mutex::default(),
        }
    }

    /// Counts an allocation before it returns: the block or the failure.
    #[inline(always)]
    pub(super) fn allocated(
        &self,
        requested: usize,
        stream: StreamId,
        tag: AllocTag,
        result: Result<&DeviceBlock, &ResourceError>,
    ) {
        let key = Key { tag, stream, query: QueryScope::current() };
        let block = match result {
            Ok(block) => block,
            Err(error) => {
                let fail = |counts: &mut Counts, ids| counts.fail(ids, error.kind(), &self.totals);
                return self.with_ids(key, fail);
            }
        };
        let born = if self.config.ages { clock::coarse() } else { u64::MAX };
        let known = self.shards.own().with(|counts| {
            let ids = counts.recent_ids(&key)?;
            counts.allocate(ids, requested, block.bytes, &self.totals);
            Some(ids)
        });
        let mut ids = known.unwrap_or_else(|| {
            let count = |counts: &mut Counts, ids| {
                counts.allocate(ids, requested, block.bytes, &self.totals);
                ids
            };
            self.with_ids(key, count)
        });
        if !matches!(self.config.backtraces, Backtraces::Off) {
            ids = self.trace(block.generation, ids);
        }
        self.live.insert(block.generation, [block.ptr, block.bytes as u64, ids.to_word(), born]);
        scope::note(self.number, block.bytes, true);
    }

    /// Slow path: finds the ids of `key`, and counts before they can be recycled.
    #[cold]
    #[inline(never)]
    fn with_ids<T>(&self, key: Key, count: impl FnOnce(&mut Counts, Ids) -> T) -> T {
        let mut names = self.names.lock();
        let ids = names.ids(&key, |names| self.recycle_ids(names));
        self.shards.own().with(|counts| {
            counts.remember(key, ids);
            count(counts, ids)
        })
    }

    /// Captures a backtrace if one is due. Returns the ids with their flag.
    #[cold]
    #[inline(never)]
    fn trace(&self, generation: Generation, ids: Ids) -> Ids {
        let is_due = self.shards.own().with(|counts| {
            let is_due = counts.until_trace == 0;
            counts.until_trace = match self.config.backtraces {
                Backtraces::Sampled(every) if is_due => every.get() - 1,
                Backtraces::Sampled(_) => counts.until_trace - 1,
                Backtraces::Off | Backtraces::All => 0,
            };
            is_due
        });
        if !is_due {
            return ids;
        }
        let trace = Arc::new(Backtrace::force_capture());
        self.traces.lock().insert(generation, trace);
        Ids { is_traced: true, ..ids }
    }

    /// Counts a block whose free has succeeded. A block without an entry was not counted as allocated.
    #[inline(always)]
    pub(super) fn freed(&self, generation: Generation, live: Option<TakenEntry<'_, 4>>) {
        let Some(live) = live else {
            return self.shards.own().with(|counts| counts.unknown_frees += 1);
        };
        let [_, bytes, ids, _] = live.words;
        live.discard();
        let ids = Ids::from_word(ids);
        self.shards.own().with(|counts| counts.free(ids, bytes, &self.totals));
        if ids.is_traced {
            self.traces.lock().remove(&generation);
        }
        scope::note(self.number, bytes as usize, false);
    }

    /// Recycles the ids of streams and queries without live blocks; adds their totals to id 0.
    fn recycle_ids(&self, names: &mut Names) {
        self.shards.with_all(|shards| {
            let idle = |shards: &[&mut Counts], id: usize, queries: bool| {
                let meters = shards.iter().map(|c| if queries { &c.queries } else { &c.streams });
                meters.filter_map(|list| list.get(id)).map(|meter| meter.live().blocks).sum::<i64>()
                    == 0
            };
            let streams = names.streams.recycle(|id| idle(shards, id, false));
            let queries = names.queries.recycle(|id| idle(shards, id, true));
            for counts in shards.iter_mut() {
                counts.forget();
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

    /// Returns the total account at one instant. Folds the peaks since the last call into `peaks`.
    pub(super) fn fold(&self, peaks: &mut Peaks) -> Usage {
        self.shards.with_all(|shards| self.fold_shards(peaks, shards))
    }

    fn fold_shards(&self, peaks: &mut Peaks, shards: &mut [&mut Counts]) -> Usage {
        let mut now = Usage::default();
        let mut seen = BytesAndBlocks::default();
        for counts in shards.iter_mut() {
            counts.total.publish(&self.totals.total);
            counts.total.add_to(&mut now);
        }
        for counts in shards.iter_mut() {
            let live = BytesAndBlocks {
                bytes: now.current_bytes as i64,
                blocks: now.current_blocks as i64,
            };
            let peak = counts.total.reset_peak(live);
            seen.bytes = seen.bytes.max(peak.bytes);
            seen.blocks = seen.blocks.max(peak.blocks);
        }
        peaks.fold(seen, &now);
        (now.peak_bytes, now.peak_blocks) = peaks.overall();
        now
    }

    fn snapshot(&self) -> StatisticsSnapshot {
        let names = self.names.lock();
        let mut peaks = self.peaks.lock();
        self.shards.with_all(|shards| {
            let total = self.fold_shards(&mut peaks, shards);
            let sum = |part: fn(&Counts) -> &Vec<Meter>, id: usize| {
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
            let mut sizes = PowerHistogram::default();
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
        mut visit: impl FnMut(Generation, LiveWords, Key, Option<Arc<Backtrace>>),
    ) {
        let names = self.names.lock();
        let traces = self.traces.lock();
        self.live.for_each(|generation, words| {
            let ids = Ids::from_word(words[2]);
            let key = Key {
                tag: names.tags.key(ids.tag.into()).unwrap_or(AllocTag("(other tags)")),
                stream: names.streams.key(ids.stream.into()).unwrap_or(StreamId(u32::MAX)),
                query: names.queries.key(ids.query.into()).flatten(),
            };
            visit(generation, words, key, traces.get(&generation).cloned());
        });
    }
}

impl Statistics {
    pub(super) fn new(device_ordinal: u32, places_blocks: bool, config: StatisticsConfig) -> Self {
        Self(Arc::new(StatisticsCore::new(device_ordinal, places_blocks, config)))
    }

    /// Returns all counts of one instant. It takes a few microseconds, and delays no thread for longer.
    pub fn snapshot(&self) -> StatisticsSnapshot {
        self.0.snapshot()
    }

    /// The ordinal of the device.
    pub fn device_ordinal(&self) -> u32 {
        self.0.device_ordinal
    }
}

debug_fields!(self: Statistics {
    device_ordinal: self.0.device_ordinal, config: self.0.config, ..
});
