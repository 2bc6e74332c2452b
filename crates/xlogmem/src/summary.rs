//! `xlogmem summary`: counts and bytes of a log.
//!
//! Records are ordered in bounded memory; the report counts those that arrived too late for that.
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use xlog_report::text::{call_times, seconds};
use xlog_report::text_report::{TextReport, count, size};
use xlog_report::{Input, LogFormat, ReadingReport, Strict, Trouble};
use xlog_trace::{Leak, Ordered, ReservedUsage, Source, Summary, Usage};

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
    /// The log: xtrace, csv, rmm-csv, or a memory snapshot of PyTorch; - is standard input. Several xtrace files, such as those of the processes of a run, are
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

#[derive(Serialize, Debug, Default)]
struct Report {
    schema: u32,
    ok: bool,
    error: Option<String>,
    log: String,
    format: Option<&'static str>,
    reading: Option<ReadingReport>,
    /// Every field is always present.
    #[serde(rename = "numbers")]
    counts: Option<Counts>,
}

#[derive(Debug)]
struct Counts {
    summary: Summary,
    /// Records that arrived too late to be ordered; if zero, peaks are exact.
    late_records: u64,
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
    let output = Output { failure: report.error.clone(), ..Output::default() }
        .warn([(report.log.as_str(), report.reading.as_ref())]);
    Ok(match arguments.json {
        true => output.with_json(report),
        false => Output { text: render(&report), ..output },
    })
}

fn sum_up(input: &Input<'_>, report: &mut Report) -> Result<(), Trouble> {
    let source = input.begin()?;
    report.format = Some(source.format().name());
    let mut source = Ordered::new(source);
    let summary = Summary::of(&mut source);
    report.reading = Some(ReadingReport::new(source.report()));
    let summary = summary.map_err(|error| input.blame(&error))?;
    input.check(source.report())?;
    let counts = Counts { summary, late_records: source.late() };
    report.counts = Some(counts);
    Ok(())
}

/// Adds a name to the fields of `row`.
fn named(key: &str, name: impl Serialize, row: impl Serialize) -> Value {
    let mut row = json!(row);
    row[key] = json!(name);
    row
}

fn by_name(rows: &[(String, Usage)]) -> Vec<Value> {
    rows.iter().map(|(name, usage)| named("name", name, usage)).collect()
}

fn counted<K: ToString>(counts: &BTreeMap<K, u64>) -> Vec<Value> {
    counts.iter().map(|(name, count)| json!({ "name": name.to_string(), "count": count })).collect()
}

/// A list whose rows are formatted one at a time: stacks share the texts of their frames, and JSON repeats them.
struct Rows<'a, T>(&'a [T], fn(&T) -> Value);

impl<T> Serialize for Rows<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(self.1))
    }
}

fn leak_row(leak: &Leak) -> Value {
    json!({
        "pointer": format!("{:#x}", leak.block.ptr), "bytes": leak.block.charged, "tag": leak.tag, "site": leak.site,
        "stack": texts(&leak.stack), "stream": leak.block.stream, "thread": leak.block.thread,
        "order": leak.block.order, "age_nanos": leak.age_nanos,
    })
}

fn texts(frames: &[Arc<str>]) -> Vec<&str> {
    frames.iter().map(|frame| &**frame).collect()
}

impl Serialize for Counts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in self.to_json().as_object().into_iter().flatten() {
            map.serialize_entry(name, value)?;
        }
        let by_stack =
            Rows(&self.summary.by_stack, |(frames, usage)| named("frames", texts(frames), usage));
        map.serialize_entry("by_stack", &by_stack)?;
        map.serialize_entry("leaks", &Rows(&self.summary.leaks, leak_row))?;
        map.end()
    }
}

impl Counts {
    /// The time of the first record, and of the last one after it.
    fn span(&self) -> (u64, u64) {
        self.summary.time_nanos.map_or((0, 0), |(first, last)| (first, last - first))
    }

    /// Returns all but the lists of [`Rows`].
    fn to_json(&self) -> Value {
        let summary = &self.summary;
        let by_device = summary.by_device.iter();
        let times = summary.times.iter();
        let sizes = summary.sizes.rows();
        json!({
            "actions": counted(&summary.actions),
            "paths": counted(&summary.paths),
            "failures": counted(&summary.failures),
            "total": named("name", "all", summary.total),
            "peak_order": summary.peak_order,
            "peak_time_nanos": summary.peak_time_nanos,
            "duration_nanos": self.span().1,
            "by_tag": by_name(&summary.by_tag),
            "by_stream": by_name(&summary.by_stream),
            "by_thread": by_name(&summary.by_thread),
            "by_query": by_name(&summary.by_query),
            "by_site": by_name(&summary.by_site),
            "by_device": by_device.map(|(device, usage)| named("name", device.to_string(), usage)).collect::<Vec<_>>(),
            "call_times": times.map(|(action, times)| named("action", action.to_string(), times.report())).collect::<Vec<_>>(),
            "sizes": sizes.map(|(from, requests)| json!({ "from": from, "requests": requests })).collect::<Vec<_>>(),
            "unknown_frees": summary.unknown_frees,
            "missing_frees": summary.missing_frees,
            "reserved": summary.reserved,
            "late_records": self.late_records,
        })
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
    if let (Some(counts), Some(reading)) = (&report.counts, &report.reading) {
        figures(&mut page, counts, reading);
    }
    let verdict = match (&report.error, &report.reading, &report.counts) {
        (None, Some(reading), Some(counts)) => {
            format!("{}: {}", report.log, reading.freed(&counts.summary.total))
        }
        (error, ..) => error.clone().unwrap_or_default(),
    };
    page.close(&verdict)
}

fn figures(page: &mut TextReport, counts: &Counts, reading: &ReadingReport) {
    let (summary, total) = (&counts.summary, &counts.summary.total);
    let (first, duration) = counts.span();
    page.title("Memory");
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
    let after = seconds(summary.peak_time_nanos.saturating_sub(first));
    page.line("at", &format!("{after} after the first record, order {}", summary.peak_order));
    page.line(
        "at the end",
        &format!("{} in {}", size(total.live_bytes), count(total.live_blocks, "block")),
    );
    if let Some(usage) = &summary.reserved {
        let ReservedUsage { peak_bytes, at_peak_bytes, end_bytes, .. } = *usage;
        let text = format!(
            "{} at most, {} at the peak, {} at the end",
            size(peak_bytes),
            size(at_peak_bytes),
            size(end_bytes)
        );
        page.line("reserved", &text);
    }
    page.line("duration", &seconds(duration));
    if summary.unknown_frees + summary.missing_frees + counts.late_records > 0 {
        page.line(
            "gaps",
            &format!(
                "{} frees of unknown blocks, {} frees missing, {} records out of order",
                summary.unknown_frees, summary.missing_frees, counts.late_records
            ),
        );
    }
    for (kind, times) in &summary.failures {
        page.line("failed", &format!("{}: {kind}", count(*times, "time")));
    }
    table(page, "By tag", &summary.by_tag);
    table(page, "By stream", &summary.by_stream);
    if summary.by_thread.len() > 1 {
        table(page, "By thread", &summary.by_thread);
    }
    if !summary.by_query.is_empty() {
        table(page, "By query", &summary.by_query);
    }
    if !summary.by_site.is_empty() {
        table(page, "By call site", &summary.by_site);
    }
    if !summary.by_stack.is_empty() {
        stacks(page, &summary.by_stack);
    }
    if summary.by_device.len() > 1 {
        let named = |(device, usage): (&u32, &Usage)| (device.to_string(), *usage);
        table(page, "By device", &summary.by_device.iter().map(named).collect::<Vec<_>>());
    }
    call_times(page, &summary.times);
    page.title("Sizes");
    for (from, requests) in summary.sizes.rows() {
        page.line(&format!("from {}", size(from)), &count(requests, "request"));
    }
    if !summary.leaks.is_empty() {
        page.title(reading.leaks_title());
    }
    for leak in summary.leaks.iter().take(ROWS) {
        let tag = if leak.tag.is_empty() { "untagged" } else { &leak.tag };
        let at = if leak.site.is_empty() { "" } else { ", at " };
        page.line(
            &format!("{:#x}", leak.block.ptr),
            &format!(
                "{}, {tag}{at}{}, order {}, age {:.3} s",
                size(leak.block.charged),
                leak.site,
                leak.block.order,
                leak.age_nanos as f64 / 1e9
            ),
        );
    }
    more(page, summary.leaks.len());
}

fn table(page: &mut TextReport, title: &str, rows: &[(String, Usage)]) {
    page.title(title);
    for (name, usage) in rows.iter().take(ROWS) {
        let name = if name.is_empty() { "untagged" } else { name };
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
                size(usage.peak_bytes),
                size(usage.live_bytes),
                count(usage.allocations, "allocation")
            ),
        );
    }
    more(page, rows.len());
}

/// The maximum number of stacks shown, and of frames of each.
const STACKS: usize = 3;
const FRAMES: usize = 12;

fn stacks(page: &mut TextReport, rows: &[(Vec<Arc<str>>, Usage)]) {
    page.title("By sampled stack");
    for (frames, usage) in rows.iter().take(STACKS) {
        page.row(&format!(
            "peak granted {}, at the end {}, {}",
            size(usage.peak_bytes),
            size(usage.live_bytes),
            count(usage.allocations, "allocation")
        ));
        for frame in frames.iter().take(FRAMES) {
            page.row(&format!("  {frame}"));
        }
        if frames.len() > FRAMES {
            page.row(&format!("  and {} more frames", frames.len() - FRAMES));
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
