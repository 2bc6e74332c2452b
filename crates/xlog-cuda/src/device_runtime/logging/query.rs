//! Thread-local context of a call: the query that the thread works for, and the path that served the call.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ServedBy;

thread_local! {
    /// The innermost scope's query, for the fast path.
    static QUERY: Cell<Option<u64>> = const { Cell::new(None) };
    /// All scopes of the thread, outermost first. Guards may end in any order.
    static SCOPES: RefCell<Scopes> = const { RefCell::new(Scopes { open: Vec::new(), next: 0 }) };
    static PATH: Cell<ServedBy> = const { Cell::new(ServedBy::Unknown) };
}

/// Whether a logging resource was ever created.
static LOGGED: AtomicBool = AtomicBool::new(false);

struct Scopes {
    open: Vec<(u64, u64)>,
    next: u64,
}

/// Until it is dropped, operations of this thread are logged and counted for one query.
///
/// Scopes nest: the innermost counts. A scope cannot move to another thread; work on another thread enters a scope there.
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
    /// Enters a scope for query `id`.
    pub fn enter(id: u64) -> Self {
        let number = SCOPES.with_borrow_mut(|scopes| {
            scopes.next += 1;
            scopes.open.push((scopes.next, id));
            scopes.next
        });
        QUERY.set(Some(id));
        Self { number, id, _of_this_thread: PhantomData }
    }

    /// Awaits `future`, which works for query `id` whenever it is polled, on any thread.
    ///
    /// ```
    /// use xlog_cuda::device_runtime::QueryScope;
    ///
    /// let query = QueryScope::follow(42, async { QueryScope::current() });
    /// # let executor = tokio::runtime::Builder::new_current_thread().build().unwrap();
    /// # executor.block_on(async {
    /// assert_eq!(query.await, Some(42));
    /// # });
    /// ```
    pub async fn follow<F: Future>(id: u64, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|context| {
            let _scope = Self::enter(id);
            future.as_mut().poll(context)
        })
        .await
    }

    /// The query of this scope.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The query that this thread works for.
    #[inline]
    #[must_use]
    pub fn current() -> Option<u64> {
        // The cell has no destructor, so it is readable while the thread ends.
        QUERY.try_with(Cell::get).unwrap_or(None)
    }
}

impl Drop for QueryScope {
    fn drop(&mut self) {
        // A scope in another thread-local may outlive the list; then there is nothing to restore.
        let _ = SCOPES.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            scopes.open.retain(|&(number, _)| number != self.number);
            QUERY.set(scopes.open.last().map(|&(_, id)| id));
        });
    }
}

/// Notes the path that served this thread's current allocation. Resources call it.
///
/// A [`LoggingResource`](super::LoggingResource) above them adds it to its record.
#[inline]
pub fn note_path(path: ServedBy) {
    if LOGGED.load(Ordering::Relaxed) {
        PATH.with(|cell| cell.set(path));
    }
}

/// Enables [`note_path`].
pub(super) fn begin_logging() {
    LOGGED.store(true, Ordering::Relaxed);
}

/// Returns whether a logging resource was ever created.
pub(crate) fn is_logging() -> bool {
    LOGGED.load(Ordering::Relaxed)
}

/// Returns the path noted since the last call, and resets it.
#[inline]
pub(super) fn reset_path() -> ServedBy {
    PATH.replace(ServedBy::Unknown)
}
