//! A look at a ledger without taking part: no slot, no write, no mapping, and no lock that anybody waits for.
//!
//! The file is read anew for each snapshot and its header checked each time, so a file that is damaged or cut
//! in the meantime is an error and nothing worse.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::file::{failed, open_for_reading};
use super::ledger::snapshot_of;
use super::mapping::try_share;
use crate::error::LedgerResult;
use crate::format::{AT_WATCH, Header};
use crate::key::DeviceKey;
use crate::snapshot::Snapshot;

/// A ledger file opened for reading.
#[derive(Debug)]
pub struct LedgerView {
    file: File,
    path: PathBuf,
    header: Header,
}

impl LedgerView {
    /// Opens a ledger file, whoever owns it.
    pub fn open(path: impl AsRef<Path>) -> LedgerResult<Self> {
        let path = path.as_ref().to_owned();
        let (file, header) = open_for_reading(&path)?;
        Ok(Self { file, path, header })
    }

    /// Who holds what, as of about now.
    pub fn snapshot(&self) -> LedgerResult<Snapshot> {
        snapshot_of(&self.file, &self.path, &self.header, None)
    }

    /// Lets the processes of the ledger know, as long as this view is open, that somebody wants to see their tags.
    ///
    /// It takes no part by that either: a byte that means nothing is locked, shared with all others who look.
    pub fn watch(&self) -> LedgerResult<()> {
        try_share(&self.file, AT_WATCH)
            .map(|_| ())
            .map_err(|error| failed(&self.path, "lock", error))
    }

    /// The device.
    pub fn key(&self) -> &DeviceKey {
        &self.header.key
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
