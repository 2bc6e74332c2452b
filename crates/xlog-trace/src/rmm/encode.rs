//! Writes RMM's log. Actions that RMM lacks are left out.

use crate::action::Action;
use crate::csv::fields::{decimal, hex, put_decimal, put_hex};
use crate::encoder::Encoder;
use crate::header::Header;
use crate::names::Names;
use crate::record::Record;

use super::{NANOS_PER_DAY, RMM_HEADER};

/// Encodes records as lines of an RMM log. Times of day are UTC.
#[derive(Debug, Default)]
pub(crate) struct RmmEncoder {
    epoch: u64,
}

impl Encoder for RmmEncoder {
    fn begin(&mut self, header: &Header, out: &mut Vec<u8>) {
        self.epoch = header.epoch_unix_nanos;
        out.extend_from_slice(RMM_HEADER.as_bytes());
        out.push(b'\n');
    }

    fn record(&mut self, record: &Record, names: &Names, out: &mut Vec<u8>) -> bool {
        let action: &[u8] = match record.action() {
            Action::Allocate if record.is_failure() => b",allocate failure,",
            Action::AllocateFailure => b",allocate failure,",
            Action::Allocate => b",allocate,",
            // A refused free freed nothing.
            Action::Deallocate if !record.is_failure() => b",free,",
            _ => return false,
        };
        put_decimal(record.thread, out);
        out.push(b',');
        put_time_of_day(self.epoch.saturating_add(record.time) % NANOS_PER_DAY, out);
        out.extend_from_slice(action);
        match record.ptr() {
            Some(ptr) => put_hex(ptr, out),
            None => out.extend_from_slice(b"(nil)"),
        }
        out.push(b',');
        put_decimal(record.bytes, out);
        out.push(b',');
        let stream = record.stream().unwrap_or(0);
        match names.stream_name(stream).filter(|name| is_handle(name)) {
            Some(name) => out.extend_from_slice(name.as_bytes()),
            None if stream == 0 => out.push(b'0'),
            None => put_hex(u64::from(stream), out),
        }
        out.push(b'\n');
        true
    }

    fn seal(&mut self, _out: &mut Vec<u8>) {}

    fn end(&mut self, _written: u64, _dropped: u64, _out: &mut Vec<u8>) {}
}

/// Returns whether a stream's name has the form that RMM writes.
fn is_handle(name: &str) -> bool {
    name == "(nil)" || hex(name.as_bytes()).or_else(|| decimal(name.as_bytes())).is_some()
}

fn put_time_of_day(nanos: u64, out: &mut Vec<u8>) {
    let seconds = nanos / 1_000_000_000;
    let mut put = |value: u64, digits: u32, end: u8| {
        for place in (0..digits).rev() {
            out.push(b'0' + (value / 10u64.pow(place) % 10) as u8);
        }
        if end != 0 {
            out.push(end);
        }
    };
    put(seconds / 3600, 2, b':');
    put(seconds / 60 % 60, 2, b':');
    put(seconds % 60, 2, b'.');
    put(nanos / 1000 % 1_000_000, 6, 0);
}
