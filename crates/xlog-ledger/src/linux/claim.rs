//! Claims, which identify the file that living processes use, so that a ledger that lost its name is not replaced by a second account.
//!
//! Each opener holds claims: shared locks of single bytes on directories, the *anchors*. The offset of a claim identifies an account (high
//! half) and the inode of its file (low half). If a process claims the account with another inode, joining here would create a second
//! account, so it is refused. The kernel drops the claims of dead processes.
//!
//! The anchors are the ledger's directory, which containers share with the file, and the root directory, which stays when a directory
//! moves. An opener claims first and checks second, so of two that race for different files at least one sees the other.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::file::{failed, is_absent};
use super::mapping::{effective_user, is_any_locked, keep_from_cleaners, try_share, unlock};
use crate::error::LedgerResult;
use crate::format::checksum;
use crate::key::DeviceKey;

/// The identity of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    /// The identity of an open file.
    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        file.metadata().map(|facts| Self { device: facts.dev(), number: facts.ino() })
    }

    /// The identity of the file at `path`, without following links.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        fs::symlink_metadata(path).map(|facts| Self { device: facts.dev(), number: facts.ino() })
    }

    /// The low half of a claim's offset.
    fn offset(self) -> u64 {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.device.to_le_bytes());
        bytes[8..].copy_from_slice(&self.number.to_le_bytes());
        checksum(&bytes) >> 32
    }
}

/// The open anchors of one ledger, and the claimed accounts.
#[derive(Debug)]
pub(super) struct Claims {
    anchors: Vec<(PathBuf, File)>,
    /// The high halves of the offsets, already shifted.
    accounts: Vec<u64>,
}

impl Claims {
    /// Opens the anchors of a ledger. `is_default` means that it lies in the user's default directory, which should be unique.
    pub(super) fn open(path: &Path, key: &DeviceKey, is_default: bool) -> LedgerResult<Self> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        let resolved = resolve(directory);
        let name = path.file_name().unwrap_or_default();
        let mut accounts = vec![account(resolved.join(name).as_os_str().as_bytes())];
        if is_default {
            accounts.push(account(format!("default {} {key}", effective_user()).as_bytes()));
        }
        let mut anchors = Vec::new();
        // If the root directory is not readable, the ledger's directory is the only anchor.
        for (place, is_needed) in [(directory, true), (Path::new("/"), false)] {
            let opened = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK)
                .open(place);
            match opened {
                Ok(anchor) => anchors.push((place.to_owned(), anchor)),
                Err(error) if is_needed && !is_absent(&error) => {
                    return Err(failed(place, "open", error));
                }
                Err(_) => {}
            }
        }
        if let Some((_, own)) = anchors.first() {
            keep_from_cleaners(own);
        }
        Ok(Self { anchors, accounts })
    }

    /// Claims the accounts for a file.
    pub(super) fn hold(&self, inode: Inode) -> LedgerResult<()> {
        self.each(|anchor, account| {
            try_share(anchor, offset(account | inode.offset())).map(|_| false)
        })
        .map(|_| ())
    }

    /// Releases the claims. Best effort: closing the anchors releases them too.
    pub(super) fn release(&self, inode: Inode) {
        let _ = self.each(|anchor, account| {
            unlock(anchor, offset(account | inode.offset())).map(|()| false)
        });
    }

    /// True if a living process claims one of the accounts for a file other than `inode`, or for any file if that is `None`.
    pub(super) fn is_held_for_another(&self, inode: Option<Inode>) -> LedgerResult<bool> {
        let all = 1 << 32;
        self.each(|anchor, account| match inode.map(Inode::offset) {
            None => is_any_locked(anchor, offset(account), all),
            Some(own) => Ok(is_any_locked(anchor, offset(account), own)?
                || is_any_locked(anchor, offset(account | own) + 1, all - 1 - own)?),
        })
    }

    /// The anchors' descriptors.
    pub(super) fn files(&self) -> impl Iterator<Item = &File> {
        self.anchors.iter().map(|(_, anchor)| anchor)
    }

    /// True if `ask` returns true for any anchor and account.
    fn each(&self, ask: impl Fn(&File, u64) -> io::Result<bool>) -> LedgerResult<bool> {
        for (path, anchor) in &self.anchors {
            for account in &self.accounts {
                if ask(anchor, *account).map_err(|error| failed(path, "lock", error))? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// The high half of a claim's offset, which must stay positive as a signed number.
fn account(name: &[u8]) -> u64 {
    checksum(name) >> 33 << 32
}

fn offset(claim: u64) -> usize {
    claim as usize
}

/// The directory with links resolved as far as it exists.
fn resolve(directory: &Path) -> PathBuf {
    fs::canonicalize(directory).unwrap_or_else(|_| {
        let parent = directory.parent().and_then(|parent| fs::canonicalize(parent).ok());
        match (parent, directory.file_name()) {
            (Some(parent), Some(name)) => parent.join(name),
            _ => directory.to_owned(),
        }
    })
}
