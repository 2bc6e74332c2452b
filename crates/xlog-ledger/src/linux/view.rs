//! A read-only view of a ledger: no slot, no write, and no lock that a process waits for.
//!
//! Each snapshot reads the file and checks its header again, so damage or truncation meanwhile causes only an error.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::file::{failed, open_for_reading};
use super::ledger::snapshot_of;
use super::mapping::{try_share, wake_listeners_of};
use crate::error::LedgerResult;
use crate::format::AT_WATCH;
use crate::snapshot::Snapshot;

/// A ledger file opened for reading.
#[derive(Debug)]
pub struct LedgerView {
    file: File,
    path: PathBuf,
}

impl LedgerView {
    /// Opens a ledger file of any owner.
    pub fn open(path: impl AsRef<Path>) -> LedgerResult<Self> {
        let path = path.as_ref().to_owned();
        let file = open_for_reading(&path)?;
        Ok(Self { file, path })
    }

    /// Reads the slots of all processes.
    pub fn snapshot(&self) -> LedgerResult<Snapshot> {
        snapshot_of(&self.file, &self.path, None)
    }

    /// Asks the processes of the ledger to publish their tags while this view is open, and wakes their listeners.
    ///
    /// The view stays read-only: it holds a shared lock on a byte without meaning, as other watching views do.
    pub fn watch(&self) -> LedgerResult<()> {
        try_share(&self.file, AT_WATCH).map_err(|error| failed(&self.path, "lock", error))?;
        wake_listeners_of(&self.file);
        Ok(())
    }
}
