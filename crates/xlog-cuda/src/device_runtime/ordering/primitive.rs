//! The atomics and locks of the concurrent core.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use xlog_driver::sync::{
    Bias, BiasedSection, CurrentThread, thread_index, with_current_thread,
};

use once_cell::race::OnceBox;
use xlog_driver::sync::{BiasedGuard, BiasedMutex, is_scheduled, scheduling_point};

/// A value that is made when it is asked for, elsewhere: one word until then.
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

/// `with_as!(lock, current, |value| body)` is [`Lock::with`] for one who knows its name, as an expression: `body` stands here for the
/// common case and elsewhere for the others, so that several fit into one function. It must not return from the function around it.
///
/// Nobody, as whom a thread comes under a scheduler, always goes elsewhere, and there the scheduler is asked.
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

/// `visit!(lock, current, else leave)` is the value of a lock for one who knows its name and owns it, where nothing else follows: a scheduler
/// is asked before. Anybody else does `leave`, which does not come back.
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

/// A lock around a value. Nothing that may block or call the driver is done inside; before it, a deterministic scheduler may
/// hand over to another thread.
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

    /// [`Lock::with`] for one who comes seldom to what is another thread's, and leaves it to that thread.
    pub(crate) fn with_temporary_revocation<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        scheduling_point();
        self.0.with_temporary_revocation(body)
    }

    /// [`Lock::enter`] for one who knows its name, as a part of [`with_as`] and [`visit`].
    #[inline(always)]
    pub(crate) fn enter_as(&self, current: CurrentThread<'_>) -> Option<BiasedGuard<'_, T>> {
        self.0.enter_as(current)
    }

    /// A part of [`visit`]: under a scheduler the owner comes as nobody, and it is asked here, before the owner enters.
    #[cold]
    #[inline(never)]
    pub(crate) fn enter_scheduled(&self) -> Option<BiasedGuard<'_, T>> {
        if !is_scheduled() {
            return None;
        }
        scheduling_point();
        self.0.enter()
    }

    /// [`Lock::with`] out of the way of the common case.
    #[cold]
    #[inline(never)]
    pub(crate) fn with_elsewhere<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.with(body)
    }

    /// Runs `body` with the values of several, which all callers give in the same order.
    pub(crate) fn with_all<R>(locks: &[&Self], body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        scheduling_point();
        let locks: Vec<_> = locks.iter().map(|lock| &lock.0).collect();
        BiasedMutex::with_all(&locks, body)
    }

    /// The same, unless somebody else is inside for long.
    pub(crate) fn try_with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        scheduling_point();
        self.0.try_with(body)
    }

    /// True when this thread can look inside without disturbing others.
    pub(crate) fn is_local(&self) -> bool {
        self.0.is_local()
    }

    /// The value, if this thread is the one that mostly uses it; otherwise take [`Lock::with`]. Nobody is let go ahead.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Option<BiasedGuard<'_, T>> {
        self.0.enter()
    }

    /// The same from inside another lock: nobody is let go ahead there.
    #[inline(always)]
    pub(crate) fn with_nested<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        self.0.with(body)
    }
}
