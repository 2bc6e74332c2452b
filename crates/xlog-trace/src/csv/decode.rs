//! Reading CSV by the names in its header line.

use std::io::Read;

use crate::action::{Action, ServedBy, UseAccess};
use crate::error::{BadInput, InputPosition, TraceError, excerpt};
use crate::header::Header;
use crate::lines::{Broken, Line, Lines};
use crate::names::Names;
use crate::reader::{ReadReport, Strictness};
use crate::record::{Failure, Record};

use super::columns::{Column, is_header, parse_header};
use super::fields::{Fields, decimal, hex};

/// Reads our CSV from any byte stream; it does its own buffering.
#[derive(Debug)]
pub struct CsvReader<R> {
    lines: Lines<R>,
    columns: Vec<Option<Column>>,
    /// Where the action is among the columns.
    action: usize,
    fields: Fields,
    header: Header,
    names: Names,
    report: ReadReport,
    strictness: Strictness,
    done: bool,
}

/// What a field should have been, and what it is.
type Wrong = (String, String);

impl<R: Read> CsvReader<R> {
    /// A reader at the start of a log. Reads the header line.
    pub fn new(inner: R, strictness: Strictness) -> Result<Self, TraceError> {
        let mut lines = Lines::new(inner);
        let columns = match lines.next()? {
            Some(line) => parse_header(lines.text(&line)),
            None => Vec::new(),
        };
        for needed in [Column::Action, Column::Pointer] {
            if !columns.contains(&Some(needed)) {
                return Err(TraceError::Bad(BadInput {
                    position: InputPosition::Line(1),
                    expected: format!("a header line with the column `{}`", needed.name()),
                    found: format!("{} known columns", columns.iter().flatten().count()),
                    good_records: 0,
                }));
            }
        }
        Ok(Self {
            lines,
            action: action_of(&columns),
            columns,
            fields: Fields::default(),
            header: Header::default(),
            names: Names::new(),
            report: ReadReport::default(),
            strictness,
            done: false,
        })
    }

    /// What the log says of itself: nothing, its records carry wall-clock time.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The strings of the records read so far.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// How reading went so far.
    pub fn report(&self) -> &ReadReport {
        &self.report
    }

    /// The next record, or none at the end.
    pub fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while !self.done {
            let line = self.lines.next().inspect_err(|_| self.done = true)?;
            let Some(line) = line else {
                self.done = true;
                break;
            };
            match self.parse(&line) {
                Ok(Some(record)) => {
                    self.report.records += 1;
                    return Ok(Some(record));
                }
                Ok(None) => {}
                Err(wrong) => {
                    self.lines.reconsider(&line);
                    let result = refuse(&mut self.report, self.strictness, &line, wrong);
                    self.done |= result.is_err();
                    result?;
                }
            }
        }
        Ok(None)
    }

    /// The record of a line; none for an empty line or the header line of a joined file.
    fn parse(&mut self, line: &Line) -> Result<Option<Record>, Wrong> {
        let text = self.lines.text(line);
        if let Some(broken) = line.broken {
            return Err(broken_line(broken, text));
        }
        if text.is_empty() {
            return Ok(None);
        }
        let is_split = self.fields.split(text);
        // A log that was begun anew in its file, or put behind another, has its header line again.
        if self.fields.raw(text, self.action).eq_ignore_ascii_case(Column::Action.name().as_bytes())
            || self.fields.len() != self.columns.len()
        {
            let columns = parse_header(text);
            if is_header(&columns) {
                self.action = action_of(&columns);
                self.columns = columns;
                return Ok(None);
            }
        }
        if !is_split || self.fields.len() != self.columns.len() {
            let expected = format!("{} fields, as in the header line", self.columns.len());
            return Err((expected, format!("{} in {}", self.fields.len(), excerpt(text))));
        }
        let mut record = Record::new(Action::Other(0), 0, self.report.records, 0);
        let (mut kind, mut message, mut stream_name) = (None, None, None);
        for (index, column) in self.columns.iter().enumerate() {
            let Some(column) = *column else { continue };
            let raw = self.fields.raw(text, index);
            if !self.fields.is_present(index) {
                if column == Column::Action {
                    return Err(("an action".to_owned(), "nothing".to_owned()));
                }
                continue;
            }
            let number = || decimal(raw).ok_or_else(|| wrong(column, "a decimal number", raw));
            let small = || {
                decimal(raw)
                    .and_then(|value| u32::try_from(value).ok())
                    .ok_or_else(|| wrong(column, "a decimal number below 2^32", raw))
            };
            let word = || std::str::from_utf8(raw).unwrap_or("");
            match column {
                Column::Thread => record.thread = number()?,
                Column::Time => record.time = number()?,
                Column::Action => {
                    let action = Action::from_text(word())
                        .ok_or_else(|| wrong(column, "`allocate`, `deallocate`, ...", raw))?;
                    record.action = action.code();
                }
                Column::Pointer => {
                    let ptr = hex(raw)
                        .ok_or_else(|| wrong(column, "`0x` and up to 16 hex digits", raw))?;
                    record = record.with_ptr(ptr);
                }
                Column::Bytes => record = record.with_bytes(number()?),
                Column::Stream => record = record.with_stream(small()?),
                Column::Device => record.device = small()?,
                Column::Tag => {
                    let tag = self.names.intern(&self.fields.text(text, index));
                    record = record.with_tag(tag);
                }
                Column::QueryId => record = record.with_query_id(number()?),
                Column::Granted => record = record.with_granted(number()?),
                Column::Alignment => {
                    let value = number()?;
                    if !value.is_power_of_two() {
                        return Err(wrong(column, "a power of two", raw));
                    }
                    record = record.with_alignment(value);
                }
                Column::Generation => record = record.with_generation(number()?),
                Column::Order => record.order = number()?,
                Column::LatencyNanos => record = record.with_latency_nanos(number()?),
                Column::Path => {
                    let path = ServedBy::from_text(word())
                        .ok_or_else(|| wrong(column, "`driver`, `magazine`, ...", raw))?;
                    record.path = path.code();
                }
                Column::Access => {
                    let access = UseAccess::from_text(word())
                        .ok_or_else(|| wrong(column, "`read`, `write` or `read_write`", raw))?;
                    record = record.with_access(access);
                }
                Column::Process => record.process = small()?,
                Column::ErrorKind => {
                    kind = Some(self.names.intern(&self.fields.text(text, index)));
                }
                Column::ErrorMessage => {
                    message = Some(self.names.intern(&self.fields.text(text, index)));
                }
                Column::StreamName => stream_name = Some(index),
            }
        }
        if kind.is_some() || message.is_some() {
            let kind = kind.unwrap_or_else(|| self.names.intern("error"));
            let message = message.unwrap_or_else(|| self.names.intern(""));
            record = record.with_failure(Failure { kind, message });
        }
        if let (Some(stream), Some(index)) = (record.stream(), stream_name) {
            self.names.name_stream(stream, &self.fields.text(text, index));
        }
        Ok(Some(record))
    }
}

fn action_of(columns: &[Option<Column>]) -> usize {
    columns.iter().position(|column| *column == Some(Column::Action)).unwrap_or(0)
}

fn wrong(column: Column, expected: &str, raw: &[u8]) -> Wrong {
    (format!("{expected} in column `{}`", column.name()), excerpt(raw))
}

pub(crate) fn broken_line(broken: Broken, text: &[u8]) -> Wrong {
    let expected = match broken {
        Broken::TooLong => format!("a line of at most {} bytes", super::MAX_LINE_BYTES),
        Broken::OpenQuote => "a closing quote".to_owned(),
        Broken::Cut => "the end of the line".to_owned(),
    };
    (expected, excerpt(text))
}

/// Counts a bad line; the end of a file that was cut off is no bad line, except for strict readers.
pub(crate) fn refuse(
    report: &mut ReadReport,
    strictness: Strictness,
    line: &Line,
    (expected, found): Wrong,
) -> Result<(), TraceError> {
    let cut = line.broken == Some(Broken::Cut);
    report.truncated |= cut;
    if cut && strictness == Strictness::Lenient {
        return Ok(());
    }
    let bad = BadInput {
        position: InputPosition::Line(line.number),
        expected,
        found,
        good_records: report.records,
    };
    report.refuse(bad, strictness)
}
