//! Reads a log line by line; both CSV formats use it.

use std::io::Read;

use crate::error::{BadInput, InputPosition, TraceError, excerpt};
use crate::lines::{Broken, Line, Lines, MAX_LINE_BYTES};
use crate::names::Names;
use crate::reader::{LogState, Source, Strictness};
use crate::record::Record;

/// The expected and the found content of a line.
pub(crate) struct Wrong {
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// The content of a good line.
pub(crate) enum Parsed {
    Record(Record),
    /// A header line: of a concatenated log, or one that ends a log with the number of records that its writer dropped.
    Header {
        dropped: u64,
    },
}

/// The columns of one format.
pub(crate) trait Columns: Sized {
    /// Parses the header line; an empty one means that there is none.
    fn from_header(line: &[u8]) -> Result<Self, Wrong>;

    /// Parses a line. A record without an order gets `order`.
    fn parse(&mut self, line: &[u8], order: u64, names: &mut Names) -> Result<Parsed, Wrong>;
}

/// Reads records from any byte stream, with its own buffer.
#[derive(Debug)]
pub(crate) struct TextReader<R, C> {
    lines: Lines<R>,
    columns: C,
    /// Its header stays empty: records of text logs carry wall-clock time, or no date at all.
    log: LogState,
    strictness: Strictness,
    done: bool,
}

impl<R: Read, C: Columns> TextReader<R, C> {
    /// Creates a reader and reads the header line.
    pub(crate) fn new(inner: R, strictness: Strictness) -> Result<Self, TraceError> {
        let mut lines = Lines::new(inner);
        let first = lines.next()?;
        let text = first.as_ref().map_or(&[][..], |line| lines.text(line));
        let columns = C::from_header(text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text));
        let columns = columns.map_err(|Wrong { expected, found }| {
            let position = InputPosition::Line(1);
            TraceError::Bad(BadInput { position, expected, found, good_records: 0 })
        })?;
        Ok(Self { lines, columns, log: LogState::default(), strictness, done: false })
    }

    fn parse(&mut self, line: &Line) -> Result<Option<Record>, Wrong> {
        let text = self.lines.text(line);
        if let Some(broken) = line.broken {
            let expected = match broken {
                Broken::TooLong => format!("a line of at most {MAX_LINE_BYTES} bytes"),
                Broken::OpenQuote => "a closing quote".to_owned(),
                Broken::Cut => "the end of the line".to_owned(),
            };
            return Err(Wrong { expected, found: excerpt(text) });
        }
        if text.is_empty() {
            return Ok(None);
        }
        let log = &mut self.log;
        match self.columns.parse(text, log.report.records, &mut log.names)? {
            Parsed::Record(record) => Ok(Some(record)),
            Parsed::Header { dropped } => {
                let all = &mut log.report.dropped_at_source;
                *all = all.saturating_add(dropped);
                Ok(None)
            }
        }
    }

    /// Counts a bad line. A truncated last line is not counted: `truncated` reports it, and strict readers fail there.
    fn refuse(&mut self, line: &Line, wrong: Wrong) -> Result<(), TraceError> {
        let cut = line.broken == Some(Broken::Cut);
        self.log.report.truncated |= cut;
        if cut && self.strictness == Strictness::Lenient {
            return Ok(());
        }
        let Wrong { expected, found } = wrong;
        let position = InputPosition::Line(line.number);
        let bad = BadInput { position, expected, found, good_records: self.log.report.records };
        if cut {
            self.done = true;
            self.log.report.first_bad.get_or_insert_with(|| bad.clone());
            return Err(TraceError::Bad(bad));
        }
        self.log.report.refuse(bad, self.strictness).inspect_err(|_| self.done = true)
    }
}

impl<R: Read, C: Columns> Source for TextReader<R, C> {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while !self.done {
            let line = self.lines.next().inspect_err(|_| self.done = true)?;
            let Some(line) = line else {
                self.done = true;
                break;
            };
            match self.parse(&line) {
                Ok(Some(record)) => {
                    self.log.report.records += 1;
                    return Ok(Some(record));
                }
                Ok(None) => {}
                Err(wrong) => {
                    self.lines.reconsider(&line);
                    self.refuse(&line, wrong)?;
                }
            }
        }
        Ok(None)
    }

    fn state(&self) -> &LogState {
        &self.log
    }
}
