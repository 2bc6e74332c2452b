//! One account of one shard: sums that are exact over all shards, and a peak that is exact while one shard alone changes the account.
//!
//! The sums of one shard may be negative, since one thread may free what another allocated. Differences wrap.
//!
//! For the peak a shard adds its unpublished difference to what all shards have published. It publishes when that difference reaches its
//! step. Between two bounds of the difference it does neither: there a change cannot raise the peak that it knows, and is below the
//! step. A shard that is not alone has half a step, so the peak is off by the whole steps of the other shards at most.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use super::snapshot::Usage;

/// The minimum step in bytes, for small accounts.
pub const PEAK_STEP_BYTES: usize = 64 << 10;
/// The minimum step in blocks, for small accounts.
pub const PEAK_STEP_BLOCKS: usize = 64;
/// Bytes that the only shard of an account may go up and down below the peak without publishing. Shards that join later see them at
/// its next publication.
pub const PEAK_STEP_ALONE_BYTES: usize = 8 << 20;
/// The steps of all shards together are one part in this number of an account's peak.
pub const PEAK_STEP_PART: usize = 8;

/// Bytes and blocks: an amount, or a bound for one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct BytesAndBlocks {
    pub(super) bytes: i64,
    pub(super) blocks: i64,
}

impl BytesAndBlocks {
    #[inline(always)]
    fn add(&mut self, bytes: i64, blocks: i64) {
        self.bytes = self.bytes.wrapping_add(bytes);
        self.blocks = self.blocks.wrapping_add(blocks);
    }
}

/// What all shards have published of one account, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct PublishedTotal {
    bytes: AtomicI64,
    blocks: AtomicI64,
    /// The number of shards that have changed the account.
    shards: AtomicU32,
}

/// One shard's part of an account.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    /// Allocated minus freed, not yet published.
    pending: BytesAndBlocks,
    /// What this shard has published.
    published: BytesAndBlocks,
    freed: BytesAndBlocks,
    failures: u64,
    peak: BytesAndBlocks,
    /// Above this difference the shard may raise the peak, or must publish.
    ceiling: BytesAndBlocks,
    /// Below this difference it must publish.
    floor: BytesAndBlocks,
    /// Whether this shard is counted in [`PublishedTotal::shards`].
    has_joined: bool,
}

impl Meter {
    /// Counts a block.
    #[inline(always)]
    pub(super) fn allocate(&mut self, bytes: i64, all: &PublishedTotal) {
        self.pending.add(bytes, 1);
        if self.pending.bytes > self.ceiling.bytes || self.pending.blocks > self.ceiling.blocks {
            self.update(all);
        }
    }

    /// Counts a free.
    #[inline(always)]
    pub(super) fn free(&mut self, bytes: i64, all: &PublishedTotal) {
        self.pending.add(bytes.wrapping_neg(), -1);
        self.freed.add(bytes, 1);
        if self.pending.bytes < self.floor.bytes || self.pending.blocks < self.floor.blocks {
            self.update(all);
        }
    }

    pub(super) fn fail(&mut self) {
        self.failures += 1;
    }

    /// Raises the peak, publishes if the difference has reached its step, and sets the bounds anew.
    #[inline(never)]
    fn update(&mut self, all: &PublishedTotal) {
        if !self.has_joined {
            all.shards.fetch_add(1, Ordering::Relaxed);
            self.has_joined = true;
        }
        let shards = all.shards.load(Ordering::Relaxed).max(1);
        let live = all.plus(self.pending);
        let is_peak = live.bytes > self.peak.bytes || live.blocks > self.peak.blocks;
        self.peak.bytes = self.peak.bytes.max(live.bytes);
        self.peak.blocks = self.peak.blocks.max(live.blocks);
        // Powers of two need no division.
        let part = PEAK_STEP_PART.ilog2() + shards.next_power_of_two().ilog2();
        let (halved, alone_bytes) = if shards > 1 { (1, 0) } else { (0, PEAK_STEP_ALONE_BYTES) };
        let step = BytesAndBlocks {
            bytes: (self.peak.bytes >> part).max(PEAK_STEP_BYTES as i64) >> halved,
            blocks: (self.peak.blocks >> part).max(PEAK_STEP_BLOCKS as i64) >> halved,
        };
        let slack = BytesAndBlocks { bytes: step.bytes.max(alone_bytes as i64), ..step };
        let bound = if is_peak { step } else { slack };
        let BytesAndBlocks { bytes, blocks } = self.pending;
        if bytes.wrapping_abs() > bound.bytes || blocks.wrapping_abs() > bound.blocks {
            self.publish(all);
        }
        let published = all.plus(BytesAndBlocks::default());
        self.ceiling = BytesAndBlocks {
            bytes: self.peak.bytes.wrapping_sub(published.bytes).min(slack.bytes),
            blocks: self.peak.blocks.wrapping_sub(published.blocks).min(slack.blocks),
        };
        self.floor = BytesAndBlocks { bytes: -slack.bytes, blocks: -slack.blocks };
    }

    pub(super) fn publish(&mut self, all: &PublishedTotal) {
        let BytesAndBlocks { bytes, blocks } = std::mem::take(&mut self.pending);
        self.published.add(bytes, blocks);
        all.bytes.fetch_add(bytes, Ordering::Relaxed);
        all.blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Returns the peak since the last call, and resets it to what is live.
    pub(super) fn reset_peak(&mut self, live: BytesAndBlocks) -> BytesAndBlocks {
        (self.ceiling, self.floor) = Default::default();
        std::mem::replace(&mut self.peak, live)
    }

    /// Allocated minus freed, of this shard.
    pub(super) fn live(&self) -> BytesAndBlocks {
        let mut live = self.published;
        live.add(self.pending.bytes, self.pending.blocks);
        live
    }

    /// Adds the totals of an ended account, which has nothing live over all shards.
    pub(super) fn absorb(&mut self, ended: &mut Self) {
        let live = ended.live();
        self.published.add(live.bytes, live.blocks);
        self.freed.add(ended.freed.bytes, ended.freed.blocks);
        self.failures += ended.failures;
        self.peak.bytes = self.peak.bytes.max(ended.peak.bytes);
        self.peak.blocks = self.peak.blocks.max(ended.peak.blocks);
        *ended = Self::default();
    }

    /// Adds this shard's sums to `sum`. The peak is the maximum over shards.
    pub(super) fn add_to(&self, sum: &mut Usage) {
        let (live, freed) = (self.live(), self.freed);
        sum.current_bytes = sum.current_bytes.wrapping_add(live.bytes as usize);
        sum.current_blocks = sum.current_blocks.wrapping_add(live.blocks as usize);
        sum.peak_bytes = sum.peak_bytes.max(self.peak.bytes.max(0) as usize);
        sum.peak_blocks = sum.peak_blocks.max(self.peak.blocks.max(0) as usize);
        sum.total_bytes = sum.total_bytes.wrapping_add(live.bytes.wrapping_add(freed.bytes) as u64);
        sum.freed_bytes = sum.freed_bytes.wrapping_add(freed.bytes as u64);
        sum.allocations =
            sum.allocations.wrapping_add(live.blocks.wrapping_add(freed.blocks) as u64);
        sum.deallocations = sum.deallocations.wrapping_add(freed.blocks as u64);
        sum.failures += self.failures;
    }
}

impl PublishedTotal {
    /// What is published, and a difference that is not.
    fn plus(&self, pending: BytesAndBlocks) -> BytesAndBlocks {
        let mut sum = pending;
        sum.add(self.bytes.load(Ordering::Relaxed), self.blocks.load(Ordering::Relaxed));
        sum
    }

    /// Resets an ended account.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.blocks.store(0, Ordering::Relaxed);
        self.shards.store(0, Ordering::Relaxed);
    }
}
