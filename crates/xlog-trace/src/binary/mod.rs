//! The binary layout: a file is a row of chunks, each with its length, kind and checksums.
//!
//! A file cut anywhere reads back to its last complete record; damage in the middle costs the
//! chunks it touches. All numbers are little endian. The layout is in `docs/logging-format.md`.

mod decode;
mod encode;
mod frames;
mod layout;

pub(crate) use decode::BinaryReader;
pub(crate) use encode::BinaryEncoder;
pub(crate) use layout::SYNC;
pub use layout::{MAX_PAYLOAD_BYTES, VERSION};
