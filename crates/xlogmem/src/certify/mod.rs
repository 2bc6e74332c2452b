//! `xlogmem certify`: plants bugs and shows which detectors catch them.
//!
//! Each cell of the table runs in its own process, which a wrong access may end: the command starts itself again, once
//! plainly and, on a GPU with compute-sanitizer, once more under that. `plan` states which cells must detect the bug.

mod cell;
mod checker;
mod plan;
mod report;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use xlog_cuda::{CudaDevice, DeviceSpec};
use xlog_report::Trouble;

use crate::Output;
use crate::atomic_file::AtomicFolder;
use crate::cli::Refusal;
use crate::doctor::{Cuda, select};
use crate::temporary;
use cell::{By, Catch, Line};
use plan::{Bug, Circumstance, Stack};
use report::{Cell, Report, Verdict};

/// The time limit of a cell, with or without a checker.
const PATIENCE: Duration = Duration::from_secs(90);

/// The arguments of `certify`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    xlogmem certify --device sim\n  \
    xlogmem certify --device cuda:0 --output certificate\n  \
    xlogmem certify --bug overflow --stack direct,nvtx --json\n\n\
    Exit status: 0 every promise is kept, 1 one is not or the device failed,\n\
    2 the command line was refused, or the folder cannot be written.")]
pub(crate) struct CertifyArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Without it: what XLOG_DEVICE says, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,

    /// Only these bugs
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_enum)]
    bug: Vec<Bug>,

    /// Only these stacks
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_enum)]
    stack: Vec<Stack>,

    /// Keep what every process and compute-sanitizer said in this folder
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,

    /// The compute-sanitizer to use, on any device [default: the one of this machine, on a GPU]
    #[arg(long, value_name = "FILE")]
    sanitizer: Option<PathBuf>,

    /// Do not run under compute-sanitizer
    #[arg(long, conflicts_with = "sanitizer")]
    no_sanitizer: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,

    /// Be the process of one cell. Given by the command to the processes it starts
    #[arg(long, hide = true, requires = "bug", requires = "stack")]
    cell: bool,
}

/// Runs `certify`. It refuses a bad device spec, a missing sanitizer and a folder that cannot be written; other failures are
/// part of the output.
pub(crate) fn run(arguments: &CertifyArguments) -> Result<Output, Refusal> {
    let selection = select(arguments.device.as_deref(), &Cuda::find())?;
    if let (true, [bug], [stack]) = (arguments.cell, &*arguments.bug, &*arguments.stack) {
        // This call ends the process.
        cell::run(selection.spec, *bug, *stack);
    }
    if let Some(path) = arguments.sanitizer.as_ref().filter(|path| !path.is_file()) {
        let line = format!("--sanitizer: {path:?} is no file; expected compute-sanitizer");
        return Err(Refusal::Line(line));
    }
    let simulated = selection.spec.is_simulated();
    let (checker, no_checker) = match &arguments.sanitizer {
        Some(path) => (Some(path.clone()), None),
        None if arguments.no_sanitizer => (None, Some("not asked for")),
        None if simulated => (None, Some("it checks GPUs, and this device is simulated")),
        None => match checker::find() {
            Some(path) => (Some(path), None),
            None => (None, Some("it is neither on the path nor in /usr/local/cuda*")),
        },
    };
    let mut report = Report {
        schema: 1,
        selection: selection.describe(),
        checker: checker.as_ref().map(|path| path.display().to_string()),
        no_checker: no_checker.map(str::to_owned),
        ..Report::default()
    };
    let folder = match &arguments.output {
        Some(path) => AtomicFolder::create(path).map_err(|error| format!("--output {error}")),
        None => AtomicFolder::passing("xlogmem-certify"),
    };
    let folder = folder.map_err(Refusal::Line)?;
    let filled = fill(&mut report, selection.spec, checker.as_deref(), arguments, &folder);
    report.error = Refusal::or_found(filled)?;
    folder.commit().map_err(|error| Refusal::Line(format!("--output {error}")))?;
    report.judge();
    Ok(Output::of(&report, arguments.json, Report::render, report.error.clone()))
}

fn fill(
    report: &mut Report,
    spec: DeviceSpec,
    checker: Option<&Path>,
    arguments: &CertifyArguments,
    folder: &AtomicFolder,
) -> Result<(), Trouble> {
    let failed = |error: &dyn std::fmt::Display| Trouble::Found(format!("{spec}: {error}"));
    // The device is closed again before the first cell, which then has it to itself.
    let device = CudaDevice::open_spec(spec).map_err(|error| failed(&error))?;
    report.device_name = Some(device.properties().name.clone());
    drop(device);
    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let chosen = |bug: &Bug| arguments.bug.is_empty() || arguments.bug.contains(bug);
    for with_checker in [false, true] {
        for bug in Bug::value_variants().iter().copied().filter(chosen) {
            for &stack in Stack::value_variants() {
                if !arguments.stack.is_empty() && !arguments.stack.contains(&stack) {
                    continue;
                }
                let simulated = spec.is_simulated();
                let of = Circumstance { bug, stack, simulated, checker: with_checker };
                let checker = checker.filter(|_| with_checker);
                let cell = match of.is_possible() && (checker.is_some() || !with_checker) {
                    true => examine(of, spec, &program, checker, folder)
                        .map_err(|error| Trouble::Refused(format!("--output {error}")))?,
                    false => Cell::unavailable(of),
                };
                report.cells.push(cell);
            }
        }
    }
    Ok(())
}

/// Runs and judges one cell. An error concerns the files to keep.
fn examine(
    of: Circumstance,
    spec: DeviceSpec,
    program: &Path,
    checker: Option<&Path>,
    folder: &AtomicFolder,
) -> Result<Cell, String> {
    let under = if checker.is_some() { "-memcheck" } else { "" };
    let stem = format!("{}-{}{under}", value_of(of.bug), value_of(of.stack));
    let log = folder.path(&format!("{stem}.log"));
    let mut command = match checker {
        Some(checker) => checker::command(checker, program, of.stack, &log),
        None => Command::new(program),
    };
    command.args(["certify", "--cell", "--device", &spec.to_string()]);
    for (flag, value) in [("--bug", value_of(of.bug)), ("--stack", value_of(of.stack))] {
        command.args([flag, &value]);
    }
    let mut cell = Cell { promised: of.is_promised(), ..Cell::unavailable(of) };
    let said = match talk(command) {
        Ok(said) => said,
        Err(error) => {
            cell.verdict = Verdict::Failed;
            cell.error = Some(error);
            return Ok(cell);
        }
    };
    folder.keep(&format!("{stem}.txt"), &said.text)?;
    let mut done = false;
    let mut planned = None;
    for line in said.text.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Plan { ptr, address, .. }) => {
                planned = Some(address);
                cell.offset = Some(address.wrapping_sub(ptr) as i64);
            }
            Ok(Line::Done { caught, error }) => {
                done = true;
                cell.caught = caught;
                cell.error = error;
            }
            // Output of others: a guard, a driver.
            Err(_) => {}
        }
    }
    if checker.is_some() {
        let report = std::fs::read_to_string(&log).unwrap_or_default();
        note_findings(&mut cell, &checker::parse(&report), planned);
    }
    if !done && cell.error.is_none() && cell.caught.is_empty() {
        cell.error = Some(format!("the process did not get to its end: {}", said.status));
    }
    cell.verdict = match (of.bug, cell.caught.is_empty(), &cell.error) {
        (_, true, Some(_)) => Verdict::Failed,
        (Bug::None, true, None) => Verdict::Clean,
        (Bug::None, false, _) => Verdict::FalseAlarm,
        (_, false, _) => Verdict::Caught,
        (_, true, None) if of.needs_checker() => Verdict::Unavailable,
        (_, true, None) => Verdict::Missed,
    };
    Ok(cell)
}

/// Adds the findings of compute-sanitizer to the cell.
fn note_findings(cell: &mut Cell, findings: &checker::Findings, planned: Option<u64>) {
    match findings.errors {
        None => cell.error = Some("compute-sanitizer left no complete report".to_owned()),
        Some(0) => {}
        Some(count) => {
            let first = findings.first.as_deref().unwrap_or("an error");
            let named: Vec<String> =
                findings.addresses.iter().map(|address| format!("{address:#x}")).collect();
            let detail = format!("{count} errors; the first: {first}, at {}", named.join(", "));
            cell.caught.push(Catch { by: By::Memcheck, detail });
            cell.exact = Some(planned.is_some_and(|address| findings.addresses.contains(&address)));
        }
    }
}

fn value_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The text of a process, from both of its outputs.
struct Said {
    text: String,
    status: String,
}

/// Starts a process, reads its outputs, and kills it at the time limit.
fn talk(mut command: Command) -> Result<Said, String> {
    let failed = |error: std::io::Error| error.to_string();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut child, _registered) = temporary::process(&mut command).map_err(failed)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let out = scope.spawn(move || hear(stdout));
        let err = scope.spawn(move || hear(stderr));
        let status = wait(&mut child);
        let text = |heard: std::thread::ScopedJoinHandle<'_, String>| heard.join();
        let text = [text(out), text(err)].map(|text| text.unwrap_or_default()).concat();
        status.map(|status| Said { text, status })
    })
}

fn hear(output: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut output) = output {
        // Output read before an error is kept.
        let _ = output.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn wait(child: &mut Child) -> Result<String, String> {
    let started = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status.to_string()),
            Ok(None) if started.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) => {
                let _ = child.kill().and_then(|()| child.wait().map(|_| ()));
                return Err(format!("it did not end within {} s", PATIENCE.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}
