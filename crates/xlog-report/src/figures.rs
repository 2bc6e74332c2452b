//! The figures of a report, as they appear in JSON.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
//! Every field is always present; an unknown value is `null`.
use serde::Serialize;
use xlog_trace::ReservedUsage;

use crate::analysis::{Analysis, Holder};
use crate::compare::{Comparison, compare};
use crate::input::ReadingReport;
use crate::lifetimes::Histogram;

const SCHEMA: u32 = 1;
/// The number of time steps.
const STEPS: usize = 64;

/// A written file.
#[derive(Serialize, Clone, Debug)]
pub struct WrittenFile {
    /// Its path.
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
    /// Reserved device memory; `null` if the log has no segments.
    reserved: Option<ReservedFigures>,
    /// The maximum total in each of equal time steps.
    over_time: Vec<u64>,
    sizes: Vec<HistogramRow>,
    lifetimes_nanos: Vec<HistogramRow>,
    /// By tag, if the log has uses.
    idle: Option<Vec<IdleRow>>,
    /// Uses and frees on another stream than the previous one.
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
    /// The maximum in each of equal time steps.
    over_time: Vec<u64>,
}

#[derive(Serialize, Debug)]
struct HistogramRow {
    /// The minimum of this row; the next row's minimum is its exclusive end.
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
    /// Returns the figures of an analysis and the files written for it.
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
