//! Frees that are not on the fast path.
//!
//! A block that only its own stream used is freed at once. If another stream still uses it, the free is deferred until
//! that use completes; if memory is short, the own stream waits for the use instead. A failed free is kept, and a reap
//! retries it.

use super::PoolResource;
use super::arena::FreedBlock;
use crate::device_runtime::ordering::{BlockMeta, Retired, UseTracking, generation_bits};
use crate::device_runtime::resource::{BlockId, DeviceBlock, Generation, ResourceResult};
use crate::stream::RawStream;

/// The call that frees a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FreedBy {
    /// The caller's free, which has not been counted yet.
    Caller,
    /// A later free of a retired block, which the caller's free has counted.
    Deferred,
}

impl PoolResource {
    /// Returns the memory of a retired block to its arena. Its own stream is ordered after all uses.
    pub(super) fn free_to_arena(
        &self,
        generation: Generation,
        meta: &BlockMeta,
        freed_by: FreedBy,
    ) -> ResourceResult<()> {
        self.free_to_arena_at(None, generation, meta, freed_by)
    }

    /// [`Self::free_to_arena`] with the own stream's stamp of the last work; `None` takes the current stamp.
    fn free_to_arena_at(
        &self,
        last_work: Option<u64>,
        generation: Generation,
        meta: &BlockMeta,
        freed_by: FreedBy,
    ) -> ResourceResult<()> {
        let owner = self.tracker.owner_stream(meta)?;
        if let Err(error) = owner.check_not_capturing("pool free") {
            if freed_by == FreedBy::Caller {
                self.count_free(meta.owner())?;
            }
            self.deferred_frees.keep_failed(generation);
            return Err(error.into());
        }
        if let Some(observer) = &self.observer {
            let _ = observer.end_range(meta.ptr(), meta.bytes(), owner.handle());
        }
        let arena = self.arena(owner.clock().slot())?;
        if let Some(sanitizer) = &self.sanitizer {
            sanitizer.end_block(meta.ptr());
        }
        let bytes = meta.bytes();
        meta.end();
        arena.with(|arena| {
            match freed_by {
                FreedBy::Caller => arena.counts.deallocations += 1,
                // The thread that closed the last use may get here before the freeing thread has counted the block as
                // retired: the count wraps.
                FreedBy::Deferred => arena.counts.retired = arena.counts.retired.wrapping_sub(1),
            }
            // Read inside the lock: blocks that other threads freed here meanwhile may leave the magazine with this
            // stamp.
            let (freed, table) = (FreedBlock::of(generation, meta), &self.tracker.table);
            let capacity = self.arenas.magazine_capacity();
            match last_work {
                None => arena.free(freed, owner.stamp_free(), capacity, table),
                Some(stamp) => {
                    owner.note_free(stamp);
                    arena.free_since(freed, stamp, capacity, table);
                }
            }
        });
        // A deferred free records nothing: the call that frees it does not name the stream.
        if freed_by == FreedBy::Caller {
            self.record_if_polled(owner, bytes);
        }
        Ok(())
    }

    /// Queues waits for all outstanding uses of a block, then frees it. A reap retries after a failure.
    pub(super) fn free_in_order(
        &self,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        self.free_ordered(None, generation, meta)
    }

    /// Frees a deferred block whose uses have completed. The memory keeps the stamp of the deferred free, since later work of
    /// the own stream does not touch it.
    fn free_deferred(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        // For the race detector the block ends now, at the current stamp.
        let freed = self.observer.is_none().then(|| meta.stamps.last_write());
        self.free_ordered(freed, generation, meta)
    }

    /// [`Self::free_in_order`] of a block that was freed at stamp `freed` of its own stream, if that is known.
    fn free_ordered(
        &self,
        freed: Option<u64>,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        if let Some(sanitizer) = &self.sanitizer {
            return sanitizer.waiting.push(&self.tracker, generation, meta);
        }
        let owner = self.tracker.owner_stream(meta)?;
        let outstanding = meta.with_uses(|uses| uses.take_outstanding(&self.tracker.streams));
        if let Err(error) = self.tracker.wait_on_all(owner, &outstanding) {
            meta.with_uses(|uses| uses.restore(outstanding));
            self.deferred_frees.keep_failed(generation);
            return Err(error);
        }
        // Queued waits are work of the own stream, at its current stamp.
        let last_work = freed.filter(|_| outstanding.is_empty());
        self.free_to_arena_at(last_work, generation, meta, FreedBy::Deferred)
    }

    /// Frees deferred blocks whose uses have completed, and stops after `pending` others.
    pub(super) fn free_completed(&self, pending: usize) -> ResourceResult<()> {
        let free = |generation, meta: &BlockMeta| self.free_deferred(generation, meta);
        self.deferred_frees.free_completed(pending, &self.tracker, free)
    }

    /// Frees all deferred blocks, with the waits that this needs.
    pub(super) fn free_deferred_with_waits(&self) -> ResourceResult<()> {
        let free = |generation, meta: &BlockMeta| self.free_in_order(generation, meta);
        self.deferred_frees.free_all(&self.tracker, free)
    }

    pub(super) fn retry_failed(&self) -> ResourceResult<()> {
        let free =
            |generation, meta: &BlockMeta| self.free_late(Self::free_in_order, generation, meta);
        self.deferred_frees.retry_failed(&self.tracker, free)
    }

    /// [`Self::free_deferred_with_waits`] for a reap.
    pub(super) fn free_deferred_late(&self) -> ResourceResult<()> {
        let free =
            |generation, meta: &BlockMeta| self.free_late(Self::free_in_order, generation, meta);
        self.deferred_frees.free_all(&self.tracker, free)
    }

    /// [`Self::free_completed`] of all blocks, for a reap.
    pub(super) fn free_completed_late(&self) -> ResourceResult<()> {
        let free =
            |generation, meta: &BlockMeta| self.free_late(Self::free_deferred, generation, meta);
        self.deferred_frees.free_completed(usize::MAX, &self.tracker, free)
    }

    /// Frees a block by `free` in a reap. A block whose stream is being captured is kept for a later reap, without an error.
    fn free_late(
        &self,
        free: fn(&Self, Generation, &BlockMeta) -> ResourceResult<()>,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        let owner = self.tracker.owner_stream(meta)?;
        self.deferred_frees.free_unless_captured(owner, generation, || free(self, generation, meta))
    }

    /// Frees a block that was never shared, on a stream that other code may capture, after the driver has confirmed that none does.
    /// Returns false with nothing changed if that does not apply.
    #[cold]
    #[inline(never)]
    pub(super) fn free_escaped(&self, block: &DeviceBlock) -> bool {
        let (generation, table) = (block.generation, &self.tracker.table);
        let meta = table.lookup(BlockId::from_block(block)).filter(|meta| meta.state.is_unshared());
        let Some(meta) = meta.filter(|_| self.fast_path) else { return false };
        let (slot, bytes) = (meta.owner(), meta.bytes());
        let owner = self.tracker.streams.at(slot).filter(|owner| owner.handle_escaped());
        let (Some(owner), Some(arena)) = (owner, self.arenas.get(slot)) else { return false };
        if owner.check_not_capturing("pool free").is_err() {
            return false;
        }
        let is_freed = arena.with(|arena| {
            // While this thread is inside the arena, no other thread changes the state of an unshared block.
            let is_free = meta.state.is_live_and_unshared(generation_bits(generation));
            if is_free {
                let (freed, capacity) =
                    (FreedBlock::of(generation, meta), self.arenas.magazine_capacity());
                arena.end_block(freed, owner.stamp_free(), capacity, table);
            }
            is_free
        });
        if is_freed {
            self.record_if_polled(owner, bytes);
        }
        is_freed
    }

    /// Frees a block off the fast path.
    #[inline(never)]
    pub(super) fn free_slow(&self, block: &DeviceBlock) -> ResourceResult<()> {
        let generation = block.generation;
        let meta = self.tracker.table.find_block(block)?;
        self.publish_block(meta);
        // Read before the block is retired: from then on the thread that closes its last use may end the metadata.
        let owner = meta.owner();
        match self.tracker.retire(meta, generation)? {
            Retired::OwnStreamOnly if self.free_retired_fast(generation, meta) => Ok(()),
            Retired::OwnStreamOnly if self.sanitizer.is_none() => {
                self.free_to_arena(generation, meta, FreedBy::Caller)
            }
            Retired::OwnStreamOnly | Retired::Used => self.free_used(generation, meta),
            Retired::Open => self.count_free(owner),
        }
    }

    /// Frees a returned block that other streams have used.
    pub(super) fn free_used(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        // Read first: the metadata may end with the free.
        let (owner, bytes) = (meta.owner(), meta.bytes());
        self.count_free(owner)?;
        let freed = self.free(generation, meta);
        if let Some(owner) = self.tracker.streams.at(owner) {
            self.record_if_polled(owner, bytes);
        }
        freed
    }

    /// Records an event for `bytes` freed on a stream that other calls poll, if enough became free since the last event.
    fn record_if_polled(&self, owner: &RawStream, bytes: usize) {
        if owner.count_free_and_check(bytes) {
            // A stream that cannot record keeps its memory.
            let _ = owner.record(&self.tracker.counters);
        }
    }

    pub(super) fn count_free(&self, owner: u32) -> ResourceResult<()> {
        let arena = self.arena(owner)?;
        arena.with(|arena| {
            arena.counts.deallocations += 1;
            arena.counts.retired = arena.counts.retired.wrapping_add(1);
        });
        Ok(())
    }
}
