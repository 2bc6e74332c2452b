//! What a thread is working for, and which path served it: words that travel beside a call, not through it.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use xlog_trace::ServedBy;

thread_local! {
    /// The innermost scope's query, where the hot path looks.
    static QUERY: Cell<Option<u64>> = const { Cell::new(None) };
    /// All scopes of the thread, outermost first. Guards may end in any order.
    static SCOPES: RefCell<Scopes> = const { RefCell::new(Scopes { open: Vec::new(), next: 0 }) };
    static PATH: Cell<ServedBy> = const { Cell::new(ServedBy::Unknown) };
}

/// True once there has been a resource that logs.
static LOGGED: AtomicBool = AtomicBool::new(false);

struct Scopes {
    open: Vec<(u64, u64)>,
    next: u64,
}

/// Until it is dropped, operations of this thread are logged and counted for one query.
///
/// Scopes nest: the innermost counts. A scope belongs to its thread and cannot leave it; work handed to another thread enters a
/// scope there.
///
/// ```
/// use xlog_cuda::device_runtime::QueryScope;
///
/// let outer = QueryScope::enter(7);
/// {
///     let _inner = QueryScope::enter(8);
///     assert_eq!(QueryScope::current(), Some(8));
/// }
/// assert_eq!(QueryScope::current(), Some(7));
/// drop(outer);
/// assert_eq!(QueryScope::current(), None);
/// ```
///
/// ```compile_fail
/// let scope = xlog_cuda::device_runtime::QueryScope::enter(7);
/// std::thread::spawn(move || drop(scope));
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct QueryScope {
    number: u64,
    id: u64,
    _of_this_thread: PhantomData<*const ()>,
}

impl QueryScope {
    /// From now on this thread works for query `id`.
    pub fn enter(id: u64) -> Self {
        let number = SCOPES.with_borrow_mut(|scopes| {
            scopes.next += 1;
            scopes.open.push((scopes.next, id));
            scopes.next
        });
        QUERY.set(Some(id));
        Self { number, id, _of_this_thread: PhantomData }
    }

    /// The query of this scope.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The query this thread works for.
    #[inline]
    #[must_use]
    pub fn current() -> Option<u64> {
        // Works while the thread is taken down too: the cell has no destructor.
        QUERY.try_with(Cell::get).unwrap_or(None)
    }
}

impl Drop for QueryScope {
    fn drop(&mut self) {
        // A guard kept in another thread-local may outlive the list; then nobody is left to be told.
        let _ = SCOPES.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            scopes.open.retain(|&(number, _)| number != self.number);
            QUERY.set(scopes.open.last().map(|&(_, id)| id));
        });
    }
}

/// Says which path served the allocation that this thread is in. For resources, whatever is above them.
///
/// A [`LoggingResource`](super::LoggingResource) above takes it into its record; without one it is a store that nobody reads.
#[inline]
pub fn note_path(path: ServedBy) {
    if LOGGED.load(Ordering::Relaxed) {
        PATH.with(|cell| cell.set(path));
    }
}

/// Somebody logs: from now on paths are noted.
pub(super) fn begin_logging() {
    LOGGED.store(true, Ordering::Relaxed);
}

/// The path noted since the last time this was asked.
#[inline]
pub(super) fn reset_path() -> ServedBy {
    PATH.replace(ServedBy::Unknown)
}
