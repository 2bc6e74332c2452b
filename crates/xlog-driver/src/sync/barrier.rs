//! A barrier in two halves: free for the one who runs often, dear for the one who comes seldom.
//!
//! The light half only keeps the compiler from reordering; the heavy half makes every running thread of the process pass a full
//! barrier (`membarrier`). Paired, they order like two full barriers. Where the system does not offer it, [`available`] says so and
//! nobody may rely on the light half.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::compiler_fence;
use std::sync::{Mutex, PoisonError};

use super::bias::sign_of;

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// In the place of a name: the thread is about to end.
const ENDED: u32 = u32::MAX;

thread_local! {
    /// Without a destructor, so that it can be looked at to the very end.
    static NAME: Cell<u32> = const { Cell::new(0) };
    /// The name as an owner has it, ready for who enters several things: one load. Nobody's before there is a name, after its end, and
    /// while the thread is hidden.
    static SIGN: Cell<u32> = const { Cell::new(sign_of(0)) };
    static HIDDEN: Cell<bool> = const { Cell::new(false) };
    static END: End = const { End };
}

/// The threads that have ended, by name.
static EXITED_THREADS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
/// How many they are.
static EXITED_COUNT: AtomicU32 = AtomicU32::new(0);

/// Says that its thread has ended. What still runs on the thread after this has no name.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        let name = NAME.replace(ENDED);
        SIGN.set(sign_of(ENDED));
        if name != 0 && name != ENDED {
            EXITED_THREADS.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
            EXITED_COUNT.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A number for this thread that no other thread of the process has had; 0 when there is none.
#[inline]
pub fn thread_name() -> u32 {
    let name = NAME.get();
    // Both ends of the range are special.
    if name.wrapping_sub(1) < ENDED - 1 { name } else { first_name(name) }
}

/// The sign of this thread; nobody's while it is hidden and before it has asked for a name.
#[inline(always)]
pub(super) fn own_sign() -> u32 {
    SIGN.get()
}

/// Makes this thread nobody to what it enters by its sign, or somebody again.
pub(super) fn hide(hidden: bool) {
    HIDDEN.set(hidden);
    SIGN.set(sign_of(if hidden { 0 } else { NAME.get() }));
}

/// True when this thread has that name, which is one that some thread has or had.
#[inline(always)]
pub(super) fn is_named(name: u32) -> bool {
    NAME.get() == name
}

#[cold]
fn first_name(name: u32) -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    // A thread whose end would not be noticed gets no name.
    if name == ENDED || END.try_with(|_| ()).is_err() {
        return 0;
    }
    let next = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
        next.checked_add(1).filter(|next| *next < ENDED)
    });
    NAME.set(next.unwrap_or(0));
    hide(HIDDEN.get());
    NAME.get()
}

/// True when the thread of this name will never enter anything again, nor do anything else under its name. What it did under it is seen
/// by who was told so. Takes a lock of the process; see [`exited_count`].
#[must_use]
pub fn has_exited(name: u32) -> bool {
    EXITED_THREADS.lock().unwrap_or_else(PoisonError::into_inner).contains(&name)
}

/// How many threads with a name have ended, about: while it stays the same, nobody need be asked for again.
#[must_use]
pub fn exited_count() -> u32 {
    EXITED_COUNT.load(Ordering::Relaxed)
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
