//! Messages to standard error, and the guard against panics.
//!
//! Each kind of message is printed once per process, by one system call that bypasses the program's buffers.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use xlog_base::escape;

/// True once a panic has switched the library off.
static IS_OFF: AtomicBool = AtomicBool::new(false);
static SAID: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The kinds of messages.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Settings,
    Ledger,
    Log,
    Panic,
    Pool,
}

/// Prints a line, unless a line of its kind was printed before.
pub(crate) fn say_once(kind: Kind, text: &str) {
    let bit = 1 << kind as u32;
    if SAID.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return;
    }
    let line = format!("xlogmem exec: process {}: {}\n", std::process::id(), escape::line(text));
    // SAFETY: the pointer and the length are those of a live string.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// True until the library's first panic.
pub(crate) fn is_on() -> bool {
    !IS_OFF.load(Ordering::Relaxed)
}

/// Runs `work`. Returns `None` if it panics, and switches the library off.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(_) => {
            IS_OFF.store(true, Ordering::Relaxed);
            say_once(
                Kind::Panic,
                "internal error; from here on nothing is counted, limited or logged",
            );
            None
        }
    }
}

/// Marks this thread as inside a counted call, so that calls that the driver makes to itself are not counted.
pub(crate) struct Inside(());

impl Inside {
    /// Returns `None` if the thread is already inside or is ending.
    pub(crate) fn enter() -> Option<Self> {
        let entered = IS_INSIDE.try_with(|inside| !inside.replace(true)).unwrap_or(false);
        // Not `then_some`: it would construct and drop a value even if refused, and so end the outer call.
        entered.then(|| Self(()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = IS_INSIDE.try_with(|inside| inside.set(false));
    }
}
