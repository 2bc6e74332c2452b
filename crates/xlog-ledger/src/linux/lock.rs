//! The file lock: a lock on one byte of the file, for every decision that concerns several slots.
//!
//! The lock belongs to the open file description, so a gate separates the threads that share one. It is tried until a deadline: a holder
//! that was stopped costs others an error, never a hang. The kernel drops a dead holder's lock. The holder's name in the header is for
//! display.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use xlog_base::{Condvar, Mutex};

use super::claim::Inode;
use super::file::failed;
use super::mapping::{ForkSentinel, Mapping, SlotCell, Standing, try_lock, unlock};
use crate::error::{LedgerError, LedgerResult, LockHolder};
use crate::format::{AT_HOLDER, VERSION, VERSION_1, file_size};
use crate::snapshot::shown;

const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// The change in the error for a file that another process upgraded; the file can be opened again.
pub(super) const UPGRADED: &str = "upgraded to a newer version";

#[derive(Debug)]
pub(super) struct Opened<'a> {
    pub(super) file: &'a File,
    pub(super) path: &'a Path,
    pub(super) mapping: &'a Mapping,
    pub(super) sentinel: &'a ForkSentinel,
    pub(super) inode: Inode,
}

/// Admits one thread of this opening at a time to the file lock.
#[derive(Debug)]
pub(super) struct Gate {
    taken: Mutex<bool>,
    left: Condvar,
    deadline: Duration,
}

/// Holds the file lock and unlocks it when dropped.
#[must_use = "the file lock is held as long as this value lives"]
#[derive(Debug)]
pub struct FileLockGuard<'a> {
    opened: Opened<'a>,
    gate: &'a Gate,
}

impl Gate {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { taken: Mutex::new(false), left: Condvar::new(), deadline }
    }

    /// Takes the lock on behalf of `slot`, or without one while the opener has none.
    pub(super) fn lock<'a>(
        &'a self,
        opened: Opened<'a>,
        slot: Option<usize>,
    ) -> LedgerResult<FileLockGuard<'a>> {
        let begin = Instant::now();
        if !self.enter(begin, self.deadline) {
            return Err(busy(&opened, begin.elapsed()));
        }
        // The process may have left while this thread waited.
        if opened.sentinel.standing() == Standing::Left {
            self.leave();
            return Err(LedgerError::Closed { path: opened.path.to_owned() });
        }
        match try_until(&opened, begin, self.deadline) {
            Ok(()) => {}
            Err(error) => {
                self.leave();
                return Err(error);
            }
        }
        // From here on dropping the guard unlocks, even if the file is refused.
        let guard = FileLockGuard { opened, gate: self };
        let place = slot.map_or(0, |slot| slot as u64 + 1);
        let holder = u64::from(std::process::id()) << 32 | place;
        guard.opened.mapping.header().holder.store(holder, Ordering::Relaxed);
        check_in_place(&guard.opened)?;
        Ok(guard)
    }

    /// Runs `work` while no thread of this opening holds or awaits the file lock. Returns false if `deadline` passes first.
    pub(super) fn without_lock(&self, deadline: Duration, work: impl FnOnce()) -> bool {
        let entered = self.enter(Instant::now(), deadline);
        if entered {
            work();
            self.leave();
        }
        entered
    }

    fn enter(&self, begin: Instant, deadline: Duration) -> bool {
        let mut taken = self.taken.lock();
        while *taken {
            let Some(left) = deadline.checked_sub(begin.elapsed()) else { return false };
            taken = self.left.wait_timeout(taken, left);
        }
        *taken = true;
        true
    }

    fn leave(&self) {
        *self.taken.lock() = false;
        self.left.notify_one();
    }
}

impl Drop for FileLockGuard<'_> {
    fn drop(&mut self) {
        // A forked child shares the lock with its parent and would unlock it there.
        if self.opened.sentinel.forked() {
            return;
        }
        self.opened.mapping.header().holder.store(0, Ordering::Relaxed);
        // Unlocking an open descriptor does not fail; if it did, errors of other processes would name the holder.
        let _ = unlock(self.opened.file, AT_HOLDER);
        self.gate.leave();
    }
}

fn try_until(opened: &Opened<'_>, begin: Instant, deadline: Duration) -> LedgerResult<()> {
    let mut sleep = FIRST_SLEEP;
    loop {
        match try_lock(opened.file, AT_HOLDER) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(failed(opened.path, "lock", error)),
        }
        let Some(left) = deadline.checked_sub(begin.elapsed()).filter(|left| !left.is_zero())
        else {
            return Err(busy(opened, begin.elapsed()));
        };
        std::thread::sleep(sleep.min(left));
        sleep = (sleep * 2).min(LONGEST_SLEEP);
    }
}

/// Checks that the path and the size are unchanged. A path that names another file means another account. A path that names no file is
/// accepted: this opener's claims keep others from creating a file there (see `claim`).
fn check_in_place(opened: &Opened<'_>) -> LedgerResult<()> {
    let metadata = opened.file.metadata().map_err(|error| failed(opened.path, "stat", error))?;
    let removed = |how| LedgerError::Removed { path: opened.path.to_owned(), how };
    let mapping = opened.mapping;
    if metadata.len() != mapping.file_size() {
        // A version 1 file is being upgraded, or its upgrade was completed or interrupted.
        let upgraded = file_size(VERSION, mapping.slots().len() as u32);
        match mapping.version_now() {
            _ if metadata.len() != upgraded => return Err(removed("resized")),
            VERSION_1 => {}
            _ => return Err(removed(UPGRADED)),
        }
    }
    match Inode::at(opened.path) {
        Ok(named) if named != opened.inode => Err(removed("replaced by another file")),
        // Also accepted if this process may no longer read the path.
        _ => Ok(()),
    }
}

fn busy(opened: &Opened<'_>, waited: Duration) -> LedgerError {
    let raw = opened.mapping.header().holder.load(Ordering::Relaxed);
    let place = (raw & u64::from(u32::MAX)) as usize;
    let slot = place.checked_sub(1).and_then(|index| opened.mapping.slots().get(index));
    let holder =
        (raw != 0).then(|| LockHolder { pid: (raw >> 32) as u32, name: slot.map(name_of) });
    LedgerError::Busy { path: opened.path.to_owned(), waited, holder }
}

fn name_of(slot: &SlotCell) -> String {
    let bytes: Vec<u8> =
        slot.name.iter().flat_map(|part| part.load(Ordering::Relaxed).to_le_bytes()).collect();
    shown(&bytes)
}
