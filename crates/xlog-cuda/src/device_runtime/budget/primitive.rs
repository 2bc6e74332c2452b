//! The locks of the credit scheme, in one place so that a model checker can replace them.

use std::time::Duration;

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use xlog_driver::sync::BiasedMutex;
/// Held across calls into the resource below, so a deterministic scheduler must see it.
pub(crate) use xlog_driver::sync::Mutex as Turnstile;

/// A lock inside which nothing is called; which of them a thread meets depends on the whole process, so a seeded scheduler
/// must not see it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// How often an operation of another thread is waited for: about a second.
const PATIENCE: u32 = 10_000;

/// Lets others go on; false when it has been asked too often.
pub(crate) fn pause(round: u32) -> bool {
    static TURN: Turnstile<()> = Turnstile::new(());
    // Where threads are scheduled by a seed, this is where another one may go on.
    drop(TURN.lock());
    if round < 64 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(100));
    }
    round < PATIENCE
}
