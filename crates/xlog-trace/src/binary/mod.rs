//! The binary layout: a file is a sequence of chunks, each with its length, kind and checksums.
//!
//! A truncated file is readable up to its last complete record; damage in the middle costs only the chunks it
//! touches. All numbers are little-endian. `docs/logging-format.md` specifies the layout.

mod decode;
mod encode;
mod frames;
mod layout;

pub(crate) use decode::BinaryReader;
pub(crate) use encode::BinaryEncoder;
pub(crate) use layout::SYNC;
pub use layout::{MAX_PAYLOAD_BYTES, VERSION};
