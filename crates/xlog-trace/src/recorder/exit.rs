//! Handlers for the end of the process, a panic, and a fork.
//!
//! A recorder in a static is never dropped, so a C exit handler ends the file of every live recorder. A panic hook,
//! chained before the previous one, flushes. Both wait a bounded time; neither runs on `abort`, `_exit` or a signal.
//! The child of a fork has no writer: its records are counted as dropped. It may create its own recorder, so the fork
//! handler holds the locks that recorders share; otherwise the child could wait forever for a thread of its parent.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, Weak};

use xlog_base::{Mutex, MutexGuard};

use super::LAST_FLUSH_LIMIT;
use super::intern;
use super::rings::{self, RecorderShared};
use crate::names::Names;

/// Functions that run before the files are ended.
static WORK: Mutex<Vec<fn()>> = Mutex::new(Vec::new());
static ALIVE: Mutex<Vec<Weak<RecorderShared>>> = Mutex::new(Vec::new());
static AT_EXIT: Once = Once::new();
static HOOKED: AtomicBool = AtomicBool::new(false);

/// The locks that recorders share.
struct SharedLocks {
    _alive: MutexGuard<'static, Vec<Weak<RecorderShared>>>,
    _names: MutexGuard<'static, Names>,
}

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
    /// Held by the forking thread while it forks.
    static FORKING: RefCell<Option<SharedLocks>> = const { RefCell::new(None) };
}

/// Marks the calling thread as a writer, which must not wait for itself.
pub(super) fn this_thread_writes() {
    IS_WRITER.with(|is| is.set(true));
}

/// Registers `shared` for the flush at exit and on panic.
pub(super) fn watch(shared: &Arc<RecorderShared>) {
    {
        let mut alive = ALIVE.lock();
        alive.retain(|known| known.strong_count() > 0);
        alive.push(Arc::downgrade(shared));
    }
    AT_EXIT.call_once(register_handlers);
    // A thread that panics cannot change the hook; the next recorder sets it.
    if !std::thread::panicking() && !HOOKED.swap(true, Ordering::AcqRel) {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            flush_all();
            previous(info);
        }));
    }
}

/// Runs `work` once before logs are ended, if the process ends by `exit` or by returning from `main`.
///
/// It runs on any thread and must return. A panic in it is caught.
pub fn at_exit(work: fn()) {
    WORK.lock().push(work);
    AT_EXIT.call_once(register_handlers);
}

fn for_all(work: impl Fn(&RecorderShared)) {
    // A thread that panics while it holds the list must not wait for itself.
    let Some(alive) = ALIVE.try_lock() else { return };
    let alive: Vec<Arc<RecorderShared>> = alive.iter().filter_map(Weak::upgrade).collect();
    alive.iter().for_each(|shared| work(shared));
}

fn is_writer() -> bool {
    IS_WRITER.try_with(Cell::get).unwrap_or(true)
}

fn flush_all() {
    if !is_writer() {
        for_all(|shared| shared.flush(Some(LAST_FLUSH_LIMIT)));
    }
}

fn end_all() {
    let work = std::mem::take(&mut *WORK.lock());
    for work in work {
        let _ = panic::catch_unwind(work);
    }
    if !is_writer() {
        for_all(|shared| shared.close_within(LAST_FLUSH_LIMIT));
    }
}

#[allow(unsafe_code)]
fn register_handlers() {
    extern "C" fn at_exit() {
        // A panic must not unwind into the C library.
        let _ = panic::catch_unwind(end_all);
    }
    extern "C" fn before_fork() {
        let lock = || SharedLocks { _alive: ALIVE.lock(), _names: intern::table() };
        let hold = || FORKING.try_with(|held| held.replace(Some(lock())));
        let _ = panic::catch_unwind(hold);
    }
    extern "C" fn in_parent() {
        let _ = panic::catch_unwind(|| FORKING.try_with(RefCell::take));
    }
    extern "C" fn in_child() {
        in_parent();
        let _ = panic::catch_unwind(rings::forget_rings);
    }
    // SAFETY: both take any `extern "C" fn()` that lives as long as the process. These are function items that neither
    // unwind nor return a value. The handler in the child of a fork takes no lock.
    unsafe {
        libc::atexit(at_exit);
        libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child));
    }
}
