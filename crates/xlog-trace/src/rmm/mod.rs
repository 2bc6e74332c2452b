//! RMM's allocation log: six columns of CSV, read and written without changing a byte.
//!
//! Stream handles become small numbers whose names keep the handle's text. The time of day becomes nanoseconds, plus a
//! day for every midnight passed. Fields that RMM lacks stay absent.

mod decode;
mod encode;

pub(crate) use decode::RmmReader;
pub(crate) use encode::RmmEncoder;

/// The header line of an RMM log.
pub const RMM_HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

const NANOS_PER_DAY: u64 = 86_400_000_000_000;
