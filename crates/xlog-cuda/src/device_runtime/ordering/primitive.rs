//! Atomics and locks of the concurrent core. A model checker replaces this module.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use xlog_driver::sync::{
    Bias, BiasedSection, CurrentThread, thread_index, with_current_thread,
};

use once_cell::race::OnceBox;
use xlog_driver::sync::{BiasedGuard, BiasedMutex, is_scheduled, scheduling_point};

/// A value that is allocated when it is first needed: one word until then.
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

/// `with_as!(lock, current, |value| body)` is [`Lock::with`] for the current thread, as an expression. `body` is
/// expanded inline for the owner of the bias and out of line for other threads, so that several fit into one function.
/// It must not return from the enclosing function.
///
/// Under a scheduler `current` is no thread: it always takes the out-of-line path, which calls the scheduler.
macro_rules! with_as {
    ($lock:expr, $current:expr, |$value:ident| $body:expr) => {
        match $lock.enter_as($current) {
            Some(mut inside) => {
                let $value = &mut *inside;
                $body
            }
            None => $lock.with_elsewhere(move |$value| $body),
        }
    };
}
pub(crate) use with_as;

/// `visit!(lock, current, else leave)` is the value of a lock, if the current thread owns its bias. It calls a
/// scheduler first. Other threads evaluate `leave`, which must diverge.
macro_rules! visit {
    ($lock:expr, $current:expr, else $leave:expr) => {
        match $lock.enter_as($current) {
            Some(inside) => inside,
            None => match $lock.enter_scheduled() {
                Some(inside) => inside,
                None => $leave,
            },
        }
    };
}
pub(crate) use visit;

/// A biased lock around a value. Nothing inside may block or call the driver. Before it is entered, a deterministic
/// scheduler may switch to another thread.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(BiasedMutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(BiasedMutex::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        scheduling_point();
        self.0.with(body)
    }

    /// [`Lock::with`] for a rare visitor: the owner keeps its bias.
    pub(crate) fn with_temporary_revocation<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        scheduling_point();
        self.0.with_temporary_revocation(body)
    }

    /// [`Lock::enter`] for the current thread; a part of [`with_as`] and [`visit`].
    #[inline(always)]
    pub(crate) fn enter_as(&self, current: CurrentThread<'_>) -> Option<BiasedGuard<'_, T>> {
        self.0.enter_as(current)
    }

    /// A part of [`visit`]: calls the scheduler, and then enters by the thread's own name.
    #[cold]
    #[inline(never)]
    pub(crate) fn enter_scheduled(&self) -> Option<BiasedGuard<'_, T>> {
        if !is_scheduled() {
            return None;
        }
        scheduling_point();
        self.0.enter()
    }

    /// [`Lock::with`], out of line.
    #[cold]
    #[inline(never)]
    pub(crate) fn with_elsewhere<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.with(body)
    }

    /// Runs `body` with the values of several locks. All callers pass them in one order.
    pub(crate) fn with_all<R>(locks: &[&Self], body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        scheduling_point();
        let locks: Vec<_> = locks.iter().map(|lock| &lock.0).collect();
        BiasedMutex::with_all(&locks, body)
    }

    /// [`Lock::with`], or `None` if another thread stays inside.
    pub(crate) fn try_with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        scheduling_point();
        self.0.try_with(body)
    }

    /// Whether this thread can enter without a process-wide barrier.
    pub(crate) fn is_local(&self) -> bool {
        self.0.is_local()
    }

    /// The value, if this thread owns the bias; otherwise use [`Lock::with`]. Does not call the scheduler.
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
