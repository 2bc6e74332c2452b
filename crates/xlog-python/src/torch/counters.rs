//! Counters of PyTorch's statistics: current, peak, and totals since the last reset.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde_json::{Value, json};
use xlog_base::Mutex;

/// A quantity over time. All values but the peak are exact.
#[derive(Default)]
pub(super) struct Counter {
    added: AtomicU64,
    removed: AtomicU64,
    peak: AtomicU64,
    /// The totals at the last reset.
    added_before: AtomicU64,
    removed_before: AtomicU64,
    setting: Mutex<()>,
}

impl Counter {
    fn current(&self) -> u64 {
        let removed = self.removed.load(Relaxed);
        self.added.load(Relaxed).saturating_sub(removed)
    }

    pub(super) fn add(&self, amount: u64) {
        let added = self.added.fetch_add(amount, Relaxed) + amount;
        let now = added.saturating_sub(self.removed.load(Relaxed));
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    pub(super) fn remove(&self, amount: u64) {
        self.removed.fetch_add(amount, Relaxed);
    }

    /// Sets a quantity that is measured rather than counted.
    pub(super) fn set(&self, amount: u64) {
        if self.current() == amount {
            return;
        }
        let _setting = self.setting.lock();
        match amount.checked_sub(self.current()) {
            Some(0) => {}
            Some(more) => self.add(more),
            None => self.remove(self.current().saturating_sub(amount)),
        }
    }

    fn reset_peak(&self) {
        self.peak.store(self.current(), Relaxed);
    }

    fn reset_totals(&self) {
        self.added_before.store(self.added.load(Relaxed), Relaxed);
        self.removed_before.store(self.removed.load(Relaxed), Relaxed);
    }

    fn value(&self) -> Value {
        let since = |all: &AtomicU64, before: &AtomicU64| {
            all.load(Relaxed).saturating_sub(before.load(Relaxed))
        };
        json!({
            "current": self.current(),
            "peak": self.peak.load(Relaxed),
            "allocated": since(&self.added, &self.added_before),
            "freed": since(&self.removed, &self.removed_before),
        })
    }
}

#[derive(Default)]
pub(super) struct Counters {
    /// Blocks.
    pub(super) blocks: Counter,
    /// Bytes of the blocks.
    pub(super) allocated: Counter,
    /// Requested bytes.
    pub(super) requested: Counter,
    /// Reserved device bytes.
    pub(super) reserved: Counter,
    /// Refused requests.
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
