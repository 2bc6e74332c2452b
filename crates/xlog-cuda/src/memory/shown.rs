//! The flag that makes the address of a buffer visible, for tracked-only managers.
//!
//! A buffer and the recorders that name it share a flag. A thread reuses the flags of dropped buffers, so that in the steady state a
//! buffer needs no heap allocation.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of unused flags that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    static UNUSED: RefCell<Vec<Arc<AtomicBool>>> = const { RefCell::new(Vec::new()) };
}

/// A flag that the first preflight sets.
#[derive(Clone, Debug)]
pub(crate) struct Shown(Arc<AtomicBool>);

impl Shown {
    /// Returns a flag that is not set.
    pub(super) fn not_yet() -> Self {
        // An ending thread has no unused flags.
        let unused = UNUSED.try_with(|unused| unused.borrow_mut().pop()).ok().flatten();
        Self(unused.unwrap_or_default())
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Ends the use of the flag by a dropped buffer. If no recorder shares it, this thread reuses it.
    pub(super) fn end(mut self) {
        let Some(flag) = Arc::get_mut(&mut self.0) else { return };
        *flag.get_mut() = false;
        let _ = UNUSED.try_with(|unused| {
            let mut unused = unused.borrow_mut();
            if unused.len() < KEPT {
                unused.push(self.0);
            }
        });
    }
}
