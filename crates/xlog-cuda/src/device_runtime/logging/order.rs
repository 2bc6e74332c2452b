//! The order of records: one counter for the process, without a locked instruction while only one thread logs.
//!
//! The first thread owns the counter and increments it by plain stores. The second thread revokes that for good; from then on all
//! threads increment atomically.
//!
//! Invariant: no thread increments atomically before the owner is known to be outside, so no number is issued twice.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_base::Mutex;
use xlog_driver::sync::Bias;

/// One for the process, so that the logs of several resources in one sink merge.
static ORDER: LazyLock<OrderCounter> = LazyLock::new(OrderCounter::new);

/// Issues the numbers of records. On cache lines of its own: every logging thread writes it.
#[repr(align(128))]
pub(super) struct OrderCounter {
    next: AtomicU64,
    bias: Bias,
    /// All threads increment atomically; the counter has no owner any more.
    is_shared: AtomicBool,
    /// Whether the counter ever had an owner. Locked by a thread that claims or revokes ownership.
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

    /// Returns the next number. Relaxed suffices: threads hand a block over by a synchronisation, and the modification order of one
    /// atomic agrees with it.
    #[inline(always)]
    pub(super) fn next(&self) -> u64 {
        match self.bias.enter() {
            Some(_inside) => self.advance(),
            None => self.next_shared(),
        }
    }

    /// Increments by plain stores. Only the owner calls this, inside its section.
    #[inline(always)]
    fn advance(&self) -> u64 {
        let number = self.next.load(Ordering::Relaxed);
        self.next.store(number + 1, Ordering::Relaxed);
        number
    }

    #[inline]
    fn next_shared(&self) -> u64 {
        // Acquire: the former owner's stores precede this increment.
        if !self.is_shared.load(Ordering::Acquire) {
            return self.next_of_new_thread();
        }
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    #[cold]
    #[inline(never)]
    fn next_of_new_thread(&self) -> u64 {
        let mut was_owned = self.was_owned.lock();
        if !*was_owned {
            *was_owned = true;
            if self.bias.claim() {
                // Still under the lock, so no thread can have revoked it.
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
