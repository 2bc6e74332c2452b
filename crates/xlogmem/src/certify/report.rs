//! The results of all cells, and whether they are as required.
use clap::ValueEnum;
use serde::Serialize;
use xlog_report::text_report::TextReport;

use super::cell::{By, Catch};
use super::plan::{Bug, Circumstance, Stack};
use crate::doctor::Selection;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// A detector caught the bug.
    Caught,
    /// No detector did.
    Missed,
    /// There was no bug, and no detector reported one.
    Clean,
    /// There was no bug, and a detector reported one.
    FalseAlarm,
    /// The bug cannot exist, or the detector is not available.
    Unavailable,
    /// The process did not finish.
    Failed,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    pub(super) bug: Bug,
    pub(super) stack: Stack,
    /// Whether it ran under compute-sanitizer.
    pub(super) checker: bool,
    pub(super) promised: bool,
    pub(super) verdict: Verdict,
    /// The detections, the most specific first.
    pub(super) caught: Vec<Catch>,
    /// Offset of the wrong access from the block's first byte.
    pub(super) offset: Option<i64>,
    /// Whether compute-sanitizer named exactly that address, if it reported an error.
    pub(super) exact: Option<bool>,
    pub(super) error: Option<String>,
}

impl Cell {
    pub(super) fn unavailable(of: Circumstance) -> Self {
        Self {
            bug: of.bug,
            stack: of.stack,
            checker: of.checker,
            promised: false,
            verdict: Verdict::Unavailable,
            caught: Vec::new(),
            offset: None,
            exact: None,
            error: None,
        }
    }

    /// Returns whether the result is as required, if anything is required.
    pub(super) fn is_kept(&self) -> bool {
        if !self.promised {
            return true;
        }
        match self.verdict {
            Verdict::Clean => true,
            Verdict::Caught => {
                !self.checker || self.exact == Some(true) && self.is_caught_by(By::Memcheck)
            }
            _ => false,
        }
    }

    fn is_caught_by(&self, by: By) -> bool {
        self.caught.iter().any(|catch| catch.by == by)
    }

    /// Returns one word of at most nine characters.
    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Clean => "clean",
            Verdict::FalseAlarm => "ALARM",
            Verdict::Unavailable => "n/a",
            Verdict::Failed => "FAILED",
            Verdict::Missed if self.promised => "MISSED",
            Verdict::Missed => "missed",
            Verdict::Caught if self.is_caught_by(By::Memcheck) => match self.exact {
                Some(true) => "memcheck",
                _ => "memcheck?",
            },
            Verdict::Caught => match self.caught.first().map(|catch| catch.by) {
                Some(By::Guard) => "guard",
                Some(By::Host) => "host",
                Some(By::Fault) => "fault",
                Some(By::Race) => "race",
                Some(By::Device) => "device",
                Some(By::Memcheck) | None => "caught",
            },
        }
    }
}

/// The words of a table and their meanings.
const WORDS: [(&str, &str); 14] = [
    ("guard", "the debug guard reported it: canaries, poison, quarantine"),
    ("host", "the runtime refused the call on the host, before any work was queued"),
    ("fault", "the device stopped with an error: no memory is mapped there"),
    ("race", "the race detector of the simulated device reported it"),
    ("device", "the simulated device refused the access: it is outside of every allocation"),
    ("memcheck", "compute-sanitizer reported it, at the planted address"),
    ("memcheck?", "compute-sanitizer reported it, at another address"),
    ("caught", "it was reported, and the report does not name a detector"),
    ("missed", "no detector reported it, and none is expected to in this stack"),
    ("MISSED", "no detector reported it, although one must"),
    ("clean", "there was no bug, and no detector reported one"),
    ("ALARM", "there was no bug, and a detector reported one"),
    ("FAILED", "the process of this cell did not get to its end"),
    ("n/a", "not examined: this bug cannot occur in this stack, or its tool is not installed"),
];

/// The report, as it appears in JSON. Every field is always present; an unknown value is `null`.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) schema: u32,
    pub(super) ok: bool,
    pub(super) error: Option<String>,
    pub(super) selection: Selection,
    pub(super) device_name: Option<String>,
    /// The path of compute-sanitizer; `null` if no cell ran under it.
    pub(super) checker: Option<String>,
    /// The reason why not.
    pub(super) no_checker: Option<String>,
    pub(super) cells: Vec<Cell>,
}

impl Report {
    /// Decides whether the certificate is given.
    pub(super) fn judge(&mut self) {
        let broken: Vec<String> = self
            .cells
            .iter()
            .filter(|cell| !cell.is_kept())
            .map(|cell| {
                let under = if cell.checker { " with compute-sanitizer" } else { "" };
                let why = cell.error.as_deref().map(|error| format!(" ({error})"));
                let why = why.unwrap_or_default();
                let (bug, stack) = (cell.bug.label(), cell.stack.label());
                format!("{bug} under {stack}{under} is {}{why}", cell.word())
            })
            .collect();
        if self.error.is_none() && !broken.is_empty() {
            self.error = Some(format!("not as promised: {}", broken.join("; ")));
        }
        self.ok = self.error.is_none();
    }

    pub(super) fn render(&self) -> String {
        let mut page = TextReport::default();
        page.title("Certificate");
        let name = self.device_name.as_deref().unwrap_or("not opened");
        page.line("device", &format!("{} ({name})", self.selection.spec));
        match (&self.checker, &self.no_checker) {
            (Some(path), _) => page.line("compute-sanitizer", path),
            (None, Some(why)) => page.line("compute-sanitizer", &format!("n/a: {why}")),
            (None, None) => {}
        }
        for (checker, title) in
            [(false, "Who notices"), (true, "Who notices, with compute-sanitizer memcheck")]
        {
            self.table(&mut page, checker, title);
        }
        page.title("Words");
        for (word, meaning) in WORDS {
            if self.cells.iter().any(|cell| cell.word() == word) {
                page.line(word, meaning);
            }
        }
        page.close(&match &self.error {
            None => format!("{}: every promise is kept", self.selection.spec),
            Some(error) => error.clone(),
        })
    }

    fn table(&self, page: &mut TextReport, checker: bool, title: &str) {
        let is_used = |stack: &&Stack| self.cells.iter().any(|cell| cell.stack == **stack);
        let stacks: Vec<&Stack> = Stack::value_variants().iter().filter(is_used).collect();
        let is_examined =
            |cell: &Cell| cell.checker == checker && cell.verdict != Verdict::Unavailable;
        if !self.cells.iter().any(is_examined) {
            return;
        }
        page.title(title);
        let row = |first: &str, words: Vec<&str>| {
            let words: String = words.iter().map(|word| format!("{word:<9} ")).collect();
            format!("{first:<22}{}", words.trim_end())
        };
        page.row(&row("", stacks.iter().map(|stack| stack.label()).collect()));
        for &bug in Bug::value_variants() {
            let words: Vec<&str> = stacks
                .iter()
                .filter_map(|stack| {
                    let same = |cell: &&Cell| {
                        (cell.bug, cell.stack, cell.checker) == (bug, **stack, checker)
                    };
                    self.cells.iter().find(same).map(Cell::word)
                })
                .collect();
            if !words.is_empty() {
                page.row(&row(bug.label(), words));
            }
        }
    }
}
