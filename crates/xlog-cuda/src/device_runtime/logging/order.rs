//! Places in the history: one counter for the process, without a locked instruction as long as one thread logs.
//!
//! The first thread that takes a number owns the counter and counts by plain stores; the second one takes that right away, for
//! good, and from then on all threads count by an atomic addition. Nobody adds atomically before the owner is known to be out, so
//! no number is given twice.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use xlog_driver::sync::Bias;

/// One for the process, so that the logs of several resources in one sink merge.
static ORDER: LazyLock<OrderCounter> = LazyLock::new(OrderCounter::new);

/// Gives out places in the history. On cache lines of its own: every thread that logs writes it.
#[repr(align(128))]
pub(super) struct OrderCounter {
    next: AtomicU64,
    bias: Bias,
    /// All threads add atomically; nobody owns the counter again.
    is_shared: AtomicBool,
    /// Whether the counter had an owner. Held by whoever claims or revokes.
    was_owned: Mutex<bool>,
}

impl OrderCounter {
    fn new() -> Self {
        Self {
            next: AtomicU64::new(1),
            bias: Bias::default(),
            is_shared: AtomicBool::new(false),
            was_owned: Mutex::new(false),
        }
    }

    /// The counter of the process.
    pub(super) fn of_process() -> &'static Self {
        &ORDER
    }

    /// The next number. Relaxed is enough: a block moves between threads only by what orders them, and one atomic's changes agree
    /// with that order.
    #[inline(always)]
    pub(super) fn next(&self) -> u64 {
        match self.bias.enter() {
            Some(_inside) => self.advance(),
            None => self.next_shared(),
        }
    }

    /// For the one thread that may: no other changes the counter meanwhile.
    #[inline(always)]
    fn advance(&self) -> u64 {
        let number = self.next.load(Ordering::Relaxed);
        self.next.store(number + 1, Ordering::Relaxed);
        number
    }

    #[inline]
    fn next_shared(&self) -> u64 {
        // Acquire: what the former owner stored comes before what is added here.
        if !self.is_shared.load(Ordering::Acquire) {
            return self.next_of_new_thread();
        }
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    #[cold]
    #[inline(never)]
    fn next_of_new_thread(&self) -> u64 {
        let mut was_owned = self.was_owned.lock().unwrap_or_else(PoisonError::into_inner);
        if !*was_owned {
            *was_owned = true;
            if self.bias.claim() {
                // Still under the lock, so nobody can have taken it away.
                return self.advance();
            }
        }
        self.bias.revoke();
        self.is_shared.store(true, Ordering::Release);
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn threads_that_come_while_the_first_counts_get_numbers_of_their_own() {
        for round in 0..50 {
            let order = OrderCounter::new();
            let take = |count: usize| (0..count).map(|_| order.next()).collect::<Vec<_>>();
            let taken: Vec<Vec<u64>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|thread| scope.spawn(move || take(200 * (thread + 1) + round)))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
            });
            let all: HashSet<u64> = taken.iter().flatten().copied().collect();
            assert_eq!(all.len(), 2000 + 4 * round, "round {round}");
            assert_eq!(all.iter().max(), Some(&(2000 + 4 * round as u64)), "round {round}");
            assert!(taken.iter().all(|of_one| of_one.is_sorted()), "round {round}");
        }
    }
}
