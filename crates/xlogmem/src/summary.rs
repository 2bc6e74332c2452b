//! `xlogmem summary`: counts and bytes of a log.
//!
//! Records are ordered in bounded memory; the report counts those that arrived too late for that.
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use xlog_report::text::{seconds, times_text};
use xlog_report::text_report::{TextReport, count, size};
use xlog_report::{Input, LogFormat, ReadingReport, Strict, Trouble};
use xlog_trace::{Ordered, ReservedUsage, Source, Summary, TimesReport, Usage};

use crate::Output;
use crate::cli::{Refusal, option};
use crate::report::joined_name;

const SCHEMA: u32 = 1;
/// The maximum number of rows in a table; the JSON has all.
const ROWS: usize = 10;

/// The arguments of `summary`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 read, also when bad records were skipped; 1 --strict found something bad; 2 the command \
                        line was refused, or the log cannot be read."
)]
pub(crate) struct SummaryArguments {
    /// The log: xtrace, csv or rmm-csv; - is standard input. Several xtrace files, such as those of the processes of a run, are
    /// summarized together
    #[arg(value_name = "LOG", required = true)]
    logs: Vec<PathBuf>,

    /// Its format, where its beginning is damaged [default: what the file begins with]
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,

    /// Stop at the first bad record instead of skipping it
    #[arg(long)]
    strict: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize, Debug)]
struct TagRow {
    name: String,
    #[serde(flatten)]
    usage: Usage,
}

impl TagRow {
    fn new(name: &str, usage: &Usage) -> Self {
        Self { name: name.to_owned(), usage: *usage }
    }
}

#[derive(Serialize, Debug)]
struct StackRow {
    /// The innermost frame first.
    frames: Vec<String>,
    #[serde(flatten)]
    usage: Usage,
}

#[derive(Serialize, Debug)]
struct TimesRow {
    action: String,
    #[serde(flatten)]
    times: TimesReport,
}

/// Requests within one power of two.
#[derive(Serialize, Debug)]
struct SizeRow {
    /// The minimum size of this row.
    from: u64,
    requests: u64,
}

#[derive(Serialize, Debug)]
struct LeakRow {
    pointer: String,
    bytes: u64,
    tag: String,
    /// Source location of the allocation; empty if the log lacks it.
    site: String,
    /// The sampled stack of the allocation, the innermost frame first.
    stack: Vec<String>,
    stream: Option<u32>,
    thread: u64,
    order: u64,
    age_nanos: u64,
}

#[derive(Serialize, Debug)]
struct Named {
    name: String,
    count: u64,
}

/// The summary, as it appears in JSON. Every field is always present.
#[derive(Serialize, Debug, Default)]
struct Numbers {
    actions: Vec<Named>,
    paths: Vec<Named>,
    failures: Vec<Named>,
    total: Option<TagRow>,
    peak_order: u64,
    peak_time_nanos: u64,
    #[serde(skip)]
    peak_after_nanos: u64,
    duration_nanos: u64,
    by_tag: Vec<TagRow>,
    by_stream: Vec<TagRow>,
    by_thread: Vec<TagRow>,
    by_query: Vec<TagRow>,
    by_site: Vec<TagRow>,
    by_stack: Vec<StackRow>,
    by_device: Vec<TagRow>,
    /// By action, for records with a time.
    call_times: Vec<TimesRow>,
    sizes: Vec<SizeRow>,
    leaks: Vec<LeakRow>,
    unknown_frees: u64,
    missing_frees: u64,
    /// Reserved device memory, in use or not; `null` if the log has no segments.
    reserved: Option<ReservedUsage>,
    /// Records that arrived too late to be ordered; if zero, peaks are exact.
    late_records: u64,
}

#[derive(Serialize, Debug, Default)]
struct Report {
    schema: u32,
    ok: bool,
    error: Option<String>,
    log: String,
    format: Option<&'static str>,
    reading: Option<ReadingReport>,
    numbers: Option<Numbers>,
}

pub(crate) fn run(arguments: &SummaryArguments) -> Result<Output, Refusal> {
    let from = option("--from", arguments.from.as_deref(), LogFormat::parse_input)?;
    let name = joined_name(&arguments.logs);
    let mut report =
        Report { schema: SCHEMA, log: name.display().to_string(), ..Report::default() };
    let strict = Strict(arguments.strict);
    let input = match arguments.logs.as_slice() {
        [log] => Input::new(log, from, strict).once(),
        several => Input::joined(&name, several, strict).map_err(Refusal::Line)?,
    };
    report.error = Refusal::or_found(sum_up(&input, &mut report))?;
    report.ok = report.error.is_none();
    let output = Output::of(&report, arguments.json, render, report.error.clone());
    Ok(output.warn([(report.log.as_str(), report.reading.as_ref())]))
}

fn sum_up(input: &Input<'_>, report: &mut Report) -> Result<(), Trouble> {
    let source = input.begin()?;
    report.format = Some(source.format().name());
    let mut source = Ordered::new(source);
    let summary = Summary::of(&mut source);
    report.reading = Some(ReadingReport::new(source.report()));
    let summary = summary.map_err(|error| input.blame(&error))?;
    input.check(source.report())?;
    report.numbers = Some(Numbers::new(&summary, source.late()));
    Ok(())
}

impl Numbers {
    fn new(summary: &Summary, late_records: u64) -> Self {
        let all = |rows: &[(String, Usage)]| {
            rows.iter().map(|(name, usage)| TagRow::new(name, usage)).collect()
        };
        let times = &summary.times;
        let named = |name: &dyn ToString, count: u64| Named { name: name.to_string(), count };
        Self {
            actions: summary.actions.iter().map(|(name, count)| named(name, *count)).collect(),
            paths: summary.paths.iter().map(|(name, count)| named(name, *count)).collect(),
            failures: summary.failures.iter().map(|(name, count)| named(name, *count)).collect(),
            total: Some(TagRow::new("all", &summary.total)),
            peak_order: summary.peak_order,
            peak_time_nanos: summary.peak_time_nanos,
            peak_after_nanos: summary
                .time_nanos
                .map_or(0, |(first, _)| summary.peak_time_nanos.saturating_sub(first)),
            duration_nanos: summary.time_nanos.map_or(0, |(first, last)| last - first),
            by_tag: all(&summary.by_tag),
            by_stream: all(&summary.by_stream),
            by_thread: all(&summary.by_thread),
            by_query: all(&summary.by_query),
            by_site: all(&summary.by_site),
            by_stack: summary
                .by_stack
                .iter()
                .map(|(frames, usage)| StackRow { frames: frames.clone(), usage: *usage })
                .collect(),
            call_times: times
                .iter()
                .map(|(action, times)| TimesRow {
                    action: action.to_string(),
                    times: times.report(),
                })
                .collect(),
            by_device: summary
                .by_device
                .iter()
                .map(|(device, usage)| TagRow::new(&device.to_string(), usage))
                .collect(),
            sizes: summary
                .sizes
                .rows()
                .map(|(from, requests)| SizeRow { from, requests })
                .collect(),
            leaks: summary
                .leaks
                .iter()
                .map(|leak| LeakRow {
                    pointer: format!("{:#x}", leak.block.ptr),
                    bytes: leak.block.charged,
                    tag: leak.tag.clone(),
                    site: leak.site.clone(),
                    stack: leak.stack.clone(),
                    stream: leak.block.stream,
                    thread: leak.block.thread,
                    order: leak.block.order,
                    age_nanos: leak.age_nanos,
                })
                .collect(),
            unknown_frees: summary.unknown_frees,
            missing_frees: summary.missing_frees,
            reserved: summary.reserved,
            late_records,
        }
    }
}

fn render(report: &Report) -> String {
    let mut page = TextReport::default();
    page.title("Log");
    page.line("file", &report.log);
    if let Some(format) = report.format {
        page.line("format", format);
    }
    if let Some(reading) = &report.reading {
        reading.render(&mut page);
    }
    if let (Some(numbers), Some(reading)) = (&report.numbers, &report.reading) {
        figures(&mut page, numbers, reading);
    }
    let total = report.numbers.as_ref().and_then(|numbers| numbers.total.as_ref());
    let verdict = match (&report.error, &report.reading, total) {
        (None, Some(reading), Some(total)) => {
            format!("{}: {}", report.log, reading.freed(&total.usage))
        }
        (error, ..) => error.clone().unwrap_or_default(),
    };
    page.close(&verdict)
}

fn figures(page: &mut TextReport, numbers: &Numbers, reading: &ReadingReport) {
    page.title("Memory");
    if let Some(TagRow { usage: total, .. }) = &numbers.total {
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
            "peak granted",
            &format!("{} in {}", size(total.peak_bytes), count(total.peak_blocks, "block")),
        );
        let after = seconds(numbers.peak_after_nanos);
        page.line("at", &format!("{after} after the first record, order {}", numbers.peak_order));
        page.line(
            "at the end",
            &format!("{} in {}", size(total.live_bytes), count(total.live_blocks, "block")),
        );
    }
    if let Some(usage) = &numbers.reserved {
        let ReservedUsage { peak_bytes, at_peak_bytes, end_bytes, .. } = *usage;
        let text = format!(
            "{} at most, {} at the peak, {} at the end",
            size(peak_bytes),
            size(at_peak_bytes),
            size(end_bytes)
        );
        page.line("reserved", &text);
    }
    page.line("duration", &seconds(numbers.duration_nanos));
    if numbers.unknown_frees + numbers.missing_frees + numbers.late_records > 0 {
        page.line(
            "gaps",
            &format!(
                "{} frees of unknown blocks, {} frees missing, {} records out of order",
                numbers.unknown_frees, numbers.missing_frees, numbers.late_records
            ),
        );
    }
    for failure in &numbers.failures {
        page.line("failed", &format!("{}: {}", count(failure.count, "time"), failure.name));
    }
    table(page, "By tag", &numbers.by_tag);
    table(page, "By stream", &numbers.by_stream);
    if numbers.by_thread.len() > 1 {
        table(page, "By thread", &numbers.by_thread);
    }
    if !numbers.by_query.is_empty() {
        table(page, "By query", &numbers.by_query);
    }
    if !numbers.by_site.is_empty() {
        table(page, "By call site", &numbers.by_site);
    }
    if !numbers.by_stack.is_empty() {
        stacks(page, &numbers.by_stack);
    }
    if numbers.by_device.len() > 1 {
        table(page, "By device", &numbers.by_device);
    }
    if !numbers.call_times.is_empty() {
        page.title("Call times");
    }
    for row in &numbers.call_times {
        page.line(&row.action, &times_text(&row.times));
    }
    page.title("Sizes");
    for row in &numbers.sizes {
        page.line(&format!("from {}", size(row.from)), &count(row.requests, "request"));
    }
    if !numbers.leaks.is_empty() {
        page.title(reading.leaks_title());
    }
    for leak in numbers.leaks.iter().take(ROWS) {
        let tag = if leak.tag.is_empty() { "untagged" } else { &leak.tag };
        let at = if leak.site.is_empty() { "" } else { ", at " };
        page.line(
            &leak.pointer,
            &format!(
                "{}, {tag}{at}{}, order {}, age {:.3} s",
                size(leak.bytes),
                leak.site,
                leak.order,
                leak.age_nanos as f64 / 1e9
            ),
        );
    }
    more(page, numbers.leaks.len());
}

fn table(page: &mut TextReport, title: &str, rows: &[TagRow]) {
    page.title(title);
    for row in rows.iter().take(ROWS) {
        let name = if row.name.is_empty() { "untagged" } else { &row.name };
        // A long name gets a line of its own above its figures.
        let mut label = name;
        if name.chars().count() > 18 {
            page.line("", name);
            label = "";
        }
        page.line(
            label,
            &format!(
                "peak granted {}, at the end {}, {}",
                size(row.usage.peak_bytes),
                size(row.usage.live_bytes),
                count(row.usage.allocations, "allocation")
            ),
        );
    }
    more(page, rows.len());
}

/// The maximum number of stacks shown, and of frames of each.
const STACKS: usize = 3;
const FRAMES: usize = 12;

fn stacks(page: &mut TextReport, rows: &[StackRow]) {
    page.title("By sampled stack");
    for row in rows.iter().take(STACKS) {
        page.row(&format!(
            "peak granted {}, at the end {}, {}",
            size(row.usage.peak_bytes),
            size(row.usage.live_bytes),
            count(row.usage.allocations, "allocation")
        ));
        for frame in row.frames.iter().take(FRAMES) {
            page.row(&format!("  {frame}"));
        }
        if row.frames.len() > FRAMES {
            page.row(&format!("  and {} more frames", row.frames.len() - FRAMES));
        }
    }
    if rows.len() > STACKS {
        page.row(&format!("and {} more stacks; --json has them", rows.len() - STACKS));
    }
}

fn more(page: &mut TextReport, rows: usize) {
    if rows > ROWS {
        page.line("", &format!("and {} more; --json has them", rows - ROWS));
    }
}
