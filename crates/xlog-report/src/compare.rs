//! The comparison of two summaries, the largest changes first.
use std::collections::BTreeMap;

use serde::Serialize;
use xlog_trace::{Action, CallTimes, Summary, Usage};

use crate::text::{named, seconds, shorten};
use crate::text_report::{TextReport, size};

/// The maximum number of rows in a table; the JSON has all.
const ROWS: usize = 12;

/// A figure of both logs.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) before: u64,
    pub(crate) after: u64,
}

impl Change {
    pub(crate) fn new(before: u64, after: u64) -> Self {
        Self { before, after }
    }

    /// Returns the absolute difference.
    pub(crate) fn distance(self) -> u64 {
        self.before.abs_diff(self.after)
    }

    pub(crate) fn is_same(self) -> bool {
        self.before == self.after
    }
}

/// The usage of one tag, in both logs.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct TagChange {
    pub(crate) tag: String,
    pub(crate) peak_bytes: Change,
    pub(crate) total_bytes: Change,
    pub(crate) allocations: Change,
    pub(crate) failures: Change,
    pub(crate) live_bytes: Change,
    pub(crate) live_blocks: Change,
}

impl TagChange {
    fn new(tag: &str, before: &Usage, after: &Usage) -> Self {
        let change = |of: fn(&Usage) -> u64| Change::new(of(before), of(after));
        Self {
            tag: tag.to_owned(),
            peak_bytes: change(|usage| usage.peak_bytes),
            total_bytes: change(|usage| usage.total_bytes),
            allocations: change(|usage| usage.allocations),
            failures: change(|usage| usage.failures),
            live_bytes: change(|usage| usage.live_bytes),
            live_blocks: change(|usage| usage.live_blocks),
        }
    }

    fn figures(&self) -> [Change; 6] {
        [
            self.peak_bytes,
            self.total_bytes,
            self.allocations,
            self.failures,
            self.live_bytes,
            self.live_blocks,
        ]
    }

    /// Returns whether none of its figures changed.
    pub(crate) fn is_same(&self) -> bool {
        self.figures().into_iter().all(Change::is_same)
    }
}

/// The comparison of two logs. Times, threads and addresses do not affect `same`: they vary between runs.
#[derive(Serialize, Clone, Debug)]
pub struct Comparison {
    /// Whether both logs describe the same use of memory.
    pub same: bool,
    /// Records, without those of segments.
    pub(crate) records: Change,
    /// The maximum reserved bytes; `null` if neither log has segments. It does not affect `same`: it depends on the allocator.
    pub(crate) reserved_bytes: Option<Change>,
    pub(crate) peak_blocks: Change,
    pub(crate) frees: Change,
    pub(crate) duration_nanos: Change,
    /// Usage of all tags together; its tag is empty.
    pub(crate) total: TagChange,
    /// By tag, the largest change of a peak first, then of the total.
    pub(crate) by_tag: Vec<TagChange>,
    /// Failures by kind.
    pub(crate) failures: Vec<(String, Change)>,
    /// The median, p99 and maximum call times of each action, in nanoseconds. They do not affect `same`.
    pub(crate) times: Vec<(String, Change)>,
    /// The peaks of queries, by id. They do not affect `same`: another run may number queries differently.
    pub(crate) by_query: Vec<(String, Change)>,
}

/// Compares `after` with `before`.
pub fn compare(before: &Summary, after: &Summary) -> Comparison {
    let total = TagChange::new("", &before.total, &after.total);
    let mut tags: BTreeMap<&str, (Usage, Usage)> = BTreeMap::new();
    for (tag, usage) in &before.by_tag {
        tags.entry(tag).or_default().0 = *usage;
    }
    for (tag, usage) in &after.by_tag {
        tags.entry(tag).or_default().1 = *usage;
    }
    let mut by_tag: Vec<TagChange> =
        tags.iter().map(|(tag, (before, after))| TagChange::new(tag, before, after)).collect();
    by_tag.sort_by_key(|row| {
        let weight = |change: Change| std::cmp::Reverse(change.distance());
        (weight(row.peak_bytes), weight(row.total_bytes), weight(row.allocations))
    });
    let duration = |summary: &Summary| summary.time_nanos.map_or(0, |(first, last)| last - first);
    let failures = side_by_side(before, after, |summary| {
        summary.failures.iter().map(|(kind, times)| (kind.clone(), *times)).collect()
    });
    let times = side_by_side(before, after, |summary| {
        let of = |(action, times): (&Action, &CallTimes)| {
            let times = times.report();
            let parts =
                [("p50", times.median_nanos), ("p99", times.p99_nanos), ("max", times.max_nanos)];
            parts.map(|(part, nanos)| (format!("{action} {part}"), nanos))
        };
        summary.times.iter().flat_map(of).collect()
    });
    let by_query = side_by_side(before, after, |summary| {
        summary.by_query.iter().map(|(id, usage)| (id.clone(), usage.peak_bytes)).collect()
    });
    let frees = Change::new(before.total.frees, after.total.frees);
    let peak_blocks = Change::new(before.total.peak_blocks, after.total.peak_blocks);
    let calls = |summary: &Summary| {
        let segments = summary.reserved.map_or(0, |usage| usage.takes + usage.returns);
        summary.records.saturating_sub(segments)
    };
    let records = Change::new(calls(before), calls(after));
    let held = |summary: &Summary| summary.reserved.map_or(0, |usage| usage.peak_bytes);
    let has_segments = before.reserved.is_some() || after.reserved.is_some();
    let reserved_bytes = has_segments.then(|| Change::new(held(before), held(after)));
    let same = total.is_same()
        && by_tag.iter().all(TagChange::is_same)
        && failures.iter().all(|(_, times)| times.is_same())
        && [frees, peak_blocks, records].into_iter().all(Change::is_same);
    Comparison {
        same,
        records,
        reserved_bytes,
        peak_blocks,
        frees,
        duration_nanos: Change::new(duration(before), duration(after)),
        total,
        by_tag,
        failures,
        times,
        by_query,
    }
}

/// Pairs the figures of both logs by name.
fn side_by_side(
    before: &Summary,
    after: &Summary,
    figures: impl Fn(&Summary) -> Vec<(String, u64)>,
) -> Vec<(String, Change)> {
    let mut all: BTreeMap<String, Change> = BTreeMap::new();
    for (name, figure) in figures(before) {
        all.entry(name).or_insert(Change::new(0, 0)).before = figure;
    }
    for (name, figure) in figures(after) {
        all.entry(name).or_insert(Change::new(0, 0)).after = figure;
    }
    all.into_iter().collect()
}

/// Adds the tables of a comparison.
pub fn rows(page: &mut TextReport, comparison: &Comparison) {
    let total = &comparison.total;
    page.row(&format!("{:<20}{:>13}{:>13}{:>14}{:>10}", "", "before", "after", "change", ""));
    let bytes = [
        ("peak", total.peak_bytes),
        ("allocated in all", total.total_bytes),
        ("never freed", total.live_bytes),
    ];
    for (name, change) in bytes {
        row(page, name, change, size);
    }
    if let Some(change) = comparison.reserved_bytes {
        row(page, "reserved at most", change, size);
    }
    let counts = [
        ("most blocks", comparison.peak_blocks),
        ("allocations", total.allocations),
        ("frees", comparison.frees),
        ("failures", total.failures),
        ("blocks never freed", total.live_blocks),
        ("records", comparison.records),
    ];
    for (name, change) in counts {
        row(page, name, change, |count| count.to_string());
    }
    row(page, "duration", comparison.duration_nanos, seconds);
    let table = |page: &mut TextReport, title: &str, of: fn(&TagChange) -> Change| {
        let mut changed: Vec<&TagChange> =
            comparison.by_tag.iter().filter(|tag| !of(tag).is_same()).collect();
        changed.sort_by_key(|tag| std::cmp::Reverse(of(tag).distance()));
        if !changed.is_empty() {
            page.title(title);
        }
        for tag in changed.iter().take(ROWS) {
            row(page, named(&tag.tag), of(tag), size);
        }
        if changed.len() > ROWS {
            page.row(&format!("and {} more; --json has them", changed.len() - ROWS));
        }
    };
    table(page, "Peaks by tag, the largest changes first", |tag| tag.peak_bytes);
    table(page, "Allocated in all by tag, the largest changes first", |tag| tag.total_bytes);
    table(page, "Never freed by tag, the largest changes first", |tag| tag.live_bytes);
    changes(page, "Failures", &comparison.failures, |count| count.to_string());
    changes(page, "Peaks by query", &comparison.by_query, size);
    changes(page, "Call times", &comparison.times, seconds);
}

/// Adds a table of the figures that changed, the largest changes first.
fn changes(page: &mut TextReport, title: &str, rows: &[(String, Change)], unit: fn(u64) -> String) {
    let mut changed: Vec<_> = rows.iter().filter(|(_, change)| !change.is_same()).collect();
    changed.sort_by_key(|(_, change)| std::cmp::Reverse(change.distance()));
    if !changed.is_empty() {
        page.title(title);
    }
    for (name, change) in changed.iter().take(ROWS) {
        row(page, name, *change, unit);
    }
    if changed.len() > ROWS {
        page.row(&format!("and {} more; --json has them", changed.len() - ROWS));
    }
}

fn row(page: &mut TextReport, name: &str, change: Change, unit: fn(u64) -> String) {
    let sign = if change.after >= change.before { "+" } else { "-" };
    let (distance, ratio) = match change.is_same() {
        true => ("same".to_owned(), String::new()),
        false => (format!("{sign}{}", unit(change.distance())), ratio(change)),
    };
    page.row(&format!(
        "{:<20}{:>13}{:>13}{distance:>14}{ratio:>10}",
        shorten(name, 20),
        unit(change.before),
        unit(change.after)
    ));
}

fn ratio(change: Change) -> String {
    match (change.before, change.after) {
        (0, _) => "new".to_owned(),
        (_, 0) => "gone".to_owned(),
        (before, after) => {
            let percent = (after as f64 / before as f64 - 1.0) * 100.0;
            match percent.abs() < 1000.0 {
                true => format!("{percent:+.1} %"),
                false => format!("{:.0}x", after as f64 / before as f64),
            }
        }
    }
}
