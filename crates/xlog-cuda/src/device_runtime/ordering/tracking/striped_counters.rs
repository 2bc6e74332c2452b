//! Counters without contention and with exact sums.
//!
//! Each thread counts in its own stripe while there are enough stripes. A sum is a consistent snapshot: it locks all stripes.

use xlog_driver::sync::Sharded;

const STRIPES: usize = 16;

/// The counters of a resource. One stripe's counters wrap, since threads free blocks of other threads; only the sum is
/// meaningful.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) recorded: u64,
    pub(crate) inserted: u64,
    pub(crate) elided: u64,
    pub(crate) allocations: u64,
    pub(crate) deallocations: u64,
    /// Blocks whose free has completed.
    pub(crate) freed: u64,
    pub(crate) outstanding: usize,
}

/// The waits of one hook, which are counted together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitCounts {
    pub(crate) recorded: u64,
    pub(crate) inserted: u64,
    pub(crate) elided: u64,
}

impl Counts {
    #[inline]
    pub(crate) fn add_waits(&mut self, waits: WaitCounts) {
        self.recorded += waits.recorded;
        self.inserted += waits.inserted;
        self.elided += waits.elided;
    }

    fn add(&mut self, other: &Self) {
        self.recorded = self.recorded.wrapping_add(other.recorded);
        self.inserted = self.inserted.wrapping_add(other.inserted);
        self.elided = self.elided.wrapping_add(other.elided);
        self.allocations = self.allocations.wrapping_add(other.allocations);
        self.deallocations = self.deallocations.wrapping_add(other.deallocations);
        self.freed = self.freed.wrapping_add(other.freed);
        self.outstanding = self.outstanding.wrapping_add(other.outstanding);
    }
}

#[derive(Debug)]
pub(crate) struct StripedCounters(Sharded<Counts, STRIPES>);

impl Default for StripedCounters {
    fn default() -> Self {
        Self(Sharded::new(Counts::default))
    }
}

impl StripedCounters {
    /// Counts in this thread's stripe.
    #[inline]
    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.0.own().with(change);
    }

    /// Returns the sum of all stripes at one instant.
    pub(crate) fn sum(&self) -> Counts {
        self.0.with_all(|parts| {
            let mut sum = Counts::default();
            parts.iter().for_each(|part| sum.add(part));
            sum
        })
    }
}

#[cfg(test)]
mod tests {
    use xlog_driver::sync::thread_index;

    use super::*;

    fn count(counters: &StripedCounters, times: u64) {
        (0..times).for_each(|_| {
            counters.count(|counts| {
                let waits = WaitCounts { recorded: 1, inserted: 2, elided: 0 };
                counts.add_waits(waits);
            })
        });
    }

    #[test]
    fn threads_that_come_when_others_have_ended_lose_no_count() {
        let counters = StripedCounters::default();
        std::thread::scope(|scope| {
            for _ in 0..4 * STRIPES {
                assert!(scope.spawn(|| count(&counters, 10)).join().is_ok());
            }
        });
        let sum = counters.sum();
        assert_eq!((sum.recorded, sum.inserted), (40 * STRIPES as u64, 80 * STRIPES as u64));
    }

    #[test]
    fn a_thread_that_lives_loses_no_count_while_others_end_beside_it() {
        let counters = StripedCounters::default();
        count(&counters, 100);
        let (mine, mut counted) = (thread_index() as usize, 100);
        let all = std::sync::Barrier::new(2 * STRIPES);
        let beside = || {
            // All are alive now, so they are spread over the stripes.
            all.wait();
            count(&counters, 100);
            thread_index() as usize % STRIPES == mine % STRIPES
        };
        let is_met = (0..1000).any(|_| {
            counted += 2 * STRIPES as u64 * 100;
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..2 * STRIPES).map(|_| scope.spawn(beside)).collect();
                threads.into_iter().any(|thread| thread.join().is_ok_and(|is_beside| is_beside))
            })
        });
        assert!(is_met, "no thread came into this thread's part");
        count(&counters, 100);
        assert_eq!(counters.sum().recorded, counted + 100);
    }

    #[test]
    fn short_lives_side_by_side_lose_no_count() {
        let counters = StripedCounters::default();
        for _ in 0..8 {
            std::thread::scope(|scope| {
                (0..2 * STRIPES).for_each(|_| drop(scope.spawn(|| count(&counters, 100))));
            });
        }
        assert_eq!(counters.sum().recorded, 8 * 2 * STRIPES as u64 * 100);
    }
}
