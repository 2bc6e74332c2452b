//! Atomics and locks of the concurrent core. A model checker replaces this module.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use xlog_driver::sync::{Bias, BiasedSection, thread_index};

use once_cell::race::OnceBox;
use xlog_driver::sync::{BiasedGuard, BiasedMutex, scheduling_point};

/// A value that is allocated at its first use: one word until then.
#[derive(Debug, Default)]
pub(crate) struct Lazy<T>(OnceBox<T>);

impl<T: Default> Lazy<T> {
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.get()
    }

    #[inline(always)]
    pub(crate) fn get_or_make(&self) -> &T {
        #[cold]
        #[inline(never)]
        fn made<T: Default>() -> Box<T> {
            Box::default()
        }
        self.0.get_or_init(made)
    }
}

/// A biased lock around a value. Nothing inside may block or call the driver. A deterministic scheduler may switch to
/// another thread before each entry.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(BiasedMutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(BiasedMutex::new(value))
    }

    /// Runs `body` with the value.
    #[inline(always)]
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        scheduling_point();
        self.0.with(body)
    }

    /// Runs `body` with the values of several locks, which all callers pass in one order. Their owners keep their bias.
    pub(crate) fn with_all<R>(locks: &[&Self], body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        scheduling_point();
        let locks: Vec<_> = locks.iter().map(|lock| &lock.0).collect();
        BiasedMutex::with_all(&locks, body)
    }

    /// Runs `body` with the value, or returns `None` if another thread is inside. The owner keeps its bias.
    pub(crate) fn try_with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        scheduling_point();
        if let Some(mut value) = self.0.enter() {
            return Some(body(&mut value));
        }
        if self.0.is_busy() {
            return None;
        }
        BiasedMutex::with_all(&[&self.0], |values| values.first_mut().map(|value| body(value)))
    }

    /// Whether another thread is inside; only a hint.
    pub(crate) fn is_busy(&self) -> bool {
        self.0.is_busy()
    }

    /// Whether this thread can enter without a process-wide barrier.
    pub(crate) fn is_local(&self) -> bool {
        self.0.is_local()
    }

    /// Enters if this thread owns the bias; otherwise use [`Lock::with`]. Does not call the scheduler.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Option<BiasedGuard<'_, T>> {
        self.0.enter()
    }

    /// [`Lock::with`] inside another lock, where the scheduler must not switch.
    #[inline(always)]
    pub(crate) fn with_nested<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.0.with(body)
    }
}
