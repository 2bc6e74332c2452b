//! One writer per log file: an advisory lock on the open file.
//!
//! The lock belongs to the file and not to its name, so two paths to one file meet, in one process as well as in two. The
//! system drops it when the file is closed, also by a kill. Pipes and devices have no contents that two writers could
//! spoil by cutting them, and are not locked.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::error::TraceError;

/// Makes the caller the only writer of a regular file until it closes the file.
#[cfg(unix)]
#[allow(unsafe_code)]
pub(super) fn lock(file: &File, path: &Path) -> Result<(), TraceError> {
    use std::os::fd::AsRawFd;

    let context = || TraceError::io(format!("locking {}", path.display()));
    if !file.metadata().map_err(context())?.is_file() {
        return Ok(());
    }
    loop {
        // SAFETY: `flock` reads and writes no memory of the process, and the descriptor is open as long as `file` is borrowed.
        let failed = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0;
        if !failed {
            return Ok(());
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
pub(super) fn lock(_file: &File, _path: &Path) -> Result<(), TraceError> {
    Ok(())
}
