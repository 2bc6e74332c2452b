//! The settings of `xlogmem exec`, passed by environment variables.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The limit of a process: bytes, `share:N` in hundred-millionths of the device's memory, or `ledger-share:N` in hundred-millionths of the
/// ledger's limit. The smallest of several, separated by commas, applies.
const LIMIT: &str = "XLOG_EXEC_LIMIT";
/// The guaranteed share of a process in the ledger, in the format of a limit.
const GUARANTEE: &str = "XLOG_EXEC_GUARANTEE";
/// The name of the quota.
const NAME: &str = "XLOG_EXEC_NAME";
/// The log file, where `%p` is the process.
const LOG: &str = "XLOG_EXEC_LOG";
/// The logged allocations with a call stack: `off`, `all`, or `sampled:N` for one in N.
const STACKS: &str = "XLOG_EXEC_STACKS";
/// The ledger: `on`, `off`, a directory, or a file that ends in `.ledger`.
const LEDGER: &str = "XLOG_EXEC_LEDGER";
/// A file that is created when the first call is intercepted.
const NOTE: &str = "XLOG_EXEC_NOTE";

const WHOLE_SHARE: u128 = 100_000_000;

/// The limit of a process on each device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    Bytes(u64),
    /// In hundred-millionths of the device's memory.
    Share(u64),
    /// In hundred-millionths of the ledger's limit, or of the device's memory without a ledger.
    LedgerShare(u64),
}

/// The totals to which shares refer, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    pub(crate) device: u64,
    pub(crate) ledger: u64,
}

impl Limit {
    fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            Some(("share", share)) => share.parse().ok().map(Self::Share),
            Some(("ledger-share", share)) => share.parse().ok().map(Self::LedgerShare),
            Some(_) => None,
            None => text.parse().ok().map(Self::Bytes),
        }
    }

    pub(crate) fn of(self, whole: Whole) -> u64 {
        let part = |of: u64, share: u64| {
            let bytes = u128::from(of) * u128::from(share) / WHOLE_SHARE;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => part(whole.device, share),
            Self::LedgerShare(share) => part(whole.ledger, share),
        }
    }
}

/// The ledger that the process joins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LedgerSetting {
    Off,
    On,
    Directory(PathBuf),
    File(PathBuf),
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) limits: Vec<Limit>,
    pub(crate) guarantee: Option<Limit>,
    pub(crate) name: Option<String>,
    pub(crate) log: Option<PathBuf>,
    /// One in this number of allocations is logged with its stack; none for 0.
    pub(crate) stacks: u32,
    pub(crate) ledger: LedgerSetting,
    pub(crate) note: Option<PathBuf>,
    /// The message for an invalid setting.
    pub(crate) rejected: Option<String>,
}

impl Settings {
    pub(crate) fn from_environment() -> Self {
        let path = |name| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
        let mut rejected = None;
        let text = std::env::var(LIMIT).unwrap_or_default();
        let limits = text.split(',').filter(|text| !text.is_empty()).filter_map(|text| {
            let limit = Limit::parse(text);
            if limit.is_none() {
                rejected = Some(format!("{LIMIT}={text:?} is not understood; it is no limit"));
            }
            limit
        });
        let limits = limits.collect();
        let guarantee = std::env::var(GUARANTEE).ok().filter(|text| !text.is_empty());
        let guarantee = guarantee.and_then(|text| {
            let share = Limit::parse(&text);
            if share.is_none() {
                rejected = Some(format!("{GUARANTEE}={text:?} is not understood"));
            }
            share
        });
        let stacks = std::env::var(STACKS).unwrap_or_default();
        let stacks = match stacks.as_str() {
            "" | "off" => 0,
            "all" => 1,
            text => {
                let every = text.strip_prefix("sampled:").and_then(|every| every.parse().ok());
                if every.is_none() {
                    rejected = Some(format!("{STACKS}={text:?} is not understood; no stacks"));
                }
                every.unwrap_or(0)
            }
        };
        let name = std::env::var(NAME).ok().filter(|text| !text.is_empty());
        let ledger = match path(LEDGER) {
            None => LedgerSetting::On,
            Some(text) if text.as_os_str() == "on" => LedgerSetting::On,
            Some(text) if text.as_os_str() == "off" => LedgerSetting::Off,
            Some(file) if file.extension().is_some_and(|end| end == "ledger") => {
                LedgerSetting::File(file)
            }
            Some(directory) => LedgerSetting::Directory(directory),
        };
        let (log, note) = (path(LOG), path(NOTE));
        Self { limits, guarantee, name, log, stacks, ledger, note, rejected }
    }
}

impl Settings {
    /// The smallest limit in bytes.
    pub(crate) fn limit(&self, whole: Whole) -> Option<u64> {
        self.limits.iter().map(|limit| limit.of(whole)).min()
    }
}

/// Returns the path of a log: `%p` is replaced by the process id and `%%` by a percent sign. If `is_taken` is true for that path, the
/// process id precedes the extension unless the name already has it, and then a counter follows until a name is free.
pub(crate) fn log_path(pattern: &Path, process: u32, is_taken: impl Fn(&Path) -> bool) -> PathBuf {
    let mut path = Vec::new();
    let mut names_process = false;
    let mut letters = pattern.as_os_str().as_bytes().iter().copied().peekable();
    while let Some(letter) = letters.next() {
        match (letter, letters.peek()) {
            (b'%', Some(b'p')) => {
                letters.next();
                names_process = true;
                path.extend_from_slice(process.to_string().as_bytes());
            }
            (b'%', Some(b'%')) => {
                letters.next();
                path.push(b'%');
            }
            _ => path.push(letter),
        }
    }
    let path = PathBuf::from(OsString::from_vec(path));
    if !is_taken(&path) {
        return path;
    }
    let process = if names_process { String::new() } else { format!("-{process}") };
    let first = if names_process { 2 } else { 1 };
    let mut names = (first..=u32::MAX).map(|count| {
        let mut name = path.file_stem().unwrap_or_default().to_owned();
        name.push(&process);
        if count > 1 {
            name.push(format!("-{count}"));
        }
        if let Some(extension) = path.extension() {
            name.push(".");
            name.push(extension);
        }
        path.with_file_name(name)
    });
    let free = names.find(|name| !is_taken(name));
    free.unwrap_or_else(|| path.clone())
}
