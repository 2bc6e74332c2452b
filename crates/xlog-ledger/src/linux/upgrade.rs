//! The in-place upgrade of a version 1 file, while no living process uses it.
//!
//! The upgrading process holds the file lock, so no process can claim a slot meanwhile. The file first grows by zeroed quotas, and then one
//! write replaces its header. A kill between the two leaves a version 1 file with the size of version 2, which the next opener upgrades. An
//! older program that has opened the file and waits for the lock finds another size and is refused.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::file::failed;
use super::mapping::{fill_holes, try_lock, unlock};
use crate::error::LedgerResult;
use crate::format::{Header, VERSION, file_size, fixed_part, slot_offset};

/// Upgrades the file. Returns false if a living process has a slot or there is no space. The caller holds the file lock.
pub(super) fn upgrade(file: &File, path: &Path, header: &Header) -> LedgerResult<bool> {
    if is_in_use(file, header.slots).map_err(|error| failed(path, "lock", error))? {
        return Ok(false);
    }
    if fill_holes(file, file_size(VERSION, header.slots)).is_err() {
        return Ok(false);
    }
    let fixed = fixed_part(VERSION, &header.key, header.slots);
    file.write_all_at(&fixed, 0).map_err(|error| failed(path, "write", error))?;
    Ok(true)
}

/// True if a living process has a slot.
fn is_in_use(file: &File, slots: u32) -> std::io::Result<bool> {
    for index in 0..slots as usize {
        if !try_lock(file, slot_offset(index))? {
            return Ok(true);
        }
        unlock(file, slot_offset(index))?;
    }
    Ok(false)
}
