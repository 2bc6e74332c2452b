//! Encoders turn records into bytes; every output format implements [`Encoder`].
//!
//! An encoder appends to a byte buffer and never fails; the buffer's owner decides when to write it. After
//! [`Encoder::seal`] the buffer ends at a boundary that a reader accepts as the end of a file.

use std::fmt;
use std::io::Write;

use crate::binary::BinaryEncoder;
use crate::csv::CsvEncoder;
use crate::error::TraceError;
use crate::header::Header;
use crate::names::Names;
use crate::reader::ReadReport;
use crate::record::Record;
use crate::rmm::RmmEncoder;

/// The file formats that are both read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// The binary layout, `.xtrace`.
    Binary,
    /// CSV with this crate's columns.
    Csv,
    /// The six columns of RMM's logging adaptor.
    RmmCsv,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Binary => "xtrace binary",
            Self::Csv => "csv",
            Self::RmmCsv => "rmm csv",
        })
    }
}

/// Encodes records in one format.
pub trait Encoder: Send {
    /// Begins a file: everything before the first record. May be called again for the next file.
    fn begin(&mut self, header: &Header, out: &mut Vec<u8>);
    /// Adds a record. Returns false, and adds nothing, if the format cannot represent it.
    fn record(&mut self, record: &Record, names: &Names, out: &mut Vec<u8>) -> bool;
    /// Completes the pending chunk, so that `out` may be written.
    fn seal(&mut self, out: &mut Vec<u8>);
    /// Ends a file with the number of records in it and the number its writer dropped.
    fn end(&mut self, written: u64, dropped: u64, out: &mut Vec<u8>);
    /// Returns whether the format marks the end of a file, so that a reader detects an incomplete one.
    fn has_end(&self) -> bool {
        false
    }
}

/// Returns the encoder of a format.
pub fn encoder(format: Format) -> Box<dyn Encoder> {
    match format {
        Format::Binary => Box::<BinaryEncoder>::default(),
        Format::Csv => Box::<CsvEncoder>::default(),
        Format::RmmCsv => Box::<RmmEncoder>::default(),
    }
}

/// Writes records in any format to a byte stream; every write ends at a record boundary.
///
/// ```
/// use xlog_trace::{Action, Format, Header, LogWriter, Names, Record};
///
/// # fn main() -> Result<(), xlog_trace::TraceError> {
/// let mut names = Names::new();
/// let mut log = LogWriter::new(Format::RmmCsv, &Header::new(), Vec::new());
/// let block = Record::new(Action::Allocate, 0, 1, 0).with_ptr(0x7f00).with_bytes(4096).with_tag(names.intern("rows"));
/// log.write(&block, &names)?;
/// let bytes = log.finish()?;
/// assert!(bytes.starts_with(b"Thread,Time,Action,Pointer,Size,Stream\n"));
/// # Ok(())
/// # }
/// ```
pub struct LogWriter<W: Write> {
    encoder: Box<dyn Encoder>,
    buffer: Vec<u8>,
    inner: W,
    written: u64,
    left_out: u64,
}

const WRITE_SIZE: usize = 256 << 10;

impl<W: Write> LogWriter<W> {
    /// Begins a log in `inner`.
    pub fn new(format: Format, header: &Header, inner: W) -> Self {
        let mut writer =
            Self { encoder: encoder(format), buffer: Vec::new(), inner, written: 0, left_out: 0 };
        writer.encoder.begin(header, &mut writer.buffer);
        writer
    }

    /// Adds one record, whose strings are in `names`.
    pub fn write(&mut self, record: &Record, names: &Names) -> Result<(), TraceError> {
        if self.encoder.record(record, names, &mut self.buffer) {
            self.written += 1;
        } else {
            self.left_out += 1;
        }
        if self.buffer.len() >= WRITE_SIZE {
            self.encoder.seal(&mut self.buffer);
            self.drain()?;
        }
        Ok(())
    }

    /// Returns the number of records written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Returns the number of records that the format cannot represent.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Ends the log and returns the stream.
    pub fn finish(self) -> Result<W, TraceError> {
        self.finish_as(&Header::new(), &ReadReport::default())
    }

    /// Ends a copy of the log that `report` describes and returns the stream. If the format allows it, the copy records that
    /// records are missing: those the writer dropped, and those lost because the log was not closed or has damage.
    pub fn finish_as(mut self, header: &Header, report: &ReadReport) -> Result<W, TraceError> {
        self.encoder.seal(&mut self.buffer);
        let is_open = report.truncated || report.unclosed || report.skipped > 0;
        if !is_open || report.dropped_at_source > 0 {
            self.encoder.end(self.written, report.dropped_at_source, &mut self.buffer);
        }
        if is_open && report.dropped_at_source > 0 && self.encoder.has_end() {
            // A second header without an end follows, which marks the copy as unclosed.
            self.encoder.begin(header, &mut self.buffer);
        }
        self.drain()?;
        self.inner.flush().map_err(TraceError::io("flushing the log"))?;
        Ok(self.inner)
    }

    fn drain(&mut self) -> Result<(), TraceError> {
        self.inner.write_all(&self.buffer).map_err(TraceError::io("writing the log"))?;
        self.buffer.clear();
        Ok(())
    }
}

impl<W: Write> fmt::Debug for LogWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogWriter")
            .field("written", &self.written)
            .field("left_out", &self.left_out)
            .finish_non_exhaustive()
    }
}
