//! The report as a text of 80 columns, for terminals and continuous integration.
use std::collections::BTreeMap;

use xlog_trace::{Action, CallTimes, TimesReport, Usage};

use crate::analysis::Analysis;
use crate::compare::compare;
use crate::escape;
use crate::lifetimes::Histogram;
use crate::text_report::{TextReport, count, size};
use crate::timeline::Timeline;

const WIDTH: usize = 64;
const HEIGHT: usize = 8;
const BAR: usize = 24;
/// The maximum number of rows in a table.
const ROWS: usize = 10;

impl Analysis {
    /// Returns why the log fails a budget, in one line; `None` if it does not, or without a budget.
    pub fn over_budget(&self, budget: Option<u64>) -> Option<String> {
        let peak = self.summary.total.peak_bytes;
        let budget = budget.filter(|budget| peak > *budget)?;
        let (log, peak, budget) = (&self.log, size(peak), size(budget));
        Some(format!("{log}: the peak of {peak} is above the budget of {budget}"))
    }

    /// Returns notes on what the report cannot show.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let (summary, reading) = (&self.summary, &self.reading);
        if reading.skipped > 0 {
            notes.push(format!("{} bad places of the log were skipped", reading.skipped));
        }
        if reading.cut_off {
            notes.push("the log is cut off at the end".to_owned());
        }
        if reading.not_closed && !reading.cut_off {
            notes.push("the log was not closed by its writer; records may be missing".to_owned());
        }
        if reading.dropped_by_writer > 0 {
            notes.push(format!("{} records were dropped by the writer", reading.dropped_by_writer));
        }
        if summary.unknown_frees > 0 {
            notes.push(format!("{} frees are of unknown blocks", summary.unknown_frees));
        }
        if summary.missing_frees > 0 {
            notes.push(format!("{} frees are missing", summary.missing_frees));
        }
        if self.late > 0 {
            notes.push(format!("{} records are out of order", self.late));
        }
        notes
    }
}

/// Returns the name of a log for a text.
pub type Naming = fn(&Analysis) -> &str;

/// Renders the report. `other` is the log it is compared with.
pub fn render(
    analysis: &Analysis,
    other: Option<&Analysis>,
    budget: Option<u64>,
    name: Naming,
) -> String {
    let mut page = TextReport::default();
    let summary = &analysis.summary;
    let total = &summary.total;
    page.title("Memory report");
    page.line("log", name(analysis));
    page.line("records", &format!("{} over {}", summary.records, seconds(analysis.timeline.end)));
    page.line(
        "calls",
        &format!(
            "{}, {}, {}",
            count(total.allocations, "allocation"),
            count(total.frees, "free"),
            count(total.failures, "failure")
        ),
    );
    page.line(
        "peak",
        &format!(
            "{} in {}, after {}",
            size(total.peak_bytes),
            count(analysis.peak_blocks, "block"),
            seconds(analysis.peak_time)
        ),
    );
    if let Some(usage) = summary.reserved {
        let free = usage.at_peak_bytes.saturating_sub(total.peak_bytes);
        let at_peak = size(usage.at_peak_bytes);
        let text = format!(
            "{} at most; {at_peak} at the peak, of which {} were free",
            size(usage.peak_bytes),
            size(free)
        );
        page.line("reserved", &text);
    }
    if let Some(budget) = budget {
        page.line("budget", &against(budget, total.peak_bytes));
    }
    for note in analysis.notes() {
        page.line("note", &note);
    }
    page.title("Memory over time");
    chart(&mut page, &analysis.timeline, budget);

    page.title("At the peak");
    for holder in analysis.holders.iter().take(ROWS) {
        let share = part(holder.bytes, total.peak_bytes);
        bar_row(&mut page, named(&holder.tag), holder.bytes, share);
    }
    more(&mut page, analysis.holders.len());
    histogram(&mut page, "Sizes", &analysis.lifetimes.sizes, size);
    histogram(&mut page, "Lifetimes", &analysis.lifetimes.lifetimes, seconds);
    if analysis.uses > 0 {
        idle(&mut page, analysis);
    }
    usages(&mut page, "By query", &summary.by_query);
    usages(&mut page, "By thread", &summary.by_thread);
    // The last component of a path identifies a file best in little space.
    let file = |site: &String| site.rsplit(['/', '\\']).next().unwrap_or(site).to_owned();
    let sites: Vec<_> = summary.by_site.iter().map(|(site, usage)| (file(site), *usage)).collect();
    usages(&mut page, "By call site", &sites);
    call_times(&mut page, &summary.times);
    failures(&mut page, analysis);
    leaks(&mut page, analysis);
    if let Some(other) = other {
        changes(&mut page, other, analysis, name);
    }
    page.close(&verdict(analysis, budget, name))
}

fn verdict(analysis: &Analysis, budget: Option<u64>, name: Naming) -> String {
    let total: &Usage = &analysis.summary.total;
    let end = analysis.reading.freed(total);
    let over = budget.filter(|budget| total.peak_bytes > *budget);
    let over = over.map_or_else(String::new, |_| ", the budget was passed".to_owned());
    format!("{}: peak {}, {end}{over}", name(analysis), size(total.peak_bytes))
}

fn against(budget: u64, peak: u64) -> String {
    match peak.checked_sub(budget).filter(|over| *over > 0) {
        Some(over) => format!("{}; the peak is {} above it", size(budget), size(over)),
        None => format!("{}; {} were left at the peak", size(budget), size(budget - peak)),
    }
}

/// Draws the maximum total of each column; dashes mark the budget.
fn chart(page: &mut TextReport, timeline: &Timeline, budget: Option<u64>) {
    let totals: Vec<u64> =
        timeline.columns(WIDTH).iter().map(|&bin| timeline.stack(bin).iter().sum()).collect();
    let highest = totals.iter().copied().max().unwrap_or(0).max(1);
    // A budget far above the maximum would flatten the chart.
    let budget = budget.filter(|budget| *budget / 3 < highest);
    let top = highest.max(budget.unwrap_or(0));
    for line in crate::plot::rows(&totals, top, HEIGHT, budget) {
        page.row(&line);
    }
    let end = seconds(timeline.end);
    page.row(&format!("{:>10}  0{end:>width$}", "", width = WIDTH - 1));
}

fn bar_row(page: &mut TextReport, name: &str, bytes: u64, share: f64) {
    let (cells, name) = ((share * BAR as f64).round() as usize, shorten(name, 24));
    let bar = "#".repeat(cells.min(BAR));
    page.row(&format!("{name:<24}{:>11} {:>6.1} %  {bar}", size(bytes), share * 100.0));
}

fn histogram(page: &mut TextReport, title: &str, histogram: &Histogram, unit: fn(u64) -> String) {
    let most = histogram.rows().map(|(_, count, _)| count).max().unwrap_or(1).max(1);
    if histogram.rows().next().is_none() {
        return;
    }
    page.title(title);
    for (from, count, bytes) in histogram.rows() {
        let bar = "#".repeat(((count as f64 / most as f64) * BAR as f64).ceil() as usize);
        let bytes = size(bytes);
        page.row(&format!("from {:<11}{count:>10} blocks {bytes:>11}  {bar}", unit(from)));
    }
}

fn idle(page: &mut TextReport, analysis: &Analysis) {
    page.title("Held after the last use");
    let tags = analysis.tags.iter().zip(&analysis.lifetimes.by_tag);
    let mut tags: Vec<_> = tags.filter(|(_, tag)| tag.held > 0.0).collect();
    tags.sort_by(|a, b| b.1.idle.total_cmp(&a.1.idle));
    for (name, tag) in tags.iter().take(ROWS) {
        let share = tag.idle / tag.held;
        let bar = "#".repeat((share * BAR as f64).round() as usize);
        let name = shorten(named(name), 24);
        page.row(&format!("{name:<24}{:>6.1} % of its bytes x time  {bar}", share * 100.0));
    }
}

/// Adds a table of peaks, unless there is only one, whose peak is the total.
fn usages(page: &mut TextReport, title: &str, rows: &[(String, Usage)]) {
    if rows.len() < 2 {
        return;
    }
    page.title(title);
    for (name, usage) in rows.iter().take(ROWS) {
        page.row(&format!(
            "{:<24}{:>11} at its peak, {}, {}",
            shorten(name, 24),
            size(usage.peak_bytes),
            count(usage.allocations, "allocation"),
            count(usage.failures, "failure")
        ));
    }
    more(page, rows.len());
}

fn failures(page: &mut TextReport, analysis: &Analysis) {
    if analysis.summary.failures.is_empty() {
        return;
    }
    page.title("Failures");
    for (kind, times) in &analysis.summary.failures {
        page.line(&count(*times, "time"), kind);
    }
    if let Some(first) = analysis.failed.first() {
        let tag = named(&first.tag);
        let mut what = format!("{}, {tag}, after {}", size(first.bytes), seconds(first.time));
        if !first.site.is_empty() {
            what = format!("{what}, at {}", first.site);
        }
        page.line("the first", &format!("{what}: {}", first.message));
    }
}

fn leaks(page: &mut TextReport, analysis: &Analysis) {
    let leaks = &analysis.summary.leaks;
    if leaks.is_empty() {
        return;
    }
    page.title(analysis.reading.leaks_title());
    for leak in leaks.iter().take(ROWS) {
        page.row(&format!(
            "{:<24}{:>11}  {:#x}, order {}, age {}",
            shorten(named(&leak.tag), 24),
            size(leak.block.charged),
            leak.block.ptr,
            leak.block.order,
            seconds(leak.age_nanos)
        ));
    }
    more(page, analysis.summary.total.live_blocks as usize);
}

fn changes(page: &mut TextReport, other: &Analysis, analysis: &Analysis, name: Naming) {
    let comparison = compare(&other.summary, &analysis.summary);
    page.title("Since the other log");
    page.line("other", name(other));
    crate::compare::rows(page, &comparison);
}

fn more(page: &mut TextReport, rows: usize) {
    if rows > ROWS {
        page.row(&format!("and {} more", rows - ROWS));
    }
}

/// Returns the display name of a tag, including the empty one.
pub(crate) fn named(tag: &str) -> &str {
    if tag.is_empty() { "untagged" } else { tag }
}

/// Truncates to `width - 1` characters and escapes anything that would move the cursor.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    let text = escape::line(text);
    let mut short: String = text.chars().take(width - 1).collect();
    if text.chars().count() > width - 1 {
        short.pop();
        short.push('~');
    }
    short
}

fn part(bytes: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { bytes as f64 / whole as f64 }
}

/// Adds the times of calls, one line per action.
pub fn call_times(page: &mut TextReport, times: &BTreeMap<Action, CallTimes>) {
    if times.is_empty() {
        return;
    }
    page.title("Call times");
    for (action, times) in times {
        page.line(&action.to_string(), &times_text(&times.report()));
    }
}

/// Formats the figures of call times in one line.
pub fn times_text(times: &TimesReport) -> String {
    format!(
        "mean {}, p50 {}, p99 {}, max {}",
        seconds(times.mean_nanos.round() as u64),
        seconds(times.median_nanos),
        seconds(times.p99_nanos),
        seconds(times.max_nanos)
    )
}

/// Formats a duration in a suitable unit.
pub fn seconds(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.1} us", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.3} s", nanos as f64 / 1e9),
    }
}
