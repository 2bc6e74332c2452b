//! `xlogmem`: see, check and exercise device memory from the command line.
//!
//! Exit status of every command:
//! - 0: success;
//! - 1: the command ran, and the answer is negative or the device failed;
//! - 2: the command line, the input or the output is unusable. The command then writes one line to standard error, nothing to
//!   standard output, and no partial file.

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
use std::io::{BufWriter, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use serde::Serialize;
use xlog_report::{ReadingReport, escape, text_report};

use cli::{Command, Refusal, RunCommand};

/// The status of a command that could not run.
const REFUSED: u8 = 2;

fn main() -> ExitCode {
    if let (true, Ok((columns, _))) = (std::io::stdout().is_terminal(), crossterm::terminal::size())
    {
        text_report::set_width(usize::from(columns));
    }
    // Some commands answer with a status that is not a failure.
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
    let (output, status) = match outcome {
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
            (output, status)
        }
        Err(Refusal::Shown(text)) => (Output { text, ..Output::default() }, ExitCode::SUCCESS),
        // The reader of `-`, such as head, has closed it.
        Err(Refusal::Line(line)) if atomic_file::has_no_reader(&line) => return ExitCode::SUCCESS,
        Err(Refusal::Line(line)) => {
            complain(&line);
            return ExitCode::from(REFUSED);
        }
    };
    match print(&output.text, output.json) {
        Ok(()) => status,
        Err(error) => {
            complain(&format!("standard output: {error}"));
            ExitCode::from(REFUSED)
        }
    }
}

/// Returns whether a text on the same terminal already contains the failure: errors are printed once.
fn is_shown(failure: &str, text: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    std::io::stdout().is_terminal()
        && std::io::stderr().is_terminal()
        && words(text).contains(&words(&escape::line(failure)))
}

/// Prints one line to standard error, with line breaks and control characters of names escaped.
fn complain(line: &str) {
    // A line that cannot be written must not change the exit status.
    let _ = writeln!(std::io::stderr(), "xlogmem: {}", escape::line(line));
}

/// The output of a command that ran.
#[derive(Default)]
pub(crate) struct Output {
    /// For standard output.
    pub(crate) text: String,
    /// For standard output after the text: JSON that may be larger than memory.
    json: Option<Json>,
    /// One line for standard error if the command failed.
    pub(crate) failure: Option<String>,
    /// Lines for standard error that are not failures.
    pub(crate) warnings: Vec<String>,
}

/// Writes JSON piece by piece.
type Json = Box<dyn FnOnce(&mut dyn Write) -> serde_json::Result<()>>;

impl Output {
    /// Adds a report that is printed as one JSON object, while it is formatted.
    pub(crate) fn with_json<R: Serialize + 'static>(self, report: R) -> Self {
        let write = move |out: &mut dyn Write| serde_json::to_writer_pretty(out, &report);
        Self { json: Some(Box::new(write)), ..self }
    }

    /// Drops the text if standard output carries something else.
    pub(crate) fn unless(self, has_other: bool) -> Self {
        if has_other { Self { text: String::new(), ..self } } else { self }
    }

    /// Adds warnings of incomplete logs. With a failure, only that line is printed.
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

    /// Formats a report as one JSON object, or by `render`.
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

/// Formats a report as one JSON object.
pub(crate) fn json_text(report: &impl Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(report).map(|json| json + "\n").map_err(|error| error.to_string())
}

/// Writes one JSON object as a line, for the parent process.
pub(crate) fn write_json_line(value: &impl Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// Prints a text, then JSON. A reader that has closed the pipe, such as `head`, is not a failure.
fn print(text: &str, json: Option<Json>) -> std::io::Result<()> {
    let mut stdout = BufWriter::new(std::io::stdout().lock());
    let mut printed = stdout.write_all(escape::lines(text).as_bytes());
    if let Some(write) = json {
        printed = printed
            .and_then(|()| Ok(write(&mut Escaped(&mut stdout))?))
            .and_then(|()| stdout.write_all(b"\n"));
    }
    match printed.and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Escapes what is written to it. Each write must be whole characters, as those of `serde_json` are.
struct Escaped<W>(W);

impl<W: Write> Write for Escaped<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(std::io::Error::other)?;
        self.0.write_all(escape::lines(text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}
