//! Keeps the descriptors and mappings of a ledger from forked children.
//!
//! The kernel keeps the locks of an open file description until its last descriptor and mapping are gone, also those of a forked child.
//! So the child replaces each of them before `fork` returns there, by something harmless of the same number and address: what the parent's
//! objects own stays valid to use and to release. A child made by the bare system call, past the C library, is not seen.
//!
//! The table is locked while a ledger is opened and while the process forks, so a child never inherits what is not in the table yet.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use xlog_base::{Mutex, MutexGuard};

/// One ledger's descriptors and mapping.
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
/// Takes the place of a ledger's descriptors in a child. An event counter needs no file system.
static SUBSTITUTE: OnceLock<OwnedFd> = OnceLock::new();

thread_local! {
    /// Held by the forking thread while it forks.
    static FORKING: RefCell<Option<MutexGuard<'static, Table>>> = const { RefCell::new(None) };
}

/// Locks the table. Descriptors and mappings that are made before it is unlocked cannot be inherited unregistered.
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
        // SAFETY: just made, owned by nothing else.
        let substitute = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // SAFETY: the functions are there as long as this library; the C library forgets them if it is unloaded.
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

    /// Registers what one ledger has open.
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

/// Ends with the ledger, before its descriptors are closed.
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
    // Without the slot, in a thread that is ending, the table is unlocked again and a ledger that is just being opened may be inherited.
    let _ =
        FORKING.try_with(|forking| forking.try_borrow_mut().map(|mut slot| *slot = Some(table)));
}

extern "C" fn after_fork() {
    let _ = FORKING.try_with(|forking| forking.try_borrow_mut().map(|mut slot| *slot = None));
}

/// Makes system calls only: other threads of the parent may have held the allocator.
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
            // SAFETY: the number belongs to a file of a registered ledger, which in this process nothing has used yet.
            unsafe { libc::dup3(substitute, *descriptor, libc::O_CLOEXEC) };
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let start = std::ptr::without_provenance_mut(self.mapped.start);
        // SAFETY: exactly the range of a registered ledger's mapping is replaced by zeroes, which are valid atomics.
        unsafe { libc::mmap(start, self.mapped.len(), protection, flags, -1, 0) };
    }
}
