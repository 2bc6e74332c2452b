//! `xlogmem`: see, check and exercise device memory from the command line.
//!
//! Exit status of every command: 0 done, 1 the device or the work failed, 2 the command line was refused. A refusal is one
//! line on standard error and nothing on standard output.

#![deny(unsafe_code)]

mod bench;
mod certify;
mod cli;
mod convert;
mod diff;
mod doctor;
mod generate;
mod ledger;
mod page;
mod plot;
mod replay;
mod report;
mod run;
mod shell;
mod summary;
mod top;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use cli::{Command, Refusal, RunCommand};

fn main() -> ExitCode {
    // An answer may be a status that is no failure.
    let mut status = ExitCode::SUCCESS;
    let outcome = match cli::parse() {
        Ok(Command::Doctor(arguments)) => doctor::run(&arguments),
        Ok(Command::Ledger(arguments)) => ledger::run(&arguments),
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
    match outcome {
        Ok(output) => {
            if let Some(failure) = &output.failure {
                eprintln!("xlogmem: {failure}");
            }
            match print(&output.text) {
                Ok(()) if output.failure.is_none() => status,
                _ => ExitCode::FAILURE,
            }
        }
        Err(Refusal::Shown(text)) => match print(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(Refusal::Line(line)) => {
            eprintln!("xlogmem: {line}");
            ExitCode::from(2)
        }
    }
}

/// What a command that was understood has to say.
pub(crate) struct Output {
    /// For standard output.
    pub(crate) text: String,
    /// One line for standard error, when the command failed.
    pub(crate) failure: Option<String>,
}

impl Output {
    /// A text that may not have come about, and the failure of the command, which goes before that.
    pub(crate) fn new(text: Result<String, String>, failure: Option<String>) -> Self {
        match text {
            Ok(text) => Self { text, failure },
            Err(error) => Self { text: String::new(), failure: failure.or(Some(error)) },
        }
    }
}

/// A report as one JSON object.
pub(crate) fn json_text(report: &impl serde::Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(report).map(|json| json + "\n").map_err(|error| error.to_string())
}

/// A reader that has gone away, such as `head`, is no failure.
fn print(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
