//! Whether a log contains all records of its run: one definition for every command that reads logs.
//!
//! A log is incomplete if its writer dropped records or did not close it, or if it is truncated or damaged. Every command
//! then prints [`ReadingReport::warning`] on standard error, sets `complete` and `incomplete` in its JSON, and qualifies its
//! conclusions: a missing record may be the free of a block, or the allocation of a leaked one. Text formats do not record
//! whether they were closed.
use xlog_trace::{ReadReport, Usage};

use crate::input::ReadingReport;
use crate::text_report::{count, size};

impl ReadingReport {
    /// Returns why records may be missing, in words that follow "it is incomplete:"; `None` for a complete log.
    pub(crate) fn missing(report: &ReadReport) -> Option<String> {
        let mut reasons = Vec::new();
        if report.dropped_at_source > 0 {
            let dropped = report.dropped_at_source;
            reasons.push(format!("{dropped} records are missing, dropped by its writer"));
        }
        if report.truncated {
            reasons.push("it is cut off at the end".to_owned());
        } else if report.unclosed {
            reasons
                .push("it was not closed by its writer, which was killed or still runs".to_owned());
        }
        if report.skipped > 0 {
            let places = if report.skipped == 1 { "place was" } else { "places were" };
            reasons.push(format!("{} bad {places} skipped", report.skipped));
        }
        (!reasons.is_empty()).then(|| reasons.join(", and "))
    }

    /// Returns a warning for standard error; `None` for a complete log.
    pub fn warning(&self, log: &str) -> Option<String> {
        let why = self.incomplete.as_ref()?;
        let records = self.records;
        Some(format!("warning: {log} is incomplete: {why}; the answer is about {records} records"))
    }

    /// Returns the error of a strict command; `None` for a complete log.
    pub fn refusal(&self, log: &str) -> Option<String> {
        Some(format!("{log}: it is incomplete: {}", self.incomplete.as_ref()?))
    }

    /// Describes the blocks that were not freed, qualified if the log is incomplete.
    pub fn freed(&self, total: &Usage) -> String {
        let held = format!("{} in {}", size(total.live_bytes), count(total.live_blocks, "block"));
        match (&self.incomplete, total.live_blocks) {
            (None, 0) if self.records == 0 => "it has no records".to_owned(),
            (None, 0) => "every block was freed".to_owned(),
            (None, _) => format!("{held} was never freed"),
            (Some(why), 0) => {
                format!("every block in these records was freed, of others nothing is known: {why}")
            }
            (Some(why), _) => format!(
                "{held} has no free in these records; whether it was freed is unknown: {why}"
            ),
        }
    }

    /// Returns the title of the list of leaks.
    pub fn leaks_title(&self) -> &'static str {
        if self.complete { "Never freed" } else { "Without a free in these records" }
    }
}
