//! What `ordering::primitive` gives the core, from loom.

pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use crate::barrier::thread_name;
pub(crate) use crate::bias::Bias;

/// Loom's mutex with the runtime's signature.
#[derive(Debug)]
pub(crate) struct Lock<T>(loom::sync::Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    pub(crate) fn with_nested<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.with(body)
    }
}
