//! A barrier in two halves: free for the one who runs often, dear for the one who comes seldom.
//!
//! The light half only keeps the compiler from reordering; the heavy half makes every running thread of the process pass a full
//! barrier (`membarrier`). Paired, they order like two full barriers. Where the system does not offer it, [`available`] says so and
//! nobody may rely on the light half.

use std::sync::atomic::compiler_fence;

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A number for this thread that no other thread of the process has had; 0 when the numbers have run out.
#[inline]
pub fn thread_name() -> u32 {
    use std::cell::Cell;
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static NAME: Cell<u32> = const { Cell::new(0) };
    }
    let name = NAME.get();
    if name != 0 {
        return name;
    }
    first_name(&NEXT, &NAME)
}

#[cold]
fn first_name(next: &AtomicU32, name: &'static std::thread::LocalKey<std::cell::Cell<u32>>) -> u32 {
    let next = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
    name.set(next.unwrap_or(0));
    name.get()
}

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
