//! CSV with a header line: the columns other tools expect first, then ours.
//!
//! Written with all columns and minimal quoting; read by the names in the header line, in any
//! order, with extra columns ignored and optional ones missing.

mod columns;
mod decode;
mod encode;
pub(crate) mod fields;

pub(crate) use columns::looks_like_header;
pub use columns::{COLUMNS, Column};
pub(crate) use decode::CsvReader;
pub(crate) use encode::CsvEncoder;
