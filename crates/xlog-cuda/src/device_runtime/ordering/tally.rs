//! Counters that threads do not meet on, and that still add up exactly.
//!
//! Each thread counts in a part of its own, as far as there are enough. Reading visits all parts at once, so that a sum is one that
//! was true at an instant; that costs a microsecond, counting costs next to nothing.

use xlog_driver::sync::{BiasedMutex, Me, thread_name};

const PARTS: usize = 16;

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
pub(crate) struct Edges {
    pub(crate) recorded: u64,
    pub(crate) inserted: u64,
    pub(crate) elided: u64,
}

impl Counts {
    #[inline]
    pub(crate) fn add_edges(&mut self, edges: Edges) {
        self.recorded += edges.recorded;
        self.inserted += edges.inserted;
        self.elided += edges.elided;
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

/// On cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(BiasedMutex<Counts>);

/// The counters of one resource.
#[derive(Debug, Default)]
pub(crate) struct Tally([Part; PARTS]);

impl Tally {
    /// Counts in this thread's part.
    #[inline]
    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.0[thread_name() as usize % PARTS].0.with(change);
    }

    /// [`Tally::count`] for one who knows its name.
    #[inline(always)]
    pub(crate) fn count_as(&self, me: Me<'_>, change: impl FnOnce(&mut Counts)) {
        match self.0[me.name() as usize % PARTS].0.enter_as(me) {
            Some(mut counts) => change(&mut counts),
            None => self.count_elsewhere(change),
        }
    }

    #[cold]
    #[inline(never)]
    fn count_elsewhere(&self, change: impl FnOnce(&mut Counts)) {
        self.count(change);
    }

    /// All that was counted, as it was at one instant.
    pub(crate) fn sum(&self) -> Counts {
        let parts: [&BiasedMutex<Counts>; PARTS] = std::array::from_fn(|at| &self.0[at].0);
        BiasedMutex::with_all(&parts, |counts| {
            let mut sum = Counts::default();
            counts.iter().for_each(|part| sum.add(part));
            sum
        })
    }
}
