//! The common part of all run reports: header, verdict and output.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
//! Every field is always present; an unknown value is `null`.

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

/// The header of a report, as it appears in JSON.
#[derive(Serialize, Debug, Default)]
pub(super) struct RunHead {
    schema: u32,
    workload: &'static str,
    /// Whether everything was done and verified, without races, and nothing is left.
    pub(super) ok: bool,
    /// The reason why not, in one line.
    pub(super) error: Option<String>,
    pub(super) selection: Selection,
    pub(super) device_name: Option<String>,
    pub(super) resource: String,
    /// The result of the log, if one was requested.
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

    /// Begins the text.
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

    /// Ends the text with the error, or with `verdict`.
    pub(super) fn end(&self, page: TextReport, verdict: &str) -> String {
        match &self.error {
            Some(error) => page.close(error),
            None => page.close(&format!("{}: {verdict}", self.selection.spec)),
        }
    }
}

pub(super) trait RunReport: Serialize + Sized {
    fn head(&mut self) -> &mut RunHead;

    /// Returns the first problem of the run, in one line without the device.
    fn problem(&self) -> Option<String>;

    /// Returns the report as text.
    fn render(&self) -> String;

    /// Sets whether the run succeeded, and if not, why.
    fn judge(&mut self) {
        let problem = self.problem();
        let head = self.head();
        let problem = problem.map(|problem| format!("{}: {problem}", head.selection.spec));
        let missing = head.log.as_ref().and_then(LogReport::problem);
        head.error = head.error.take().or(problem).or(missing);
        head.ok = head.error.is_none();
    }

    /// Judges the run and formats its output.
    fn finish(mut self, json: bool) -> Output {
        self.judge();
        let failure = self.head().error.clone();
        Output::of(&self, json, Self::render, failure)
    }
}

/// Builds the stack of a run and measures on it. It refuses a log that cannot be written; a failure of the device is part of
/// the report.
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

/// Describes the number of races, if the device detects them.
pub(super) fn races_text(races: &[String], detects_races: bool) -> String {
    match detects_races {
        true => races.len().to_string(),
        false => "not looked for: only a simulated device can".to_owned(),
    }
}

/// Returns the problem of a run with races.
pub(super) fn race_problem(races: &[String]) -> Option<String> {
    races.first().map(|race| format!("{} races; the first: {race}", races.len()))
}
