//! The settings of a ledger: its location, its creation and its use.

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
    /// Processes of a group: file 0660, directory 2770. The file may belong to any member: members trust each other.
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
    /// The limit in bytes, used only if the ledger does not exist yet. The limit of an existing file rules;
    /// [`Ledger::set_limit`](crate::Ledger::set_limit) changes it.
    pub limit: Option<u64>,
    /// The directory of the files; `None` is [`LedgerConfig::default_directory`].
    pub directory: Option<PathBuf>,
    /// The users that may join.
    pub sharing: Sharing,
    /// The number of slots of a new file: the maximum number of concurrent processes.
    pub slots: u32,
    /// How many bytes a grant may hold beyond what was asked. 0 asks the file lock at every take.
    pub chunk: u64,
    /// How long the file lock is tried.
    pub lock_deadline: Duration,
    /// The name shown for this process; `None` is the name of its command.
    pub name: Option<String>,
    /// The quota of this process. A ledger of version 1 that is in use has none: opening it is then refused
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

    /// The defaults for a device: private, no limit (an existing ledger is joined, none is created).
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
        /// Sets the limit of a ledger that does not exist yet, in bytes.
        with_limit(bytes: u64) { limit: Some(bytes) }
        /// Sets the directory.
        with_directory(directory: impl Into<PathBuf>) { directory: Some(directory.into()) }
        /// Sets the users that may join.
        with_sharing(sharing: Sharing) { sharing: sharing }
        /// Sets the number of slots of a new file.
        with_slots(slots: u32) { slots: slots }
        /// Sets how many bytes a grant may hold beyond what was asked.
        with_chunk(bytes: u64) { chunk: bytes }
        /// Sets how long the file lock is tried.
        with_lock_deadline(deadline: Duration) { lock_deadline: deadline }
        /// Sets the name shown for this process.
        with_name(name: impl Into<String>) { name: Some(name.into()) }
        /// Sets the quota of this process.
        with_quota(quota: Quota) { quota: Some(quota) }
    }

    /// `~/.local/state/xlog/ledger` in the home directory that the user database has for the effective user, whatever the environment says.
    ///
    /// It is `/tmp/xlog-ledger-<effective user id>` where that home directory is missing, another user's, not writable, or not on
    /// ext2 to ext4, XFS, tmpfs or overlayfs.
    pub fn default_directory() -> LedgerResult<PathBuf> {
        crate::linux::default_directory()
    }

    /// The directory in use, absolute.
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

    /// Refuses what the format cannot hold.
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

/// The units of a limit, rounded down: the sum of what is granted is then never above it.
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
