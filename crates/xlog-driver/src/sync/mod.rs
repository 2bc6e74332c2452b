//! Locks: a mutex that a deterministic scheduler controls, and a biased mutex.
//!
//! Under the seeded simulated device, host threads are logical: one runs at a time, and any driver call may switch to another. If a thread
//! holds a lock across a driver call, the only running thread could block on that lock. [`Mutex`] calls the scheduler instead of blocking,
//! and offers it a switch before each lock. Without a scheduler it costs one load more than the standard mutex. It does not poison: the
//! owner of the data keeps it consistent.

mod barrier;
mod bias;
mod biased_mutex;
mod sharded;
mod thread_record;
mod threads;

pub use bias::{Bias, BiasedSection};
pub use biased_mutex::{BiasedGuard, BiasedMutex};
pub use sharded::Sharded;
pub use threads::{thread_index, thread_name};

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
pub use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A callback by which a thread lets its scheduler choose the next thread to run.
pub type Scheduler = Rc<dyn Fn(Turn)>;

/// A thread's request to its scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// The scheduler may run another thread.
    May,
    /// The scheduler must run another thread before this one can continue.
    Must,
}

/// The number of threads in the process that run under a scheduler.
static SCHEDULED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SCHEDULER: RefCell<Option<Scheduler>> = const { RefCell::new(None) };
}

/// Runs `body` with `scheduler` called before this thread locks a [`Mutex`] and whenever it would block on one.
pub fn with_scheduler<T>(scheduler: Scheduler, body: impl FnOnce() -> T) -> T {
    struct Restore(Option<Scheduler>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let previous = self.0.take();
            SCHEDULER.with(|slot| *slot.borrow_mut() = previous);
            SCHEDULED.fetch_sub(1, Ordering::Relaxed);
        }
    }
    SCHEDULED.fetch_add(1, Ordering::Relaxed);
    let _restore = Restore(SCHEDULER.with(|slot| slot.borrow_mut().replace(scheduler)));
    body()
}

#[cold]
fn scheduler() -> Option<Scheduler> {
    SCHEDULER.with(|slot| slot.borrow().clone())
}

/// True if any thread of the process runs under a scheduler.
#[inline]
pub fn is_scheduled() -> bool {
    SCHEDULED.load(Ordering::Relaxed) != 0
}

/// Offers a switch to this thread's scheduler, if it has one.
#[inline]
pub fn scheduling_point() {
    if SCHEDULED.load(Ordering::Relaxed) != 0
        && let Some(scheduler) = scheduler()
    {
        scheduler(Turn::May);
    }
}

/// Mutual exclusion that a deterministic scheduler controls.
#[derive(Default)]
pub struct Mutex<T: ?Sized>(xlog_base::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes a mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(xlog_base::Mutex::new(value))
    }

    /// Takes the value out of the mutex.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks, waiting for the holder if there is one.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        scheduling_point();
        match self.0.try_lock() {
            Some(guard) => guard,
            None => self.lock_contended(),
        }
    }

    /// Locks if no thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, T> {
        let Some(scheduler) = scheduler() else {
            return self.0.lock();
        };
        loop {
            scheduler(Turn::Must);
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
