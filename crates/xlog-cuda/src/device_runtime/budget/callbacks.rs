//! Registered functions: pressure functions and refusal functions.
//!
//! Invariants: functions run in the order of their registration, and no lock is held while one runs. A function that asks a budget
//! for memory calls no functions again.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::Weak;

use super::primitive::Mutex;
use crate::device_wait;

type Callback<E> = Arc<dyn Fn(&E) + Send + Sync>;

struct List<E> {
    next: u64,
    functions: Vec<(u64, Callback<E>)>,
}

/// Registered functions of one kind.
pub(crate) struct Callbacks<E>(Arc<Mutex<List<E>>>);

impl<E> Default for Callbacks<E> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(List { next: 0, functions: Vec::new() })))
    }
}

impl<E: 'static> Callbacks<E> {
    pub(crate) fn register(&self, function: Callback<E>) -> Registration {
        let mut list = self.0.lock();
        let key = list.next;
        list.next += 1;
        list.functions.push((key, function));
        let list: Weak<Mutex<List<E>>> = Arc::downgrade(&self.0);
        Registration {
            remove: Some(Box::new(move || {
                if let Some(list) = list.upgrade() {
                    let mut list = list.lock();
                    let at = list.functions.iter().position(|(other, _)| *other == key);
                    let gone = at.map(|at| list.functions.remove(at));
                    drop(list);
                    drop(gone);
                }
            })),
        }
    }

    pub(crate) fn functions(&self) -> Vec<Callback<E>> {
        self.0.lock().functions.iter().map(|(_, function)| function.clone()).collect()
    }

    /// Returns the functions; none if this thread already runs one of a budget.
    pub(crate) fn outermost(&self) -> Vec<Callback<E>> {
        if INSIDE.get() { Vec::new() } else { self.functions() }
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, whose own requests call no functions. Its waits do not count against the deadline of the surrounding call.
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

/// A registered function. Dropping this ends the registration.
#[must_use = "dropping the registration ends it; `forever` keeps it"]
pub struct Registration {
    remove: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Registration {
    /// Keeps the function registered for the lifetime of its budget.
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
