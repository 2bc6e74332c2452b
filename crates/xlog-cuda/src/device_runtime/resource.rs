//! The words that everything ordered on a stream shares.

use std::fmt;

pub use xlog_driver::Access;

/// A stream of a [`StreamPool`](super::StreamPool), by name.
///
/// [`StreamId::DEFAULT`] is a real stream of each pool. Any other id is issued by one pool for one lease: it resolves in
/// that pool only, and no longer once the stream was given back. `u32::MAX` is never issued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamId(pub u32);

impl StreamId {
    /// The stream that every pool has.
    pub const DEFAULT: Self = Self(0);
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream id {}", self.0)
    }
}
