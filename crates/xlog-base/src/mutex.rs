//! A mutex and a condition variable that stay usable after a panic under the lock: the owner of the data keeps it consistent.

pub use std::sync::MutexGuard;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

/// A standard mutex without poisoning.
///
/// It must not be held over a driver call, because a deterministic scheduler does not control it; use `xlog_driver::sync::Mutex` there.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes a mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Takes the value out of the mutex.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks, waiting for the holder if there is one.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the value without locking, through an exclusive reference.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A standard condition variable for a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// Makes a condition variable without waiters.
    #[must_use]
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    /// Unlocks, waits for a notification, and locks again. May also return without one.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits like [`wait`](Self::wait), for at most `limit`.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> MutexGuard<'a, T> {
        self.0.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_under_the_lock_leaves_it_usable() {
        let mutex = Mutex::new(1);
        std::thread::scope(|scope| {
            let panicked = scope.spawn(|| {
                let _guard = mutex.lock();
                std::panic::resume_unwind(Box::new(()));
            });
            assert!(panicked.join().is_err());
        });
        *mutex.lock() += 1;
        assert_eq!(mutex.try_lock().map(|value| *value), Some(2));
        let guard = Condvar::new().wait_timeout(mutex.lock(), Duration::ZERO);
        assert!(mutex.try_lock().is_none());
        drop(guard);
        assert_eq!(mutex.into_inner(), 2);
    }
}
