//! What `ordering::primitive` gives the core, from loom.

pub(crate) use loom::sync::Arc;
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

/// Loom's mutex with the runtime's signature.
#[derive(Debug)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
