//! The source location of the caller, for the records of allocations.
//!
//! Public functions that allocate are `#[track_caller]`. Trait objects lose the caller, so the runtime passes it in a thread-local. A
//! runtime that was built before any logging resource skips this.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Until it is dropped, allocations of this thread are logged with its call site.
#[must_use = "the scope ends when this is dropped"]
pub(crate) struct SiteScope {
    outer: Option<&'static Location<'static>>,
    _of_this_thread: PhantomData<*const ()>,
}

impl SiteScope {
    #[inline]
    pub(crate) fn enter(site: &'static Location<'static>) -> Self {
        let outer = SITE.try_with(|cell| cell.replace(Some(site))).unwrap_or(None);
        Self { outer, _of_this_thread: PhantomData }
    }
}

impl Drop for SiteScope {
    #[inline]
    fn drop(&mut self) {
        // The cell has no destructor, so it is writable while the thread ends.
        let _ = SITE.try_with(|cell| cell.set(self.outer));
    }
}

/// The call site of the innermost scope of this thread.
#[inline]
pub(super) fn current_site() -> Option<&'static Location<'static>> {
    SITE.try_with(Cell::get).unwrap_or(None)
}
