//! Relational work whose data stays on the device: a hash join, a transitive closure, a sort.
//!
//! Each workload is a sequence of kernels ([`kernels`]) on buffers of the runtime. A [`Session`] names the buffers of a kernel to
//! a recorder, which orders it with all other work on them. Steps cycle through a ring of streams, so nearly every buffer is
//! used on a stream that did not allocate it. The host reads row counts, to allocate exact sizes, and at the end the result.
//!
//! [`host`] computes the expected results by other algorithms, from the seed alone.

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

/// A buffer on the device.
pub type Column<T> = TrackedCudaSlice<T>;

/// Returns a column's address for a launch that names it. `ptr` requires a preflight, which some tests omit.
fn address<T>(column: &Column<T>) -> u64 {
    column.id().map_or_else(|| column.ptr(), |id| id.ptr)
}

/// Marks an empty slot of a hash table: no key, row or vertex has all its bits set.
pub const EMPTY: u64 = u64::MAX;

/// Rows that a thread block of the scans takes at a time.
pub const TILE: usize = 1024;

/// The maximum number of rows, edges or numbers of a workload: row numbers have 31 bits on the device.
pub const MAX_ROWS: usize = 1 << 30;

/// Returns the slots of a hash table for `entries` entries: a power of two that leaves at least half of them empty.
#[must_use]
pub fn table_places(entries: usize) -> usize {
    entries.saturating_mul(2).max(64).next_power_of_two()
}

/// Returns the elements of the tile sums of `rows` rows, including one for the total.
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
    /// The number of rows that the host expects.
    pub expected: u64,
    /// The fault, in one line.
    pub wrong: Option<String>,
}
