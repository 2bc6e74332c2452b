//! Leaving at the normal end of the process: an exit handler of the C library gives back the slots of ledgers that are still there.
//!
//! Otherwise the slot of a ledger in a static would stay behind as a dead process's, and be shown as such until a request needs it. The
//! handler does not run on `abort`, `_exit` or a signal; then the kernel drops the locks, and the next request that needs the bytes gets them.

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
        // SAFETY: a function item lives as long as the library, and this one does not unwind.
        // If there is no room for it, the slots stay behind as a killed process's do.
        unsafe { libc::atexit(leave_all) };
    });
}

extern "C" fn leave_all() {
    // Nothing may unwind into the C library, and a thread that ends the process while it holds the list must not wait for itself.
    let _ = std::panic::catch_unwind(|| {
        let Some(present) = PRESENT.try_lock() else { return };
        for ledger in present.iter().filter_map(Weak::upgrade) {
            ledger.leave();
            // Its last holder may be gone by now; the process ends, and the kernel closes what it has open.
            std::mem::forget(ledger);
        }
    });
}
