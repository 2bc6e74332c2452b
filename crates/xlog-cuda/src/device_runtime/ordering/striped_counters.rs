//! Counters that threads do not meet on, and that still add up exactly.
//!
//! Each thread counts in a part of its own, as far as there are enough. Reading visits all parts at once, so that a sum is one that
//! was true at an instant; that costs a microsecond, counting costs next to nothing. Events and waits, which only grow, are also counted
//! beside that, by one thread of a part: the first that came, and when it has ended the next one.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use xlog_driver::sync::{BiasedMutex, CurrentThread, exited_count, has_exited, thread_name};

const STRIPES: usize = 16;

/// What a resource counts. Sums over all parts are true, those of one part need not be: a block may be allocated by one thread
/// and freed by another, so parts wrap around.
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

/// What the waits of one hook came to, to be counted by one visit.
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

/// Events and waits that one thread counts by plain loads and stores.
#[derive(Debug, Default)]
struct SingleWriter {
    /// The name of the thread; 0 before the first one. Nobody else stores the counts. One that has ended never comes back, and whoever
    /// takes its place has seen its last store, see [`has_exited`], and goes on from there.
    of: AtomicU32,
    /// How many threads had ended when another one last asked whether this one has.
    asked: AtomicU32,
    recorded: AtomicU64,
    inserted: AtomicU64,
}

impl SingleWriter {
    /// Makes a thread the one that counts here, if there is none or it has ended.
    fn claim(&self, name: u32) {
        let of = self.of.load(Ordering::Relaxed);
        if of != 0 && !self.has_ended(of) {
            return;
        }
        // Of several only one takes the place of the same thread: a name never comes again.
        if self.of.compare_exchange(of, name, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            // It was the thread before this one that was asked for.
            self.asked.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the thread that counts here has ended, asked again only when some thread has.
    fn has_ended(&self, of: u32) -> bool {
        let count = exited_count();
        if self.asked.load(Ordering::Relaxed) == count {
            return false;
        }
        self.asked.store(count, Ordering::Relaxed);
        has_exited(of)
    }
}

/// On cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    counts: BiasedMutex<Counts>,
    own: SingleWriter,
}

/// The counters of one resource.
#[derive(Debug, Default)]
pub(crate) struct StripedCounters([Stripe; STRIPES]);

fn raise(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl StripedCounters {
    /// Counts in this thread's part.
    #[inline]
    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        match self.0[thread_name() as usize % STRIPES].counts.enter() {
            Some(mut counts) => change(&mut counts),
            None => self.count_slow(change),
        }
    }

    /// [`StripedCounters::count`] for one who knows its name.
    #[inline(always)]
    pub(crate) fn count_as(&self, current: CurrentThread<'_>, change: impl FnOnce(&mut Counts)) {
        match self.0[current.name() as usize % STRIPES].counts.enter_as(current) {
            Some(mut counts) => change(&mut counts),
            None => self.count_slow(change),
        }
    }

    /// Counts events recorded and waits queued, for one who knows its name. They only ever grow, so that a sum is right without
    /// holding anybody up.
    #[inline(always)]
    pub(crate) fn count_waits(&self, current: CurrentThread<'_>, recorded: u64, inserted: u64) {
        let own = &self.0[current.name() as usize % STRIPES].own;
        if own.of.load(Ordering::Relaxed) != current.name() {
            return self.count_waits_slow(recorded, inserted);
        }
        if recorded != 0 {
            raise(&own.recorded, recorded);
        }
        if inserted != 0 {
            raise(&own.inserted, inserted);
        }
    }

    #[cold]
    #[inline(never)]
    fn count_waits_slow(&self, recorded: u64, inserted: u64) {
        let name = thread_name();
        if name != 0 {
            self.0[name as usize % STRIPES].own.claim(name);
        }
        self.count(|counts| counts.add_waits(WaitCounts { recorded, inserted, elided: 0 }));
    }

    #[cold]
    #[inline(never)]
    fn count_slow(&self, change: impl FnOnce(&mut Counts)) {
        self.0[thread_name() as usize % STRIPES].counts.with(change);
    }

    /// All that was counted, as it was at one instant; events and waits perhaps a little later.
    pub(crate) fn sum(&self) -> Counts {
        let parts: [&BiasedMutex<Counts>; STRIPES] = std::array::from_fn(|at| &self.0[at].counts);
        let mut sum = BiasedMutex::with_all(&parts, |counts| {
            let mut sum = Counts::default();
            counts.iter().for_each(|part| sum.add(part));
            sum
        });
        for Stripe { own, .. } in &self.0 {
            sum.recorded = sum.recorded.wrapping_add(own.recorded.load(Ordering::Relaxed));
            sum.inserted = sum.inserted.wrapping_add(own.inserted.load(Ordering::Relaxed));
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_driver::sync::with_current_thread;

    fn count(counters: &StripedCounters, times: u64) {
        (0..times).for_each(|_| with_current_thread(|current| counters.count_waits(current, 1, 2)));
    }

    fn owner_of_my_stripe(counters: &StripedCounters) -> u32 {
        counters.0[thread_name() as usize % STRIPES].own.of.load(Ordering::Relaxed)
    }

    #[test]
    fn threads_that_come_when_others_have_ended_take_their_place_and_lose_no_count() {
        let counters = StripedCounters::default();
        std::thread::scope(|scope| {
            for _ in 0..4 * STRIPES {
                let thread = scope.spawn(|| {
                    count(&counters, 10);
                    assert_eq!(
                        owner_of_my_stripe(&counters),
                        thread_name(),
                        "the former one has ended"
                    );
                });
                // Not before its end: the end of a scope comes a little earlier.
                assert!(thread.join().is_ok());
            }
        });
        let sum = counters.sum();
        assert_eq!((sum.recorded, sum.inserted), (40 * STRIPES as u64, 80 * STRIPES as u64));
    }

    #[test]
    fn a_thread_that_lives_keeps_its_part_while_others_end_beside_it() {
        let counters = StripedCounters::default();
        count(&counters, 1);
        let (mine, mut counted) = (thread_name(), 1);
        std::thread::scope(|scope| {
            for _ in 0..4096 {
                let thread = scope.spawn(|| {
                    count(&counters, 3);
                    thread_name() as usize % STRIPES == mine as usize % STRIPES
                });
                counted += 3;
                if thread.join().is_ok_and(|is_beside| is_beside) {
                    break;
                }
            }
        });
        assert_eq!(owner_of_my_stripe(&counters), mine);
        assert_eq!(counters.sum().recorded, counted);
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
