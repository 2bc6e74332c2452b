//! A mutex that a deterministic scheduler can see through.
//!
//! Under the seeded simulated device, host threads are logical: one runs at a time, and any driver call may hand over
//! to another. A thread that holds a lock across a driver call could then be waited for by the only thread that runs.
//! [`Mutex`] tells the scheduler instead of blocking. Without a scheduler it is the standard mutex and its uncontended
//! path is the same. Poisoning is ignored: the data behind it is kept consistent by its owner.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::{MutexGuard, PoisonError, TryLockError};

thread_local! {
    static YIELD: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Runs `body` with `yield_now` called whenever this thread would block on a [`Mutex`].
pub fn with_scheduler<T>(yield_now: Rc<dyn Fn()>, body: impl FnOnce() -> T) -> T {
    struct Restore(Option<Rc<dyn Fn()>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let previous = self.0.take();
            YIELD.with(|slot| *slot.borrow_mut() = previous);
        }
    }
    let _restore = Restore(YIELD.with(|slot| slot.borrow_mut().replace(yield_now)));
    body()
}

/// Mutual exclusion, visible to a deterministic scheduler.
#[derive(Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// The value, without the mutex.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks, waiting for the holder if there is one.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, T> {
        let Some(yield_now) = YIELD.with(|slot| slot.borrow().clone()) else {
            return self.0.lock().unwrap_or_else(PoisonError::into_inner);
        };
        loop {
            yield_now();
            match self.0.try_lock() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
