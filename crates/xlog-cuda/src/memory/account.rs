//! The limit and the counters of a manager, shared by its clones, reservations and buffers.
//!
//! Invariant: a charge never raises `charged` above the limit. It is raised before the allocation and lowered after the free or a
//! failure. The other counters are for display: each is exact, but two may be read at different instants. They order nothing, hence
//! `Relaxed`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::device_runtime::resource::{ResourceError, ResourceResult};

const UNLIMITED: usize = usize::MAX;

#[derive(Debug)]
pub(super) struct Account {
    limit: AtomicUsize,
    /// Bytes of buffers, of reservations, and of allocations being made.
    charged: AtomicUsize,
    pub(super) allocated: AtomicUsize,
    pub(super) reserved: AtomicUsize,
    pub(super) peak: AtomicUsize,
    pub(super) live: AtomicUsize,
    pub(super) total: AtomicU64,
    pub(super) failed_frees: AtomicU64,
}

impl Account {
    pub(super) const fn new() -> Self {
        Self {
            limit: AtomicUsize::new(UNLIMITED),
            charged: AtomicUsize::new(0),
            allocated: AtomicUsize::new(0),
            reserved: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            total: AtomicU64::new(0),
            failed_frees: AtomicU64::new(0),
        }
    }

    pub(super) fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Relaxed);
    }

    pub(super) fn limit(&self) -> Option<usize> {
        Some(self.limit.load(Relaxed)).filter(|&limit| limit != UNLIMITED)
    }

    pub(super) fn remaining(&self) -> usize {
        self.limit.load(Relaxed).saturating_sub(self.charged.load(Relaxed))
    }

    /// Charges bytes to the limit, or refuses without a change.
    pub(super) fn charge(&self, bytes: usize) -> ResourceResult<()> {
        let limit = self.limit.load(Relaxed);
        let within = |charged: usize| charged.checked_add(bytes).filter(|&sum| sum <= limit);
        match self.charged.fetch_update(Relaxed, Relaxed, within) {
            Ok(_) => Ok(()),
            Err(charged) => Err(ResourceError::OutOfBudget {
                requested: bytes,
                remaining: limit.saturating_sub(charged),
            }),
        }
    }

    /// Releases charged bytes.
    pub(super) fn discharge(&self, bytes: usize) {
        self.charged.fetch_sub(bytes, Relaxed);
    }

    /// Counts charged bytes as reserved.
    pub(super) fn set_aside(&self, bytes: usize) {
        self.reserved.fetch_add(bytes, Relaxed);
    }

    /// Counts bytes as no longer reserved; they stay charged.
    pub(super) fn unset_aside(&self, bytes: usize) {
        self.reserved.fetch_sub(bytes, Relaxed);
    }

    /// Counts a new buffer, whose bytes are charged already.
    pub(super) fn opened(&self, bytes: usize) {
        let allocated = self.allocated.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(allocated, Relaxed);
        self.live.fetch_add(1, Relaxed);
        self.total.fetch_add(1, Relaxed);
    }

    /// Counts the end of a buffer, and releases its charge.
    pub(super) fn closed(&self, bytes: usize) {
        self.live.fetch_sub(1, Relaxed);
        self.allocated.fetch_sub(bytes, Relaxed);
        self.discharge(bytes);
    }

    pub(super) fn free_failed(&self) {
        self.failed_frees.fetch_add(1, Relaxed);
    }
}
