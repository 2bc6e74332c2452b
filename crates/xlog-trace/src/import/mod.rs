//! Imports other tools' files that are not streams of records: read whole, validated, and written as a log.

mod pickle;
mod snapshot;

pub use pickle::PickleError;
pub(crate) use snapshot::STRETCHES;
pub use snapshot::{
    MAX_SNAPSHOT_BYTES, SnapshotError, SnapshotRead, convert_torch_snapshot, looks_like_snapshot,
};
