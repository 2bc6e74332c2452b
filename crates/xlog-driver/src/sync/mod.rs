//! Locks: a mutex that a deterministic scheduler can see through, and a lock that costs its usual owner no locked instruction.
//!
//! Under the seeded simulated device, host threads are logical: one runs at a time, and any driver call may hand over
//! to another. A thread that holds a lock across a driver call could then be waited for by the only thread that runs.
//! [`Mutex`] tells the scheduler instead of blocking, and lets it hand over before a lock is taken. Without a scheduler
//! it is the standard mutex plus one load of a word that never changes. Poisoning is ignored: the data behind it is kept
//! consistent by its owner.

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

/// How a thread lets its scheduler choose who goes on.
pub type Scheduler = Rc<dyn Fn(Turn)>;

/// The messages of a thread to its scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Another thread may go on.
    May,
    /// This thread cannot go on before another one has.
    Must,
}

/// Threads that run under a scheduler, in the whole process.
static SCHEDULED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SCHEDULER: RefCell<Option<Scheduler>> = const { RefCell::new(None) };
}

/// Runs `body` with `scheduler` called before this thread takes a [`Mutex`] and whenever it would block on one.
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

/// True when some thread of the process runs under a scheduler.
#[inline]
pub fn is_scheduled() -> bool {
    SCHEDULED.load(Ordering::Relaxed) != 0
}

/// Lets the scheduler of this thread, if it has one, hand over to another thread.
#[inline]
pub fn scheduling_point() {
    if SCHEDULED.load(Ordering::Relaxed) != 0
        && let Some(scheduler) = scheduler()
    {
        scheduler(Turn::May);
    }
}

/// Mutual exclusion, visible to a deterministic scheduler.
#[derive(Default)]
pub struct Mutex<T: ?Sized>(xlog_base::Mutex<T>);

impl<T> Mutex<T> {
    /// A mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(xlog_base::Mutex::new(value))
    }

    /// The value, without the mutex.
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

    /// Locks if nobody holds it.
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
