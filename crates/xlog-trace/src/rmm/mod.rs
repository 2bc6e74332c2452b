//! RMM's allocation log: six columns of CSV, read and written without changing a byte.
//!
//! Stream handles become small numbers that keep their text as a name; the time of day becomes
//! nanoseconds, with a day added when it passes midnight. What RMM does not know stays absent.

mod decode;
mod encode;

pub(crate) use decode::RmmReader;
pub(crate) use encode::RmmEncoder;

/// The header line of an RMM log.
pub const RMM_HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

const NANOS_PER_DAY: u64 = 86_400_000_000_000;
