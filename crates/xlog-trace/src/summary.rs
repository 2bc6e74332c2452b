//! The summary of a log: allocations by tag, stream and device, the peak, and leaks.
//!
//! It takes one pass. Memory grows with live blocks, tags and streams, each with a limit, not with the log. Stacks share the
//! texts of their frames. Peaks depend on the order of the records: read logs of many threads through
//! [`Ordered`](crate::Ordered).

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use serde::Serialize;
use xlog_base::PowerHistogram;

use crate::action::{Action, ServedBy};
use crate::error::TraceError;
use crate::live::{Change, LiveBlock, LiveBlocks};
use crate::names::{NameId, Names};
use crate::reader::Source;
use crate::record::Record;
use crate::reserved::{Reserved, ReservedUsage};
use crate::stacks::StackId;
use crate::times::CallTimes;

/// The maximum number of leaks listed; the totals count all.
pub const MAX_LISTED_LEAKS: usize = 1000;
/// The maximum number of streams, threads or queries counted separately; further ones are counted together.
const MAX_STREAMS: usize = 1 << 16;

/// Usage of one tag, stream or other key. Bytes are charged bytes.
#[derive(Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Blocks allocated.
    pub allocations: u64,
    /// Blocks freed.
    pub frees: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Bytes allocated in total.
    pub total_bytes: u64,
    /// Bytes live at the end.
    pub live_bytes: u64,
    /// Blocks live at the end.
    pub live_blocks: u64,
    /// The maximum live bytes.
    pub peak_bytes: u64,
    /// The maximum live blocks.
    pub peak_blocks: u64,
}

impl Usage {
    fn born(&mut self, block: &LiveBlock) {
        self.allocations += 1;
        self.total_bytes = self.total_bytes.saturating_add(block.charged);
        self.live_bytes = self.live_bytes.saturating_add(block.charged);
        self.live_blocks += 1;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.peak_blocks = self.peak_blocks.max(self.live_blocks);
    }

    fn died(&mut self, block: &LiveBlock) {
        self.live_bytes = self.live_bytes.saturating_sub(block.charged);
        self.live_blocks = self.live_blocks.saturating_sub(1);
    }
}

/// A block that was never freed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leak {
    /// The block.
    pub block: LiveBlock,
    /// Its tag; empty when it has none.
    pub tag: String,
    /// Source file and line of its allocation; empty when the log does not have it.
    pub site: String,
    /// The sampled stack of its allocation, the innermost frame first.
    pub stack: Vec<Arc<str>>,
    /// Nanoseconds from its allocation to the last record.
    pub age_nanos: u64,
}

/// The summary of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Records counted.
    pub records: u64,
    /// Records of each action.
    pub actions: BTreeMap<Action, u64>,
    /// Allocations served by each path.
    pub paths: BTreeMap<ServedBy, u64>,
    /// Usage of all blocks.
    pub total: Usage,
    /// Order of the record that reached the peak.
    pub peak_order: u64,
    /// Time of the record that reached the peak.
    pub peak_time_nanos: u64,
    /// Usage by tag, the largest peak first.
    pub by_tag: Vec<(String, Usage)>,
    /// Usage by stream, the largest peak first.
    pub by_stream: Vec<(String, Usage)>,
    /// Usage by the thread that allocated, the largest peak first.
    pub by_thread: Vec<(String, Usage)>,
    /// Usage by the query that allocated, the largest peak first, without calls outside of queries.
    pub by_query: Vec<(String, Usage)>,
    /// Usage by source location of the allocation, the largest peak first, without calls that lack one.
    pub by_site: Vec<(String, Usage)>,
    /// Usage by the stack of the allocation, its innermost frame first, without calls whose stack was not sampled.
    pub by_stack: Vec<(Vec<Arc<str>>, Usage)>,
    /// Usage by device ordinal.
    pub by_device: BTreeMap<u32, Usage>,
    /// Failed calls by the kind of their error.
    pub failures: BTreeMap<String, u64>,
    /// Requests by size.
    pub sizes: PowerHistogram,
    /// Times of the calls of each action, failed ones included, without calls that have no time.
    pub times: BTreeMap<Action, CallTimes>,
    /// Blocks that were never freed, the largest first, at most [`MAX_LISTED_LEAKS`].
    pub leaks: Vec<Leak>,
    /// Frees of blocks whose allocation the log lacks.
    pub unknown_frees: u64,
    /// Allocations at the address of a live block, whose free the log lacks.
    pub missing_frees: u64,
    /// Times of the earliest and of the latest record.
    pub time_nanos: Option<(u64, u64)>,
    /// Reserved device memory; `None` if the log has no segments.
    pub reserved: Option<ReservedUsage>,
}

/// Summarizes a log record by record.
///
/// ```
/// use xlog_trace::{Action, Names, Record, Summarizer};
///
/// # fn main() -> Result<(), xlog_trace::TraceError> {
/// let (names, mut sum) = (Names::new(), Summarizer::new());
/// sum.push(&Record::new(Action::Allocate, 0, 1, 0).with_ptr(0x7f00).with_bytes(4096), &names)?;
/// assert_eq!(sum.finish(&names).total.peak_bytes, 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Summarizer {
    live: LiveBlocks,
    summary: Summary,
    tags: HashMap<Option<NameId>, Usage>,
    streams: HashMap<Option<u32>, Usage>,
    threads: HashMap<u64, Usage>,
    queries: HashMap<u64, Usage>,
    sites: HashMap<NameId, Usage>,
    stacks: HashMap<StackId, Usage>,
    kinds: HashMap<Option<NameId>, u64>,
    reserved: Reserved,
}

impl Summarizer {
    /// Creates an empty summary.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a record, whose strings are in `names`. No tag and an empty tag count as one.
    ///
    /// Fails only if more blocks are live than can be tracked ([`TraceError::TooManyLive`]).
    pub fn push(&mut self, record: &Record, names: &Names) -> Result<(), TraceError> {
        let summary = &mut self.summary;
        summary.records += 1;
        *summary.actions.entry(record.action()).or_default() += 1;
        if record.latency > 0 {
            summary.times.entry(record.action()).or_default().add(u64::from(record.latency));
        }
        let (first, last) = summary.time_nanos.unwrap_or((record.time, record.time));
        summary.time_nanos = Some((first.min(record.time), last.max(record.time)));
        if record.is_failure() {
            summary.total.failures += 1;
            *self.kinds.entry(record.failure().map(|failure| failure.kind)).or_default() += 1;
            let owner = Owner {
                tag: named(record.tag(), names),
                stream: record.stream(),
                device: record.device,
                thread: record.thread(),
                query: record.query_id(),
                site: record.site(),
                stack: record.stack(),
            };
            self.each(owner, |usage| usage.failures += 1);
        }
        if self.reserved.apply(record, |_| {}) {
            let usage = self.summary.reserved.get_or_insert_default();
            usage.add(record, self.reserved.bytes());
            return Ok(());
        }
        match self.live.apply(record)? {
            Change::None => {}
            Change::UnknownFree => self.summary.unknown_frees += 1,
            Change::Born(born) => self.born(&born, record, names),
            Change::Replaced { born, lost } => {
                self.summary.missing_frees += 1;
                self.died(&lost, false, names);
                self.born(&born, record, names);
            }
            Change::Died(died) => self.died(&died, true, names),
        }
        Ok(())
    }

    fn each(&mut self, owner: Owner, change: impl Fn(&mut Usage)) {
        let Owner { tag, stream, device, thread, query, site, stack } = owner;
        change(self.tags.entry(tag).or_default());
        change(counted(&mut self.streams, stream, Some(u32::MAX)));
        change(counted(&mut self.threads, thread, u64::MAX));
        if let Some(query) = query {
            change(counted(&mut self.queries, query, u64::MAX));
        }
        if let Some(site) = site {
            change(self.sites.entry(site).or_default());
        }
        if let Some(stack) = stack {
            change(self.stacks.entry(stack).or_default());
        }
        let devices = &mut self.summary.by_device;
        let known = devices.len() < MAX_STREAMS || devices.contains_key(&device);
        change(devices.entry(if known { device } else { u32::MAX }).or_default());
    }

    fn born(&mut self, block: &LiveBlock, record: &Record, names: &Names) {
        let before = self.summary.total.peak_bytes;
        self.summary.total.born(block);
        if self.summary.total.peak_bytes > before {
            self.summary.peak_order = record.order;
            self.summary.peak_time_nanos = record.time;
            if let Some(usage) = &mut self.summary.reserved {
                usage.at_peak_bytes = self.reserved.bytes();
            }
        }
        self.summary.sizes.add(block.bytes);
        *self.summary.paths.entry(record.served_by()).or_default() += 1;
        self.each(Owner::of(block, names), |usage| usage.born(block));
    }

    fn died(&mut self, block: &LiveBlock, freed: bool, names: &Names) {
        let change = |usage: &mut Usage| {
            usage.died(block);
            usage.frees += u64::from(freed);
        };
        change(&mut self.summary.total);
        self.each(Owner::of(block, names), change);
    }

    /// Returns the summary, with the names that the records used.
    pub fn finish(self, names: &Names) -> Summary {
        let Self {
            live, mut summary, tags, streams, threads, queries, sites, stacks, kinds, ..
        } = self;
        summary.by_tag = by_peak(tags, |tag: Option<NameId>| names.text_or_empty(tag).to_owned());
        summary.by_stream = by_peak(streams, |stream| stream_name(stream, names));
        let number = |id: u64| if id == u64::MAX { "others".to_owned() } else { id.to_string() };
        summary.by_thread = by_peak(threads, number);
        summary.by_query = by_peak(queries, number);
        summary.by_site = by_peak(sites, |site| names.text_or_empty(Some(site)).to_owned());
        summary.by_stack = by_peak(stacks, |stack| names.shared_stack(Some(stack)));
        for (kind, times) in kinds {
            let kind = kind.map_or("unknown", |kind| names.text_or_empty(Some(kind)));
            *summary.failures.entry(kind.to_owned()).or_default() += times;
        }
        let last = summary.time_nanos.map_or(0, |(_, last)| last);
        summary.leaks = largest(live.into_blocks())
            .into_iter()
            .map(|block| Leak {
                tag: names.text_or_empty(block.tag).to_owned(),
                site: names.text_or_empty(block.site).to_owned(),
                stack: names.shared_stack(block.stack),
                age_nanos: last.saturating_sub(block.time_nanos),
                block,
            })
            .collect();
        summary
    }
}

impl Summary {
    /// Summarizes the rest of a log.
    pub fn of(source: &mut impl Source) -> Result<Self, TraceError> {
        let mut summarizer = Summarizer::new();
        while let Some(record) = source.next_record()? {
            summarizer.push(&record, source.names())?;
        }
        Ok(summarizer.finish(source.names()))
    }
}

/// The keys that a block or a failed call is counted under.
struct Owner {
    tag: Option<NameId>,
    stream: Option<u32>,
    device: u32,
    thread: u64,
    query: Option<u64>,
    site: Option<NameId>,
    stack: Option<StackId>,
}

impl Owner {
    fn of(block: &LiveBlock, names: &Names) -> Self {
        Self {
            tag: named(block.tag, names),
            stream: block.stream,
            device: block.device,
            thread: block.thread,
            query: block.query_id,
            site: block.site,
            stack: block.stack,
        }
    }
}

/// Returns the usage of `key`, or of `others` if there are too many keys.
fn counted<K: Copy + Eq + Hash>(usages: &mut HashMap<K, Usage>, key: K, others: K) -> &mut Usage {
    let known = usages.len() < MAX_STREAMS || usages.contains_key(&key);
    usages.entry(if known { key } else { others }).or_default()
}

/// Returns the usages with the names of their keys, the largest peak first.
fn by_peak<K, N: Ord>(usages: HashMap<K, Usage>, name: impl Fn(K) -> N) -> Vec<(N, Usage)> {
    let mut rows: Vec<_> = usages.into_iter().map(|(key, usage)| (name(key), usage)).collect();
    rows.sort_unstable_by(|(a, x), (b, y)| (y.peak_bytes, a).cmp(&(x.peak_bytes, b)));
    rows
}

/// Returns the tag to count under; an empty one counts as none.
fn named(tag: Option<NameId>, names: &Names) -> Option<NameId> {
    tag.filter(|tag| !names.text_or_empty(Some(*tag)).is_empty())
}

/// Returns the largest blocks, without a copy of all.
fn largest(blocks: impl Iterator<Item = LiveBlock>) -> Vec<LiveBlock> {
    let mut kept: Vec<LiveBlock> = Vec::with_capacity(2 * MAX_LISTED_LEAKS);
    let cut = |kept: &mut Vec<LiveBlock>| {
        kept.sort_unstable_by_key(|block| (std::cmp::Reverse(block.charged), block.order));
        kept.truncate(MAX_LISTED_LEAKS);
    };
    for block in blocks {
        kept.push(block);
        if kept.len() == kept.capacity() {
            cut(&mut kept);
        }
    }
    cut(&mut kept);
    kept
}

fn stream_name(stream: Option<u32>, names: &Names) -> String {
    match stream {
        None => "none".to_owned(),
        Some(u32::MAX) => "others".to_owned(),
        Some(id) => match names.stream_name(id) {
            Some(name) => format!("{id} ({name})"),
            None => id.to_string(),
        },
    }
}
