//! Vector clocks, which give the happens-before order of operations.
//!
//! Every stream owns a slot and counts its operations in it. A clock holds for each slot how many operations happen before its owner. The
//! host has a clock without a slot; it advances only by synchronisation.

/// The epoch of one operation: the `count`-th of its slot, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Epoch {
    pub(crate) slot: u32,
    pub(crate) count: u64,
}

/// For each slot, how many of its operations happen before.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct VectorClock(Vec<u64>);

impl VectorClock {
    pub(crate) fn get(&self, slot: u32) -> u64 {
        self.0.get(slot as usize).copied().unwrap_or(0)
    }

    pub(crate) fn covers(&self, epoch: Epoch) -> bool {
        self.get(epoch.slot) >= epoch.count
    }

    pub(crate) fn set(&mut self, slot: u32, count: u64) {
        let slot = slot as usize;
        if self.0.len() <= slot {
            self.0.resize(slot + 1, 0);
        }
        self.0[slot] = count;
    }

    /// Counts the next operation of `slot`.
    pub(crate) fn tick(&mut self, slot: u32) -> Epoch {
        let count = self.get(slot) + 1;
        self.set(slot, count);
        Epoch { slot, count }
    }

    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// True if a join with `other` would change nothing.
    pub(crate) fn includes(&self, other: &Self) -> bool {
        other.0.iter().enumerate().all(|(slot, &count)| self.get(slot as u32) >= count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_covers_its_own_operations_and_what_it_joined() {
        let mut a = VectorClock::default();
        let first = a.tick(0);
        let mut b = VectorClock::default();
        let other = b.tick(3);
        assert!(a.covers(first) && !a.covers(other) && !b.covers(first));
        b.join(&a);
        assert!(b.covers(first) && b.covers(other) && b.includes(&a) && !a.includes(&b));
        let later = a.tick(0);
        assert!(!b.covers(later));
    }
}
