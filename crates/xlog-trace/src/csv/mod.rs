//! CSV with a header line: first the columns that other tools expect, then this crate's.
//!
//! The writer emits all columns with minimal quoting. The reader finds columns by name, in any order; it ignores
//! unknown ones and accepts missing optional ones.

mod columns;
mod decode;
mod encode;
pub(crate) mod fields;

pub(crate) use columns::looks_like_header;
pub use columns::{COLUMNS, Column};
pub(crate) use decode::CsvReader;
pub(crate) use encode::CsvEncoder;
