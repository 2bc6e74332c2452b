//! Exports a log to the formats of other tools' viewers. They are written as a stream and never read back.

mod chrome;
mod extents;
mod pickle;
mod snapshot;

pub use chrome::{ChromeCounts, write_chrome_trace};
pub use snapshot::{MAX_SNAPSHOT_DEVICES, SnapshotCounts, write_torch_snapshot};
