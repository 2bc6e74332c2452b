//! The locks of the credit scheme, in one place so that a model checker can replace them.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use xlog_driver::sync::BiasedMutex;

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
