//! Reading RMM's log.

use std::collections::HashMap;
use std::io::Read;

use crate::action::Action;
use crate::csv::fields::{Fields, decimal, hex};
use crate::csv::{broken_line, refuse};
use crate::error::{BadInput, InputPosition, TraceError, excerpt};
use crate::header::Header;
use crate::lines::{Line, Lines};
use crate::names::{MAX_STREAM_NAMES, Names};
use crate::reader::{ReadReport, Strictness};
use crate::record::Record;

use super::{NANOS_PER_DAY, RMM_HEADER};

/// Handles below this are RMM's well-known streams and keep their number.
const FIRST_FREE_STREAM: u64 = 3;

/// Reads an RMM log from any byte stream; it does its own buffering.
#[derive(Debug)]
pub struct RmmReader<R> {
    lines: Lines<R>,
    fields: Fields,
    header: Header,
    names: Names,
    streams: HashMap<u64, u32>,
    day: u64,
    last_time: u64,
    report: ReadReport,
    strictness: Strictness,
    done: bool,
}

type Wrong = (String, String);

impl<R: Read> RmmReader<R> {
    /// A reader at the start of a log. Reads the header line.
    pub fn new(inner: R, strictness: Strictness) -> Result<Self, TraceError> {
        let mut lines = Lines::new(inner);
        let line = lines.next()?;
        let text = line.as_ref().map_or(&[][..], |line| lines.text(line));
        if text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text) != RMM_HEADER.as_bytes() {
            return Err(TraceError::Bad(BadInput {
                position: InputPosition::Line(1),
                expected: format!("`{RMM_HEADER}`"),
                found: excerpt(text),
                good_records: 0,
            }));
        }
        Ok(Self {
            lines,
            fields: Fields::default(),
            header: Header::default(),
            names: Names::new(),
            streams: HashMap::new(),
            day: 0,
            last_time: 0,
            report: ReadReport::default(),
            strictness,
            done: false,
        })
    }

    /// What the log says of itself: nothing, not even the day.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The names of the streams.
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

    fn parse(&mut self, line: &Line) -> Result<Option<Record>, Wrong> {
        let text = self.lines.text(line);
        if let Some(broken) = line.broken {
            return Err(broken_line(broken, text));
        }
        if text.is_empty() || text == RMM_HEADER.as_bytes() {
            return Ok(None);
        }
        if !self.fields.split(text) || self.fields.len() != 6 {
            let expected = format!("the 6 fields of `{RMM_HEADER}`");
            return Err((expected, format!("{} in {}", self.fields.len(), excerpt(text))));
        }
        let field = |index| self.fields.raw(text, index);
        let wrong = |expected: &str, index| {
            Err((format!("{expected} as field {}", index + 1), excerpt(field(index))))
        };
        let Some(thread) = decimal(field(0)) else { return wrong("a decimal thread id", 0) };
        let Some(time) = time_of_day(field(1)) else {
            return wrong("a time of day like `12:34:56.123456`", 1);
        };
        let action = match field(2) {
            b"allocate" => Action::Allocate,
            b"free" => Action::Deallocate,
            b"allocate failure" => Action::AllocateFailure,
            _ => return wrong("`allocate`, `free` or `allocate failure`", 2),
        };
        let ptr = match field(3) {
            b"(nil)" => None,
            digits => match hex(digits) {
                Some(ptr) => Some(ptr),
                None => return wrong("a pointer like `0x7f00` or `(nil)`", 3),
            },
        };
        let Some(bytes) = decimal(field(4)) else { return wrong("a decimal size", 4) };
        let handle = match field(5) {
            b"(nil)" => Some(0),
            digits => hex(digits).or_else(|| decimal(digits)),
        };
        let Some(handle) = handle else { return wrong("a stream like `0` or `0x55d0`", 5) };
        let Some(stream) = stream_number(&mut self.streams, handle) else {
            return wrong("one of at most 65536 different streams", 5);
        };
        if let Ok(name) = std::str::from_utf8(field(5)) {
            self.names.name_stream(stream, name);
        }
        let time = self.absolute(time);
        let mut record = Record::new(action, 0, self.report.records, time)
            .with_thread(thread)
            .with_bytes(bytes)
            .with_stream(stream);
        if let Some(ptr) = ptr {
            record = record.with_ptr(ptr);
        }
        Ok(Some(record))
    }

    /// Nanoseconds since the midnight before the log's first record.
    fn absolute(&mut self, time_of_day: u64) -> u64 {
        const HALF: u64 = NANOS_PER_DAY / 2;
        let mut day = self.day;
        if time_of_day + HALF < self.last_time {
            day += 1;
        } else if time_of_day > self.last_time + HALF && day > 0 {
            // A record of before midnight, written after one of after midnight.
            return at(day - 1, time_of_day);
        }
        self.day = day;
        self.last_time = time_of_day;
        at(day, time_of_day)
    }
}

/// The time on a day. Saturates: a log can claim more midnights than 64 bits of nanoseconds hold.
fn at(day: u64, time_of_day: u64) -> u64 {
    day.saturating_mul(NANOS_PER_DAY).saturating_add(time_of_day)
}

/// The number of a stream by its handle, the same for the same handle.
fn stream_number(streams: &mut HashMap<u64, u32>, handle: u64) -> Option<u32> {
    if handle < FIRST_FREE_STREAM {
        return Some(handle as u32);
    }
    let next = streams.len() + FIRST_FREE_STREAM as usize;
    if let Some(&known) = streams.get(&handle) {
        return Some(known);
    }
    if next >= MAX_STREAM_NAMES {
        return None;
    }
    streams.insert(handle, next as u32);
    Some(next as u32)
}

/// Nanoseconds since midnight of `HH:MM:SS.uuuuuu`.
fn time_of_day(text: &[u8]) -> Option<u64> {
    let [h1, h2, b':', m1, m2, b':', s1, s2, b'.' | b':', micros @ ..] = text else { return None };
    let pair = |a: u8, b: u8, below: u64| decimal(&[a, b]).filter(|&value| value < below);
    let micros = if micros.len() == 6 { decimal(micros)? } else { return None };
    let seconds = pair(*h1, *h2, 24)? * 3600 + pair(*m1, *m2, 60)? * 60 + pair(*s1, *s2, 60)?;
    Some(seconds * 1_000_000_000 + micros * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_midnights_than_the_clock_holds_saturate() {
        let log = format!("{RMM_HEADER}\n");
        let mut reader = RmmReader::new(log.as_bytes(), Strictness::Strict).unwrap();
        reader.day = u64::MAX / NANOS_PER_DAY;
        reader.last_time = NANOS_PER_DAY - 1;
        assert_eq!(reader.absolute(5), u64::MAX);
        assert_eq!(reader.absolute(NANOS_PER_DAY - 5), u64::MAX);
    }
}
