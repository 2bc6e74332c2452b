//! The report of a handoff, as it appears in JSON.

use serde::Serialize;
use xlog_report::text_report::{TextReport, size};

use super::super::report::{RunHead, RunReport, race_problem, races_text};
use super::work::Wrong;
use crate::cli::HandoffArguments;
use crate::doctor::Selection;

#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) head: RunHead,
    streams: u32,
    threads: u32,
    /// The requested rounds, if the device was opened.
    pub(super) rounds: Option<u32>,
    rows: u32,
    seed: u64,
    pub(super) rounds_verified: u64,
    pub(super) rounds_wrong: u64,
    pub(super) first_wrong: Option<Wrong>,
    /// The races that a simulated device's detector found.
    pub(super) races: Vec<String>,
    /// Allocated blocks.
    pub(super) blocks: u64,
    /// Events recorded to order streams.
    pub(super) edges: u64,
    pub(super) waits_inserted: u64,
    /// Waits elided because the order was already implied.
    pub(super) waits_elided: u64,
    /// Driver calls, on a device that counts them.
    pub(super) driver_calls: Option<u64>,
    /// The maximum bytes in buffers.
    pub(super) bytes_peak: usize,
    /// Bytes not returned at the end.
    pub(super) bytes_left: usize,
    pub(super) failed_frees: u64,
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
            head: RunHead::new("handoff", selection, resource),
            streams: arguments.streams,
            threads: arguments.threads,
            rounds: arguments.rounds,
            rows: arguments.rows,
            seed: arguments.seed,
            ..Self::default()
        }
    }

    pub(super) fn note_rate(&mut self) {
        self.rows_per_second = self
            .seconds
            .filter(|seconds| *seconds > 0.0)
            .map(|seconds| self.rounds_verified as f64 * f64::from(self.rows) / seconds);
    }
}

impl RunReport for Report {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        if let Some(wrong) = &self.first_wrong {
            return Some(format!(
                "{} rounds are wrong; the first, round {}, gave {} instead of {}",
                self.rounds_wrong, wrong.round, wrong.found, wrong.expected
            ));
        }
        if let Some(races) = race_problem(&self.races) {
            return Some(races);
        }
        let rounds = self.rounds.map_or(0, u64::from);
        if self.rounds_verified != rounds {
            let verified = self.rounds_verified;
            return Some(format!("{verified} of {rounds} rounds were verified"));
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
        let mut page = self.head.begin("Handoff");
        page.line("resource", &self.head.resource);
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
        self.head.end(page, "every round verified")
    }
}

impl Report {
    fn figures(&self, page: &mut TextReport, seconds: f64) {
        page.title("Result");
        page.line("rounds verified", &self.rounds_verified.to_string());
        page.line("rounds wrong", &self.rounds_wrong.to_string());
        page.line("races", &races_text(&self.races, self.driver_calls.is_some()));
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
        self.head.render_log(page);
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

    /// Returns the report of a successful run.
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
        report.note_rate();
        report.judge();
        assert!(report.head.ok && report.head.error.is_none());
        assert_eq!(report.rows_per_second, Some(10.0 * f64::from(report.rows) / 0.5));
    }

    #[test]
    fn whatever_is_not_as_it_must_be_is_an_error_that_says_what() {
        let wrong = Wrong { round: 3, expected: 7, found: 8 };
        let mut lost = Report { bytes_left: 1, ..good() };
        lost.head.error = Some("lost".to_owned());
        let cases: [(Report, &str); 6] = [
            (
                Report { rounds_verified: 9, rounds_wrong: 1, first_wrong: Some(wrong), ..good() },
                "round 3, gave 8 instead of 7",
            ),
            (Report { races: vec!["a race".to_owned()], ..good() }, "1 races; the first: a race"),
            (Report { rounds_verified: 9, ..good() }, "9 of 10 rounds"),
            (Report { bytes_left: 256, ..good() }, "256 bytes were not returned"),
            (Report { failed_frees: 1, ..good() }, "1 frees failed"),
            (lost, "lost"),
        ];
        for (mut report, words) in cases {
            report.judge();
            let error = report.head.error.clone().unwrap_or_default();
            assert!(!report.head.ok && error.contains(words), "{error} does not say {words}");
            assert!(report.render().trim_end().ends_with(error.split(' ').next_back().unwrap()));
        }
    }
}
