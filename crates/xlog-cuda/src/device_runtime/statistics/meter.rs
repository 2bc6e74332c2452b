//! One account: blocks and bytes, counted in shards, with a peak over all of them.
//!
//! A shard's sums need not make sense alone: a block may be allocated by one thread and freed by another. Differences wrap, and
//! the sum over all shards is true. For the peak each shard knows what all have published, and adds what it has not published
//! itself.

use std::sync::atomic::{AtomicI64, Ordering};

use super::shard::Moved;
use super::snapshot::Usage;

/// Bytes by which a shard may have moved before it tells the others.
pub const PEAK_STEP_BYTES: usize = 64 << 10;
/// Blocks by which a shard may have moved before it tells the others.
pub const PEAK_STEP_BLOCKS: usize = 64;

/// Half of it may be in a shard's meters, and half in front of them.
pub(super) const HALF_STEP_BYTES: i64 = PEAK_STEP_BYTES as i64 / 2;
pub(super) const HALF_STEP_BLOCKS: i64 = PEAK_STEP_BLOCKS as i64 / 2;

/// What the shards have published of one account.
#[derive(Debug, Default)]
pub(super) struct Published {
    bytes: AtomicI64,
    blocks: AtomicI64,
}

/// One shard's part of an account.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    /// Allocated minus freed, not yet published.
    pending_bytes: i64,
    pending_blocks: i64,
    peak_bytes: i64,
    peak_blocks: i64,
    allocated_bytes: u64,
    allocated_blocks: u64,
    freed_bytes: u64,
    freed_blocks: u64,
    failures: u64,
    /// Room given in `epoch`.
    given_bytes: i64,
    given_blocks: i64,
    epoch: u64,
}

impl Meter {
    /// Counts a block, and looks whether that is a new peak.
    pub(super) fn allocate(&mut self, bytes: u64, all: &Published) {
        let moved = Moved { allocated_bytes: bytes, allocated_blocks: 1, ..Moved::default() };
        self.settle(&moved, all);
    }

    /// Takes in what was counted elsewhere, and looks whether that is a new peak.
    pub(super) fn settle(&mut self, moved: &Moved, all: &Published) {
        self.allocated_bytes = self.allocated_bytes.wrapping_add(moved.allocated_bytes);
        self.allocated_blocks = self.allocated_blocks.wrapping_add(moved.allocated_blocks);
        self.freed_bytes = self.freed_bytes.wrapping_add(moved.freed_bytes);
        self.freed_blocks = self.freed_blocks.wrapping_add(moved.freed_blocks);
        self.pending_bytes += moved.allocated_bytes.wrapping_sub(moved.freed_bytes) as i64;
        self.pending_blocks += moved.allocated_blocks.wrapping_sub(moved.freed_blocks) as i64;
        let (bytes, blocks) = self.estimate(all);
        self.peak_bytes = self.peak_bytes.max(bytes);
        self.peak_blocks = self.peak_blocks.max(blocks);
        if self.pending_bytes.abs() >= HALF_STEP_BYTES
            || self.pending_blocks.abs() >= HALF_STEP_BLOCKS
        {
            self.publish(all);
        }
    }

    /// What is live, as far as this shard knows.
    fn estimate(&self, all: &Published) -> (i64, i64) {
        let bytes = all.bytes.load(Ordering::Relaxed) + self.pending_bytes;
        (bytes, all.blocks.load(Ordering::Relaxed) + self.pending_blocks)
    }

    /// What lies below the peak and was given to nobody in this epoch.
    pub(super) fn room(&self, epoch: u64, all: &Published) -> (i64, i64) {
        let (bytes, blocks) = self.estimate(all);
        let given =
            if self.epoch == epoch { (self.given_bytes, self.given_blocks) } else { (0, 0) };
        (self.peak_bytes - bytes - given.0, self.peak_blocks - blocks - given.1)
    }

    /// Remembers room that was given to an entry.
    pub(super) fn give_room(&mut self, epoch: u64, room: (i64, i64)) {
        if self.epoch != epoch {
            (self.epoch, self.given_bytes, self.given_blocks) = (epoch, 0, 0);
        }
        self.given_bytes += room.0;
        self.given_blocks += room.1;
    }

    pub(super) fn fail(&mut self) {
        self.failures += 1;
    }

    pub(super) fn publish(&mut self, all: &Published) {
        all.bytes.fetch_add(self.pending_bytes, Ordering::Relaxed);
        all.blocks.fetch_add(self.pending_blocks, Ordering::Relaxed);
        (self.pending_bytes, self.pending_blocks) = (0, 0);
    }

    /// The peak seen since the last time; from here it counts anew, starting at what is live.
    pub(super) fn take_peak(&mut self, live_bytes: i64, live_blocks: i64) -> (i64, i64) {
        let seen = (self.peak_bytes, self.peak_blocks);
        (self.peak_bytes, self.peak_blocks) = (live_bytes, live_blocks);
        seen
    }

    /// Live bytes and blocks, as far as this shard is concerned.
    pub(super) fn live(&self) -> (i64, i64) {
        let bytes = self.allocated_bytes.wrapping_sub(self.freed_bytes) as i64;
        (bytes, self.allocated_blocks.wrapping_sub(self.freed_blocks) as i64)
    }

    /// Takes over the totals of an account that ends here, with nothing live in all shards together.
    pub(super) fn absorb(&mut self, ended: &mut Self) {
        self.allocated_bytes = self.allocated_bytes.wrapping_add(ended.allocated_bytes);
        self.allocated_blocks = self.allocated_blocks.wrapping_add(ended.allocated_blocks);
        self.freed_bytes = self.freed_bytes.wrapping_add(ended.freed_bytes);
        self.freed_blocks = self.freed_blocks.wrapping_add(ended.freed_blocks);
        self.failures += ended.failures;
        self.peak_bytes = self.peak_bytes.max(ended.peak_bytes);
        self.peak_blocks = self.peak_blocks.max(ended.peak_blocks);
        *ended = Self::default();
    }

    /// Adds this shard's part to a sum. Peaks are the largest any shard saw.
    pub(super) fn add_to(&self, sum: &mut Usage) {
        let (bytes, blocks) = self.live();
        sum.current_bytes = sum.current_bytes.wrapping_add(bytes as usize);
        sum.current_blocks = sum.current_blocks.wrapping_add(blocks as usize);
        sum.peak_bytes = sum.peak_bytes.max(self.peak_bytes.max(0) as usize);
        sum.peak_blocks = sum.peak_blocks.max(self.peak_blocks.max(0) as usize);
        sum.total_bytes = sum.total_bytes.wrapping_add(self.allocated_bytes);
        sum.freed_bytes = sum.freed_bytes.wrapping_add(self.freed_bytes);
        sum.allocations = sum.allocations.wrapping_add(self.allocated_blocks);
        sum.deallocations = sum.deallocations.wrapping_add(self.freed_blocks);
        sum.failures += self.failures;
    }
}

impl Published {
    /// Forgets an account that has ended.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.blocks.store(0, Ordering::Relaxed);
    }
}
