//! `exec`: runs any CUDA program with a library that counts, limits and logs its device memory.
//!
//! The library is part of this binary. It is written to a private folder of the user, where it stays, and preloaded; its
//! settings are environment variables. The ledger of the program's own runtime is disabled, so memory is charged once.
//! Within another exec the outer limit and log also apply.
//!
//! The exit status is that of the program.

mod library;
mod program;
mod signals;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use clap::Args;
use tempfile::TempDir;
use xlog_cuda::ByteSize;
use xlog_cuda::device_runtime::{Backtraces, LedgerSetting};

use crate::cli::{Refusal, option};

const PRELOAD: &str = "LD_PRELOAD";
const LEDGER: &str = "XLOG_EXEC_LEDGER";
const LIMIT: &str = "XLOG_EXEC_LIMIT";
const GUARANTEE: &str = "XLOG_EXEC_GUARANTEE";
const NAME: &str = "XLOG_EXEC_NAME";
const LOG: &str = "XLOG_EXEC_LOG";
const STACKS: &str = "XLOG_EXEC_STACKS";
const NOTE: &str = "XLOG_EXEC_NOTE";
/// The variable for the ledger of a program's own runtime.
const RUNTIME_LEDGER: &str = "XLOG_DEVICE_LEDGER";

/// The arguments of `exec`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    xlogmem exec -- python train.py\n  \
    xlogmem exec --limit 10GiB --log run-%p.xtrace -- ./app\n  \
    xlogmem report run-*.xtrace -o report.html\n\n\
    It is cooperative, not a jail: a program can evade it. It does not see static\n\
    and setuid programs, and not the memory of contexts.\n\n\
    Exit status: the program's own; 128 + N if signal N ended it; 2 if it could\n\
    not be started.")]
pub(crate) struct ExecArguments {
    /// The limit of each process on each device, such as 10GiB or 50%. Beyond it the program gets CUDA's out-of-memory error
    #[arg(long, value_name = "SIZE")]
    limit: Option<String>,

    /// The share of each process that others on the ledger leave free, such as 4GiB or 25%
    #[arg(long, value_name = "SIZE")]
    guarantee: Option<String>,

    /// The name of the quota, which top and ledger show beside the process
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Log every driver allocation to this file, such as run-%p.xtrace (%p is the process)
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,

    /// Log the stack of the caller with allocations: off, all, or sampled:N for one in N
    ///
    /// Only with a log. Default: off.
    #[arg(long, value_name = "MODE")]
    stacks: Option<String>,

    /// The ledger: on, off, the absolute path of a directory, or of one ledger's file KEY.ledger
    ///
    /// Default: XLOG_DEVICE_LEDGER, else on.
    #[arg(long, value_name = "WHERE")]
    ledger: Option<String>,

    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Runs the program. Returns its status, and a warning if none of its calls was intercepted.
pub(crate) fn run(arguments: &ExecArguments) -> Result<(u8, Option<String>), Refusal> {
    let (name, rest) =
        arguments.program.split_first().ok_or_else(|| "a program is missing".to_owned())?;
    let settings = Settings::of(arguments)?;
    let mut caught = signals::catch().map_err(|error| format!("signals: {error}"))?;
    let library = library::install()?;
    let note = Note::new().map_err(|error| format!("a temporary folder: {error}"))?;
    if let Some(signal) = caught.pending().next() {
        drop(note);
        signals::end(signal);
        return Ok((u8::try_from(128 + signal).unwrap_or(1), None));
    }

    let mut command = Command::new(name);
    command.args(rest).env(PRELOAD, preloaded(&library)).env(NOTE, &note.path);
    settings.pass_to(&mut command);
    let status = signals::wait(&mut command, caught)
        .map_err(|error| format!("{}: {error}", Path::new(name).display()))?;

    let warning = (!note.has_grown()).then(|| {
        let reason = program::why_not_intercepted(name);
        format!("nothing was intercepted: {reason}")
    });
    Ok((status_code(status), warning))
}

/// The settings passed to the library.
struct Settings {
    limit: Option<String>,
    guarantee: Option<String>,
    name: Option<String>,
    log: Option<PathBuf>,
    stacks: Option<String>,
    ledger: String,
}

impl Settings {
    fn of(arguments: &ExecArguments) -> Result<Self, String> {
        let size = |text: &str| match text.parse() {
            Ok(ByteSize::Bytes(bytes)) => Ok(bytes.to_string()),
            Ok(ByteSize::Share(share)) => Ok(format!("share:{share}")),
            Ok(_) => Err(format!("{text:?} is not a size")),
            Err(error) => Err(error.to_string()),
        };
        let limit = option("--limit", arguments.limit.as_deref(), size)?;
        let guarantee = option("--guarantee", arguments.guarantee.as_deref(), size)?;
        let name = arguments.name.clone();
        let limit = within(limit, std::env::var(LIMIT).ok());
        let log = arguments.log.as_deref().map(log_pattern).transpose()?;
        let stacks = arguments.stacks.clone();
        option("--stacks", stacks.as_deref(), str::parse::<Backtraces>)?;
        if stacks.is_some() && log.is_none() && std::env::var_os(LOG).is_none() {
            return Err("--stacks: stacks are part of a log; give --log too".to_owned());
        }
        // Within another exec the runtime's ledger is off, so the library's setting is inherited first.
        let inherited = [LEDGER, RUNTIME_LEDGER]
            .into_iter()
            .find_map(|name| Some((name, std::env::var(name).ok()?)));
        let (from, text) = match (&arguments.ledger, &inherited) {
            (Some(text), _) => ("--ledger", text.as_str()),
            (None, Some((name, text))) => (*name, text.as_str()),
            (None, None) => ("--ledger", "on"),
        };
        let ledger = option(from, Some(text), str::parse::<LedgerSetting>)?;
        let ledger = ledger.map_or_else(|| "on".to_owned(), |ledger| ledger.to_string());
        Ok(Self { limit, guarantee, name, log, stacks, ledger })
    }

    fn pass_to(&self, command: &mut Command) {
        command.env(LEDGER, &self.ledger).env(RUNTIME_LEDGER, "off");
        // Options that are absent keep the values of an outer exec.
        let settings = [
            (LIMIT, &self.limit),
            (GUARANTEE, &self.guarantee),
            (NAME, &self.name),
            (STACKS, &self.stacks),
        ];
        for (variable, value) in settings {
            if let Some(value) = value {
                command.env(variable, value);
            }
        }
        if let Some(log) = &self.log {
            command.env(LOG, log);
        }
    }
}

/// Combines a limit with that of an outer exec as a list. The library takes the minimum: a share is not known in bytes here.
fn within(own: Option<String>, outer: Option<String>) -> Option<String> {
    match (own, outer.filter(|outer| !outer.is_empty())) {
        (Some(own), Some(outer)) => Some(format!("{own},{outer}")),
        (own, outer) => own.or(outer),
    }
}

/// Returns the absolute name of a log: the program may change its directory.
fn log_pattern(path: &Path) -> Result<PathBuf, String> {
    let refuse = |reason: &str| Err(format!("--log: {}: {reason}", path.display()));
    if path.extension() != Some(OsStr::new("xtrace")) {
        return refuse("the name must end in .xtrace; xlogmem convert writes other formats");
    }
    let mut letters = path.as_os_str().as_bytes().iter();
    while let Some(letter) = letters.next() {
        if *letter == b'%' && !matches!(letters.next(), Some(b'p' | b'%')) {
            return refuse("after % only p (the process) or % may follow");
        }
    }
    match std::path::absolute(path) {
        Ok(path) if path.parent().is_some_and(Path::is_dir) => Ok(path),
        Ok(_) => refuse("its directory does not exist"),
        Err(error) => refuse(&error.to_string()),
    }
}

/// Creates a folder that lives as long as the run.
fn temporary_folder() -> std::io::Result<TempDir> {
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("xlogmem-exec-");
        builder
    };
    builder().tempdir().or_else(|_| builder().tempdir_in("/tmp"))
}

/// The file in which intercepted processes leave a mark. Within another exec it is the outer one, so that both see it.
struct Note {
    path: PathBuf,
    bytes_before: u64,
    _folder: Option<TempDir>,
}

impl Note {
    fn new() -> std::io::Result<Self> {
        let outer = std::env::var_os(NOTE).map(PathBuf::from);
        if let Some(path) = outer.filter(|path| path.parent().is_some_and(Path::is_dir)) {
            let bytes_before = length(&path);
            return Ok(Self { path, bytes_before, _folder: None });
        }
        let folder = temporary_folder()?;
        let path = folder.path().join("intercepted");
        Ok(Self { path, bytes_before: 0, _folder: Some(folder) })
    }

    fn has_grown(&self) -> bool {
        length(&self.path) > self.bytes_before
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len())
}

/// Puts the library before those already preloaded, without the library of an outer exec.
fn preloaded(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    let present = std::env::var_os(PRELOAD).unwrap_or_default();
    for name in present.as_bytes().split(|byte| b": ".contains(byte)) {
        let path = Path::new(OsStr::from_bytes(name));
        if !name.is_empty() && path.file_name() != Some(OsStr::new(library::NAME)) {
            all.push(":");
            all.push(path);
        }
    }
    all
}

fn status_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
