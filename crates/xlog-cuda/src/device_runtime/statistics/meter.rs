//! One account: blocks and bytes, counted in shards, with a peak over all of them.
//!
//! The sums of one shard may be negative, since one thread may free what another allocated. Differences wrap, and the sum over all
//! shards is exact. For the peak a shard adds its unpublished difference to the published totals.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use super::bytes_and_blocks::BytesAndBlocks;
use super::shard::CountDelta;
use super::snapshot::Usage;

/// The minimum of unpublished bytes that a shard may have, for small accounts.
pub const PEAK_STEP_BYTES: usize = 64 << 10;
/// The minimum of unpublished blocks that a shard may have, for small accounts.
pub const PEAK_STEP_BLOCKS: usize = 64;
/// Unpublished bytes that the only shard of an account may have below the peak. Shards that join later see them at its next
/// publication.
pub const PEAK_STEP_ALONE_BYTES: usize = 8 << 20;
/// All shards together may have unpublished differences of one part in this number of an account's peak.
pub const PEAK_STEP_PART: usize = 8;

const MIN_STEP: BytesAndBlocks =
    BytesAndBlocks { bytes: PEAK_STEP_BYTES as i64, blocks: PEAK_STEP_BLOCKS as i64 };
const MIN_STEP_ALONE: BytesAndBlocks =
    BytesAndBlocks { bytes: PEAK_STEP_ALONE_BYTES as i64, blocks: PEAK_STEP_BLOCKS as i64 };
/// A shard's meter gets one part in this number of its step, its entries the rest. Entries get the larger part: each time that they
/// use it up the meter publishes, for which all threads contend.
const METER_PART: i64 = 4;

/// The published total of one account, on a cache line of its own.
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
    peak: BytesAndBlocks,
    allocated_bytes: u64,
    allocated_blocks: u64,
    freed_bytes: u64,
    freed_blocks: u64,
    failures: u64,
    /// Room granted to entries in `epoch`.
    given: BytesAndBlocks,
    epoch: u64,
    /// The unpublished differences that entries have reserved in `aside_epoch`.
    aside: BytesAndBlocks,
    aside_epoch: u64,
    /// The number of shards that had changed the account at this shard's last flush; 0 before its first one.
    shards: u32,
    /// The maximum unpublished difference of this shard's meter and entries together, from the peak and the number of shards.
    step: BytesAndBlocks,
}

impl Meter {
    /// Adds the counts of an entry, and raises the peak.
    pub(super) fn flush(&mut self, delta: &CountDelta, all: &PublishedTotal) {
        self.allocated_bytes = self.allocated_bytes.wrapping_add(delta.allocated_bytes);
        self.allocated_blocks = self.allocated_blocks.wrapping_add(delta.allocated_blocks);
        self.freed_bytes = self.freed_bytes.wrapping_add(delta.freed_bytes);
        self.freed_blocks = self.freed_blocks.wrapping_add(delta.freed_blocks);
        self.pending = self.pending.plus(
            delta.allocated_bytes.wrapping_sub(delta.freed_bytes) as i64,
            delta.allocated_blocks.wrapping_sub(delta.freed_blocks) as i64,
        );
        let shards = match self.shards {
            0 => all.shards.fetch_add(1, Ordering::Relaxed) + 1,
            _ => all.shards.load(Ordering::Relaxed),
        };
        let peak = self.peak.max(self.estimate(all));
        if (peak, shards) != (self.peak, self.shards) {
            (self.peak, self.shards) = (peak, shards);
            self.set_step();
        }
        let left = self.step().divided_by(METER_PART).less(self.pending.distance());
        if left.bytes <= 0 || left.blocks <= 0 {
            self.publish(all);
        }
    }

    #[inline]
    fn step(&self) -> BytesAndBlocks {
        self.step.max(MIN_STEP)
    }

    fn set_step(&mut self) {
        let shards = i64::from(self.shards.max(1));
        self.step = self.peak.divided_by(PEAK_STEP_PART as i64 * shards);
    }

    /// The maximum unpublished difference of all entries of this shard together.
    #[inline]
    pub(super) fn step_of_entries(&self) -> BytesAndBlocks {
        let step = self.step();
        let rest = step.less(step.divided_by(METER_PART));
        // A shard that has not changed the account does not know whether others have.
        if self.shards == 1 { rest.max(MIN_STEP_ALONE) } else { rest }
    }

    /// The live amount that this shard knows of.
    fn estimate(&self, all: &PublishedTotal) -> BytesAndBlocks {
        let (bytes, blocks) = (&all.bytes, &all.blocks);
        self.pending.plus(bytes.load(Ordering::Relaxed), blocks.load(Ordering::Relaxed))
    }

    /// The room below the peak that was granted to no entry in this epoch.
    pub(super) fn room(&self, epoch: u64, all: &PublishedTotal) -> BytesAndBlocks {
        let given = if self.epoch == epoch { self.given } else { BytesAndBlocks::NONE };
        self.peak.less(self.estimate(all)).less(given)
    }

    /// Notes room that was granted to an entry.
    pub(super) fn give_room(&mut self, epoch: u64, room: BytesAndBlocks) {
        if self.epoch != epoch {
            (self.epoch, self.given) = (epoch, BytesAndBlocks::NONE);
        }
        self.given = self.given.and(room);
    }

    /// The unpublished difference that no entry has reserved in this epoch.
    pub(super) fn unseen_left(&self, epoch: u64) -> BytesAndBlocks {
        let aside = if self.aside_epoch == epoch { self.aside } else { BytesAndBlocks::NONE };
        self.step_of_entries().less(aside)
    }

    /// Notes the reservation of an entry.
    pub(super) fn set_aside(&mut self, epoch: u64, more: BytesAndBlocks) {
        if self.aside_epoch != epoch {
            (self.aside_epoch, self.aside) = (epoch, BytesAndBlocks::NONE);
        }
        self.aside = self.aside.and(more);
    }

    pub(super) fn fail(&mut self) {
        self.failures += 1;
    }

    pub(super) fn publish(&mut self, all: &PublishedTotal) {
        let BytesAndBlocks { bytes, blocks } = std::mem::take(&mut self.pending);
        all.bytes.fetch_add(bytes, Ordering::Relaxed);
        all.blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Returns the peak since the last call, and resets it to what is live.
    pub(super) fn reset_peak(&mut self, live: BytesAndBlocks) -> BytesAndBlocks {
        let seen = std::mem::replace(&mut self.peak, live);
        self.set_step();
        seen
    }

    /// The live bytes and blocks of this shard's sums.
    pub(super) fn live(&self) -> (i64, i64) {
        let bytes = self.allocated_bytes.wrapping_sub(self.freed_bytes) as i64;
        (bytes, self.allocated_blocks.wrapping_sub(self.freed_blocks) as i64)
    }

    /// Adds the totals of an ended account, which has nothing live over all shards.
    pub(super) fn absorb(&mut self, ended: &mut Self) {
        self.allocated_bytes = self.allocated_bytes.wrapping_add(ended.allocated_bytes);
        self.allocated_blocks = self.allocated_blocks.wrapping_add(ended.allocated_blocks);
        self.freed_bytes = self.freed_bytes.wrapping_add(ended.freed_bytes);
        self.freed_blocks = self.freed_blocks.wrapping_add(ended.freed_blocks);
        self.failures += ended.failures;
        self.peak = self.peak.max(ended.peak);
        *ended = Self::default();
    }

    /// Adds this shard's sums to `sum`. The peak is the maximum over shards.
    pub(super) fn add_to(&self, sum: &mut Usage) {
        let (bytes, blocks) = self.live();
        sum.current_bytes = sum.current_bytes.wrapping_add(bytes as usize);
        sum.current_blocks = sum.current_blocks.wrapping_add(blocks as usize);
        sum.peak_bytes = sum.peak_bytes.max(self.peak.bytes.max(0) as usize);
        sum.peak_blocks = sum.peak_blocks.max(self.peak.blocks.max(0) as usize);
        sum.total_bytes = sum.total_bytes.wrapping_add(self.allocated_bytes);
        sum.freed_bytes = sum.freed_bytes.wrapping_add(self.freed_bytes);
        sum.allocations = sum.allocations.wrapping_add(self.allocated_blocks);
        sum.deallocations = sum.deallocations.wrapping_add(self.freed_blocks);
        sum.failures += self.failures;
    }
}

impl PublishedTotal {
    /// Resets an ended account.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.blocks.store(0, Ordering::Relaxed);
        self.shards.store(0, Ordering::Relaxed);
    }
}
