//! Reserve: the segments and the shared free list of a pool, which belong to no stream.
//!
//! Invariants:
//! - No work is pending on memory of the shared free list, so any stream may take it without a wait.
//! - `growing` is held while memory moves between the pool and the device, and while ranges belong to no arena. A
//!   request searches again after it has locked it, so two requests do not both grow for one need.

use xlog_driver::sync::{Mutex, MutexGuard};

use super::arena::UNIT;
use super::config::PoolConfig;
use super::segments::{Segments, Span, WatchedSegments};
use super::tlsf::{BoundedFit, CHUNK, Range, Removed, SMALL, Tlsf, TlsfAllocation};
use super::trim::IdleMemory;
use crate::device_runtime::resource::{ResourceError, ResourceResult, StreamId};

/// The largest range that moves to another stream for a smaller request: ranges of this size seldom move.
pub(super) const MAX_TRANSFER: u64 = 2 << 20;

/// The maximum of remap credits; a pool starts with them.
const MAX_REMAP_CREDITS: u32 = 4096;
/// Credits that one growth earns: remapping as many handles takes about as long.
const REMAP_CREDITS_PER_GROWTH: u32 = 16;

/// Remap credits, guarded by the growth lock.
pub(super) struct Growth {
    remap_credits: u32,
}

impl Growth {
    /// Earns credits for one growth.
    pub(super) fn note(&mut self) {
        let credits = self.remap_credits + REMAP_CREDITS_PER_GROWTH;
        self.remap_credits = credits.min(MAX_REMAP_CREDITS);
    }

    /// Charges `cost` for a completed search; the credits end at 0.
    pub(super) fn charge_search(&mut self, cost: usize) {
        self.remap_credits =
            self.remap_credits.saturating_sub(u32::try_from(cost).unwrap_or(u32::MAX));
    }

    /// Pays `cost`; false if there are too few credits.
    pub(super) fn pay_for_remap(&mut self, cost: usize) -> bool {
        let left = u32::try_from(cost).ok().and_then(|cost| self.remap_credits.checked_sub(cost));
        self.remap_credits = left.unwrap_or(self.remap_credits);
        left.is_some()
    }
}

/// The segments and the shared free list, on cache lines apart from those that all streams read.
#[repr(align(128))]
pub(super) struct Reserve {
    pub(super) segments: WatchedSegments,
    shared_free: Mutex<Tlsf>,
    growing: Mutex<Growth>,
    growth_bytes: u64,
}

impl Reserve {
    pub(super) fn new(segments: Box<dyn Segments>, config: &PoolConfig) -> Self {
        Self {
            segments: WatchedSegments::new(segments),
            shared_free: Mutex::default(),
            growing: Mutex::new(Growth { remap_credits: MAX_REMAP_CREDITS }),
            growth_bytes: config.growth_bytes as u64,
        }
    }

    /// Takes `bytes` for the shared free list.
    pub(super) fn grow_initial(&self, bytes: u64) -> ResourceResult<()> {
        let mut left = bytes;
        while left > 0 {
            // Several spans, each of which can be returned by itself.
            let span = self.segments.grow(left.min(self.growth_bytes), StreamId::DEFAULT)?;
            self.insert(Range { ptr: span.ptr, bytes: span.bytes, stamp: 0 });
            left = left.saturating_sub(span.bytes);
        }
        Ok(())
    }

    /// Locks growth and trims.
    pub(super) fn growing(&self) -> MutexGuard<'_, Growth> {
        self.growing.lock()
    }

    /// Returns the size of a range that moves to a stream for a smaller request.
    pub(super) fn transfer_bytes(&self) -> u64 {
        (self.growth_bytes / 16).next_multiple_of(UNIT).min(MAX_TRANSFER)
    }

    /// Allocates from `tlsf` a range that is worth moving to another stream, or a whole smaller range. A small part would
    /// leave a splinter, and the next request would come back for more.
    pub(super) fn allocate_worth_moving(
        &self,
        tlsf: &mut Tlsf,
        size: u64,
        align: u64,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<TlsfAllocation> {
        let maximum = self.transfer_bytes();
        let fit = BoundedFit { bytes: size.max(maximum), maximum, align };
        // A chunk is aligned, so that it pins as few handles as possible.
        let chunk =
            (size < SMALL && maximum == CHUNK).then_some(BoundedFit { align: CHUNK, ..fit });
        chunk
            .and_then(|chunk| tlsf.allocate_if(chunk, usable))
            .or_else(|| tlsf.allocate_if(fit, usable))
            .or_else(|| tlsf.allocate_if(BoundedFit { bytes: size, ..fit }, usable))
    }

    /// Removes a range that holds a request from the shared free list.
    pub(super) fn remove_for(&self, size: u64, align: u64) -> Option<Range> {
        let mut shared_free = self.shared_free.lock();
        let taken = self
            .allocate_worth_moving(&mut shared_free, size, align, &mut |_| true)
            .or_else(|| shared_free.allocate(size, align))?;
        let range = shared_free.remove_allocated(taken.node)?;
        Some(Range { stamp: 0, ..range })
    }

    pub(super) fn ranges(&self) -> Vec<Range> {
        self.shared_free.lock().ranges().collect()
    }

    /// Removes the parts that `leave` selects from the shared free list.
    pub(super) fn remove_if(
        &self,
        minimum: u64,
        leave: &mut dyn FnMut(&Range) -> Option<Range>,
    ) -> Removed {
        self.shared_free.lock().remove_if(minimum, leave)
    }

    /// Inserts a range without pending work into the shared free list; false if the list refuses it.
    pub(super) fn insert(&self, range: Range) -> bool {
        self.shared_free.lock().insert_span(range, true)
    }

    /// Removes all ranges of at least `minimum` bytes from the shared free list.
    pub(super) fn remove(&self, minimum: u64) -> Removed {
        self.shared_free.lock().remove_if(minimum, &mut |range| Some(*range))
    }

    /// Inserts `idle`, without the parts in `gone`, into the shared free list.
    pub(super) fn insert_idle(&self, idle: &IdleMemory, gone: &[Span]) {
        let mut shared_free = self.shared_free.lock();
        let gone_bytes: u64 = gone.iter().map(|span| span.bytes).sum();
        shared_free.raise_low_water(idle.unneeded.saturating_sub(gone_bytes));
        for span in idle.spans.iter().flat_map(|span| span.without(gone)) {
            shared_free.insert_span(Range { ptr: span.ptr, bytes: span.bytes, stamp: 0 }, true);
        }
    }

    /// Takes at least `bytes` from the device, or 1/32 of the pool if that is more: a small pool stays small, and a large one
    /// seldom grows. Each foreign arena adds 1/32, up to 8/32, because its requests will follow.
    pub(super) fn grow(
        &self,
        bytes: u64,
        stream: StreamId,
        foreign_arenas: u32,
    ) -> ResourceResult<Span> {
        let part = self.segments.reserved() / 32 * u64::from(foreign_arenas.min(7) + 1);
        let step = part.max(2 << 20).next_multiple_of(2 << 20);
        let step = step.min(self.growth_bytes);
        if step > bytes {
            match self.segments.grow(step, stream) {
                Err(error) if is_full(&error) => {}
                other => return other,
            }
        }
        self.segments.grow(bytes, stream)
    }

    /// Calls `visit` for the shared free list, under its lock.
    pub(super) fn with_shared_free<R>(&self, visit: impl FnOnce(&mut Tlsf) -> R) -> R {
        visit(&mut self.shared_free.lock())
    }
}

impl From<Range> for Span {
    fn from(range: Range) -> Self {
        Self { ptr: range.ptr, bytes: range.bytes }
    }
}

/// Whether the device, a limit or a ledger has no more memory.
pub(super) fn is_full(error: &ResourceError) -> bool {
    matches!(error, ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })
}
