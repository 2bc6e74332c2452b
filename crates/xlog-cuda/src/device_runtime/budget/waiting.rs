//! The queue of threads that wait for memory: by priority, then by arrival.
//!
//! Only the first waiter retries; the others sleep. Each sleep is short: completed stream work sends no notification, and a seeded
//! scheduler must be able to switch threads.

use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use xlog_driver::sync::scheduling_point;

use super::core::BudgetCore;
use super::primitive::Mutex;

/// The maximum sleep of a waiter.
const STEP: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(crate) struct WaitQueue(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    next: u64,
    /// In the order in which they are served.
    waiters: Vec<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    priority: u8,
    number: u64,
    thread: Thread,
}

impl WaitQueue {
    /// Wakes the first waiter, after memory was released.
    pub(crate) fn wake(&self) {
        if let Some(first) = self.0.lock().waiters.first() {
            first.thread.unpark();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().waiters.len()
    }
}

/// A position in the queue until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Ticket<'a> {
    core: &'a BudgetCore,
    number: u64,
    end: Option<Instant>,
}

impl<'a> Ticket<'a> {
    pub(crate) fn new(core: &'a BudgetCore, priority: u8, patience: Duration) -> Self {
        let mut list = core.queue.0.lock();
        let number = list.next;
        list.next += 1;
        let at = list.waiters.partition_point(|other| other.priority >= priority);
        list.waiters.insert(at, Waiter { priority, number, thread: thread::current() });
        drop(list);
        core.quotas.begin_waiting();
        Self { core, number, end: Instant::now().checked_add(patience) }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.core.queue.0.lock().waiters.first().is_some_and(|first| first.number == self.number)
    }

    /// Sleeps until something may have changed. Returns false after the deadline.
    pub(crate) fn sleep(&self) -> bool {
        scheduling_point();
        // A deadline beyond the range of `Instant` is no deadline.
        let left = self.end.map_or(STEP, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return false;
        }
        thread::park_timeout(left.min(STEP));
        true
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.core.quotas.end_waiting();
        let mut list = self.core.queue.0.lock();
        list.waiters.retain(|waiter| waiter.number != self.number);
        drop(list);
        self.core.queue.wake();
    }
}
