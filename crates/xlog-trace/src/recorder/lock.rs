//! One writer per log file: an advisory lock on the open file.
//!
//! The lock belongs to the file, not to its name, so it also excludes a second path to the same file, in this process or
//! another. Dropping the [`LockedFile`] or the end of the process, even by a kill, releases it. Pipes and devices are not
//! locked: they have no contents that a second writer could truncate.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::path::Path;

use crate::error::TraceError;

/// How often a name is opened again if a writer renamed its file between open and lock.
const MAX_ATTEMPTS: u32 = 64;

/// A file whose only writer is this recorder.
#[derive(Debug)]
pub(super) struct LockedFile(File);

impl LockedFile {
    /// Opens the file at `path` for appending, creates it if necessary, and locks it.
    ///
    /// Another writer may rotate the file away between open and lock. So the name is compared after the lock and, if it
    /// names another file, opened again.
    pub(super) fn append(path: &Path) -> Result<Self, TraceError> {
        let context = || TraceError::io(format!("opening {}", path.display()));
        for _ in 0..MAX_ATTEMPTS {
            let file = OpenOptions::new().append(true).create(true).open(path).map_err(context())?;
            let file = Self::lock(file, path)?;
            if file.is_at(path).map_err(context())? {
                return Ok(file);
            }
        }
        Err(TraceError::InUse { path: path.to_owned() })
    }

    /// Makes the caller the only writer of an open file. `path` is for the error.
    #[cfg(unix)]
    #[allow(unsafe_code)]
    pub(super) fn lock(file: File, path: &Path) -> Result<Self, TraceError> {
        use std::os::fd::AsRawFd;

        let context = || TraceError::io(format!("locking {}", path.display()));
        if !file.metadata().map_err(context())?.is_file() {
            return Ok(Self(file));
        }
        loop {
            // SAFETY: `flock` reads and writes no memory of the process, and the descriptor is open as long as `file` lives.
            let failed =
                unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0;
            if !failed {
                return Ok(Self(file));
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => {
                    return Err(TraceError::InUse { path: path.to_owned() });
                }
                _ => return Err(context()(error)),
            }
        }
    }

    /// This platform has no advisory locks: the caller must ensure that a file has one writer.
    #[cfg(not(unix))]
    pub(super) fn lock(file: File, _path: &Path) -> Result<Self, TraceError> {
        Ok(Self(file))
    }

    /// Returns whether `path` names this file.
    #[cfg(unix)]
    fn is_at(&self, path: &Path) -> io::Result<bool> {
        use std::os::unix::fs::MetadataExt;

        let own = self.0.metadata()?;
        match std::fs::metadata(path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (own.dev(), own.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    #[cfg(not(unix))]
    fn is_at(&self, _path: &Path) -> io::Result<bool> {
        Ok(true)
    }
}

impl Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

#[cfg(unix)]
impl Drop for LockedFile {
    /// Unlocks before closing. A process that another thread starts also has the descriptor until it executes its program,
    /// and would keep the lock.
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        use std::os::fd::AsRawFd;

        // SAFETY: `flock` reads and writes no memory of the process, and the descriptor is open until the field is dropped.
        let _ = unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}
