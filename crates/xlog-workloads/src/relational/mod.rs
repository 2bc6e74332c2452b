//! Relational work whose data stays on the device: a hash join, a transitive closure, a sort.
//!
//! Each workload is a sequence of kernels ([`kernels`]) over buffers of the runtime. A kernel is an operation of its own: a
//! [`Session`] names its buffers to a recorder, which orders it against all other work on them, and steps follow each other round
//! a ring of streams, so that nearly every buffer is used on a stream that did not allocate it. The host sees numbers of rows,
//! which it needs to allocate exactly, and at the end the result.
//!
//! [`host`] computes the same answers by other means, from the seed alone; nothing of the device's data goes into them.

pub mod fixed_fixpoint;
pub mod fixpoint;
pub mod host;
pub mod join;
pub mod kernels;
mod launch;
pub mod numbers;
pub mod sort;
mod touched;
mod workload;

pub use launch::{Launch, Launched, Omission, Session, SessionOptions};
pub use workload::{Executed, Workload};

use xlog_cuda::TrackedCudaSlice;

/// A buffer of the device.
pub type Column<T> = TrackedCudaSlice<T>;

/// The address of a column for a launch that names it: a column shows its own only after a preflight, and tests leave one out.
fn address<T>(column: &Column<T>) -> u64 {
    column.id().map_or_else(|| column.ptr(), |id| id.ptr)
}

/// Marks an empty slot of a hash table: no key, row or vertex has all its bits set.
pub const EMPTY: u64 = u64::MAX;

/// How many rows a block of threads of the scans takes at a time.
pub const TILE: usize = 1024;

/// The maximum number of rows, edges or numbers of a workload: row numbers have 31 bits on the device.
pub const MAX_ROWS: usize = 1 << 30;

/// Places of a hash table for `entries` entries: a power of two that leaves at least half of them empty.
#[must_use]
pub fn table_places(entries: usize) -> usize {
    entries.saturating_mul(2).max(64).next_power_of_two()
}

/// Sums of `rows` rows taken by tiles, and one more for their total.
#[must_use]
pub fn tile_sums(rows: usize) -> usize {
    rows.div_ceil(TILE) + 1
}

/// The host's verdict on a result.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Verdict {
    /// Rows of the result.
    pub rows: u64,
    /// Rows that the host expected.
    pub expected: u64,
    /// The fault, in one line.
    pub wrong: Option<String>,
}
