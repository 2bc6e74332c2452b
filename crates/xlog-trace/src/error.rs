//! Everything that can go wrong between a file and its records, with the place and what was expected.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Where in a file something is: a line of text, or a byte.
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

/// Input that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadInput {
    /// Where it is.
    pub position: InputPosition,
    /// The expected input.
    pub expected: String,
    /// The input found, shortened.
    pub found: String,
    /// How many records before it were good.
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

/// Why a log cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Something in the input is wrong. Only strict readers return it for single records.
    #[error("{0}")]
    Bad(BadInput),
    /// The file is none of the known formats.
    #[error(
        "not an allocation log: expected an xtrace binary file, a CSV header with the columns \
         `action` and `pointer`, or RMM's `Thread,Time,Action,Pointer,Size,Stream`; found {found}"
    )]
    UnknownFormat {
        /// How the file begins.
        found: String,
    },
    /// The file is of a newer layout than this version reads.
    #[error("xtrace version {found} is newer than {supported}, the newest this version reads")]
    NewerVersion {
        /// The file's version.
        found: u16,
        /// The newest version read here.
        supported: u16,
    },
    /// A memory snapshot cannot be read.
    #[error(transparent)]
    Snapshot(#[from] crate::import::SnapshotError),
    /// A setting of a recorder cannot be used.
    #[error("{setting} is {value}, expected {expected}")]
    BadSetting {
        /// The setting's name.
        setting: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// More blocks are live at one point of the log than can be followed.
    #[error(
        "{live} blocks are live at one point of the log and more follow; to follow them takes {} MiB of memory, {why}",
        bytes >> 20
    )]
    TooManyLive {
        /// Blocks that are followed.
        live: usize,
        /// Memory that more of them would take.
        bytes: usize,
        /// Why that is too much.
        why: &'static str,
    },
    /// Another recorder, of this process or another, writes the file.
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
        /// The attempted action.
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

/// An excerpt of bad bytes for an error: printable, at most 40 characters.
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
