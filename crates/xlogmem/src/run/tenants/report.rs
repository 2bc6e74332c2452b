//! The report of `run tenants`, as it appears in JSON.

use serde::Serialize;
use xlog_report::text_report::{TextReport, size};

use super::TenantsArguments;
use super::watch::LedgerPeaks;
use super::worker::Outcome;
use crate::doctor::Selection;
use crate::run::report::{RunHead, RunReport};

#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) head: RunHead,
    processes: u32,
    tenants: u32,
    rounds: u32,
    seed: u64,
    /// The limit of all processes together.
    pub(super) limit_bytes: Option<u64>,
    /// The maximum used and granted bytes of all processes together.
    pub(super) highest_bytes: u64,
    /// Readings of the ledger.
    pub(super) samples: u64,
    /// Readings above the limit.
    pub(super) violations: u64,
    /// Bytes in the ledger after all processes had ended.
    pub(super) left_bytes: u64,
    pub(super) seconds: Option<f64>,
    pub(super) outcomes: Vec<Outcome>,
}

impl Report {
    pub(super) fn new(selection: Selection, arguments: &TenantsArguments) -> Self {
        Self {
            head: RunHead::new("tenants", selection, &arguments.resource),
            processes: arguments.processes,
            tenants: arguments.tenants,
            rounds: arguments.rounds,
            seed: arguments.seed,
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, peaks: LedgerPeaks) {
        self.samples = peaks.samples;
        self.highest_bytes = peaks.highest;
        self.violations = peaks.violations;
    }

    fn sum(&self, field: impl Fn(&Outcome) -> u64) -> u64 {
        self.outcomes.iter().map(field).sum()
    }
}

impl RunReport for Report {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        for outcome in &self.outcomes {
            let who = format!("process {} ({})", outcome.process, outcome.pid);
            if let Some(error) = &outcome.error {
                return Some(format!("{who}: {error}"));
            }
            let counts = [
                (outcome.wrong, "buffers came back wrong"),
                (outcome.scope_violations, "times a tenant was above its hard limit"),
                (outcome.races as u64, "races"),
                (outcome.left_bytes, "bytes did not come back"),
            ];
            if let Some((count, what)) = counts.iter().find(|(count, _)| *count > 0) {
                return Some(format!("{who}: {count} {what}"));
            }
        }
        let limit = self.limit_bytes.unwrap_or(0);
        if self.violations > 0 || self.highest_bytes > limit {
            return Some(format!(
                "{} readings above the limit of {limit} bytes, the highest {}",
                self.violations, self.highest_bytes
            ));
        }
        if self.left_bytes > 0 {
            return Some(format!("the ledger still counts {} bytes", self.left_bytes));
        }
        if self.outcomes.len() != self.processes as usize {
            let told = self.outcomes.len();
            return Some(format!("{told} of {} processes came to an end", self.processes));
        }
        if self.sum(|outcome| outcome.verified) == 0 {
            return Some("no buffer fitted; raise --budget".to_owned());
        }
        None
    }

    fn render(&self) -> String {
        let mut page = self.head.begin("Tenants");
        page.line("resource", &format!("{}, under a budget, in a ledger", self.head.resource));
        page.line(
            "work",
            &format!(
                "{} processes with {} tenants each, {} turns each",
                self.processes, self.tenants, self.rounds
            ),
        );
        page.line("seed", &self.seed.to_string());
        if let Some(seconds) = self.seconds {
            self.figures(&mut page, seconds);
        }
        self.head.end(page, "the limit held, every buffer was right, everything came back")
    }
}

impl Report {
    fn figures(&self, page: &mut TextReport, seconds: f64) {
        page.title("Result");
        page.line("limit of all", &size(self.limit_bytes.unwrap_or(0)));
        let highest = size(self.highest_bytes);
        page.line("highest", &format!("{highest}, in {} readings", self.samples));
        page.line("left", &size(self.left_bytes));
        page.line("time", &format!("{seconds:.2} s"));
        page.columns(&["", "pid", "blocks", "refused", "verified", "wrong", "peak"]);
        for outcome in &self.outcomes {
            page.columns(&[
                &outcome.process.to_string(),
                &outcome.pid.to_string(),
                &outcome.blocks.to_string(),
                &outcome.refused.to_string(),
                &outcome.verified.to_string(),
                &outcome.wrong.to_string(),
                &size(outcome.peak_bytes as u64),
            ]);
        }
        page.columns(&[
            "all",
            "",
            &self.sum(|outcome| outcome.blocks).to_string(),
            &self.sum(|outcome| outcome.refused).to_string(),
            &self.sum(|outcome| outcome.verified).to_string(),
            &self.sum(|outcome| outcome.wrong).to_string(),
            "",
        ]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse_tenants;
    use crate::doctor::{Cuda, select};

    /// Returns the report of a successful run.
    fn good() -> Report {
        let arguments = parse_tenants(&["--processes", "1"]);
        let selection = select(Some("sim"), &Cuda::find()).unwrap().describe();
        let outcome = Outcome { verified: 3, ..Outcome::default() };
        let mut report = Report::new(selection, &arguments);
        report.limit_bytes = Some(100);
        report.highest_bytes = 100;
        report.seconds = Some(0.5);
        report.outcomes = vec![outcome];
        report
    }

    #[test]
    fn whatever_is_not_as_it_must_be_is_an_error_that_says_what() {
        let mut report = good();
        report.judge();
        assert!(report.head.ok && report.head.error.is_none());
        let with = |change: fn(&mut Outcome)| {
            let mut report = good();
            report.outcomes.iter_mut().for_each(change);
            report
        };
        let cases: [(Report, &str); 9] = [
            (with(|outcome| outcome.wrong = 2), "2 buffers came back wrong"),
            (with(|outcome| outcome.scope_violations = 1), "above its hard limit"),
            (with(|outcome| outcome.races = 1), "1 races"),
            (with(|outcome| outcome.left_bytes = 256), "256 bytes did not come back"),
            (with(|outcome| outcome.error = Some("lost".to_owned())), "lost"),
            (with(|outcome| outcome.verified = 0), "no buffer fitted"),
            (Report { violations: 1, highest_bytes: 101, ..good() }, "above the limit of 100"),
            (Report { left_bytes: 1, ..good() }, "still counts 1 bytes"),
            (Report { outcomes: Vec::new(), ..good() }, "0 of 1 processes"),
        ];
        for (mut report, words) in cases {
            report.judge();
            let error = report.head.error.clone().unwrap_or_default();
            assert!(!report.head.ok && error.contains(words), "{error} does not say {words}");
            assert!(report.render().contains(words.split(' ').next_back().unwrap()));
        }
    }
}
