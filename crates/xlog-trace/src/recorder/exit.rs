//! The last flush: at the end of the process, and when a thread panics.
//!
//! A recorder in a static is never dropped, so an exit handler of the C library flushes every
//! recorder that is still alive; a panic hook, chained before the one that was there, does the same.
//! Both wait a bounded time. Neither runs on `abort`, `_exit` or a signal.

use std::cell::Cell;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

use super::LAST_FLUSH_LIMIT;
use super::rings::Shared;

static ALIVE: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static AT_EXIT: Once = Once::new();
static HOOKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// A writer does not wait for itself.
pub(super) fn this_thread_writes() {
    IS_WRITER.with(|is| is.set(true));
}

/// Flushes `shared` at exit and on panic, as long as it is alive.
pub(super) fn watch(shared: &Arc<Shared>) {
    {
        let mut alive = ALIVE.lock().unwrap_or_else(PoisonError::into_inner);
        alive.retain(|known| known.strong_count() > 0);
        alive.push(Arc::downgrade(shared));
    }
    AT_EXIT.call_once(register_exit_handler);
    // The hook cannot be changed while this thread panics; the next recorder sets it.
    if !std::thread::panicking() && !HOOKED.swap(true, Ordering::AcqRel) {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            flush_all();
            previous(info);
        }));
    }
}

fn flush_all() {
    if IS_WRITER.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    // A thread that panics while it holds the list must not wait for itself.
    let Ok(alive) = ALIVE.try_lock() else { return };
    let alive: Vec<Arc<Shared>> = alive.iter().filter_map(Weak::upgrade).collect();
    for shared in alive {
        shared.flush(Some(LAST_FLUSH_LIMIT));
    }
}

#[allow(unsafe_code)]
fn register_exit_handler() {
    extern "C" fn at_exit() {
        // Nothing may unwind into the C library.
        let _ = panic::catch_unwind(flush_all);
    }
    // SAFETY: `atexit` takes any `extern "C" fn()` that lives as long as the process; a function
    // item does, and it neither unwinds nor returns a value.
    unsafe {
        libc::atexit(at_exit);
    }
}
