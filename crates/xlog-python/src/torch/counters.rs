//! What PyTorch's statistics ask for: current, peak, and totals since the last reset.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde_json::{Value, json};

/// A quantity over time.
#[derive(Default)]
pub(super) struct Counter {
    current: AtomicU64,
    peak: AtomicU64,
    added: AtomicU64,
    removed: AtomicU64,
}

impl Counter {
    pub(super) fn add(&self, amount: u64) {
        let now = self.current.fetch_add(amount, Relaxed) + amount;
        self.peak.fetch_max(now, Relaxed);
        self.added.fetch_add(amount, Relaxed);
    }

    pub(super) fn remove(&self, amount: u64) {
        self.current.fetch_sub(amount, Relaxed);
        self.removed.fetch_add(amount, Relaxed);
    }

    /// Sets what is measured and not counted.
    pub(super) fn set(&self, amount: u64) {
        let before = self.current.swap(amount, Relaxed);
        self.peak.fetch_max(amount, Relaxed);
        self.added.fetch_add(amount.saturating_sub(before), Relaxed);
        self.removed.fetch_add(before.saturating_sub(amount), Relaxed);
    }

    fn reset_peak(&self) {
        self.peak.store(self.current.load(Relaxed), Relaxed);
    }

    fn reset_totals(&self) {
        self.added.store(0, Relaxed);
        self.removed.store(0, Relaxed);
    }

    fn value(&self) -> Value {
        json!({
            "current": self.current.load(Relaxed),
            "peak": self.peak.load(Relaxed),
            "allocated": self.added.load(Relaxed),
            "freed": self.removed.load(Relaxed),
        })
    }
}

/// The counters of one device.
#[derive(Default)]
pub(super) struct Counters {
    /// Blocks.
    pub(super) blocks: Counter,
    /// Their bytes.
    pub(super) allocated: Counter,
    /// The bytes that were asked for.
    pub(super) requested: Counter,
    /// Bytes held of the device.
    pub(super) reserved: Counter,
    /// Requests that were refused.
    pub(super) refusals: AtomicU64,
}

impl Counters {
    fn each(&self) -> [&Counter; 4] {
        [&self.blocks, &self.allocated, &self.requested, &self.reserved]
    }

    pub(super) fn reset_peaks(&self) {
        self.each().into_iter().for_each(Counter::reset_peak);
    }

    pub(super) fn reset_totals(&self) {
        self.each().into_iter().for_each(Counter::reset_totals);
        self.refusals.store(0, Relaxed);
    }

    pub(super) fn value(&self) -> Value {
        json!({
            "allocation": self.blocks.value(),
            "allocated_bytes": self.allocated.value(),
            "requested_bytes": self.requested.value(),
            "reserved_bytes": self.reserved.value(),
            "num_ooms": self.refusals.load(Relaxed),
        })
    }
}
