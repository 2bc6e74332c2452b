//! A barrier in two halves: free for the one who runs often, dear for the one who comes seldom.
//!
//! The light half only keeps the compiler from reordering; the heavy half makes every running thread of the process pass a full
//! barrier (`membarrier`). Paired, they order like two full barriers. Where the system does not offer it, [`available`] says so and
//! nobody may rely on the light half.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

thread_local! {
    static NAME: Cell<u32> = const { Cell::new(0) };
}

/// Names this thread, never another one; 0 when the names have run out.
#[inline]
pub(super) fn thread_name() -> u32 {
    match NAME.get() {
        0 => new_name(),
        name => name,
    }
}

#[cold]
#[inline(never)]
fn new_name() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let next = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
    NAME.set(next.unwrap_or(0));
    NAME.get()
}

#[inline]
pub(super) fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// True when the two halves pair up on this system.
#[cfg(target_os = "linux")]
pub(super) fn available() -> bool {
    use rustix::thread::{MembarrierCommand, membarrier};
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// The heavy half. It cannot fail once [`available`] has said yes.
#[cfg(target_os = "linux")]
pub(super) fn heavy() {
    use rustix::thread::{MembarrierCommand, membarrier};
    std::sync::atomic::fence(Ordering::SeqCst);
    if available() {
        let passed = membarrier(MembarrierCommand::PrivateExpedited);
        debug_assert!(passed.is_ok(), "membarrier was registered: {passed:?}");
    }
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(not(target_os = "linux"))]
pub(super) fn available() -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
pub(super) fn heavy() {
    std::sync::atomic::fence(Ordering::SeqCst);
}
