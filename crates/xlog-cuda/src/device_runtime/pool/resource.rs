//! The pool as a [`DeviceMemoryResource`].

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::PoolResource;
use super::arena::UNIT;
use super::magazine::{MAX_CACHED, class_of};
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::ordering::{BlockMeta, Tracker, UseTracking, tracked_hooks};
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    FreeSpace, Generation, GrowthHook, MemoryUse, PhysicalCap, PhysicalMeter, ResourceError,
    ResourceHome, ResourceResult, ResourceStatistics, Seal, SegmentWatcher, StreamId,
};
use crate::stream::RawStream;

const MAX_ALIGN: usize = 2 << 20;
/// The largest request: no device has more addresses.
pub(super) const MAX_BYTES: usize = 1 << 47;

/// Returns the bytes that a request takes: a whole class, or whole units. Returns `None` for a refused size.
#[inline]
fn rounded_bytes(bytes: usize) -> Option<u64> {
    // 0 wraps around and is refused.
    (bytes.wrapping_sub(1) < MAX_BYTES).then(|| match bytes as u64 {
        small if small <= MAX_CACHED => class_of(small).bytes,
        large => large.next_multiple_of(UNIT),
    })
}

/// [`rounded_bytes`] with an error that names the reason.
#[inline]
pub(super) fn block_bytes(bytes: usize) -> ResourceResult<u64> {
    rounded_bytes(bytes).ok_or_else(|| refusal(bytes))
}

fn check_align(align: usize) -> ResourceResult<()> {
    if align.is_power_of_two() && align <= MAX_ALIGN {
        return Ok(());
    }
    Err(ResourceError::InvalidRequest {
        value: format!("alignment {align}"),
        accepted: format!("a power of two up to {MAX_ALIGN}"),
    })
}

#[cold]
#[inline(never)]
fn refusal(bytes: usize) -> ResourceError {
    match bytes {
        0 => ResourceError::zero_bytes(),
        requested => ResourceError::OutOfMemory {
            requested,
            detail: "no device has so many addresses".to_owned(),
        },
    }
}

impl UseTracking for PoolResource {
    #[inline]
    fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    fn publish_block(&self, meta: &BlockMeta) {
        let owner = meta.owner();
        if meta.state.is_unshared()
            && let Ok(arena) = self.arena(owner)
        {
            arena.with(|_| {
                // The slot may hold a block of another stream by now.
                if meta.owner() == owner {
                    meta.state.publish();
                }
            });
        }
    }

    /// Frees at once if the block's stream is already ordered after all uses. Otherwise the free is deferred until they
    /// complete, so that the stream does not wait for another one.
    fn free(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        if self.sanitizer.is_some() {
            return self.free_in_order(generation, meta);
        }
        let owner = self.tracker.owner_stream(meta)?;
        // The free is a write of the own stream, after everything queued there.
        meta.stamps.stamp(true, owner.clock().now());
        let streams = &self.tracker.streams;
        let at_once = meta.with_uses(|uses| {
            let at_once = uses.is_ordered_before(streams, owner);
            if !at_once {
                uses.note_free(streams);
            }
            at_once
        });
        if at_once || !self.deferred_frees.defer(generation) {
            return self.free_in_order(generation, meta);
        }
        Ok(())
    }
}

impl DeviceMemoryResource for PoolResource {
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        match self.allocate_fast(bytes, stream) {
            Some(block) => Ok(block.live(self.ordinal, stream, tag)),
            None => self.allocate_general(bytes, UNIT as usize, stream, tag, false),
        }
    }

    fn allocate_request(
        &self,
        AllocRequest { bytes, align, stream, tag, is_tracked }: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        if reservation.is_some() {
            return Err(ResourceError::no_budget());
        }
        check_align(align)?;
        if align <= UNIT as usize
            && let Some(block) = self.allocate_fast(bytes, stream)
        {
            return Ok(block.live(self.ordinal, stream, tag));
        }
        self.allocate_general(bytes, align.max(UNIT as usize), stream, tag, is_tracked)
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        if self.free_fast(&block) || self.free_escaped(&block) {
            Ok(())
        } else {
            self.free_slow(&block)
        }
    }

    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        if self.free_fast(block) || self.free_escaped(block) {
            return Ok(BlockState::Freed);
        }
        self.free_slow(block).map(|()| self.block_state(BlockId::from_block(block)))
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        let taken = self.arenas.counts().1;
        (taken - self.slack().min(taken)) as usize
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let reaper = self.deferred_frees.reaper_lock();
        let mut outcome = self.retry_failed();
        let waited =
            self.free_deferred_late().and(self.release_with_waits(RawStream::synchronize_freed));
        outcome = outcome.and(waited);
        drop(reaper);
        // Ignores the deadline of the running call: a reap ends when everything is freed.
        let settled = self.synchronize_streams(RawStream::synchronize_freed);
        outcome.and(settled.map_err(Into::into))
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let reaper = self.deferred_frees.reaper_lock();
        let mut outcome = self.retry_failed();
        let completed = self.free_completed_late().and(self.release_completed(usize::MAX));
        outcome = outcome.and(completed);
        drop(reaper);
        let returned = self.return_idle_if_due(Instant::now());
        outcome.and(returned.map(|_| ()))
    }

    tracked_hooks!();

    #[inline]
    fn charge_for(&self, bytes: usize, _align: usize) -> usize {
        match &self.sanitizer {
            None => rounded_bytes(bytes).map_or(bytes, |size| size as usize),
            Some(_) => bytes,
        }
    }

    fn statistics(&self) -> ResourceStatistics {
        let (counts, taken) = self.arenas.counts();
        let outstanding = taken - self.slack().min(taken);
        let order = self.tracker.counters.sum();
        let allocations = counts.allocations();
        ResourceStatistics {
            bytes_outstanding: outstanding as usize,
            live_blocks: allocations.saturating_sub(counts.deallocations) as usize,
            retired_blocks: counts.retired.cast_signed().max(0) as usize,
            allocations,
            deallocations: counts.deallocations,
            events_recorded: order.recorded,
            waits_inserted: order.inserted,
            waits_elided: order.elided,
        }
    }

    fn is_trusted(&self, seal: Seal) -> bool {
        self.reserve.segments.inner_resource().is_none_or(|inner| inner.is_trusted(seal))
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        match self.reserve.segments.inner_resource().map(|inner| inner.reserve_budget(0)) {
            Some(Ok(Some(_))) => Err(ResourceError::Unsupported {
                call: "reserve_budget",
                detail: "a pool takes whole segments of the budget below it; put the budget over the pool",
            }),
            _ => Ok(None),
        }
    }

    fn free_space(&self) -> Option<FreeSpace> {
        let snapshot = self.snapshot();
        Some(FreeSpace { bytes: snapshot.free_bytes(), largest: snapshot.largest_free })
    }

    fn trim(&self) -> ResourceResult<usize> {
        self.trim_to(0)
    }

    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        if self.return_waits() {
            return Ok(0);
        }
        // Events come first: work that completes after the trim counts as pending, so the caller asks again.
        self.mark_busy_streams();
        self.trim_to(0)
    }

    fn return_idle(&self, now: Instant) -> ResourceResult<usize> {
        self.return_idle_if_due(now)
    }

    fn on_growth(&self, hook: GrowthHook) -> bool {
        // A seed cannot reproduce a background thread.
        let interval = self.decay_interval().filter(|_| !self.device.is_seeded());
        let Some(interval) = interval else { return false };
        // Growth from now on waits for the lock, and then finds the hook.
        let mut hooks = self.on_growth.lock();
        if self.reserve.segments.reserved() > 0 {
            hook(interval);
        }
        hooks.push(hook);
        true
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let snapshot = self.snapshot();
        let pending = snapshot.pending_bytes + snapshot.deferred_bytes;
        Some(MemoryUse::of_physical(snapshot.reserved_bytes, snapshot.cached_bytes(), pending))
    }

    fn watch_segments(&self, watcher: &Weak<dyn SegmentWatcher>) -> bool {
        self.reserve.segments.watch(watcher);
        true
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.reserve.segments.meter_physical(meter)
    }

    fn physical_bytes(&self) -> Option<usize> {
        match self.reserve.segments.inner_resource() {
            Some(inner) => inner.physical_bytes(),
            None => Some(self.reserve.segments.reserved() as usize),
        }
    }

    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.reserve.segments.cap_physical(cap)
    }
}
