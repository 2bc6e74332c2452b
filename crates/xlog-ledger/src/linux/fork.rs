//! Keeps the descriptors and mappings of a ledger from forked children.
//!
//! The kernel keeps the locks of an open file description until its last descriptor and mapping are closed, including those of a forked
//! child. So a child replaces each of them, at the same number and address, before `fork` returns there. The parent's objects then stay
//! valid to use and drop in the child. A child created by the raw system call instead of the C library is not detected.
//!
//! The table is locked while a ledger is opened and while the process forks, so a child never inherits an unregistered descriptor or
//! mapping.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use xlog_base::{Mutex, MutexGuard};

#[derive(Debug)]
struct Inherited {
    number: u64,
    descriptors: Vec<RawFd>,
    /// The mapped addresses.
    mapped: Range<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Inherited>,
    made: u64,
}

static TABLE: Mutex<Table> = Mutex::new(Table { entries: Vec::new(), made: 0 });
/// Replaces a ledger's descriptors in a child. An event counter needs no file system.
static SUBSTITUTE: OnceLock<OwnedFd> = OnceLock::new();

thread_local! {
    /// The table's lock, held by the forking thread during the fork.
    static FORKING: RefCell<Option<MutexGuard<'static, Table>>> = const { RefCell::new(None) };
}

/// Locks the table. Nothing created before it is unlocked can be inherited unregistered.
pub(super) fn lock_table() -> io::Result<MutexGuard<'static, Table>> {
    let mut table = TABLE.lock();
    if SUBSTITUTE.get().is_none() {
        table.watch_forks()?;
    }
    Ok(table)
}

impl Table {
    fn watch_forks(&mut self) -> io::Result<()> {
        // SAFETY: the call takes no pointers.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and has no other owner.
        let substitute = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // SAFETY: the functions live as long as this library; the C library forgets them if it is unloaded.
        let status = unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_forked_child))
        };
        if status != 0 {
            return Err(io::Error::from_raw_os_error(status));
        }
        // The table's lock makes this the only initialisation.
        let _ = SUBSTITUTE.set(substitute);
        Ok(())
    }

    /// Registers the descriptors and the mapping of one ledger.
    pub(super) fn register<'a>(
        &mut self,
        files: impl IntoIterator<Item = &'a File>,
        mapped: Range<usize>,
    ) -> Registration {
        self.made += 1;
        let number = self.made;
        let descriptors = files.into_iter().map(AsRawFd::as_raw_fd).collect();
        self.entries.push(Inherited { number, descriptors, mapped });
        Registration { number }
    }
}

/// Dropped with the ledger, before its descriptors are closed.
#[derive(Debug)]
pub(super) struct Registration {
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut table = TABLE.lock();
        table.entries.retain(|entry| entry.number != self.number);
    }
}

extern "C" fn before_fork() {
    let table = TABLE.lock();
    // In an ending thread without the slot, the table is unlocked at once, and a ledger that is being opened may be inherited.
    let _ =
        FORKING.try_with(|forking| forking.try_borrow_mut().map(|mut slot| *slot = Some(table)));
}

extern "C" fn after_fork() {
    let _ = FORKING.try_with(|forking| forking.try_borrow_mut().map(|mut slot| *slot = None));
}

/// Makes only system calls, because other threads of the parent may have held the allocator's lock.
extern "C" fn in_forked_child() {
    let _ = FORKING.try_with(|forking| {
        let Ok(mut slot) = forking.try_borrow_mut() else { return };
        if let (Some(table), Some(substitute)) = (slot.as_mut(), SUBSTITUTE.get()) {
            table.entries.iter().for_each(|entry| entry.replace(substitute.as_raw_fd()));
        }
        *slot = None;
    });
}

impl Inherited {
    fn replace(&self, substitute: RawFd) {
        for descriptor in &self.descriptors {
            // SAFETY: the number belongs to a file of a registered ledger, which this process has not used yet.
            unsafe { libc::dup3(substitute, *descriptor, libc::O_CLOEXEC) };
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let start = std::ptr::without_provenance_mut(self.mapped.start);
        // SAFETY: exactly the range of a registered ledger's mapping is replaced, by zeroes, which are valid atomics.
        unsafe { libc::mmap(start, self.mapped.len(), protection, flags, -1, 0) };
    }
}
