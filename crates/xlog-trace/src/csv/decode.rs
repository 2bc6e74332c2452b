//! Reads CSV by the column names in its header line.

use crate::action::{Action, ServedBy, UseAccess};
use crate::error::excerpt;
use crate::names::{NameId, Names};
use crate::record::{Failure, Record};
use crate::text_reader::{Columns, Parsed, TextReader, Wrong};

use super::columns::{Column, DROPPED, is_header, parse_header};
use super::fields::{Fields, decimal, hex};

pub(crate) type CsvReader<R> = TextReader<R, CsvColumns>;

/// The columns of a log, from its header line.
#[derive(Debug)]
pub(crate) struct CsvColumns {
    columns: Vec<Option<Column>>,
    /// Index of the action's column.
    action: usize,
    fields: Fields,
}

impl Columns for CsvColumns {
    fn from_header(header: &[u8]) -> Result<Self, Wrong> {
        let columns = parse_header(header);
        for needed in [Column::Action, Column::Pointer] {
            if !columns.contains(&Some(needed)) {
                return Err(Wrong {
                    expected: format!("a header line with the column `{}`", needed.name()),
                    found: format!("{} known columns", columns.iter().flatten().count()),
                });
            }
        }
        Ok(Self { action: action_of(&columns), columns, fields: Fields::default() })
    }

    fn parse(&mut self, line: &[u8], order: u64, names: &mut Names) -> Result<Parsed, Wrong> {
        let is_split = self.fields.split(line);
        // A file that was begun anew, concatenated logs, and logs with dropped records have further header lines.
        if self.fields.raw(line, self.action).eq_ignore_ascii_case(Column::Action.name().as_bytes())
            || self.fields.len() != self.columns.len()
        {
            let columns = parse_header(line);
            if is_header(&columns) {
                self.action = action_of(&columns);
                self.columns = columns;
                return Ok(Parsed::Header { dropped: self.dropped(line) });
            }
        }
        if !is_split || self.fields.len() != self.columns.len() {
            let expected = format!("{} fields, as in the header line", self.columns.len());
            let found = format!("{} in {}", self.fields.len(), excerpt(line));
            return Err(Wrong { expected, found });
        }
        let mut record = Record::new(Action::Other(0), 0, order, 0);
        let (mut kind, mut message, mut stream_name) = (None, None, None);
        for (index, column) in self.columns.iter().enumerate() {
            let Some(column) = *column else { continue };
            let raw = self.fields.raw(line, index);
            if !self.fields.is_present(index) {
                if column == Column::Action {
                    let (expected, found) = ("an action".to_owned(), "nothing".to_owned());
                    return Err(Wrong { expected, found });
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
                    let tag = names.intern(&self.fields.text(line, index));
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
                    kind = Some(names.intern(&self.fields.text(line, index)));
                }
                Column::ErrorMessage => {
                    message = Some(names.intern(&self.fields.text(line, index)));
                }
                Column::StreamName => stream_name = Some(index),
                Column::Site => {
                    let site = names.intern(&self.fields.text(line, index));
                    record = record.with_site(site);
                }
                Column::Stack => {
                    let text = self.fields.text(line, index);
                    let frames: Vec<NameId> = text
                        .split(';')
                        .filter(|frame| !frame.is_empty())
                        .map(|frame| names.intern(frame))
                        .collect();
                    record = record.with_stack(names.intern_stack(&frames));
                }
            }
        }
        if kind.is_some() || message.is_some() {
            let kind = kind.unwrap_or_else(|| names.intern("error"));
            let message = message.unwrap_or_else(|| names.intern(""));
            record = record.with_failure(Failure { kind, message });
        }
        if let (Some(stream), Some(index)) = (record.stream(), stream_name) {
            names.name_stream(stream, &self.fields.text(line, index));
        }
        Ok(Parsed::Record(record))
    }
}

impl CsvColumns {
    /// Returns the number of dropped records that a header line has in place of a column.
    fn dropped(&self, line: &[u8]) -> u64 {
        let number =
            |index| decimal(self.fields.raw(line, index).strip_prefix(DROPPED.as_bytes())?);
        (0..self.fields.len()).find_map(number).unwrap_or(0)
    }
}

fn action_of(columns: &[Option<Column>]) -> usize {
    columns.iter().position(|column| *column == Some(Column::Action)).unwrap_or(0)
}

fn wrong(column: Column, expected: &str, raw: &[u8]) -> Wrong {
    let expected = format!("{expected} in column `{}`", column.name());
    Wrong { expected, found: excerpt(raw) }
}
