//! What came of a run, in the shape of its JSON.
//!
//! Field names are the interface: a field may be added, none changes its name or meaning without a new `schema` number.
//! Every field is always there; what is not known is `null`.
use serde::Serialize;
use xlog_report::text_report::{TextReport, size};

use super::handoff::Wrong;
use super::log::LogReport;
use crate::cli::HandoffArguments;
use crate::doctor::Selection;

const SCHEMA: u32 = 1;

/// All of it.
#[derive(Serialize, Debug)]
pub(super) struct Report {
    /// The number of this shape.
    schema: u32,
    workload: &'static str,
    /// Whether every round was run and verified, nothing raced and nothing is left.
    ok: bool,
    /// Why not, in one line.
    pub(super) error: Option<String>,
    pub(super) selection: Selection,
    pub(super) device_name: Option<String>,
    resource: &'static str,
    streams: u32,
    threads: u32,
    /// How many rounds were asked for, if the device could be opened.
    pub(super) rounds: Option<u32>,
    rows: u32,
    seed: u64,
    pub(super) rounds_verified: u64,
    pub(super) rounds_wrong: u64,
    pub(super) first_wrong: Option<Wrong>,
    /// What the race detector of a simulated device found.
    pub(super) races: Vec<String>,
    /// Blocks that were allocated.
    pub(super) blocks: u64,
    /// Events that were recorded to order streams.
    pub(super) edges: u64,
    pub(super) waits_inserted: u64,
    /// Waits that were needed for order but already implied.
    pub(super) waits_elided: u64,
    /// Calls of the driver seam, on a device that counts them.
    pub(super) driver_calls: Option<u64>,
    /// The peak of bytes in buffers.
    pub(super) bytes_peak: usize,
    /// Bytes that were not returned when all was done.
    pub(super) bytes_left: usize,
    pub(super) failed_frees: u64,
    /// What became of the log, if one was asked for.
    pub(super) log: Option<LogReport>,
    pub(super) seconds: Option<f64>,
    rows_per_second: Option<f64>,
}

impl Report {
    pub(super) fn new(
        selection: Selection,
        resource: &'static str,
        arguments: &HandoffArguments,
    ) -> Self {
        Self {
            schema: SCHEMA,
            workload: "handoff",
            ok: false,
            error: None,
            selection,
            device_name: None,
            resource,
            streams: arguments.streams,
            threads: arguments.threads,
            rounds: arguments.rounds,
            rows: arguments.rows,
            seed: arguments.seed,
            rounds_verified: 0,
            rounds_wrong: 0,
            first_wrong: None,
            races: Vec::new(),
            blocks: 0,
            edges: 0,
            waits_inserted: 0,
            waits_elided: 0,
            driver_calls: None,
            bytes_peak: 0,
            bytes_left: 0,
            failed_frees: 0,
            log: None,
            seconds: None,
            rows_per_second: None,
        }
    }

    /// Says whether the run is good, and in one line why not.
    pub(super) fn judge(&mut self) {
        self.rows_per_second = self
            .seconds
            .filter(|seconds| *seconds > 0.0)
            .map(|seconds| self.rounds_verified as f64 * f64::from(self.rows) / seconds);
        let missing = self.log.as_ref().and_then(LogReport::problem);
        self.error = self.error.take().or_else(|| self.problem()).or(missing);
        self.ok = self.error.is_none();
    }

    fn problem(&self) -> Option<String> {
        let spec = &self.selection.spec;
        if let Some(wrong) = &self.first_wrong {
            return Some(format!(
                "{spec}: {} rounds are wrong; the first, round {}, gave {} instead of {}",
                self.rounds_wrong, wrong.round, wrong.found, wrong.expected
            ));
        }
        if let Some(race) = self.races.first() {
            return Some(format!("{spec}: {} races; the first: {race}", self.races.len()));
        }
        let rounds = self.rounds.map_or(0, u64::from);
        if self.rounds_verified != rounds {
            let verified = self.rounds_verified;
            return Some(format!("{spec}: {verified} of {rounds} rounds were verified"));
        }
        if self.bytes_left > 0 || self.failed_frees > 0 {
            return Some(format!(
                "{spec}: {} bytes were not returned, {} frees failed",
                self.bytes_left, self.failed_frees
            ));
        }
        None
    }

    /// The report for people.
    pub(super) fn render(&self) -> String {
        let mut page = TextReport::default();
        page.title("Handoff");
        let name = self.device_name.as_deref();
        page.line(
            "device",
            &name.map_or_else(
                || self.selection.spec.clone(),
                |name| format!("{} ({name})", self.selection.spec),
            ),
        );
        page.line("why", &self.selection.reason);
        page.line("resource", self.resource);
        page.line(
            "work",
            &format!(
                "{} rounds of {} rows over {} streams by {} threads",
                self.rounds.map_or_else(|| "no".to_owned(), |rounds| rounds.to_string()),
                self.rows,
                self.streams,
                self.threads
            ),
        );
        page.line("seed", &self.seed.to_string());
        if let Some(seconds) = self.seconds {
            self.figures(&mut page, seconds);
        }
        match &self.error {
            None => page.close(&format!("{}: every round verified", self.selection.spec)),
            Some(error) => page.close(error),
        }
    }

    fn figures(&self, page: &mut TextReport, seconds: f64) {
        page.title("Result");
        page.line("rounds verified", &self.rounds_verified.to_string());
        page.line("rounds wrong", &self.rounds_wrong.to_string());
        page.line(
            "races",
            &match self.driver_calls {
                Some(_) => self.races.len().to_string(),
                None => "not looked for: only a simulated device can".to_owned(),
            },
        );
        page.line("blocks", &self.blocks.to_string());
        page.line("edges", &format!("{} events recorded", self.edges));
        page.line(
            "waits",
            &format!("{} inserted, {} elided", self.waits_inserted, self.waits_elided),
        );
        page.line(
            "driver calls",
            &match self.driver_calls {
                Some(calls) => calls.to_string(),
                None => "not counted on a GPU".to_owned(),
            },
        );
        page.line("peak", &size(self.bytes_peak as u64));
        page.line("left", &size(self.bytes_left as u64));
        if let Some(log) = &self.log {
            log.render(page);
        }
        page.line("time", &format!("{seconds:.2} s"));
        if let Some(rate) = self.rows_per_second {
            page.line("rate", &format!("{:.1} million rows/s", rate / 1e6));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse_handoff;
    use crate::doctor::{Cuda, select};

    /// A report of a run in which everything went well.
    fn good() -> Report {
        let arguments = parse_handoff(&["--rounds", "10"]);
        let selection = select(Some("sim"), &Cuda::find()).unwrap().describe();
        Report {
            rounds_verified: 10,
            seconds: Some(0.5),
            ..Report::new(selection, "async", &arguments)
        }
    }

    #[test]
    fn a_good_run_is_ok_and_has_a_rate() {
        let mut report = good();
        report.judge();
        assert!(report.ok && report.error.is_none());
        assert_eq!(report.rows_per_second, Some(10.0 * f64::from(report.rows) / 0.5));
    }

    #[test]
    fn whatever_is_not_as_it_must_be_is_an_error_that_says_what() {
        let wrong = Wrong { round: 3, expected: 7, found: 8 };
        let cases: [(Report, &str); 6] = [
            (
                Report { rounds_verified: 9, rounds_wrong: 1, first_wrong: Some(wrong), ..good() },
                "round 3, gave 8 instead of 7",
            ),
            (Report { races: vec!["a race".to_owned()], ..good() }, "1 races; the first: a race"),
            (Report { rounds_verified: 9, ..good() }, "9 of 10 rounds"),
            (Report { bytes_left: 256, ..good() }, "256 bytes were not returned"),
            (Report { failed_frees: 1, ..good() }, "1 frees failed"),
            (Report { error: Some("lost".to_owned()), bytes_left: 1, ..good() }, "lost"),
        ];
        for (mut report, words) in cases {
            report.judge();
            let error = report.error.clone().unwrap_or_default();
            assert!(!report.ok && error.contains(words), "{error} does not say {words}");
            assert!(report.render().trim_end().ends_with(error.split(' ').next_back().unwrap()));
        }
    }
}
