//! The configuration of a ledger: its location, creation and use.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{LedgerError, LedgerResult};
use crate::format::{MAX_LIMIT, MAX_SLOTS, UNIT};
use crate::key::DeviceKey;
use crate::quota::Quota;

/// The users that may join a ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Sharing {
    /// Processes of this user: file 0600, directory 0700, both owned by the effective user.
    #[default]
    Private,
    /// Processes of a group: file 0660, directory 2770. Any member may own the file, because members trust each other.
    Group {
        /// The group; `None` takes the group of the directory.
        gid: Option<u32>,
    },
}

/// The settings of [`Ledger::open`](crate::Ledger::open).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LedgerConfig {
    /// The device.
    pub key: DeviceKey,
    /// The limit in bytes of a new ledger. An existing ledger keeps its limit; [`Ledger::set_limit`](crate::Ledger::set_limit) changes it.
    pub limit: Option<u64>,
    /// The directory of the files; `None` is [`LedgerConfig::default_directory`].
    pub directory: Option<PathBuf>,
    /// The users that may join.
    pub sharing: Sharing,
    /// The number of slots of a new file, which is the maximum number of concurrent openers.
    pub slots: u32,
    /// The maximum bytes that a grant may hold beyond the request. With 0 every charge takes the file lock.
    pub chunk: u64,
    /// The deadline for the file lock.
    pub lock_deadline: Duration,
    /// The displayed name of this process; `None` uses its command's name.
    pub name: Option<String>,
    /// The quota of this process. A version 1 ledger that is in use has no quotas, so opening it is then refused
    /// ([`LedgerError::NoQuotas`]).
    pub quota: Option<Quota>,
}

impl LedgerConfig {
    /// The default of [`chunk`](Self::chunk).
    pub const DEFAULT_CHUNK: u64 = 64 << 20;
    /// The default of [`slots`](Self::slots).
    pub const DEFAULT_SLOTS: u32 = 256;
    /// The default of [`lock_deadline`](Self::lock_deadline).
    pub const DEFAULT_LOCK_DEADLINE: Duration = Duration::from_secs(2);

    /// Makes the defaults for a device: private, without a limit, so that an existing ledger is joined and none is created.
    pub fn new(key: DeviceKey) -> Self {
        Self {
            key,
            limit: None,
            directory: None,
            sharing: Sharing::Private,
            slots: Self::DEFAULT_SLOTS,
            chunk: Self::DEFAULT_CHUNK,
            lock_deadline: Self::DEFAULT_LOCK_DEADLINE,
            name: None,
            quota: None,
        }
    }

    xlog_base::setters! {
        /// Sets the limit of a new ledger, in bytes.
        with_limit(bytes: u64) { limit: Some(bytes) }
        /// Sets the directory.
        with_directory(directory: impl Into<PathBuf>) { directory: Some(directory.into()) }
        /// Sets the users that may join.
        with_sharing(sharing: Sharing) { sharing: sharing }
        /// Sets the number of slots of a new file.
        with_slots(slots: u32) { slots: slots }
        /// Sets the maximum bytes that a grant may hold beyond the request.
        with_chunk(bytes: u64) { chunk: bytes }
        /// Sets the deadline for the file lock.
        with_lock_deadline(deadline: Duration) { lock_deadline: deadline }
        /// Sets the displayed name of this process.
        with_name(name: impl Into<String>) { name: Some(name.into()) }
        /// Sets the quota of this process.
        with_quota(quota: Quota) { quota: Some(quota) }
    }

    /// Returns `~/.local/state/xlog/ledger` in the effective user's home directory as given by the user database, not by the environment.
    ///
    /// The fallback is `/tmp/xlog-ledger-<effective user id>`, if that home directory is missing, belongs to another user, is not writable,
    /// or is not on ext2 to ext4, XFS, tmpfs, ramfs or overlayfs.
    pub fn default_directory() -> LedgerResult<PathBuf> {
        crate::linux::default_directory()
    }

    /// The configured or default directory, as an absolute path.
    pub(crate) fn resolve_directory(&self) -> LedgerResult<PathBuf> {
        let directory = match &self.directory {
            Some(directory) => directory.clone(),
            None => Self::default_directory()?,
        };
        std::path::absolute(&directory).map_err(|source| LedgerError::Config {
            setting: "directory",
            value: directory.display().to_string(),
            accepted: format!("a path that can be made absolute ({source})"),
        })
    }

    /// Refuses values that the format cannot hold.
    pub(crate) fn check(&self) -> LedgerResult<()> {
        if let Some(limit) = self.limit {
            check_limit(limit)?;
        }
        if let Some(quota) = &self.quota {
            quota.pack()?;
        }
        if self.slots == 0 || self.slots > MAX_SLOTS {
            return Err(LedgerError::Config {
                setting: "slots",
                value: self.slots.to_string(),
                accepted: format!("1 to {MAX_SLOTS}"),
            });
        }
        if self.chunk > MAX_LIMIT {
            return Err(LedgerError::Config {
                setting: "chunk",
                value: format!("{} bytes", self.chunk),
                accepted: format!("0 to {MAX_LIMIT} bytes"),
            });
        }
        Ok(())
    }
}

/// The units of a limit, rounded down so that the sum of grants never exceeds it.
pub(crate) fn check_limit(bytes: u64) -> LedgerResult<u32> {
    match u32::try_from(bytes / UNIT) {
        Ok(units) if units > 0 => Ok(units),
        _ => Err(LedgerError::Config {
            setting: "limit",
            value: format!("{bytes} bytes"),
            accepted: format!("{UNIT} to {MAX_LIMIT} bytes"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_the_words_cannot_hold_is_refused() {
        assert_eq!(check_limit(UNIT).expect("one unit"), 1);
        assert_eq!(check_limit(2 * UNIT - 1).expect("rounds down"), 1);
        assert_eq!(check_limit(MAX_LIMIT).expect("the most"), u32::MAX);
        for bytes in [0, UNIT - 1, MAX_LIMIT + UNIT, u64::MAX] {
            assert!(matches!(
                check_limit(bytes),
                Err(LedgerError::Config { setting: "limit", .. })
            ));
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let config = || LedgerConfig::new(DeviceKey::new("k").expect("a key"));
        assert!(config().with_slots(1).check().is_ok());
        for bad in [
            config().with_slots(0),
            config().with_slots(MAX_SLOTS + 1),
            config().with_chunk(MAX_LIMIT + 1),
            config().with_limit(0),
        ] {
            assert!(matches!(bad.check(), Err(LedgerError::Config { .. })), "{bad:?}");
        }
    }
}
