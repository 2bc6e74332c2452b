//! Functions that are called, in the order they were registered, with no lock held.

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

    /// The functions, unless this thread is inside one of a budget already.
    pub(crate) fn outermost(&self) -> Vec<Callback<E>> {
        if INSIDE.get() { Vec::new() } else { self.functions() }
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` so that what it asks of budgets calls no functions again. Its waits are its own: they spend nothing of the deadline of
/// the call that it runs in.
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

/// A registered function; it is called until this is dropped.
#[must_use = "dropping the registration ends it; `forever` keeps it"]
pub struct Registration {
    remove: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Registration {
    /// The function stays for as long as its budget.
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
