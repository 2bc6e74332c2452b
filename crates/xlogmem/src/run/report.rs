//! The common part of all run reports: how they begin, how they are judged, and how they become output.
//!
//! Field names of a report are the interface: a field may be added, none changes its name or meaning without a new `schema` number.
//! Every field is always there; what is not known is `null`.

use serde::Serialize;
use xlog_cuda::{DeviceSpec, Result};
use xlog_report::text_report::TextReport;
use xlog_workloads::stack::{Stack, StackOptions};

use super::arguments::StackArguments;
use super::log::{LogReport, RunLog};
use crate::Output;
use crate::cli::Refusal;
use crate::doctor::Selection;

const SCHEMA: u32 = 1;

/// The beginning of a report, in the shape of its JSON.
#[derive(Serialize, Debug, Default)]
pub(super) struct RunHead {
    schema: u32,
    workload: &'static str,
    /// Whether everything was done and verified, nothing raced and nothing is left.
    pub(super) ok: bool,
    /// Why not, in one line.
    pub(super) error: Option<String>,
    pub(super) selection: Selection,
    pub(super) device_name: Option<String>,
    pub(super) resource: String,
    /// The fate of the log, if one was asked for.
    pub(super) log: Option<LogReport>,
}

impl RunHead {
    pub(super) fn new(workload: &'static str, selection: Selection, resource: &str) -> Self {
        let resource = resource.to_owned();
        Self { schema: SCHEMA, workload, selection, resource, ..Self::default() }
    }

    pub(super) fn workload(&self) -> &'static str {
        self.workload
    }

    /// Begins the report for people.
    pub(super) fn begin(&self, title: &str) -> TextReport {
        let mut page = TextReport::default();
        page.title(title);
        let spec = &self.selection.spec;
        match &self.device_name {
            Some(name) => page.line("device", &format!("{spec} ({name})")),
            None => page.line("device", spec),
        }
        page.line("why", &self.selection.reason);
        page
    }

    pub(super) fn render_log(&self, page: &mut TextReport) {
        if let Some(log) = &self.log {
            log.render(page);
        }
    }

    /// Ends the report for people: with the error, or with `verdict`.
    pub(super) fn end(&self, page: TextReport, verdict: &str) -> String {
        match &self.error {
            Some(error) => page.close(error),
            None => page.close(&format!("{}: {verdict}", self.selection.spec)),
        }
    }
}

/// The report of a run.
pub(super) trait RunReport: Serialize + Sized {
    fn head(&mut self) -> &mut RunHead;

    /// The first problem of the run, in one line without the device.
    fn problem(&self) -> Option<String>;

    /// The report for people.
    fn render(&self) -> String;

    /// Says whether the run is good, and in one line why not.
    fn judge(&mut self) {
        let problem = self.problem();
        let head = self.head();
        let problem = problem.map(|problem| format!("{}: {problem}", head.selection.spec));
        let missing = head.log.as_ref().and_then(LogReport::problem);
        head.error = head.error.take().or(problem).or(missing);
        head.ok = head.error.is_none();
    }

    /// Judges the run and prints it.
    fn finish(mut self, json: bool) -> Output {
        self.judge();
        let failure = self.head().error.clone();
        Output::of(&self, json, Self::render, failure)
    }
}

/// Builds the stack of a run and measures on it. A log that cannot be written is refused; what fails on the device is in the
/// report.
pub(super) fn run_on_stack<R: RunReport>(
    arguments: &StackArguments,
    spec: DeviceSpec,
    options: StackOptions,
    mut report: R,
    measure: impl FnOnce(&Stack, &mut R) -> Result<()>,
) -> Result<R, Refusal> {
    let options = arguments.with_log(options, spec)?;
    let log = RunLog::of(arguments, &options);
    match Stack::build(spec, options) {
        Ok(stack) => {
            report.head().device_name = Some(stack.device().properties().name.clone());
            if let Err(error) = measure(&stack, &mut report) {
                report.head().error = Some(format!("{spec}: {error}"));
            }
        }
        Err(error) => report.head().error = Some(error.to_string()),
    }
    report.head().log = log.map(RunLog::end);
    Ok(report)
}

/// How many races there are, where the device can detect them.
pub(super) fn races_text(races: &[String], detects_races: bool) -> String {
    match detects_races {
        true => races.len().to_string(),
        false => "not looked for: only a simulated device can".to_owned(),
    }
}

/// The problem of a run in which races were found.
pub(super) fn race_problem(races: &[String]) -> Option<String> {
    races.first().map(|race| format!("{} races; the first: {race}", races.len()))
}
