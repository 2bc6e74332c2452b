//! Counters of PyTorch's statistics: current, peak, and totals since the last reset.

use serde_json::{Value, json};

/// A quantity over time.
#[derive(Clone, Copy, Default)]
struct Counter {
    added: u64,
    removed: u64,
    peak: u64,
    /// The totals at the last reset.
    added_before: u64,
    removed_before: u64,
}

impl Counter {
    fn current(&self) -> u64 {
        self.added - self.removed
    }

    fn add(&mut self, amount: u64) {
        self.added += amount;
        self.peak = self.peak.max(self.current());
    }

    fn remove(&mut self, amount: u64) {
        self.removed += amount;
    }

    /// Sets a quantity that is measured rather than counted.
    fn set(&mut self, amount: u64) {
        let current = self.current();
        self.add(amount.saturating_sub(current));
        self.remove(current.saturating_sub(amount));
    }

    fn reset_peak(&mut self) {
        self.peak = self.current();
    }

    fn reset_totals(&mut self) {
        (self.added_before, self.removed_before) = (self.added, self.removed);
    }

    fn value(&self) -> Value {
        json!({
            "current": self.current(),
            "peak": self.peak,
            "allocated": self.added - self.added_before,
            "freed": self.removed - self.removed_before,
        })
    }
}

#[derive(Clone, Copy, Default)]
pub(super) struct Counters {
    blocks: Counter,
    /// Bytes of the blocks.
    allocated: Counter,
    /// Requested bytes.
    requested: Counter,
    /// Reserved device bytes.
    reserved: Counter,
    /// Refused requests.
    pub(super) refusals: u64,
}

impl Counters {
    /// Counts a block of `bytes`, of which `requested` were asked for.
    pub(super) fn add(&mut self, bytes: usize, requested: usize) {
        self.blocks.add(1);
        self.allocated.add(bytes as u64);
        self.requested.add(requested as u64);
    }

    /// Counts the free of a block.
    pub(super) fn remove(&mut self, bytes: usize, requested: usize) {
        self.blocks.remove(1);
        self.allocated.remove(bytes as u64);
        self.requested.remove(requested as u64);
    }

    /// Sets the reserved bytes, if they are known.
    pub(super) fn set_reserved(&mut self, bytes: Option<usize>) {
        if let Some(bytes) = bytes {
            self.reserved.set(bytes as u64);
        }
    }

    /// Sets the reserved bytes to those of the blocks.
    pub(super) fn reserve_allocated(&mut self) {
        self.reserved.set(self.allocated.current());
    }

    fn each(&mut self) -> [&mut Counter; 4] {
        [&mut self.blocks, &mut self.allocated, &mut self.requested, &mut self.reserved]
    }

    pub(super) fn reset_peaks(&mut self) {
        self.each().into_iter().for_each(Counter::reset_peak);
    }

    pub(super) fn reset_totals(&mut self) {
        self.each().into_iter().for_each(Counter::reset_totals);
        self.refusals = 0;
    }

    pub(super) fn value(&self) -> Value {
        json!({
            "allocation": self.blocks.value(),
            "allocated_bytes": self.allocated.value(),
            "requested_bytes": self.requested.value(),
            "reserved_bytes": self.reserved.value(),
            "num_ooms": self.refusals,
        })
    }
}
