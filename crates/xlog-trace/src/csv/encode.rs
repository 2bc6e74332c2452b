//! Writes this crate's CSV.
//!
//! A log with dropped records ends with a second header line, whose last field is their number: readers that do not know the
//! field skip the line as the header of a concatenated log.

use crate::encoder::Encoder;
use crate::header::Header;
use crate::names::Names;
use crate::record::Record;
use crate::stacks::StackId;

use super::columns::{COLUMNS, DROPPED};
use super::fields::{put_decimal, put_hex, put_text};

#[derive(Debug, Default)]
pub(crate) struct CsvEncoder {
    epoch: u64,
}

/// Appends the name of a value, or the value itself if it has no name.
fn put_word(name: Option<&str>, value: impl std::fmt::Display, out: &mut Vec<u8>) {
    match name {
        Some(name) => out.extend_from_slice(name.as_bytes()),
        None => out.extend_from_slice(value.to_string().as_bytes()),
    }
}

fn put_optional(value: Option<u64>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        put_decimal(value, out);
    }
    out.push(b',');
}

fn put_optional_text(text: Option<&str>, out: &mut Vec<u8>) {
    if let Some(text) = text {
        put_text(text, out);
    }
}

/// Joins the frames of a stack into one text.
fn stack_text(names: &Names, stack: Option<StackId>) -> String {
    let frames: Vec<String> =
        names.stack_texts(stack).map(|frame| frame.replace(';', ",").replace('\n', " ")).collect();
    frames.join(";")
}

/// Appends a header line that has `last` in place of the last column.
fn put_header(last: &str, out: &mut Vec<u8>) {
    for column in COLUMNS.iter().take(COLUMNS.len() - 1) {
        out.extend_from_slice(column.name().as_bytes());
        out.push(b',');
    }
    out.extend_from_slice(last.as_bytes());
    out.push(b'\n');
}

impl Encoder for CsvEncoder {
    fn begin(&mut self, header: &Header, out: &mut Vec<u8>) {
        self.epoch = header.epoch_unix_nanos;
        put_header(COLUMNS.last().map_or("", |column| column.name()), out);
    }

    fn record(&mut self, record: &Record, names: &Names, out: &mut Vec<u8>) -> bool {
        let text = |id| names.text(id).unwrap_or("(unknown)");
        put_decimal(record.thread, out);
        out.push(b',');
        put_decimal(self.epoch.saturating_add(record.time), out);
        out.push(b',');
        put_word(record.action().name(), record.action(), out);
        out.push(b',');
        if let Some(ptr) = record.ptr() {
            put_hex(ptr, out);
        }
        out.push(b',');
        put_optional(record.bytes(), out);
        put_optional(record.stream().map(u64::from), out);
        put_decimal(u64::from(record.device), out);
        out.push(b',');
        put_optional_text(record.tag().map(text), out);
        out.push(b',');
        put_optional(record.query_id(), out);
        put_optional(record.granted(), out);
        put_optional(record.alignment(), out);
        put_optional(record.generation(), out);
        put_decimal(record.order, out);
        out.push(b',');
        put_decimal(u64::from(record.latency), out);
        out.push(b',');
        put_word(record.served_by().name(), record.served_by(), out);
        out.push(b',');
        put_optional_text(record.access().map(crate::UseAccess::text), out);
        out.push(b',');
        put_decimal(u64::from(record.process), out);
        out.push(b',');
        put_optional_text(record.failure().map(|failure| text(failure.kind)), out);
        out.push(b',');
        put_optional_text(record.failure().map(|failure| text(failure.message)), out);
        out.push(b',');
        put_optional_text(record.stream().and_then(|id| names.stream_name(id)), out);
        out.push(b',');
        if let Some(site) = record.site() {
            put_text(&text(site).replace('\n', " "), out);
        }
        out.push(b',');
        if record.stack().is_some() {
            put_text(&stack_text(names, record.stack()), out);
        }
        out.push(b'\n');
        true
    }

    fn seal(&mut self, _out: &mut Vec<u8>) {}

    fn end(&mut self, _written: u64, dropped: u64, out: &mut Vec<u8>) {
        if dropped > 0 {
            put_header(&format!("{DROPPED}{dropped}"), out);
        }
    }
}
