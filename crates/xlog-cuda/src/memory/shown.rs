//! Whether the address of a buffer may be seen: for managers that are tracked only.
//!
//! A buffer and the recorders that name it share a flag. A thread uses the flags of buffers that have ended again, so that a buffer costs no
//! allocation of the host in the steady state.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flags that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    static UNUSED: RefCell<Vec<Arc<AtomicBool>>> = const { RefCell::new(Vec::new()) };
}

/// A flag that is set once, by the first preflight.
#[derive(Clone, Debug)]
pub(crate) struct Shown(Arc<AtomicBool>);

impl Shown {
    /// A flag that is not set.
    pub(super) fn not_yet() -> Self {
        // A thread that is ending has none.
        let unused = UNUSED.try_with(|unused| unused.borrow_mut().pop()).ok().flatten();
        Self(unused.unwrap_or_default())
    }

    /// Whether the address may be seen.
    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// The address may be seen from now on.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// The buffer has ended. If no recorder has the flag, another buffer of this thread may have it.
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
