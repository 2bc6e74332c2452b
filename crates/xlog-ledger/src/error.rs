//! The errors of a ledger. An error about a file names the file and the remedy.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Shorthand for the result of a ledger call.
pub type LedgerResult<T> = Result<T, LedgerError>;

/// The holder of the file lock according to the file. For display only: it is not verified.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LockHolder {
    /// The process id in the holder's own namespace.
    pub pid: u32,
    /// The name of its command, if it had a slot.
    pub name: Option<String>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(formatter, "process {} ({name})", self.pid),
            None => write!(formatter, "process {}", self.pid),
        }
    }
}

/// The failure of one ledger call. Nothing was changed unless the variant says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// The device key is not a plain file name.
    #[error(
        "device key {key:?} is not accepted; expected 1 to 64 characters of A-Z a-z 0-9 . _ -, the first a letter or digit"
    )]
    Key {
        /// The key as given.
        key: String,
    },
    /// A setting is out of range.
    #[error("{setting}: {value} is not accepted; expected {accepted}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// The value as given.
        value: String,
        /// The values that would have been accepted.
        accepted: String,
    },
    /// The system refused a call.
    #[error("{}: {call} failed: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The attempted call.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// There is no ledger, and no limit to create one with.
    #[error("{}: no such ledger; give a limit to create it", path.display())]
    Missing {
        /// The file that would have been opened.
        path: PathBuf,
    },
    /// The path is a link, directory, pipe or device instead of the expected kind.
    #[error("{}: is {found}, expected {expected}; remove it or choose another directory", path.display())]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// The kind that was found.
        found: &'static str,
        /// The kind that was expected.
        expected: &'static str,
    },
    /// The file or directory belongs to another user.
    #[error("{}: belongs to {found}, expected {expected}; choose another directory, or share by group", path.display())]
    WrongOwner {
        /// The path.
        path: PathBuf,
        /// The owner found.
        found: String,
        /// The expected owner.
        expected: String,
    },
    /// More users can write to the path than the configuration allows.
    #[error("{}: mode {mode:04o} lets {who} write; expected {expected:04o}, repair it with chmod", path.display())]
    TooOpen {
        /// The path.
        path: PathBuf,
        /// The permission bits found.
        mode: u32,
        /// The users that should not have write access.
        who: &'static str,
        /// The permission bits expected.
        expected: u32,
    },
    /// The file cannot be written.
    #[error("{}: read-only ({reason}); make it writable (chmod u+w), or look at it with a view", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// The mode or file system that forbids writing.
        reason: String,
    },
    /// The file is shorter than its header states, or than any ledger.
    #[error("{}: truncated, {size} bytes of {expected}; stop the processes that use it, then remove it", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// The size it should have.
        expected: u64,
    },
    /// The file is not a ledger, or its content is invalid.
    #[error("{}: not a valid ledger ({what}); stop the processes that use it, then remove it", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault in it.
        what: String,
    },
    /// The file was made by a newer version.
    #[error("{}: format version {version}, this program knows up to {supported}; update it, or choose another directory", path.display())]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        version: u32,
        /// The newest version known here.
        supported: u32,
    },
    /// The file belongs to another device.
    #[error("{}: is the ledger of device {found:?}, expected {expected:?}; it was copied or renamed: remove it", path.display())]
    WrongKey {
        /// The file.
        path: PathBuf,
        /// The key in the file.
        found: String,
        /// The key asked for.
        expected: String,
    },
    /// The path names another file than the opened one, or that file changed its size, so other processes may use another account. Requests
    /// that the process's own grant serves still succeed.
    #[error("{}: was {how} while in use; restart the processes that use this device", path.display())]
    Removed {
        /// The file.
        path: PathBuf,
        /// The change to it.
        how: &'static str,
    },
    /// Living processes use another file as the ledger: it was moved, removed or replaced, or they have another default directory. Joining
    /// would create a second account for one device.
    #[error(
        "{}: the ledger that is in use by living processes is another file (this one was moved, removed or replaced, or they have \
         another default directory); move that file back, or end them: grep -l {} /proc/[0-9]*/maps names them",
        path.display(), name_in(path)
    )]
    Displaced {
        /// The file that would have been opened or created.
        path: PathBuf,
    },
    /// The file lies on a file system shared between machines, where one machine does not see another's updates in time.
    #[error("{}: lies on {kind}, which other machines may share; name a directory of a local file system", path.display())]
    NotLocal {
        /// The file.
        path: PathBuf,
        /// The file system.
        kind: &'static str,
    },
    /// The file has holes and its file system has no space to fill them, so a write could end the process by SIGBUS.
    #[error("{}: has holes that cannot be filled: {source}; free some space on its file system", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Every slot belongs to a living opener.
    #[error("{}: all {slots} slots are in use; close a ledger, or recreate the file with more slots", path.display())]
    NoSlot {
        /// The file.
        path: PathBuf,
        /// The number of slots.
        slots: u32,
    },
    /// The file lock was not free within the deadline.
    #[error("{}: file lock held by {} for {waited:?}; see whether that process is stopped", path.display(), name_of(holder))]
    Busy {
        /// The file.
        path: PathBuf,
        /// The time spent waiting.
        waited: Duration,
        /// The holder, if the file names it.
        holder: Option<LockHolder>,
    },
    /// The bytes do not fit into the device's limit.
    #[error("{requested} bytes do not fit: {available} of {limit} available, {own} used here, {others} by others ({})", path.display())]
    Full {
        /// The bytes asked for.
        requested: u64,
        /// The maximum that would have been granted.
        available: u64,
        /// The limit of the device.
        limit: u64,
        /// The bytes this opener uses.
        own: u64,
        /// The bytes that others use, or hold in grants that could not be recalled.
        others: u64,
        /// The ledger.
        path: PathBuf,
    },
    /// The bytes do not fit into the process's quota.
    #[error("{requested} bytes do not fit: {available} of the process's quota of {quota} available, {own} used here ({})", path.display())]
    OverQuota {
        /// The bytes asked for.
        requested: u64,
        /// The maximum that the quota would have allowed.
        available: u64,
        /// The quota.
        quota: u64,
        /// The bytes this opener uses.
        own: u64,
        /// The ledger.
        path: PathBuf,
    },
    /// A guaranteed share exceeds what the device can guarantee beside the shares of other processes.
    #[error(
        "{requested} bytes cannot be guaranteed: {available} of {limit} are not guaranteed to other processes ({}); lower another share",
        path.display()
    )]
    Guarantee {
        /// The share asked for.
        requested: u64,
        /// The largest share that would have been accepted.
        available: u64,
        /// The limit of the device.
        limit: u64,
        /// The ledger.
        path: PathBuf,
    },
    /// A limit of the device is below the sum of its guaranteed shares.
    #[error(
        "a limit of {requested} bytes is below the {guaranteed} that are guaranteed to processes ({}); lower their shares first",
        path.display()
    )]
    BelowGuarantees {
        /// The limit asked for.
        requested: u64,
        /// The sum of the guaranteed shares.
        guaranteed: u64,
        /// The ledger.
        path: PathBuf,
    },
    /// The file is of version 1, which has no quotas, and processes use it.
    #[error("{}: format version 1 has no quotas; it is upgraded when the processes that use it have ended", path.display())]
    NoQuotas {
        /// The file.
        path: PathBuf,
    },
    /// The process whose quota was to be set has left the ledger.
    #[error("{}: the process has left this ledger", path.display())]
    NoProcess {
        /// The file.
        path: PathBuf,
    },
    /// More was released than was charged.
    #[error("{released} bytes released of {used} in use; release what was charged, once")]
    Overdrawn {
        /// The bytes to release.
        released: u64,
        /// The bytes in use.
        used: u64,
    },
    /// The slot was released, at process exit or by [`Ledger::leave`](crate::Ledger::leave).
    #[error("{}: this process has left the ledger; open another one to take part again", path.display())]
    Closed {
        /// The file.
        path: PathBuf,
    },
    /// A forked child used its parent's ledger.
    #[error("this ledger belongs to process {opener}, which forked; open one in the child")]
    Forked {
        /// The process that opened it.
        opener: u32,
    },
}

fn name_of(holder: &Option<LockHolder>) -> String {
    holder.as_ref().map_or_else(|| "an unknown process".into(), ToString::to_string)
}

fn name_in(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
