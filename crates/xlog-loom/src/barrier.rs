//! `sync::barrier` for a bias, on loom: both sides are full fences.

use loom::sync::atomic::fence;

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The minimum for a nested entry, because each slot adds interleavings.
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
