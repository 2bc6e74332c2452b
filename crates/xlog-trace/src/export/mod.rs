//! A log in the form of other tools' viewers: written as a stream, never read back.

mod chrome;
mod extents;
mod pickle;
mod snapshot;

pub use chrome::{ChromeCounts, write_chrome_trace};
pub use snapshot::{MAX_SNAPSHOT_DEVICES, SnapshotCounts, write_torch_snapshot};
