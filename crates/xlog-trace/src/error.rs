//! Errors of reading and writing logs, with their position and the expected input.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// A position in a file: a line of text or a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputPosition {
    /// A line, counted from one.
    Line(u64),
    /// An offset in bytes, counted from zero.
    Byte(u64),
}

impl fmt::Display for InputPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Byte(offset) => write!(f, "byte {offset}"),
        }
    }
}

/// Input that does not match its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadInput {
    /// Its position.
    pub position: InputPosition,
    /// The expected input.
    pub expected: String,
    /// The input found, shortened.
    pub found: String,
    /// The number of good records before it.
    pub good_records: u64,
}

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: expected {}, found {} ({} records before it are good)",
            self.position, self.expected, self.found, self.good_records
        )
    }
}

/// The reason why a log cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The input is invalid. For single records, only strict readers return it.
    #[error("{0}")]
    Bad(BadInput),
    /// The file has none of the known formats.
    #[error(
        "not an allocation log: expected an xtrace binary file, a CSV header with the columns \
         `action` and `pointer`, or RMM's `Thread,Time,Action,Pointer,Size,Stream`; found {found}"
    )]
    UnknownFormat {
        /// How the file begins.
        found: String,
    },
    /// The file has a newer layout than this version reads.
    #[error("xtrace version {found} is newer than {supported}, the newest this version reads")]
    NewerVersion {
        /// The file's version.
        found: u16,
        /// The newest version that can be read.
        supported: u16,
    },
    /// A memory snapshot cannot be read.
    #[error(transparent)]
    Snapshot(#[from] crate::import::SnapshotError),
    /// A recorder's setting is invalid.
    #[error("{setting} is {value}, expected {expected}")]
    BadSetting {
        /// The setting's name.
        setting: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// More blocks are live at one point of the log than a reader may track.
    #[error(
        "{live} blocks are live at one point of the log and more follow; to follow them takes {} MiB of memory, {why}",
        bytes >> 20
    )]
    TooManyLive {
        /// The blocks tracked so far.
        live: usize,
        /// The memory that tracking more would take.
        bytes: usize,
        /// The reason why that is too much.
        why: &'static str,
    },
    /// Another recorder, in this process or another, writes the file.
    #[error(
        "{} has a writer already, in this process or another, and a log file has one: give every runtime and process a \
         file of its own; in XLOG_DEVICE_LOG, %p stands for the process and %d for the device",
        path.display()
    )]
    InUse {
        /// The file as named.
        path: PathBuf,
    },
    /// Reading or writing failed.
    #[error("{context}: {source}")]
    Io {
        /// The operation that failed.
        context: String,
        /// The system's error.
        source: io::Error,
    },
}

impl TraceError {
    pub(crate) fn io(context: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let context = context.into();
        move |source| Self::Io { context, source }
    }
}

/// Returns a printable excerpt of bad bytes for an error, at most 40 characters.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".to_owned();
    }
    let head = bytes.get(..bytes.len().min(40)).unwrap_or(bytes);
    let mut text = String::from("`");
    text.extend(head.escape_ascii().map(char::from));
    text.push('`');
    if bytes.len() > head.len() {
        text.push_str("...");
    }
    text
}
