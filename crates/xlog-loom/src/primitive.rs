//! `ordering::primitive` and `budget::primitive`, on loom.

pub(crate) use loom::sync::Arc;
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use crate::bias::{Bias, BiasedSection};
pub(crate) use crate::sharded::Sharded;
pub(crate) use crate::threads::thread_index;

/// Initialised at once: racing initialisation is the business of a tested crate.
#[derive(Debug, Default)]
pub(crate) struct Lazy<T>(Box<T>);

impl<T> Lazy<T> {
    pub(crate) fn get(&self) -> Option<&T> {
        Some(&self.0)
    }

    pub(crate) fn get_or_make(&self) -> &T {
        &self.0
    }
}

/// A plain mutex: the quotas do not depend on the bias, which is not modelled here.
#[derive(Debug)]
pub(crate) struct BiasedMutex<T>(Mutex<T>);

impl<T> BiasedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut self.0.lock())
    }

    pub(crate) fn with_all<R>(all: &[&Self], body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        let mut guards: Vec<_> = all.iter().map(|mutex| mutex.0.lock()).collect();
        let mut values: Vec<&mut T> = guards.iter_mut().map(|guard| &mut **guard).collect();
        body(&mut values)
    }
}

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

/// Loom's mutex with an access by closure.
#[derive(Debug)]
pub(crate) struct Lock<T>(loom::sync::Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Behaves as if the bias always belonged to this thread.
    pub(crate) fn is_local(&self) -> bool {
        true
    }

    pub(crate) fn with_nested<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.with(body)
    }
}
