//! Reads RMM's log.

use std::collections::HashMap;

use crate::action::Action;
use crate::csv::fields::{Fields, decimal, hex};
use crate::error::excerpt;
use crate::names::{MAX_STREAM_NAMES, Names};
use crate::record::Record;
use crate::text_reader::{Columns, Parsed, TextReader, Wrong};

use super::{NANOS_PER_DAY, RMM_HEADER};

/// Handles below this are RMM's well-known streams and keep their number.
const FIRST_FREE_STREAM: u64 = 3;

pub(crate) type RmmReader<R> = TextReader<R, RmmColumns>;

/// The six columns of RMM, with the streams and the day known from earlier lines.
#[derive(Debug, Default)]
pub(crate) struct RmmColumns {
    fields: Fields,
    streams: HashMap<u64, u32>,
    day: u64,
    last_time: u64,
}

impl Columns for RmmColumns {
    fn from_header(line: &[u8]) -> Result<Self, Wrong> {
        if line != RMM_HEADER.as_bytes() {
            return Err(Wrong { expected: format!("`{RMM_HEADER}`"), found: excerpt(line) });
        }
        Ok(Self::default())
    }

    fn parse(&mut self, line: &[u8], order: u64, names: &mut Names) -> Result<Parsed, Wrong> {
        if line == RMM_HEADER.as_bytes() {
            return Ok(Parsed::Header { dropped: 0 });
        }
        if !self.fields.split(line) || self.fields.len() != 6 {
            let expected = format!("the 6 fields of `{RMM_HEADER}`");
            let found = format!("{} in {}", self.fields.len(), excerpt(line));
            return Err(Wrong { expected, found });
        }
        let field = |index| self.fields.raw(line, index);
        let wrong = |expected: &str, index| {
            let expected = format!("{expected} as field {}", index + 1);
            Err(Wrong { expected, found: excerpt(field(index)) })
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
            names.name_stream(stream, name);
        }
        let time = self.absolute(time);
        let mut record = Record::new(action, 0, order, time)
            .with_thread(thread)
            .with_bytes(bytes)
            .with_stream(stream);
        if let Some(ptr) = ptr {
            record = record.with_ptr(ptr);
        }
        Ok(Parsed::Record(record))
    }
}

impl RmmColumns {
    /// Converts a time of day to nanoseconds since the midnight before the log's first record.
    fn absolute(&mut self, time_of_day: u64) -> u64 {
        const HALF: u64 = NANOS_PER_DAY / 2;
        let mut day = self.day;
        if time_of_day + HALF < self.last_time {
            day += 1;
        } else if time_of_day > self.last_time + HALF && day > 0 {
            // A record from before midnight, written after one from after midnight.
            return at(day - 1, time_of_day);
        }
        self.day = day;
        self.last_time = time_of_day;
        at(day, time_of_day)
    }
}

/// Returns the time on a day, saturating: a log may contain more midnights than 64 bits of nanoseconds hold.
fn at(day: u64, time_of_day: u64) -> u64 {
    day.saturating_mul(NANOS_PER_DAY).saturating_add(time_of_day)
}

/// Returns the number of the stream with this handle.
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

/// Parses `HH:MM:SS.uuuuuu` to nanoseconds since midnight.
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
        let mut reader = RmmColumns {
            day: u64::MAX / NANOS_PER_DAY,
            last_time: NANOS_PER_DAY - 1,
            ..RmmColumns::default()
        };
        assert_eq!(reader.absolute(5), u64::MAX);
        assert_eq!(reader.absolute(NANOS_PER_DAY - 5), u64::MAX);
    }
}
