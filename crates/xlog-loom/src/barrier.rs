//! What `sync::barrier` gives to a bias, from loom: both halves of the barrier are full ones.

use loom::sync::atomic::fence;

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};

loom::lazy_static! {
    static ref NEXT: AtomicU32 = AtomicU32::new(1);
}

loom::thread_local! {
    static NAME: std::cell::Cell<u32> = std::cell::Cell::new(0);
}

pub(crate) fn thread_name() -> u32 {
    NAME.with(|name| {
        if name.get() == 0 {
            name.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        name.get()
    })
}

/// The sign of this thread.
pub(crate) fn own_sign() -> u32 {
    crate::bias::sign_of(thread_name())
}

pub(crate) fn light() {
    fence(Ordering::SeqCst);
}

pub(crate) fn heavy() {
    fence(Ordering::SeqCst);
}

pub(crate) fn available() -> bool {
    true
}

pub(crate) fn has_exited(_name: u32) -> bool {
    false
}

pub(crate) fn pause(_turns: u32) {
    loom::thread::yield_now();
}

/// True when this thread has that name.
pub(crate) fn is_named(name: u32) -> bool {
    thread_name() == name
}
