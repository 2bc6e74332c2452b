//! The locks and atomics of the quotas, in one module so that a model checker can replace them.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use xlog_driver::sync::BiasedMutex;

/// A lock that is never held over a call. A seeded scheduler must not see it: which threads contend depends on the whole process.
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
