//! Normal process exit: an exit handler of the C library releases the slots of open ledgers.
//!
//! Without it, the slot of a ledger in a static would be shown as a dead process's until a request reclaims it. The handler does not run on
//! `abort`, `_exit` or a signal. Then the kernel drops the locks, and the next request that needs the bytes reclaims them.

use std::sync::{Arc, Once, Weak};

use xlog_base::Mutex;

use super::ledger::Ledger;

static PRESENT: Mutex<Vec<Weak<Ledger>>> = Mutex::new(Vec::new());
static AT_EXIT: Once = Once::new();

pub(super) fn leave_at_exit(ledger: &Arc<Ledger>) {
    let mut present = PRESENT.lock();
    present.retain(|known| known.strong_count() > 0);
    present.push(Arc::downgrade(ledger));
    drop(present);
    AT_EXIT.call_once(|| {
        // SAFETY: a function item lives as long as the library, and this one does not unwind. If registration fails, the slots remain as
        // those of a killed process do.
        unsafe { libc::atexit(leave_all) };
    });
}

extern "C" fn leave_all() {
    // Unwinding into the C library is forbidden, and a thread that exits while it holds the list must not wait for itself.
    let _ = std::panic::catch_unwind(|| {
        let Some(present) = PRESENT.try_lock() else { return };
        for ledger in present.iter().filter_map(Weak::upgrade) {
            ledger.leave();
            // This may be the last reference. The process ends, so the kernel closes the descriptors.
            std::mem::forget(ledger);
        }
    });
}
