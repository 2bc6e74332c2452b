//! The report of relational work, as it appears in JSON.

use serde::Serialize;
use xlog_cuda::Result;
use xlog_cuda::driver::DeviceKind;
use xlog_report::text_report::{TextReport, size};
use xlog_workloads::relational::{Session, Verdict, Workload};
use xlog_workloads::stack::{Stack, StackOptions};

use super::RelationalArguments;
use crate::doctor::Selection;
use crate::replay::PoolReport;
use crate::run::report::{RunHead, RunReport, race_problem, races_text};

pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) rows: u64,
    pub(super) rounds: Option<u32>,
    pub(super) seconds: f64,
    pub(super) verdict: Verdict,
}

#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    #[serde(flatten)]
    head: RunHead,
    budget: Option<u64>,
    rows: usize,
    streams: u32,
    threads: u32,
    repeat: u32,
    seed: u64,
    runs: u32,
    runs_verified: u32,
    runs_wrong: u32,
    first_wrong: Option<String>,
    /// Rows of the results, then the number the host computed.
    rows_out: u64,
    rows_expected: u64,
    /// The maximum number of rounds of a fixpoint.
    rounds: Option<u32>,
    /// The races that a simulated device's detector found.
    races: Vec<String>,
    #[serde(skip)]
    detects_races: bool,
    launches: usize,
    allocations: u64,
    pool: Option<PoolReport>,
    events_recorded: u64,
    waits_inserted: u64,
    /// Waits elided because the order was already implied.
    waits_elided: u64,
    /// The maximum bytes in buffers.
    peak_bytes: usize,
    /// The maximum bytes reserved from the device.
    peak_reserved_bytes: Option<u64>,
    /// Bytes not returned at the end.
    bytes_left: usize,
    failed_frees: u64,
    /// From the first launch to the last result, including the host's part.
    pub(super) seconds: Option<f64>,
    /// Device time: the sum of a thread's runs, averaged over the threads.
    work_seconds: f64,
    best_seconds: Option<f64>,
    rows_per_second: Option<f64>,
    best_rows_per_second: Option<f64>,
    /// Bytes that the kernels must read and write, each value once.
    bytes_moved: u64,
    bytes_per_second: Option<f64>,
    /// The peak memory bandwidth of the device, if the driver reports it.
    peak_bytes_per_second: Option<u64>,
    bandwidth_share: Option<f64>,
}

impl Report {
    pub(super) fn new(
        selection: Selection,
        work: &Workload,
        rows: usize,
        options: &StackOptions,
        arguments: &RelationalArguments,
    ) -> Self {
        Self {
            head: RunHead::new(work.name(), selection, options.kind.name()),
            budget: options.budget,
            rows,
            streams: arguments.streams,
            threads: arguments.threads,
            repeat: arguments.repeat,
            seed: arguments.seed,
            runs: arguments.threads * arguments.repeat,
            ..Self::default()
        }
    }

    pub(super) fn note_device(&mut self, stack: &Stack) {
        let properties = stack.device().properties();
        self.detects_races = properties.kind != DeviceKind::Cuda;
        self.peak_bytes_per_second = properties.peak_bandwidth;
    }

    pub(super) fn note(&mut self, stack: &Stack, session: &Session<'_>) {
        let statistics = session.runtime().statistics();
        self.launches = session.launches();
        self.allocations = statistics.allocations;
        self.events_recorded = statistics.events_recorded;
        self.waits_inserted = statistics.waits_inserted;
        self.waits_elided = statistics.waits_elided;
        self.bytes_left = statistics.bytes_outstanding;
        self.peak_bytes = session.manager().peak_bytes();
        self.failed_frees = session.manager().failed_frees();
        self.peak_reserved_bytes = stack.peak_reserved();
        self.pool =
            stack.snapshot().map(|end| PoolReport::new(&end, session.pool_at_peak().as_ref()));
        self.bytes_moved = session.bytes_moved();
        self.races = stack.device().races().iter().map(ToString::to_string).collect();
    }

    /// Adds the runs; returns the first error.
    pub(super) fn note_runs(&mut self, runs: Vec<Result<Run>>) -> Result<()> {
        let mut failed = Ok(());
        let mut rows = 0;
        for run in runs {
            let run = match run {
                Ok(run) => run,
                Err(error) => {
                    failed = failed.and(Err(error));
                    continue;
                }
            };
            rows += run.rows;
            self.rows_out += run.verdict.rows;
            self.rows_expected += run.verdict.expected;
            self.rounds = self.rounds.max(run.rounds);
            self.work_seconds += run.seconds / f64::from(self.threads);
            if self.best_seconds.is_none_or(|best| run.seconds < best) {
                self.best_seconds = Some(run.seconds);
                self.best_rows_per_second =
                    (run.seconds > 0.0).then(|| run.rows as f64 / run.seconds);
            }
            match run.verdict.wrong {
                None => self.runs_verified += 1,
                Some(wrong) => {
                    self.runs_wrong += 1;
                    self.first_wrong.get_or_insert(format!("with seed {}, {wrong}", run.seed));
                }
            }
        }
        if self.work_seconds > 0.0 {
            self.rows_per_second = Some(rows as f64 / self.work_seconds);
            let moved = self.bytes_moved as f64 / self.work_seconds;
            self.bytes_per_second = Some(moved);
            self.bandwidth_share = self.peak_bytes_per_second.map(|peak| moved / peak as f64);
        }
        failed
    }
}

impl RunReport for Report {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        if let Some(wrong) = &self.first_wrong {
            let many = self.runs_wrong;
            return Some(format!("{many} of {} results are wrong: {wrong}", self.runs));
        }
        if let Some(races) = race_problem(&self.races) {
            return Some(races);
        }
        if self.runs_verified != self.runs {
            let verified = self.runs_verified;
            return Some(format!("{verified} of {} results were verified", self.runs));
        }
        if self.bytes_left > 0 || self.failed_frees > 0 {
            return Some(format!(
                "{} bytes were not returned, {} frees failed",
                self.bytes_left, self.failed_frees
            ));
        }
        None
    }

    fn render(&self) -> String {
        let (title, what) = match self.head.workload() {
            "join" => ("Join", format!("two tables of {} rows", self.rows)),
            "fixpoint" => ("Fixpoint", format!("a graph of {} edges", self.rows)),
            _ => ("Sort", format!("{} numbers", self.rows)),
        };
        let mut page = self.head.begin(title);
        page.line("resource", &self.head.resource);
        page.line(
            "work",
            &format!(
                "{what}, {} times by {} threads on {} streams",
                self.repeat, self.threads, self.streams
            ),
        );
        page.line("seed", &self.seed.to_string());
        if let Some(seconds) = self.seconds {
            self.figures(&mut page, seconds);
        }
        self.head.end(page, "every result equals the host's")
    }
}

impl Report {
    fn figures(&self, page: &mut TextReport, seconds: f64) {
        page.title("Result");
        page.line("verified", &format!("{} of {}", self.runs_verified, self.runs));
        page.line("rows out", &format!("{}, expected {}", self.rows_out, self.rows_expected));
        if let Some(rounds) = self.rounds {
            page.line("rounds", &format!("{rounds} at the most"));
        }
        page.line("races", &races_text(&self.races, self.detects_races));
        page.line("time", &format!("{:.3} s of {seconds:.2} s on the device", self.work_seconds));
        if let (Some(rate), Some(best)) = (self.rows_per_second, self.best_rows_per_second) {
            page.line("rate", &format!("{:.1} million rows/s, best {:.1}", rate / 1e6, best / 1e6));
        }
        if let Some(rate) = self.bytes_per_second {
            let share = self.bandwidth_share.zip(self.peak_bytes_per_second);
            let share = share.map_or_else(String::new, |(share, peak)| {
                format!(", {:.1} % of {:.0} GB/s", share * 100.0, peak as f64 / 1e9)
            });
            let moved = size(self.bytes_moved);
            page.line("moved", &format!("{moved}, {:.2} GB/s{share}", rate / 1e9));
        }

        page.title("Memory");
        page.line("launches", &self.launches.to_string());
        page.line("allocations", &self.allocations.to_string());
        if let Some(pool) = &self.pool {
            pool.render(page);
        }
        page.line(
            "peak",
            &match self.peak_reserved_bytes {
                Some(reserved) => {
                    format!("{}, from the device {}", size(self.peak_bytes as u64), size(reserved))
                }
                None => size(self.peak_bytes as u64),
            },
        );
        page.line(
            "budget",
            &self.budget.map_or_else(
                || "no limit".to_owned(),
                |limit| {
                    let share = self.peak_bytes as f64 / limit as f64 * 100.0;
                    format!("{}, at the most {share:.1} % of it used", size(limit))
                },
            ),
        );
        page.line(
            "waits",
            &format!(
                "{} inserted, {} elided, {} events recorded",
                self.waits_inserted, self.waits_elided, self.events_recorded
            ),
        );
        page.line("left", &size(self.bytes_left as u64));
        self.head.render_log(page);
    }
}
