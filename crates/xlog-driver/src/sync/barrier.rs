//! A barrier in two halves: free for the one who runs often, dear for the one who comes seldom.
//!
//! The light half only keeps the compiler from reordering; the heavy half makes every running thread of the process pass a full
//! barrier (`membarrier`). Paired, they order like two full barriers. Where the system does not offer it, [`available`] says so and
//! nobody may rely on the light half.

use std::sync::atomic::compiler_fence;

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Biases that one thread can be inside of at a time. One more is entered through its lock.
pub(super) const ENTRY_SLOTS: usize = 8;

/// Somebody must get on before this thread can.
pub(super) fn pause(turns: u32) {
    if turns < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
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
    if available() && membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // It was allowed once and no longer is: two threads could now be inside at once, and nobody would notice.
        std::process::abort();
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
