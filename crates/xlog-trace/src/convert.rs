//! Conversion between all formats, one record at a time.

use std::io::Write;

use crate::encoder::{Format, LogWriter};
use crate::error::TraceError;
use crate::reader::Source;

/// The counts of a conversion. The reader's report counts what was skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Converted {
    /// Records written.
    pub written: u64,
    /// Records that the target format cannot represent.
    pub left_out: u64,
}

/// Writes the rest of `source` to `out` in `format`. A copy of an incomplete log is marked incomplete if the format allows it.
pub fn convert<W: Write>(
    source: &mut impl Source,
    format: Format,
    out: W,
) -> Result<Converted, TraceError> {
    let header = source.header().clone();
    let mut writer = LogWriter::new(format, &header, out);
    while let Some(record) = source.next_record()? {
        writer.write(&record, source.names())?;
    }
    let converted = Converted { written: writer.written(), left_out: writer.left_out() };
    writer.finish_as(&header, source.report())?;
    Ok(converted)
}
