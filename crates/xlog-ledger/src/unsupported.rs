//! The ledger on platforms without one: every constructor is a typed error, so the other calls cannot be reached.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use crate::{DeviceKey, LedgerConfig, LedgerError, LedgerFile, LedgerResult, Reclaimed, Snapshot};

fn unsupported<T>() -> LedgerResult<T> {
    Err(LedgerError::Unsupported { platform: std::env::consts::OS })
}

pub(crate) fn default_directory() -> LedgerResult<PathBuf> {
    unsupported()
}

/// The ledgers of a directory: not on this platform.
pub fn list(_directory: &Path) -> LedgerResult<Vec<LedgerFile>> {
    unsupported()
}

/// A ledger, which this platform does not have.
#[derive(Debug)]
pub struct Ledger(Infallible);

/// A view of a ledger, which this platform does not have.
#[derive(Debug)]
pub struct LedgerView(Infallible);

/// The held file lock of a ledger, which this platform does not have.
#[derive(Debug)]
pub struct FileLockGuard<'a>(Infallible, std::marker::PhantomData<&'a Ledger>);

impl Ledger {
    /// Refused with [`LedgerError::Unsupported`].
    pub fn open(_config: LedgerConfig) -> LedgerResult<Self> {
        unsupported()
    }

    /// Refused with [`LedgerError::Unsupported`].
    pub fn rehearse_creation(_config: &LedgerConfig) -> LedgerResult<()> {
        unsupported()
    }

    /// Not reachable.
    pub fn take(&self, _bytes: u64) -> LedgerResult<()> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn give(&self, _bytes: u64) -> LedgerResult<()> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn set_limit(&self, _bytes: u64) -> LedgerResult<()> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn leave(&self) -> bool {
        match self.0 {}
    }

    /// Not reachable.
    pub fn leave_at_exit(self: &std::sync::Arc<Self>) {
        match self.0 {}
    }

    /// Not reachable.
    pub fn hand_back(&self) -> LedgerResult<u64> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn reclaim_dead(&self) -> LedgerResult<Reclaimed> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn snapshot(&self) -> LedgerResult<Snapshot> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn limit(&self) -> LedgerResult<u64> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn used(&self) -> u64 {
        match self.0 {}
    }

    /// Not reachable.
    pub fn granted(&self) -> u64 {
        match self.0 {}
    }

    /// Not reachable.
    pub fn publish_tags<'a>(&self, _tags: impl IntoIterator<Item = (&'a str, u64)>) {
        match self.0 {}
    }

    /// Not reachable.
    pub fn is_watched(&self) -> bool {
        match self.0 {}
    }

    /// Not reachable.
    pub fn slot(&self) -> u32 {
        match self.0 {}
    }

    /// Not reachable.
    pub fn created(&self) -> bool {
        match self.0 {}
    }

    /// Not reachable.
    pub fn key(&self) -> &DeviceKey {
        match self.0 {}
    }

    /// Not reachable.
    pub fn path(&self) -> &Path {
        match self.0 {}
    }

    /// Not reachable.
    #[doc(hidden)]
    pub fn hold_file_lock(&self) -> LedgerResult<FileLockGuard<'_>> {
        match self.0 {}
    }
}

impl LedgerView {
    /// Refused with [`LedgerError::Unsupported`].
    pub fn open(_path: impl AsRef<Path>) -> LedgerResult<Self> {
        unsupported()
    }

    /// Not reachable.
    pub fn watch(&self) -> LedgerResult<()> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn snapshot(&self) -> LedgerResult<Snapshot> {
        match self.0 {}
    }

    /// Not reachable.
    pub fn key(&self) -> &DeviceKey {
        match self.0 {}
    }

    /// Not reachable.
    pub fn path(&self) -> &Path {
        match self.0 {}
    }
}
