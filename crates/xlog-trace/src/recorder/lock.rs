//! One writer per log file: an advisory lock on the open file.
//!
//! The lock belongs to the file and not to its name, so two paths to one file meet, in one process as well as in two. Dropping the
//! [`LockedFile`] releases it, and so does the end of the process, also by a kill. Pipes and devices have no contents that two
//! writers could spoil by cutting them, and are not locked.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::path::Path;

use crate::error::TraceError;

/// How often a name is opened again that a writer renamed between open and lock.
const MAX_ATTEMPTS: u32 = 64;

/// A file that this recorder alone writes.
#[derive(Debug)]
pub(super) struct LockedFile(File);

impl LockedFile {
    /// Opens the file at `path` for appending, creates it if need be, and locks it.
    ///
    /// A writer may rotate the file away between open and lock. The lock would then be on a file of another name, so the name is
    /// compared after it and opened again.
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

    /// No advisory locks here: the caller has to see to it that a file has one writer.
    #[cfg(not(unix))]
    pub(super) fn lock(file: File, _path: &Path) -> Result<Self, TraceError> {
        Ok(Self(file))
    }

    /// Whether `path` names this file.
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
    /// Unlocks before closing: a process that another thread is starting has the descriptor, too, until it runs its program, and
    /// the lock would stay with it.
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        use std::os::fd::AsRawFd;

        // SAFETY: `flock` reads and writes no memory of the process, and the descriptor is open until the field is dropped.
        let _ = unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}
