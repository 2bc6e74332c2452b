//! The report of replays, as it appears in JSON.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
//! Every field is always present; an unknown value is `null`.
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use xlog_cuda::device_runtime::PoolSnapshot;
use xlog_report::ReadingReport;
use xlog_report::text::{seconds, times_text};
use xlog_report::text_report::{TextReport, size};
use xlog_trace::TimesReport;
use xlog_workloads::stack::{Stack, StackKind};

use super::execute::{Failed, Mode, Outcome};
use super::plan::LogFigures;
use super::samples::{self, Sample};
use crate::doctor::Selection;

const SCHEMA: u32 = 1;

/// The statistics of a pool, as they appear in JSON.
#[derive(Serialize, Clone, Debug, Default)]
pub(crate) struct PoolReport {
    pub(crate) magazine: u64,
    pub(crate) own: u64,
    pub(crate) covered: u64,
    pub(crate) completed: u64,
    pub(crate) grown: u64,
    pub(crate) waited: u64,
    /// The part of the free memory outside the largest range, at the peak.
    pub(crate) fragmentation_at_peak: Option<f64>,
    /// The part of the free memory outside the largest range, at the end.
    pub(crate) fragmentation_at_end: f64,
    pub(crate) free_ranges_at_end: usize,
    pub(crate) segments: usize,
    pub(crate) segment_kind: &'static str,
}

impl PoolReport {
    pub(crate) fn new(end: &PoolSnapshot, peak: Option<&PoolSnapshot>) -> Self {
        Self {
            magazine: end.paths.magazine,
            own: end.paths.own,
            covered: end.paths.covered,
            completed: end.paths.completed,
            grown: end.paths.grown,
            waited: end.paths.waited,
            fragmentation_at_peak: peak.map(PoolSnapshot::fragmentation),
            fragmentation_at_end: end.fragmentation(),
            free_ranges_at_end: end.free_ranges,
            segments: end.segments,
            segment_kind: end.segment_kind,
        }
    }

    pub(crate) fn render(&self, page: &mut TextReport) {
        page.line(
            "served from",
            &format!(
                "magazine {}, own {}, covered {}, completed {}, grown {}, waited {}",
                self.magazine, self.own, self.covered, self.completed, self.grown, self.waited
            ),
        );
        let peak = self.fragmentation_at_peak;
        let peak =
            peak.map_or_else(String::new, |part| format!("{:.1} % at the peak, ", part * 100.0));
        page.line(
            "fragmentation",
            &format!(
                "{peak}{:.1} % at the end, in {} free ranges",
                self.fragmentation_at_end * 100.0,
                self.free_ranges_at_end
            ),
        );
        page.line("segments", &format!("{} {}", self.segments, self.segment_kind));
    }
}

/// The figures of one resource.
#[derive(Serialize, Debug)]
pub(super) struct RunReport {
    resource: &'static str,
    device_name: String,
    /// Whether every operation was served and nothing is left.
    served: bool,
    seconds: f64,
    operations: u64,
    /// Time in calls of the resource divided by the number of calls; includes one clock reading per call.
    nanos_per_operation: f64,
    allocate: TimesReport,
    free: TimesReport,
    uses: TimesReport,
    peak_live_bytes: u64,
    peak_reserved_bytes: Option<u64>,
    reserved_ratio: Option<f64>,
    failures: u64,
    first_failures: Vec<Failed>,
    /// Frees and uses skipped because their block was not served or the resource tracks no uses.
    skipped: u64,
    behind_nanos: u64,
    bytes_left: usize,
    /// The cost of ordering streams: events, waits for them, and elided waits.
    events_recorded: u64,
    waits_inserted: u64,
    waits_elided: u64,
    races: Vec<String>,
    pool: Option<PoolReport>,
    /// Samples at equal steps of operations, the last at the end.
    over_time: Vec<Sample>,
    /// Relative to the first resource of a comparison.
    time_ratio: Option<f64>,
    memory_ratio: Option<f64>,
}

impl RunReport {
    pub(super) fn new(kind: StackKind, stack: &Stack, outcome: &Outcome) -> Self {
        let times = [&outcome.allocate, &outcome.free, &outcome.uses];
        let operations: u64 = times.iter().map(|times| times.calls()).sum();
        let nanos: u64 = times.iter().map(|times| times.sum()).sum();
        let reserved = stack.peak_reserved();
        let ratio = |reserved: u64| reserved as f64 / outcome.peak_live_bytes as f64;
        let bytes_left = stack.resource().bytes_outstanding();
        let statistics = stack.resource().statistics();
        let races: Vec<String> = stack.device().races().iter().map(ToString::to_string).collect();
        Self {
            resource: kind.name(),
            device_name: stack.device().properties().name.clone(),
            served: outcome.failures == 0 && bytes_left == 0 && races.is_empty(),
            seconds: outcome.seconds,
            operations,
            nanos_per_operation: if operations == 0 {
                0.0
            } else {
                nanos as f64 / operations as f64
            },
            allocate: outcome.allocate.report(),
            free: outcome.free.report(),
            uses: outcome.uses.report(),
            peak_live_bytes: outcome.peak_live_bytes,
            peak_reserved_bytes: reserved,
            reserved_ratio: reserved.filter(|_| outcome.peak_live_bytes > 0).map(ratio),
            failures: outcome.failures,
            first_failures: outcome.first_failures.clone(),
            skipped: outcome.skipped,
            behind_nanos: outcome.behind_nanos,
            bytes_left,
            events_recorded: statistics.events_recorded,
            waits_inserted: statistics.waits_inserted,
            waits_elided: statistics.waits_elided,
            races,
            pool: outcome.at_end.as_ref().map(|end| PoolReport::new(end, outcome.at_peak.as_ref())),
            over_time: outcome.over_time.clone(),
            time_ratio: None,
            memory_ratio: None,
        }
    }

    fn problem(&self) -> Option<String> {
        let name = self.resource;
        if let Some(failed) = self.first_failures.first() {
            return Some(format!(
                "{name}: {} operations failed; the first: {failed}",
                self.failures
            ));
        }
        if let Some(race) = self.races.first() {
            return Some(format!("{name}: {} races; the first: {race}", self.races.len()));
        }
        (!self.served).then(|| format!("{name}: {} bytes were not returned", self.bytes_left))
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of order {}", self.action, self.order)?;
        let mut between = " (";
        let mut part = |f: &mut std::fmt::Formatter<'_>, text: String| {
            let begun = std::mem::replace(&mut between, ", ");
            write!(f, "{begun}{text}")
        };
        if let Some(thread) = self.thread {
            part(f, format!("thread {thread}"))?;
        }
        if let Some(stream) = self.stream {
            part(f, format!("stream {stream}"))?;
        }
        if let Some(bytes) = self.bytes {
            part(f, format!("{bytes} bytes"))?;
        }
        if let Some(tag) = &self.tag {
            part(f, tag.clone())?;
        }
        let end = if between == ", " { ")" } else { "" };
        write!(f, "{end}: {}", self.error)
    }
}

/// The report of a replay.
#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    schema: u32,
    /// Whether every resource served every operation of the log.
    ok: bool,
    pub(super) error: Option<String>,
    selection: Selection,
    pub(super) log: String,
    pub(super) format: Option<&'static str>,
    pub(super) reading: Option<ReadingReport>,
    pub(super) log_figures: Option<LogFigures>,
    mode: &'static str,
    speed: Option<f64>,
    budget: Option<u64>,
    /// The cost of a clock reading.
    clock_nanos: f64,
    runs: Vec<RunReport>,
}

impl Report {
    pub(super) fn new(selection: Selection, log: &Path, mode: Mode, budget: Option<u64>) -> Self {
        let (mode, speed) = match mode {
            Mode::Sequential => ("sequential", None),
            Mode::Threads => ("threads", None),
            Mode::Recorded(speed) => ("recorded", Some(speed)),
        };
        Self {
            schema: SCHEMA,
            selection,
            log: log.display().to_string(),
            mode,
            speed,
            budget,
            clock_nanos: clock_nanos(),
            ..Self::default()
        }
    }

    /// Adds a run, with its ratios to the first.
    pub(super) fn add(&mut self, mut run: RunReport) {
        if let Some(first) = self.runs.first() {
            let ratio = |this: f64, first: f64| (first > 0.0).then(|| this / first);
            run.time_ratio = ratio(run.nanos_per_operation, first.nanos_per_operation);
            run.memory_ratio = run
                .peak_reserved_bytes
                .zip(first.peak_reserved_bytes)
                .and_then(|(this, first)| ratio(this as f64, first as f64));
        }
        self.runs.push(run);
    }

    /// Sets whether all operations were served, and if not, why.
    pub(super) fn judge(&mut self) {
        let spec = &self.selection.spec;
        let problem = || self.runs.iter().find_map(RunReport::problem);
        self.error = self.error.clone().or_else(|| Some(format!("{spec}, {}", problem()?)));
        self.ok = self.error.is_none();
    }

    pub(super) fn render(&self) -> String {
        let mut page = TextReport::default();
        page.title("Replay");
        let name = self.runs.first().map(|run| run.device_name.as_str());
        let spec = &self.selection.spec;
        page.line("device", &name.map_or_else(|| spec.clone(), |name| format!("{spec} ({name})")));
        page.line("why", &self.selection.reason);
        page.line("log", &self.log);
        page.line(
            "mode",
            &match self.speed {
                Some(speed) => format!("{}, {speed} times as fast", self.mode),
                None => self.mode.to_owned(),
            },
        );
        page.line("budget", &self.budget.map_or_else(|| "none".to_owned(), size));
        if let Some(reading) = &self.reading {
            reading.render(&mut page);
        }
        if let Some(figures) = &self.log_figures {
            log_lines(&mut page, figures);
        }
        for run in &self.runs {
            run_lines(&mut page, run);
        }
        if self.runs.len() > 1 {
            self.table(&mut page);
        }
        match &self.error {
            Some(error) => page.close(error),
            None => match self.reading.as_ref().and_then(|reading| reading.refusal(&self.log)) {
                Some(why) => page.close(&format!(
                    "{spec}: every operation of these records was served, others are not in the log; {why}"
                )),
                None => page.close(&format!("{spec}: every operation was served")),
            },
        }
    }

    fn table(&self, page: &mut TextReport) {
        page.title("Side by side");
        let row = |cells: [&str; 7]| {
            let [resource, time, speed, reserved, memory, of_peak, failed] = cells;
            format!(
                "{resource:<9}{time:>9}{speed:>14}{reserved:>12}{memory:>14}{of_peak:>9}{failed:>8}"
            )
        };
        page.row(&row(["resource", "per call", "time", "reserved", "memory", "res/req", "failed"]));
        for run in &self.runs {
            page.row(&row([
                run.resource,
                &seconds(run.nanos_per_operation.round() as u64),
                &times(run.time_ratio, "faster", "slower"),
                &run.peak_reserved_bytes.map_or_else(|| "unknown".to_owned(), size),
                &times(run.memory_ratio, "less", "more"),
                &run.reserved_ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
                &run.failures.to_string(),
            ]));
        }
    }
}

/// Describes a ratio to the first resource: 0.08 of its time is "12x faster".
fn times(ratio: Option<f64>, below: &str, above: &str) -> String {
    let ratio = ratio.unwrap_or(1.0);
    let (factor, word) = if ratio < 1.0 { (1.0 / ratio, below) } else { (ratio, above) };
    match factor {
        ..1.005 => "1.00x".to_owned(),
        1.005..9.95 => format!("{factor:.1}x {word}"),
        _ => format!("{factor:.0}x {word}"),
    }
}

fn log_lines(page: &mut TextReport, figures: &LogFigures) {
    page.line(
        "operations",
        &format!(
            "{} allocations, {} frees, {} uses by {} threads on {} streams",
            figures.allocations, figures.frees, figures.uses, figures.threads, figures.streams
        ),
    );
    page.line(
        "peak requested",
        &format!("{} in {} blocks", size(figures.peak_live_bytes), figures.peak_live_blocks),
    );
    page.line(
        "not replayed",
        &format!(
            "{} failed when recorded, {} of unknown blocks, {} of no bytes or pointer, {} others",
            figures.recorded_failures, figures.unknown_blocks, figures.empty, figures.other
        ),
    );
    page.line(
        "mended",
        &format!(
            "{} frees missing, {} blocks never freed",
            figures.missing_frees, figures.never_freed
        ),
    );
    if figures.devices > 1 {
        page.line("devices", &format!("{} in the log, all replayed on this one", figures.devices));
    }
    if figures.late_records > 0 {
        page.line("out of order", &format!("{} records", figures.late_records));
    }
    if let Some(problem) = &figures.first_problem {
        page.line("first problem", &format!("{problem}; {} in all", figures.problems()));
    }
}

fn run_lines(page: &mut TextReport, run: &RunReport) {
    page.title(&format!("Resource {}", run.resource));
    page.line("operations", &run.operations.to_string());
    page.line("time", &format!("{:.3} s", run.seconds));
    page.line("per operation", &seconds(run.nanos_per_operation.round() as u64));
    for (name, times) in [("allocate", &run.allocate), ("free", &run.free), ("uses", &run.uses)] {
        if times.calls > 0 {
            page.line(name, &times_text(times));
        }
    }
    page.line("peak requested", &size(run.peak_live_bytes));
    page.line(
        "peak reserved",
        &match (run.peak_reserved_bytes, run.reserved_ratio) {
            (Some(bytes), Some(ratio)) => {
                format!("{}, {ratio:.3} of what was requested", size(bytes))
            }
            (Some(bytes), None) => size(bytes),
            (None, _) => "unknown".to_owned(),
        },
    );
    if let Some(pool) = &run.pool {
        pool.render(page);
    }
    if run.resource != "direct" {
        page.line(
            "order",
            &format!(
                "{} events recorded, {} waits inserted, {} elided",
                run.events_recorded, run.waits_inserted, run.waits_elided
            ),
        );
    }
    if run.behind_nanos > 0 {
        page.line("behind", &format!("at most {:.3} ms", run.behind_nanos as f64 / 1e6));
    }
    page.line("failures", &run.failures.to_string());
    for failed in &run.first_failures {
        page.line("", &failed.to_string());
    }
    if run.skipped > 0 {
        page.line("left out", &format!("{} operations without their block", run.skipped));
    }
    page.line("left", &size(run.bytes_left as u64));
    samples::render(page, &run.over_time);
}

fn clock_nanos() -> f64 {
    const TIMES: u32 = 1000;
    let start = Instant::now();
    for _ in 0..TIMES {
        std::hint::black_box(Instant::now());
    }
    start.elapsed().as_nanos() as f64 / f64::from(TIMES)
}
