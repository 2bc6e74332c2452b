//! The callbacks of a budget: under memory pressure, and after a refusal.
//!
//! Invariants: callbacks run in the order of their registration, and no lock is held while one runs. A callback that asks a budget
//! for memory calls no callbacks again.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::Weak;

use super::primitive::Mutex;
use crate::device_wait;

type Callback<E> = Arc<dyn Fn(&E) + Send + Sync>;

struct List<E> {
    next: u64,
    callbacks: Vec<(u64, Callback<E>)>,
}

/// The registered callbacks of one kind.
pub(crate) struct Callbacks<E>(Arc<Mutex<List<E>>>);

impl<E> Default for Callbacks<E> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(List { next: 0, callbacks: Vec::new() })))
    }
}

impl<E: 'static> Callbacks<E> {
    pub(crate) fn register(&self, callback: Callback<E>) -> Registration {
        let mut list = self.0.lock();
        let key = list.next;
        list.next += 1;
        list.callbacks.push((key, callback));
        let list: Weak<Mutex<List<E>>> = Arc::downgrade(&self.0);
        Registration {
            remove: Some(Box::new(move || {
                if let Some(list) = list.upgrade() {
                    let mut list = list.lock();
                    let at = list.callbacks.iter().position(|(other, _)| *other == key);
                    let gone = at.map(|at| list.callbacks.remove(at));
                    drop(list);
                    drop(gone);
                }
            })),
        }
    }

    pub(crate) fn registered(&self) -> Vec<Callback<E>> {
        self.0.lock().callbacks.iter().map(|(_, callback)| callback.clone()).collect()
    }

    /// Returns the callbacks; none if this thread already runs one of a budget.
    pub(crate) fn outermost(&self) -> Vec<Callback<E>> {
        if INSIDE.get() { Vec::new() } else { self.registered() }
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, whose own requests call no callbacks. Its waits do not count against the deadline of the surrounding call.
pub(crate) fn inside<T>(body: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            INSIDE.set(self.0);
        }
    }
    let _restore = Restore(INSIDE.replace(true));
    let _suspended = device_wait::suspend();
    body()
}

/// A registered callback. Dropping this ends the registration.
#[must_use = "dropping the registration ends it; `forever` keeps it"]
pub struct Registration {
    remove: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Registration {
    /// Keeps the callback registered for the lifetime of its budget.
    pub fn forever(mut self) {
        self.remove = None;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(remove) = self.remove.take() {
            remove();
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").finish_non_exhaustive()
    }
}
