//! What `sync::barrier` gives to a bias, from loom: both halves of the barrier are full ones.

use loom::sync::atomic::fence;

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// As few as a nested entry needs: each slot is one more place where threads interleave.
pub(crate) const ENTRY_SLOTS: usize = 2;

pub(crate) fn light() {
    fence(Ordering::SeqCst);
}

pub(crate) fn heavy() {
    fence(Ordering::SeqCst);
}

pub(crate) fn available() -> bool {
    true
}

pub(crate) fn pause(_turns: u32) {
    loom::thread::yield_now();
}
