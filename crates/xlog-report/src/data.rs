//! The data of the page: figures and tables as JSON, pictures as arrays.
//!
//! Field names are private to this file and the page's scripts.
use serde::Serialize;
use xlog_trace::Usage;

use crate::analysis::{Analysis, FailedCall};
use crate::block_data::BlockData;
use crate::compare::{Comparison, compare};
use crate::html::{Array, Blob};
use crate::lifetimes::Histogram;

/// The maximum number of rows in the tables of tags and leaks; further rows are counted.
const ROWS: usize = 200;

#[derive(Serialize, Debug)]
pub(crate) struct PageData {
    log: String,
    format: &'static str,
    device: String,
    /// Wall clock at the first record in milliseconds since 1970; null if the log lacks it.
    began: Option<f64>,
    span: u64,
    records: u64,
    allocations: u64,
    frees: u64,
    failures: u64,
    uses: u64,
    notes: Vec<String>,
    complete: bool,
    budget: Option<u64>,
    peak: Peak,
    live: (u64, u64),
    tags: Vec<String>,
    other_tags: usize,
    by_tag: Vec<TagRow>,
    /// Usage by source location; empty if the log has none.
    by_site: Vec<TagRow>,
    all_sites: usize,
    all_tags: usize,
    starts: Array,
    stacks: Array,
    lows: Array,
    map: Map,
    column_bins: Array,
    lanes: LaneData,
    sizes: Vec<(u64, u64, u64)>,
    lifetimes: Vec<(u64, u64, u64)>,
    idle: Option<Idle>,
    leaks: Vec<LeakRow>,
    leak_tags: Vec<(String, u64, u64)>,
    failed: Vec<FailedCall>,
    blocks: BlockData,
    /// Null if the log has no segments.
    reserved: Option<ReservedData>,
    other: Option<Other>,
}

#[derive(Serialize, Debug)]
struct ReservedData {
    peak: u64,
    at_peak: u64,
    end: u64,
    /// The maximum of each bin.
    bins: Array,
    ranges: Vec<RangeRow>,
    all_ranges: u64,
}

/// Process, device, first address, bytes, offset in the map, reserved at, returned at.
type RangeRow = (u32, u32, String, u64, u64, u64, Option<u64>);

impl ReservedData {
    fn new(analysis: &Analysis, blob: &mut Blob) -> Option<Self> {
        let usage = analysis.summary.reserved?;
        let ranges = analysis.reserved.iter().filter_map(|row| {
            let place = analysis.segments.offset(row.process, row.device, row.start)?;
            let address = format!("{:#x}", row.start);
            Some((row.process, row.device, address, row.bytes, place, row.from, row.to))
        });
        Some(Self {
            peak: usage.peak_bytes,
            at_peak: usage.at_peak_bytes,
            end: usage.end_bytes,
            bins: blob.f32(analysis.timeline.reserved.iter().copied()),
            ranges: ranges.collect(),
            all_ranges: analysis.all_reserved,
        })
    }
}

#[derive(Serialize, Debug)]
struct Peak {
    bytes: u64,
    blocks: u64,
    time: u64,
    order: u64,
    /// Tag, bytes, blocks.
    holders: Vec<(String, u64, u64)>,
    all_holders: usize,
    largest: Vec<BlockRow>,
}

#[derive(Serialize, Debug)]
struct BlockRow {
    address: String,
    bytes: u64,
    tag: u8,
    stream: Option<u32>,
    born: u64,
}

#[derive(Serialize, Debug)]
struct TagRow {
    tag: String,
    peak: u64,
    total: u64,
    allocations: u64,
    failures: u64,
    live: u64,
}

#[derive(Serialize, Debug)]
struct Map {
    rows: usize,
    row_bytes: u64,
    fullness: Array,
    tags: Array,
    /// Process, device, first address, bytes, offset in the map.
    segments: Vec<(u32, u32, String, u64, u64)>,
}

#[derive(Serialize, Debug)]
struct LaneData {
    names: Vec<String>,
    calls: Array,
    handovers: Array,
    waits: Array,
    /// Calls, handovers and waits of each lane.
    totals: Vec<(u32, u32, u32)>,
    arrow_times: Array,
    arrow_from: Array,
    arrow_to: Array,
    arrow_step: u64,
    /// From lane, to lane, count.
    pairs: Vec<(u8, u8, u64)>,
}

#[derive(Serialize, Debug)]
struct Idle {
    /// Tag, blocks, unused blocks, byte-seconds held, and byte-seconds idle.
    tags: Vec<(String, u64, u64, f64, f64)>,
    histogram: Vec<(u64, u64, u64)>,
    /// Address, bytes, tag, idle nanoseconds, whether it was freed.
    worst: Vec<(String, u64, u8, u64, bool)>,
}

#[derive(Serialize, Debug)]
struct LeakRow {
    address: String,
    bytes: u64,
    tag: String,
    site: String,
    stream: Option<u32>,
    order: u64,
    age: u64,
}

/// The log of the comparison.
#[derive(Serialize, Debug)]
struct Other {
    log: String,
    span: u64,
    starts: Array,
    totals: Array,
    comparison: Comparison,
}

impl PageData {
    pub(crate) fn new(
        analysis: &Analysis,
        other: Option<&Analysis>,
        budget: Option<u64>,
        blob: &mut Blob,
    ) -> Self {
        let summary = &analysis.summary;
        let (timeline, map, lanes) = (&analysis.timeline, &analysis.address_map, &analysis.lanes);
        let first = summary.time_nanos.map_or(0, |(first, _)| first);
        let epoch = analysis.header.epoch_unix_nanos;
        // Times without an epoch are wall-clock times, or their date is unknown.
        let began = match (epoch, first) {
            (0, first) if first < YEAR_2000 => None,
            (epoch, first) => Some(epoch.saturating_add(first) as f64 / 1e6),
        };
        Self {
            log: analysis.file.clone(),
            format: analysis.format,
            device: analysis.header.device_name.clone(),
            began,
            span: timeline.end,
            records: summary.records,
            allocations: summary.total.allocations,
            frees: summary.total.frees,
            failures: summary.total.failures,
            uses: analysis.uses,
            notes: analysis.notes(),
            complete: analysis.reading.complete,
            budget,
            peak: Peak {
                bytes: summary.total.peak_bytes,
                blocks: analysis.peak_blocks,
                time: analysis.peak_time,
                order: summary.peak_order,
                holders: analysis
                    .holders
                    .iter()
                    .take(ROWS)
                    .map(|holder| (holder.tag.clone(), holder.bytes, holder.blocks))
                    .collect(),
                all_holders: analysis.holders.len(),
                largest: analysis
                    .largest_at_peak
                    .iter()
                    .map(|life| BlockRow {
                        address: format!("{:#x}", life.ptr),
                        bytes: life.bytes,
                        tag: life.tag,
                        stream: life.stream,
                        born: life.born,
                    })
                    .collect(),
            },
            live: (summary.total.live_bytes, summary.total.live_blocks),
            tags: analysis.tags.clone(),
            other_tags: analysis.other_tags,
            by_tag: summary
                .by_tag
                .iter()
                .take(ROWS)
                .map(|(tag, usage)| TagRow::new(tag, usage))
                .collect(),
            all_tags: summary.by_tag.len(),
            by_site: summary
                .by_site
                .iter()
                .take(ROWS)
                .map(|(site, usage)| TagRow::new(site, usage))
                .collect(),
            all_sites: summary.by_site.len(),
            starts: blob.f64(timeline.starts.iter().copied()),
            stacks: blob.f32(timeline.stacks.iter().copied()),
            lows: blob.f32(timeline.lows.iter().copied()),
            map: Map {
                rows: map.rows,
                row_bytes: map.row_bytes,
                fullness: blob.u8(map.fullness.iter().copied()),
                tags: blob.u8(map.tags.iter().copied()),
                segments: analysis
                    .segments
                    .all
                    .iter()
                    .map(|s| (s.process, s.device, format!("{:#x}", s.start), s.bytes, s.offset))
                    .collect(),
            },
            column_bins: blob.u32(analysis.column_bins.iter().map(|&bin| bin as u32)),
            lanes: LaneData {
                names: analysis.streams.clone(),
                calls: blob.u32(lanes.columns.iter().map(|counts| counts.calls)),
                handovers: blob.u32(lanes.columns.iter().map(|counts| counts.handovers)),
                waits: blob.u32(lanes.columns.iter().map(|counts| counts.waits)),
                totals: lanes.totals.iter().map(|c| (c.calls, c.handovers, c.waits)).collect(),
                arrow_times: blob.f64(lanes.arrows.iter().map(|arrow| arrow.time)),
                arrow_from: blob.u8(lanes.arrows.iter().map(|arrow| arrow.from)),
                arrow_to: blob.u8(lanes.arrows.iter().map(|arrow| arrow.to)),
                arrow_step: lanes.arrow_step,
                pairs: lanes.handovers.iter().map(|((from, to), n)| (*from, *to, *n)).collect(),
            },
            sizes: rows(&analysis.lifetimes.sizes),
            lifetimes: rows(&analysis.lifetimes.lifetimes),
            idle: (analysis.uses > 0).then(|| Idle::new(analysis)),
            leaks: leaks(analysis),
            leak_tags: leak_tags(analysis),
            failed: analysis.failed.clone(),
            blocks: BlockData::new(analysis, blob),
            reserved: ReservedData::new(analysis, blob),
            other: other.map(|other| Other {
                log: other.file.clone(),
                span: other.timeline.end,
                starts: blob.f64(other.timeline.starts.iter().copied()),
                totals: blob.f32(
                    (0..other.timeline.len()).map(|bin| other.timeline.stack(bin).iter().sum()),
                ),
                comparison: compare(&other.summary, &analysis.summary),
            }),
        }
    }

    pub(crate) fn title(&self) -> String {
        format!("{} - device memory", crate::escape::line(&self.log))
    }
}

const YEAR_2000: u64 = 946_684_800_000_000_000;

impl TagRow {
    fn new(tag: &str, usage: &Usage) -> Self {
        Self {
            tag: tag.to_owned(),
            peak: usage.peak_bytes,
            total: usage.total_bytes,
            allocations: usage.allocations,
            failures: usage.failures,
            live: usage.live_bytes,
        }
    }
}

impl Idle {
    fn new(analysis: &Analysis) -> Self {
        let lifetimes = &analysis.lifetimes;
        let mut tags: Vec<_> = analysis
            .tags
            .iter()
            .zip(&lifetimes.by_tag)
            .map(|(name, tag)| {
                (name.clone(), tag.blocks, tag.unused, tag.held / 1e9, tag.idle / 1e9)
            })
            .collect();
        tags.sort_by(|a, b| b.4.total_cmp(&a.4));
        Self {
            tags,
            histogram: rows(&lifetimes.idle),
            worst: lifetimes
                .worst
                .iter()
                .map(|block| {
                    let life = &block.life;
                    let address = format!("{:#x}", life.ptr);
                    (address, life.bytes, life.tag, block.idle_nanos, block.freed)
                })
                .collect(),
        }
    }
}

fn rows(histogram: &Histogram) -> Vec<(u64, u64, u64)> {
    histogram.rows().collect()
}

fn leaks(analysis: &Analysis) -> Vec<LeakRow> {
    let rows = analysis.summary.leaks.iter().take(ROWS).map(|leak| LeakRow {
        address: format!("{:#x}", leak.block.ptr),
        bytes: leak.block.charged,
        tag: leak.tag.clone(),
        site: leak.site.clone(),
        stream: leak.block.stream,
        order: leak.block.order,
        age: leak.age_nanos,
    });
    rows.collect()
}

/// Returns the leaks of each tag (tag, bytes, blocks), the largest first.
fn leak_tags(analysis: &Analysis) -> Vec<(String, u64, u64)> {
    let holding = analysis.summary.by_tag.iter().filter(|(_, usage)| usage.live_blocks > 0);
    let mut rows: Vec<_> =
        holding.map(|(tag, usage)| (tag.clone(), usage.live_bytes, usage.live_blocks)).collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    rows.truncate(ROWS);
    rows
}
