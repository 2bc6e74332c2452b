//! `xlogmem ledger`: the memory of each device by process.
//!
//! Reading takes no slot and no lock, and writes nothing. `--reclaim`, `--limit` and `--process` briefly join each ledger.

mod arguments;
mod quota;
mod report;

use std::path::{Path, PathBuf};

use xlog_cuda::device_runtime::{LEDGER_VARIABLE, LedgerSetting};
use xlog_cuda::ledger::{
    DeviceKey, Ledger, LedgerConfig, LedgerError, LedgerFile, LedgerResult, LedgerView, Snapshot,
    list,
};
use xlog_cuda::{ByteSize, XlogError};

use crate::cli::Refusal;
use crate::{Output, print};
pub(crate) use arguments::LedgerArguments;
use quota::Change;
pub(crate) use report::Slot;
use report::{Found, Freed, Report};

/// The ledgers to read: one file, or all of a directory.
pub(crate) enum LedgerLocation {
    Directory(PathBuf),
    File { path: PathBuf, directory: PathBuf, key: DeviceKey },
}

impl LedgerLocation {
    /// Refuses a file that is not a ledger and a directory that cannot be read. A missing location is valid and has no ledgers;
    /// so is a directory in which one ledger is damaged.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let seen = match self {
            Self::Directory(directory) => list(directory).map(|_| ()),
            Self::File { path, .. } => {
                match LedgerView::open(path).and_then(|view| view.snapshot()) {
                    Ok(_) | Err(LedgerError::Missing { .. }) => Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        seen.map_err(|error| Refusal::Line(error.to_string()))
    }

    /// Returns the displayed path and every ledger in it by file. A missing file yields no ledger and no error.
    pub(crate) fn snapshots(&self) -> (String, Vec<(String, LedgerResult<Snapshot>)>) {
        let see = |path: &Path| {
            (path.display().to_string(), LedgerView::open(path).and_then(|view| view.snapshot()))
        };
        match self {
            Self::Directory(directory) => {
                let shown = directory.display().to_string();
                let found = match list(directory) {
                    Ok(files) => files.iter().map(|file| see(&file.path)).collect(),
                    Err(error) => vec![(shown.clone(), Err(error))],
                };
                (shown, found)
            }
            Self::File { path, .. } => {
                let found = see(path);
                let is_missing = matches!(found.1, Err(LedgerError::Missing { .. }));
                let found = if is_missing { Vec::new() } else { vec![found] };
                (path.display().to_string(), found)
            }
        }
    }
}

/// Runs the command. It refuses a bad path or size, and a file that cannot be read or changed; a fault of one of several
/// ledgers is part of the output.
pub(crate) fn run(arguments: &LedgerArguments) -> Result<Output, Refusal> {
    let place = place(arguments.ledger.as_deref())?;
    let limit = arguments.limit.as_deref().map(|text| limit(text, &place)).transpose()?;
    if let Some(change) = Change::of(arguments)? {
        change.apply(&place)?;
    }
    let rounds = if arguments.watch { arguments.count.unwrap_or(u64::MAX) } else { 1 };
    for round in 1..rounds {
        let first = round == 1;
        let report = report(&place, arguments.reclaim, limit.filter(|_| first))?;
        let output = show(arguments, &report);
        if print(&output.text, None).is_err() {
            return Ok(Output { text: String::new(), ..output });
        }
        std::thread::sleep(arguments.every);
    }
    Ok(show(arguments, &report(&place, arguments.reclaim, limit.filter(|_| rounds == 1))?))
}

fn show(arguments: &LedgerArguments, report: &Report) -> Output {
    let failure = report.error.clone();
    match (arguments.json, arguments.watch) {
        // One line per reading.
        (true, true) => match serde_json::to_string(report) {
            Ok(json) => Output { text: json + "\n", failure, ..Output::default() },
            Err(error) => Output {
                text: String::new(),
                failure: Some(error.to_string()),
                ..Output::default()
            },
        },
        (false, true) => Output { text: report.render() + "\n", failure, ..Output::default() },
        (json, false) => Output::of(report, json, Report::render, failure),
    }
}

/// Returns the location from the flag, the environment, or the default.
pub(crate) fn place(flag: Option<&str>) -> Result<LedgerLocation, Refusal> {
    let refuse = |name: &str, error: &XlogError| Refusal::Line(format!("{name}: {error}"));
    let setting = match flag {
        Some(text) => {
            // On a command line, paths are relative to the current directory.
            let path = std::path::absolute(text)
                .map_err(|error| Refusal::Line(format!("--ledger {text:?}: {error}")))?;
            let text = path.to_string_lossy().into_owned();
            text.parse().map_err(|error| refuse("--ledger", &error))?
        }
        None => match std::env::var(LEDGER_VARIABLE) {
            Ok(text) => text.parse().map_err(|error| refuse(LEDGER_VARIABLE, &error))?,
            Err(_) => LedgerSetting::default(),
        },
    };
    match setting {
        LedgerSetting::Directory(path) if path.is_file() => Err(Refusal::Line(format!(
            "{}: it is no ledger; expected a folder of ledgers, or a file whose name ends in .ledger",
            path.display()
        ))),
        LedgerSetting::Directory(directory) => Ok(LedgerLocation::Directory(directory)),
        LedgerSetting::File(path) => {
            let key = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let key = DeviceKey::new(key).map_err(|error| Refusal::Line(error.to_string()))?;
            let directory = path.parent().map(PathBuf::from).unwrap_or_default();
            Ok(LedgerLocation::File { path, directory, key })
        }
        _ => LedgerConfig::default_directory()
            .map(LedgerLocation::Directory)
            .map_err(|error| Refusal::Line(error.to_string())),
    }
}

fn limit(text: &str, place: &LedgerLocation) -> Result<u64, Refusal> {
    if let LedgerLocation::Directory(directory) = place {
        return Err(Refusal::Line(format!(
            "--limit needs one ledger: name its file by --ledger, {} is a directory",
            directory.display()
        )));
    }
    match text.parse() {
        Ok(ByteSize::Bytes(bytes)) => Ok(bytes),
        Ok(share) => Err(Refusal::Line(format!(
            "--limit {share}: the file does not know the device's memory; give bytes, such as 32GiB"
        ))),
        Err(error) => Err(Refusal::Line(format!("--limit: {error}"))),
    }
}

fn report(place: &LedgerLocation, reclaim: bool, limit: Option<u64>) -> Result<Report, Refusal> {
    let refuse = |error: LedgerError| Refusal::Line(error.to_string());
    match place {
        LedgerLocation::Directory(directory) => {
            let files = list(directory).map_err(refuse)?;
            let find = |file: &LedgerFile| found(file, directory, reclaim, limit);
            let shown = directory.display().to_string();
            Ok(Report::new(shown, files.iter().map(find).collect()))
        }
        LedgerLocation::File { path, directory, key } => {
            let shown = path.display().to_string();
            match inspect(path.clone(), directory.clone(), key.clone(), reclaim, limit) {
                Err(LedgerError::Missing { .. }) => Ok(Report::new(shown, Vec::new())),
                found => Ok(Report::new(shown, vec![found.map_err(refuse)?])),
            }
        }
    }
}

fn found(file: &LedgerFile, directory: &Path, reclaim: bool, limit: Option<u64>) -> Found {
    inspect(file.path.clone(), directory.to_owned(), file.key.clone(), reclaim, limit)
        .unwrap_or_else(|error| {
            Found::unreadable(file.path.display().to_string(), error.to_string())
        })
}

fn inspect(
    path: PathBuf,
    directory: PathBuf,
    key: DeviceKey,
    reclaim: bool,
    limit: Option<u64>,
) -> LedgerResult<Found> {
    let mut freed = None;
    if reclaim || limit.is_some() {
        // Counted before joining, which may reuse and empty the slot of a dead process.
        let dead = match LedgerView::open(&path).and_then(|view| view.snapshot()) {
            Ok(snapshot) => Freed::of_dead(&snapshot),
            Err(_) => Freed::default(),
        };
        let mut config = LedgerConfig::new(key).with_directory(directory);
        config.limit = limit;
        let ledger = Ledger::open(config)?;
        if let Some(limit) = limit {
            ledger.set_limit(limit)?;
        }
        if reclaim {
            ledger.reclaim_dead()?;
            freed = Some(dead);
        }
    }
    let snapshot = LedgerView::open(path)?.snapshot()?;
    Ok(Found::of(&snapshot, freed))
}
