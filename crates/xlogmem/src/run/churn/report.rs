//! The report of a churn, as it appears in JSON.

use serde::Serialize;
use xlog_cuda::device_runtime::PoolSnapshot;
use xlog_report::text_report::{TextReport, size};
use xlog_workloads::RunCounts;
use xlog_workloads::stack::Stack;

use super::blocks::{Checks, Counts};
use super::witness::{Compared, Wrong};
use super::{Plan, Workload};
use crate::doctor::Selection;
use crate::replay::PoolReport;
use crate::run::report::{RunHead, RunReport, race_problem, races_text};

#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    #[serde(flatten)]
    head: RunHead,
    budget: Option<u64>,
    allocations_asked: u64,
    max_bytes: u64,
    /// The distribution of sizes.
    sizes: &'static str,
    threads: u32,
    streams: u32,
    seed: u64,
    verify: bool,
    allocations: u64,
    frees: u64,
    /// Requests refused for lack of memory.
    failures: u64,
    blocks_verified: u64,
    blocks_wrong: u64,
    first_wrong: Option<Wrong>,
    /// Blocks that overlapped a live one when allocated.
    overlaps: u64,
    /// The races that a simulated device's detector found.
    pub(super) races: Vec<String>,
    #[serde(skip)]
    pub(super) detects_races: bool,
    /// The maximum requested bytes live at a time.
    peak_requested_bytes: u64,
    /// The maximum bytes reserved from the device.
    peak_reserved_bytes: Option<u64>,
    reserved_ratio: Option<f64>,
    pool: Option<PoolReport>,
    /// FNV-1a of the sequence in hexadecimal, for single-threaded workloads.
    check: Option<String>,
    /// The expected check value if nothing fails.
    check_expected: Option<String>,
    bytes_left: usize,
    pub(super) seconds: Option<f64>,
    /// Mean time of a call of the resource.
    allocate_nanos: Option<f64>,
    free_nanos: Option<f64>,
}

impl Report {
    pub(super) fn new(selection: Selection, plan: &Plan) -> Self {
        let workload = match plan.workload {
            Workload::RmmRandom => "rmm-random",
            Workload::SmallBlocks => "small-blocks",
            Workload::Threads => "threads",
        };
        Self {
            head: RunHead::new(workload, selection, plan.kind.name()),
            budget: plan.budget,
            allocations_asked: plan.allocations,
            max_bytes: plan.max,
            // RMM's sizes are always uniform.
            sizes: if plan.workload == Workload::RmmRandom { "uniform" } else { plan.sizes.name() },
            threads: plan.threads,
            streams: plan.streams,
            seed: plan.seed,
            verify: plan.verify,
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, checks: &Checks<'_>, stack: &Stack) {
        self.overlaps = checks.overlaps();
        self.peak_requested_bytes = checks.peak_bytes();
        self.peak_reserved_bytes = stack.peak_reserved();
        self.reserved_ratio = self
            .peak_reserved_bytes
            .filter(|_| self.peak_requested_bytes > 0)
            .map(|reserved| reserved as f64 / self.peak_requested_bytes as f64);
        self.bytes_left = stack.resource().bytes_outstanding();
    }

    pub(super) fn note_blocks(&mut self, counts: &Counts) {
        (self.allocations, self.frees) = (counts.allocations, counts.frees);
        self.failures = counts.failures;
        let mean = |nanos: u64, calls: u64| (calls > 0).then(|| nanos as f64 / calls as f64);
        self.allocate_nanos = mean(counts.allocate_nanos, counts.allocations + counts.failures);
        self.free_nanos = mean(counts.free_nanos, counts.frees);
    }

    pub(super) fn note_pool(&mut self, peak: Option<&PoolSnapshot>, end: Option<&PoolSnapshot>) {
        self.pool = end.or(peak).map(|end| PoolReport::new(end, peak));
    }

    pub(super) fn note_counts(&mut self, tally: &RunCounts, expected: &RunCounts) {
        self.check = Some(format!("{:016x}", tally.check));
        self.check_expected = (tally.failures == 0).then(|| format!("{:016x}", expected.check));
    }

    pub(super) fn note_witness(&mut self, compared: Compared) {
        self.blocks_verified = compared.verified;
        self.blocks_wrong = compared.wrong;
        self.first_wrong = compared.first;
    }
}

impl RunReport for Report {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        if let Some(wrong) = &self.first_wrong {
            return Some(format!(
                "{} blocks are wrong; the first, block {}, had {} instead of {} at its {}",
                self.blocks_wrong, wrong.block, wrong.found, wrong.expected, wrong.end
            ));
        }
        if self.overlaps > 0 {
            return Some(format!("{} blocks were handed out over live ones", self.overlaps));
        }
        if let Some(races) = race_problem(&self.races) {
            return Some(races);
        }
        if self.verify && self.blocks_verified != self.allocations {
            let (verified, blocks) = (self.blocks_verified, self.allocations);
            return Some(format!("{verified} of {blocks} blocks were verified"));
        }
        if let Some(expected) = &self.check_expected
            && self.check.as_ref() != Some(expected)
        {
            let check = self.check.as_deref().unwrap_or("nothing");
            return Some(format!("the sequence has the check value {check} instead of {expected}"));
        }
        if self.allocations == 0 {
            return Some("no request was served".to_owned());
        }
        // Under a budget, refusals are expected.
        if self.failures > 0 && self.budget.is_none() {
            return Some(format!("{} were refused", self.refused()));
        }
        (self.bytes_left > 0 || self.frees != self.allocations).then(|| {
            let (left, frees, blocks) = (self.bytes_left, self.frees, self.allocations);
            format!("{left} bytes were not returned, {frees} of {blocks} blocks were freed")
        })
    }

    fn render(&self) -> String {
        let mut page = self.head.begin("Churn");
        page.line("workload", self.head.workload());
        page.line("resource", &self.head.resource);
        page.line("budget", &self.budget.map_or_else(|| "none".to_owned(), size));
        page.line(
            "work",
            &format!(
                "{} blocks, {} up to {}, over {} streams by {} threads",
                self.allocations_asked,
                self.sizes,
                size(self.max_bytes),
                self.streams,
                self.threads
            ),
        );
        page.line("seed", &self.seed.to_string());
        if let Some(seconds) = self.seconds {
            self.figures(&mut page, seconds);
        }
        let mut verdict = match self.verify {
            true => "every block verified".to_owned(),
            false => "done; the blocks were not looked at".to_owned(),
        };
        if self.failures > 0 {
            verdict += &format!("; {} were refused", self.refused());
        }
        self.head.end(page, &verdict)
    }
}

impl Report {
    fn refused(&self) -> String {
        format!("{} of {} requests", self.failures, self.failures + self.allocations)
    }

    fn figures(&self, page: &mut TextReport, seconds: f64) {
        page.title("Result");
        page.line("allocations", &self.allocations.to_string());
        page.line("refused", &self.refused());
        if self.verify {
            page.line("blocks verified", &self.blocks_verified.to_string());
            page.line("blocks wrong", &self.blocks_wrong.to_string());
            page.line("overlaps", &self.overlaps.to_string());
        }
        page.line("races", &races_text(&self.races, self.detects_races));
        page.line("peak requested", &size(self.peak_requested_bytes));
        page.line(
            "peak reserved",
            &match (self.peak_reserved_bytes, self.reserved_ratio) {
                (Some(bytes), Some(ratio)) => {
                    format!("{}, {ratio:.3} of what was asked for", size(bytes))
                }
                (Some(bytes), None) => size(bytes),
                (None, _) => "unknown".to_owned(),
            },
        );
        if let Some(pool) = &self.pool {
            pool.render(page);
        }
        if let Some(check) = &self.check {
            page.line("check value", check);
        }
        page.line("left", &size(self.bytes_left as u64));
        self.head.render_log(page);
        page.line("time", &format!("{seconds:.2} s"));
        if let (Some(allocate), Some(free)) = (self.allocate_nanos, self.free_nanos) {
            page.line("per call", &format!("allocate {allocate:.0} ns, free {free:.0} ns"));
        }
    }
}
