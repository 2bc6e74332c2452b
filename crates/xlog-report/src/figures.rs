//! The figures of a report, in the shape of their JSON.
//!
//! Field names are the interface: a field may be added, none changes its name or meaning without a new `schema` number.
//! Every field is always there; what is not known is `null`.
use serde::Serialize;
use xlog_trace::ReservedUsage;

use crate::analysis::{Analysis, Holder};
use crate::compare::{Comparison, compare};
use crate::input::ReadingReport;
use crate::lifetimes::Histogram;

const SCHEMA: u32 = 1;
/// Steps of memory over time.
const STEPS: usize = 64;

/// A file that was written.
#[derive(Serialize, Clone, Debug)]
pub struct WrittenFile {
    /// Where.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// The figures of one report.
#[derive(Serialize, Debug)]
pub struct Figures {
    schema: u32,
    ok: bool,
    error: Option<String>,
    log: String,
    format: &'static str,
    reading: ReadingReport,
    notes: Vec<String>,
    written: Vec<WrittenFile>,
    records: u64,
    duration_nanos: u64,
    allocations: u64,
    frees: u64,
    failures: u64,
    uses: u64,
    budget: Option<u64>,
    /// Whether the peak is above the budget; `null` without one.
    over_budget: Option<bool>,
    peak: PeakFigures,
    live_bytes: u64,
    live_blocks: u64,
    /// What allocators held of the device; `null` where the log has no segments.
    reserved: Option<ReservedFigures>,
    /// The highest total of each of equal steps of time.
    over_time: Vec<u64>,
    sizes: Vec<HistogramRow>,
    lifetimes_nanos: Vec<HistogramRow>,
    /// By tag, where the log has uses.
    idle: Option<Vec<IdleRow>>,
    /// Uses and frees on another stream than the one before.
    handovers: u64,
    comparison: Option<Comparison>,
}

#[derive(Serialize, Debug)]
struct PeakFigures {
    bytes: u64,
    blocks: u64,
    time_nanos: u64,
    order: u64,
    holders: Vec<Holder>,
}

#[derive(Serialize, Debug)]
struct ReservedFigures {
    #[serde(flatten)]
    usage: ReservedUsage,
    /// The most of each of equal steps of time.
    over_time: Vec<u64>,
}

#[derive(Serialize, Debug)]
struct HistogramRow {
    /// The minimum value of this row; the next row's minimum is its exclusive end.
    from: u64,
    blocks: u64,
    bytes: u64,
}

#[derive(Serialize, Debug)]
struct IdleRow {
    tag: String,
    blocks: u64,
    unused_blocks: u64,
    held_byte_seconds: f64,
    idle_byte_seconds: f64,
}

impl Figures {
    /// The figures of an analysis, and what was written of it.
    pub fn new(
        analysis: &Analysis,
        other: Option<&Analysis>,
        budget: Option<u64>,
        written: &[WrittenFile],
    ) -> Self {
        let (summary, timeline) = (&analysis.summary, &analysis.timeline);
        let total = &summary.total;
        let error = analysis.over_budget(budget);
        Self {
            schema: SCHEMA,
            ok: error.is_none(),
            error,
            log: analysis.log.clone(),
            format: analysis.format,
            reading: analysis.reading.clone(),
            notes: analysis.notes(),
            written: written.to_vec(),
            records: summary.records,
            duration_nanos: timeline.end,
            allocations: total.allocations,
            frees: total.frees,
            failures: total.failures,
            uses: analysis.uses,
            budget,
            over_budget: budget.map(|budget| total.peak_bytes > budget),
            peak: PeakFigures {
                bytes: total.peak_bytes,
                blocks: analysis.peak_blocks,
                time_nanos: analysis.peak_time,
                order: summary.peak_order,
                holders: analysis.holders.clone(),
            },
            live_bytes: total.live_bytes,
            live_blocks: total.live_blocks,
            reserved: summary.reserved.map(|usage| ReservedFigures {
                usage,
                over_time: timeline.reserved_columns(STEPS),
            }),
            over_time: timeline
                .columns(STEPS)
                .into_iter()
                .map(|bin| timeline.stack(bin).iter().sum())
                .collect(),
            sizes: rows(&analysis.lifetimes.sizes),
            lifetimes_nanos: rows(&analysis.lifetimes.lifetimes),
            idle: (analysis.uses > 0).then(|| idle(analysis)),
            handovers: analysis.lanes.handovers.values().sum(),
            comparison: other.map(|other| compare(&other.summary, summary)),
        }
    }
}

fn rows(histogram: &Histogram) -> Vec<HistogramRow> {
    histogram.rows().map(|(from, blocks, bytes)| HistogramRow { from, blocks, bytes }).collect()
}

fn idle(analysis: &Analysis) -> Vec<IdleRow> {
    let tags = analysis.tags.iter().zip(&analysis.lifetimes.by_tag);
    let row = |(name, tag): (&String, &crate::lifetimes::IdleTag)| IdleRow {
        tag: name.clone(),
        blocks: tag.blocks,
        unused_blocks: tag.unused,
        held_byte_seconds: tag.held / 1e9,
        idle_byte_seconds: tag.idle / 1e9,
    };
    tags.map(row).collect()
}
