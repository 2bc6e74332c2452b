//! Opens a log of any format and reads it as a stream of records.
//!
//! Readers hold one chunk or one line at a time, plus the bounded table of names. Memory is a few megabytes even for
//! a file larger than memory, or for a hostile one.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::binary::{BinaryReader, SYNC};
use crate::csv::{CsvReader, looks_like_header};
use crate::encoder::Format;
use crate::error::{BadInput, TraceError, excerpt};
use crate::header::Header;
use crate::lines::MAX_LINE_BYTES;
use crate::names::Names;
use crate::record::Record;
use crate::rmm::{RMM_HEADER, RmmReader};

/// How a reader treats invalid input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// Skips and counts it; see [`ReadReport`].
    #[default]
    Lenient,
    /// Returns it as an error and ends.
    Strict,
}

/// The counts and faults of reading a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadReport {
    /// Good records.
    pub records: u64,
    /// Skipped faults: lines, or ranges of bytes.
    pub skipped: u64,
    /// Bytes skipped in a binary file.
    pub skipped_bytes: u64,
    /// The first fault.
    pub first_bad: Option<BadInput>,
    /// The file ends inside a chunk or a line, as after a kill.
    pub truncated: bool,
    /// The writer closed the file (binary only).
    pub closed: bool,
    /// The file ends and its writer did not close it: later records may be missing (binary only).
    pub unclosed: bool,
    /// Records that the writer reports as dropped (not in RMM's CSV).
    pub dropped_at_source: u64,
}

impl ReadReport {
    pub(crate) fn refuse(
        &mut self,
        bad: BadInput,
        strictness: Strictness,
    ) -> Result<(), TraceError> {
        self.skipped += 1;
        if self.first_bad.is_none() {
            self.first_bad = Some(bad.clone());
        }
        match strictness {
            Strictness::Strict => Err(TraceError::Bad(bad)),
            Strictness::Lenient => Ok(()),
        }
    }
}

impl ReadReport {
    /// Returns whether records may be missing: dropped, skipped, or after the end.
    pub fn is_incomplete(&self) -> bool {
        self.truncated || self.unclosed || self.skipped > 0 || self.dropped_at_source > 0
    }
}

impl fmt::Display for ReadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} records", self.records)?;
        if self.skipped > 0 {
            write!(f, ", {} bad places skipped", self.skipped)?;
        }
        if let Some(bad) = &self.first_bad {
            write!(f, " (the first at {bad})")?;
        }
        if self.truncated {
            f.write_str(", cut off at the end")?;
        }
        if self.unclosed {
            f.write_str(", not closed by the writer")?;
        }
        if self.dropped_at_source > 0 {
            write!(f, ", {} dropped by the writer", self.dropped_at_source)?;
        }
        Ok(())
    }
}

/// The state of a log while it is read.
#[derive(Clone, Debug, Default)]
pub struct LogState {
    /// The header of the log.
    pub header: Header,
    /// The strings of the records read so far.
    pub names: Names,
    /// The counts and faults so far.
    pub report: ReadReport,
}

/// A sequence of records with the names they use.
pub trait Source {
    /// Returns the next record; `None` at the end.
    fn next_record(&mut self) -> Result<Option<Record>, TraceError>;
    /// Returns the header, the names and the report of the log so far.
    fn state(&self) -> &LogState;
    /// Returns the header of the log.
    fn header(&self) -> &Header {
        &self.state().header
    }
    /// Returns the strings of the records read so far.
    fn names(&self) -> &Names {
        &self.state().names
    }
    /// Returns the counts and faults so far.
    fn report(&self) -> &ReadReport {
        &self.state().report
    }
}

/// Returns the existing files of a rotated log, the oldest first: `name.2`, `name.1`, `name`.
pub fn rotated_files(path: impl AsRef<Path>) -> Vec<PathBuf> {
    let path = path.as_ref();
    let numbered = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let mut files: Vec<PathBuf> =
        (1..=10_000).map(numbered).take_while(|file| file.exists()).collect();
    files.reverse();
    files.extend(path.exists().then(|| path.to_owned()));
    files
}

type Input = Box<dyn BufRead + Send>;

/// A log of any format.
///
/// It iterates over records; [`names`](Source::names) resolves their strings.
///
/// ```
/// use xlog_trace::{Reader, Source, Strictness};
///
/// # fn main() -> Result<(), xlog_trace::TraceError> {
/// let csv = "action,pointer,bytes,tag\nallocate,0x1000,64,rows\ndeallocate,0x1000,64,rows\n";
/// let mut log = Reader::from_stream(csv.as_bytes(), Strictness::Strict)?;
/// let first = log.next_record()?.expect("it has two records");
/// assert_eq!((first.bytes(), log.names().text_or_empty(first.tag())), (Some(64), "rows"));
/// # Ok(())
/// # }
/// ```
pub struct Reader {
    format: Format,
    inner: Box<dyn Source + Send>,
}

impl Reader {
    /// Opens a file and detects its format; invalid input is skipped and counted.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        Self::open_with(path, Strictness::Lenient)
    }

    /// Opens a file and detects its format.
    pub fn open_with(path: impl AsRef<Path>, strictness: Strictness) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let file =
            File::open(path).map_err(TraceError::io(format!("opening {}", path.display())))?;
        Self::from_stream(BufReader::with_capacity(64 << 10, file), strictness)
    }

    /// Reads a byte stream and detects its format.
    pub fn from_stream(
        input: impl BufRead + Send + 'static,
        strictness: Strictness,
    ) -> Result<Self, TraceError> {
        let (format, input) = detect(Box::new(input))?;
        Self::with_format(format, input, strictness)
    }

    /// Reads a byte stream of a known format. A stream with a damaged beginning needs this.
    pub fn with_format(
        format: Format,
        input: impl BufRead + Send + 'static,
        strictness: Strictness,
    ) -> Result<Self, TraceError> {
        let input: Input = Box::new(input);
        let inner: Box<dyn Source + Send> = match format {
            Format::Binary => Box::new(BinaryReader::new(input, strictness)?),
            Format::Csv => Box::new(CsvReader::new(input, strictness)?),
            Format::RmmCsv => Box::new(RmmReader::new(input, strictness)?),
        };
        Ok(Self { format, inner })
    }

    /// Returns the format of the log.
    pub fn format(&self) -> Format {
        self.format
    }
}

impl Source for Reader {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        self.inner.next_record()
    }

    fn state(&self) -> &LogState {
        self.inner.state()
    }
}

impl Iterator for Reader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("format", &self.format())
            .field("report", self.report())
            .finish_non_exhaustive()
    }
}

/// Detects the format from the first line or sync mark, without consuming it.
fn detect(mut input: Input) -> Result<(Format, Input), TraceError> {
    let mut head = Vec::new();
    (&mut input)
        .take(MAX_LINE_BYTES as u64)
        .read_until(b'\n', &mut head)
        .map_err(TraceError::io("reading the beginning of the log"))?;
    let line = head.trim_ascii_end();
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    let format = if head.starts_with(&SYNC) {
        Format::Binary
    } else if line == RMM_HEADER.as_bytes() {
        Format::RmmCsv
    } else if looks_like_header(line) {
        Format::Csv
    } else {
        return Err(TraceError::UnknownFormat { found: excerpt(line) });
    };
    Ok((format, Box::new(std::io::Cursor::new(head).chain(input))))
}
