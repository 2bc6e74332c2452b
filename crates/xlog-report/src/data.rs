//! The data of the page: figures and tables as JSON, pictures as arrays.
//!
//! Field names are private to this file and the page's scripts.
use serde_json::{Value, json};
use xlog_trace::{Leak, Usage};

use crate::analysis::Analysis;
use crate::block_data::block_data;
use crate::compare::compare;
use crate::html::Blob;
use crate::lifetimes::Histogram;

/// The maximum number of rows in the tables of tags and leaks; further rows are counted.
const ROWS: usize = 200;

const YEAR_2000: u64 = 946_684_800_000_000_000;

pub(crate) fn page_data(
    analysis: &Analysis,
    other: Option<&Analysis>,
    budget: Option<u64>,
    blob: &mut Blob,
) -> Value {
    let summary = &analysis.summary;
    let first = summary.time_nanos.map_or(0, |(first, _)| first);
    // Times without an epoch are wall-clock times, or their date is unknown.
    let began = match (analysis.header.epoch_unix_nanos, first) {
        (0, first) if first < YEAR_2000 => None,
        (epoch, first) => Some(epoch.saturating_add(first) as f64 / 1e6),
    };
    let timeline = &analysis.timeline;
    let other = other.map(|other| {
        let totals = (0..other.timeline.len()).map(|bin| other.timeline.stack(bin).iter().sum());
        json!({
            "log": other.file,
            "span": other.timeline.end,
            "starts": blob.f64(other.timeline.starts.iter().copied()),
            "totals": blob.f32(totals),
            "comparison": compare(&other.summary, &analysis.summary),
        })
    });
    json!({
        "log": analysis.file,
        "format": analysis.format,
        "device": analysis.header.device_name,
        // Wall clock at the first record in milliseconds since 1970; null if the log lacks it.
        "began": began,
        "span": timeline.end,
        "records": summary.records,
        "allocations": summary.total.allocations,
        "frees": summary.total.frees,
        "failures": summary.total.failures,
        "uses": analysis.uses,
        "notes": analysis.notes(),
        "complete": analysis.reading.complete,
        "budget": budget,
        "peak": peak(analysis),
        "live": (summary.total.live_bytes, summary.total.live_blocks),
        "tags": analysis.tags,
        "other_tags": analysis.other_tags,
        "by_tag": usages(&summary.by_tag),
        "all_tags": summary.by_tag.len(),
        // Usage by source location; empty if the log has none.
        "by_site": usages(&summary.by_site),
        "all_sites": summary.by_site.len(),
        "starts": blob.f64(timeline.starts.iter().copied()),
        "stacks": blob.f32(timeline.stacks.iter().copied()),
        "lows": blob.f32(timeline.lows.iter().copied()),
        "map": map(analysis, blob),
        "column_bins": blob.u32(analysis.column_bins.iter().map(|&bin| bin as u32)),
        "lanes": lanes(analysis, blob),
        "sizes": rows(&analysis.lifetimes.sizes),
        "lifetimes": rows(&analysis.lifetimes.lifetimes),
        "idle": (analysis.uses > 0).then(|| idle(analysis)),
        "leaks": summary.leaks.iter().take(ROWS).map(leak).collect::<Vec<_>>(),
        "leak_tags": leak_tags(analysis),
        "failed": analysis.failed,
        "blocks": block_data(analysis, blob),
        // Null if the log has no segments.
        "reserved": reserved(analysis, blob),
        "other": other,
    })
}

fn peak(analysis: &Analysis) -> Value {
    let holders = analysis.holders.iter().take(ROWS);
    // Tag, bytes, blocks.
    let holders = holders.map(|holder| (&holder.tag, holder.bytes, holder.blocks));
    let largest = analysis.largest_at_peak.iter().map(|life| {
        json!({
            "address": format!("{:#x}", life.ptr), "bytes": life.bytes, "tag": life.tag, "stream": life.stream, "born": life.born,
        })
    });
    json!({
        "bytes": analysis.summary.total.peak_bytes,
        "blocks": analysis.peak_blocks,
        "time": analysis.peak_time,
        "order": analysis.summary.peak_order,
        "holders": holders.collect::<Vec<_>>(),
        "all_holders": analysis.holders.len(),
        "largest": largest.collect::<Vec<_>>(),
    })
}

fn map(analysis: &Analysis, blob: &mut Blob) -> Value {
    let map = &analysis.address_map;
    // Process, device, first address, bytes, offset in the map.
    let segments = analysis.segments.all.iter();
    let segments =
        segments.map(|s| (s.process, s.device, format!("{:#x}", s.start), s.bytes, s.offset));
    json!({
        "rows": map.rows,
        "row_bytes": map.row_bytes,
        "fullness": blob.u8(map.fullness.iter().copied()),
        "tags": blob.u8(map.tags.iter().copied()),
        "segments": segments.collect::<Vec<_>>(),
    })
}

fn lanes(analysis: &Analysis, blob: &mut Blob) -> Value {
    let lanes = &analysis.lanes;
    // Calls, handovers and waits of each lane.
    let totals = lanes.totals.iter().map(|c| (c.calls, c.handovers, c.waits));
    // From lane, to lane, count.
    let pairs = lanes.handovers.iter().map(|((from, to), n)| (*from, *to, *n));
    json!({
        "names": analysis.streams,
        "calls": blob.u32(lanes.columns.iter().map(|counts| counts.calls)),
        "handovers": blob.u32(lanes.columns.iter().map(|counts| counts.handovers)),
        "waits": blob.u32(lanes.columns.iter().map(|counts| counts.waits)),
        "totals": totals.collect::<Vec<_>>(),
        "arrow_times": blob.f64(lanes.arrows.iter().map(|arrow| arrow.time)),
        "arrow_from": blob.u8(lanes.arrows.iter().map(|arrow| arrow.from)),
        "arrow_to": blob.u8(lanes.arrows.iter().map(|arrow| arrow.to)),
        "arrow_step": lanes.arrow_step,
        "pairs": pairs.collect::<Vec<_>>(),
    })
}

fn reserved(analysis: &Analysis, blob: &mut Blob) -> Option<Value> {
    let usage = analysis.summary.reserved?;
    // Process, device, first address, bytes, offset in the map, reserved at, returned at.
    let ranges = analysis.reserved.iter().filter_map(|row| {
        let place = analysis.segments.offset(row.process, row.device, row.start)?;
        let address = format!("{:#x}", row.start);
        Some((row.process, row.device, address, row.bytes, place, row.from, row.to))
    });
    Some(json!({
        "peak": usage.peak_bytes,
        "at_peak": usage.at_peak_bytes,
        "end": usage.end_bytes,
        // The maximum of each bin.
        "bins": blob.f32(analysis.timeline.reserved.iter().copied()),
        "ranges": ranges.collect::<Vec<_>>(),
        "all_ranges": analysis.all_reserved,
    }))
}

fn usages(rows: &[(String, Usage)]) -> Vec<Value> {
    let row = |(tag, usage): &(String, Usage)| {
        json!({
            "tag": tag, "peak": usage.peak_bytes, "total": usage.total_bytes, "allocations": usage.allocations,
            "failures": usage.failures, "live": usage.live_bytes,
        })
    };
    rows.iter().take(ROWS).map(row).collect()
}

fn idle(analysis: &Analysis) -> Value {
    let lifetimes = &analysis.lifetimes;
    // Tag, blocks, unused blocks, byte-seconds held, and byte-seconds idle.
    let tags = analysis.tags.iter().zip(&lifetimes.by_tag);
    let tags =
        tags.map(|(name, tag)| (name, tag.blocks, tag.unused, tag.held / 1e9, tag.idle / 1e9));
    let mut tags: Vec<_> = tags.collect();
    tags.sort_by(|a, b| b.4.total_cmp(&a.4));
    // Address, bytes, tag, idle nanoseconds, whether it was freed.
    let worst = lifetimes.worst.iter().map(|block| {
        let life = &block.life;
        (format!("{:#x}", life.ptr), life.bytes, life.tag, block.idle_nanos, block.freed)
    });
    json!({ "tags": tags, "histogram": rows(&lifetimes.idle), "worst": worst.collect::<Vec<_>>() })
}

fn rows(histogram: &Histogram) -> Vec<(u64, u64, u64)> {
    histogram.rows().collect()
}

fn leak(leak: &Leak) -> Value {
    json!({
        "address": format!("{:#x}", leak.block.ptr), "bytes": leak.block.charged, "tag": leak.tag, "site": leak.site,
        "stream": leak.block.stream, "order": leak.block.order, "age": leak.age_nanos,
    })
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
