//! An asymmetric barrier: the frequent side needs only a compiler fence, the rare side calls `membarrier`.
//!
//! The rare side makes every running thread of the process execute a full barrier. Paired, the two sides order like two full barriers. If
//! the system has no `membarrier`, [`available`] is false and the frequent side orders nothing.

use std::sync::atomic::compiler_fence;

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The maximum number of biases that one thread can hold at a time. It enters a further one through its lock.
pub(super) const ENTRY_SLOTS: usize = 8;

/// Spins, then yields, while another thread must make progress.
pub(super) fn pause(turns: u32) {
    if turns < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

#[inline]
pub(super) fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// True if the two sides pair on this system.
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

/// The rare side. It cannot fail once [`available`] has returned true.
#[cfg(target_os = "linux")]
pub(super) fn heavy() {
    use rustix::thread::{MembarrierCommand, membarrier};
    std::sync::atomic::fence(Ordering::SeqCst);
    if available() && membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // The system revoked `membarrier`: two threads could now be inside unnoticed.
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
