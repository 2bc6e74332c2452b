//! `xlogmem`: see, check and exercise device memory from the command line.
//!
//! Exit status of every command: 0 all is well; 1 the work was done and the answer is no, or the device failed; 2 the command could
//! not be carried out as asked, because of its line, its input or its output. The last is one line on standard error, nothing on
//! standard output, and nothing half-written.

#![deny(unsafe_code)]

mod atomic_file;
mod bench;
mod certify;
mod cli;
mod convert;
mod diff;
mod doctor;
mod exec;
mod generate;
mod ledger;
mod replay;
mod report;
mod run;
mod shell;
mod size;
mod summary;
mod temporary;
mod top;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use serde::Serialize;
use xlog_report::{ReadingReport, escape, text_report};

use cli::{Command, Refusal, RunCommand};

/// The status of a command that could not be carried out as asked.
const REFUSED: u8 = 2;

fn main() -> ExitCode {
    if let (true, Ok((columns, _))) = (std::io::stdout().is_terminal(), crossterm::terminal::size())
    {
        text_report::set_width(usize::from(columns));
    }
    // An answer may be a status that is no failure.
    let mut status = ExitCode::SUCCESS;
    let outcome = match cli::parse() {
        Ok(Command::Doctor(arguments)) => doctor::run(&arguments),
        Ok(Command::Exec(arguments)) => exec::run(&arguments).map(|(code, warning)| {
            status = ExitCode::from(code);
            Output { warnings: warning.into_iter().collect(), ..Output::default() }
        }),
        Ok(Command::Ledger(arguments)) => ledger::run(&arguments),
        Ok(Command::Demo(arguments)) => run::demo(&arguments),
        Ok(Command::Top(arguments)) => top::run(&arguments),
        Ok(Command::Run(RunCommand::Join(arguments))) => run::join(&arguments),
        Ok(Command::Run(RunCommand::Fixpoint(arguments))) => run::fixpoint(&arguments),
        Ok(Command::Run(RunCommand::Sort(arguments))) => run::sort(&arguments),
        Ok(Command::Run(RunCommand::Handoff(arguments))) => run::handoff(&arguments),
        Ok(Command::Run(RunCommand::Tenants(arguments))) => run::tenants(&arguments),
        Ok(Command::Run(RunCommand::Churn(arguments))) => run::churn(&arguments),
        Ok(Command::Certify(arguments)) => certify::run(&arguments),
        Ok(Command::Convert(arguments)) => convert::run(&arguments),
        Ok(Command::Summary(arguments)) => summary::run(&arguments),
        Ok(Command::Replay(arguments)) => replay::run(&arguments),
        Ok(Command::Generate(arguments)) => generate::run(&arguments),
        Ok(Command::Report(arguments)) => report::run(&arguments),
        Ok(Command::Diff(arguments)) => diff::run(&arguments).map(|(output, differ)| {
            status = ExitCode::from(u8::from(differ));
            output
        }),
        Ok(Command::Bench(arguments)) => bench::run(&arguments),
        Ok(Command::Completions(arguments)) => shell::completions(&arguments),
        Ok(Command::Man(arguments)) => shell::man(&arguments),
        Err(refusal) => Err(refusal),
    };
    let (text, status) = match outcome {
        Ok(output) => {
            for warning in &output.warnings {
                complain(warning);
            }
            if let Some(failure) = &output.failure {
                if !is_shown(failure, &output.text) {
                    complain(failure);
                }
                status = ExitCode::FAILURE;
            }
            (output.text, status)
        }
        Err(Refusal::Shown(text)) => (text, ExitCode::SUCCESS),
        // A reader of `-` that has seen enough, such as head.
        Err(Refusal::Line(line)) if atomic_file::has_no_reader(&line) => return ExitCode::SUCCESS,
        Err(Refusal::Line(line)) => {
            complain(&line);
            return ExitCode::from(REFUSED);
        }
    };
    match print(&text) {
        Ok(()) => status,
        Err(error) => {
            complain(&format!("standard output: {error}"));
            ExitCode::from(REFUSED)
        }
    }
}

/// Whether a failure is in a text that goes to the same terminal: an error is printed once.
fn is_shown(failure: &str, text: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    std::io::stdout().is_terminal()
        && std::io::stderr().is_terminal()
        && words(text).contains(&words(&escape::line(failure)))
}

/// One line on standard error, also where a name in it has line breaks or what a terminal would obey.
fn complain(line: &str) {
    // An exit status is worth more than a line that cannot be written.
    let _ = writeln!(std::io::stderr(), "xlogmem: {}", escape::line(line));
}

/// The output of a command that was understood.
#[derive(Default)]
pub(crate) struct Output {
    /// For standard output.
    pub(crate) text: String,
    /// One line for standard error, when the command failed.
    pub(crate) failure: Option<String>,
    /// Lines for standard error that are no failure.
    pub(crate) warnings: Vec<String>,
}

impl Output {
    /// The output without its text, if standard output has something else.
    pub(crate) fn unless(self, has_other: bool) -> Self {
        if has_other { Self { text: String::new(), ..self } } else { self }
    }

    /// Warns of incomplete logs. A failure says why it failed, and is the one line then.
    pub(crate) fn warn<'a>(
        mut self,
        logs: impl IntoIterator<Item = (&'a str, Option<&'a ReadingReport>)>,
    ) -> Self {
        if self.failure.is_none() {
            let warnings = logs.into_iter().filter_map(|(log, reading)| reading?.warning(log));
            self.warnings.extend(warnings);
        }
        self
    }

    /// A report as one JSON object, or as `render` writes it.
    pub(crate) fn of<R: Serialize>(
        report: &R,
        json: bool,
        render: impl FnOnce(&R) -> String,
        failure: Option<String>,
    ) -> Self {
        let text = if json { json_text(report) } else { Ok(render(report)) };
        match text {
            Ok(text) => Self { text, failure, ..Self::default() },
            Err(error) => Self { failure: failure.or(Some(error)), ..Self::default() },
        }
    }
}

/// A report as one JSON object.
pub(crate) fn json_text(report: &impl Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(report).map(|json| json + "\n").map_err(|error| error.to_string())
}

/// Writes one JSON object as a line, for the process that started this one.
pub(crate) fn write_json_line(value: &impl Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// A reader that has gone away, such as `head`, is no failure.
fn print(text: &str) -> std::io::Result<()> {
    let text = escape::lines(text);
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
