//! Hooks of a resource that tracks uses: they open, order and close uses.
//!
//! A resource provides its [`Tracker`] and how it frees a block; [`UseTracking`] provides the hooks.

use super::striped_counters::WaitCounts;
use super::tracker::Tracker;
use super::use_slow_path::{BeginUse, EndUse, close, deflate_if_quiet, inflate, open};
use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::block::state_word::Attempt;
use crate::device_runtime::ordering::block::uses::{NamedUse, Needed};
use crate::device_runtime::resource::{
    Access, BlockId, Generation, ResourceError, ResourceResult, StreamId,
};
use crate::stream::RawStream;
use xlog_driver::DriverError;

/// Use tracking of a resource with a tracker.
pub(crate) trait UseTracking {
    fn tracker(&self) -> &Tracker;

    /// Frees a retired block on which no use is open.
    fn free(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()>;

    /// Publishes an unshared block; see [`StateWord`](crate::device_runtime::ordering::block::state_word::StateWord).
    fn publish_block(&self, _meta: &BlockMeta) {}

    /// Opens a use: on the block's own stream without the lock, otherwise under it. Only the common case is inline.
    #[inline]
    fn prepare(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(meta) = self.tracker().table.lookup(block) else {
            return self.tracker().refuse(block);
        };
        let opened = NamedUse { stream, access };
        match self.open_own(meta, block, opened) {
            true => Ok(()),
            false => self.prepare_locked(meta, block, opened),
        }
    }

    /// Opens a use on the block's own stream without the lock. False with nothing changed if the lock is needed.
    #[inline]
    fn open_own(&self, meta: &BlockMeta, block: BlockId, opened: NamedUse) -> bool {
        let NamedUse { stream, access } = opened;
        // The id must be leased: a released id names no stream.
        let Some(clock) = self.tracker().own_header(meta, stream) else { return false };
        if !clock.is_leased_as(stream.0) {
            return false;
        }
        let (bits, writes) = (generation_bits(block.generation), access.writes());
        if meta.state.is_biased() && meta.state.open_biased(bits, writes) {
            return true;
        }
        // An inflated block is never unshared.
        !meta.state.is_inflated() && self.open_own_shared(meta, bits, writes)
    }

    #[inline(never)]
    fn open_own_shared(&self, meta: &BlockMeta, bits: u32, writes: bool) -> bool {
        self.publish_block(meta);
        match meta.state.open(bits, writes) {
            Attempt::Done => true,
            Attempt::DoneBiasable => {
                // This thread uses the block repeatedly: the bias saves locked instructions.
                meta.with_uses(|_| meta.state.bias_to_current(bits));
                true
            }
            Attempt::NeedsLock | Attempt::Stale => false,
        }
    }

    /// Opens a use under the lock, and makes its stream wait for the dependencies. No lock is held over a driver call.
    #[inline(never)]
    fn prepare_locked(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        opened: NamedUse,
    ) -> ResourceResult<()> {
        let tracker = self.tracker();
        let raw = tracker.stream(opened.stream)?;
        self.publish_block(meta);
        let bits = generation_bits(block.generation);
        let mut needed = Needed::default();
        let begun = meta
            .with_uses(|uses| open(meta, uses, bits, &tracker.streams, raw, opened, &mut needed));
        let elided = match begun {
            BeginUse::Opened { elided } => elided,
            BeginUse::OpenedUnlocked => return Ok(()),
            BeginUse::Stale => return Err(stale(block)),
        };
        if elided == 0 && needed.is_empty() {
            return Ok(());
        }
        let mut waits = WaitCounts { elided, ..WaitCounts::default() };
        let waited = needed.iter().try_for_each(|(other, stamp)| {
            // Boxed: the error is rare, and a box keeps the result at one word.
            raw.wait_on(other, *stamp, &mut waits).map_err(Box::new)
        });
        tracker.counters.count(|counts| counts.add_waits(waits));
        match waited {
            Ok(()) => Ok(()),
            Err(error) => self.cancel(meta, block, opened, (*error).into()),
        }
    }

    /// Cancels a use whose waits could not be queued.
    #[cold]
    fn cancel(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        opened: NamedUse,
        error: ResourceError,
    ) -> ResourceResult<()> {
        let closed = meta.with_uses(|uses| {
            uses.cancel(opened);
            deflate_if_quiet(meta, uses)
        });
        if matches!(closed, EndUse::FreeNow) {
            // The block was returned meanwhile; a reap reports a failed free.
            let _ = self.free(block.generation, meta);
        }
        Err(error)
    }

    /// Closes a use: on the block's own stream without the lock, otherwise under it. Only the common case is inline.
    #[inline]
    fn finish(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(meta) = self.tracker().table.lookup(block) else {
            return self.tracker().refuse(block);
        };
        let finished = NamedUse { stream, access };
        match self.close_own(meta, block, finished) {
            true => Ok(()),
            false => self.finish_locked(meta, block, finished, &mut None),
        }
    }

    /// Closes the uses of one launch. One event serves all that need one.
    #[inline(never)]
    fn finish_all(&self, uses: &[(BlockId, Access)], stream: StreamId) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut shared_event: Option<u64> = None;
        for &(block, access) in uses {
            let finished = NamedUse { stream, access };
            let this = self.tracker().table.find_by_id(block).and_then(|meta| {
                match self.close_own(meta, block, finished) {
                    true => Ok(()),
                    false => self.finish_locked(meta, block, finished, &mut shared_event),
                }
            });
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Closes a use on the block's own stream without the lock. False with nothing changed if the lock is needed.
    #[inline]
    fn close_own(&self, meta: &BlockMeta, block: BlockId, finished: NamedUse) -> bool {
        let NamedUse { stream, access } = finished;
        let Some(clock) = self.tracker().own_header(meta, stream) else { return false };
        // The locked path finds the use of a released stream, even if its id was issued again.
        if !clock.is_leased_as(stream.0) {
            return false;
        }
        let (bits, writes) = (generation_bits(block.generation), access.writes());
        let stamp = clock.now();
        if meta.state.is_biased() && meta.state.close_biased(bits, writes, stamp, &meta.stamps) {
            return true;
        }
        !meta.state.is_inflated()
            && meta.state.close(bits, writes, stamp, &meta.stamps) == Attempt::Done
    }

    /// Closes a use under the lock. On another stream than the block's own it first records an event, or uses the event of
    /// an earlier use of the same launch.
    #[inline(never)]
    fn finish_locked(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        finished: NamedUse,
        shared_event: &mut Option<u64>,
    ) -> ResourceResult<()> {
        let tracker = self.tracker();
        tracker.check_parts()?;
        let generation = block.generation;
        let own = tracker.own_header(meta, finished.stream).filter(|clock| {
            clock.is_leased_as(finished.stream.0) || !is_open_elsewhere(meta, finished)
        });
        let (slot, stamp, failed) = match own {
            // If the slot now holds another block, the generation differs too.
            Some(clock) => (meta.owner(), clock.now(), None),
            None => {
                let raw = self.stream_of_open(meta, block, finished)?;
                let slot = raw.clock().slot();
                let (stamp, failed) = self.stamp_finished(raw, slot == meta.owner(), shared_event);
                (slot, stamp, failed)
            }
        };
        match meta.with_uses(|uses| close(meta, uses, generation, finished, slot, stamp)) {
            EndUse::Live => recorded(failed),
            EndUse::FreeNow => recorded(failed).and(self.free(generation, meta)),
            EndUse::Stale => Err(stale(block)),
            EndUse::Missing => Err(not_open(block, finished)),
        }
    }

    /// Returns the stream of an open use, even if the stream was released since.
    #[inline(always)]
    fn stream_of_open(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        finished: NamedUse,
    ) -> ResourceResult<&RawStream> {
        let slot = meta.with_uses(|uses| {
            // Checked under the lock, so that a stale identity finds no use of another block.
            if meta.generation() != block.generation {
                return Err(stale(block));
            }
            Ok(uses.find_open(finished))
        })?;
        match slot.and_then(|slot| self.tracker().streams.at(slot)) {
            Some(raw) => Ok(raw),
            None => Err(not_open(block, finished)),
        }
    }

    /// Stamps work that is queued on `stream`, and records an event if the policy requires one.
    #[inline(always)]
    fn stamp_finished(
        &self,
        stream: &RawStream,
        own: bool,
        shared_event: &mut Option<u64>,
    ) -> (u64, Option<Box<DriverError>>) {
        let exact = match self.tracker().policy {
            EventPolicy::ForeignExact => !own,
            EventPolicy::Exact => true,
        };
        if !exact {
            return (stream.clock().now(), None);
        }
        if let Some(stamp) = *shared_event {
            return (stamp, None);
        }
        match stream.record(&self.tracker().counters) {
            Ok(covers) => {
                *shared_event = Some(covers);
                (covers, None)
            }
            // Without an event the first stream that needs this work records one at the tail.
            Err(error) => (stream.clock().now(), Some(Box::new(error))),
        }
    }

    /// Runs `work` while the block is pinned. A concurrent free retires the block, and the unpin completes that free.
    fn run_pinned(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        self.tracker().check_parts()?;
        let meta = self.tracker().table.find_by_id(block)?;
        self.publish_block(meta);
        let bits = generation_bits(block.generation);
        let is_pinned = meta.with_uses(|uses| {
            let is_live = inflate(meta, uses, bits);
            if is_live {
                uses.pin();
            }
            is_live
        });
        if !is_pinned {
            return Err(stale(block));
        }
        let unpin = Unpin { resource: self, meta, generation: block.generation };
        work();
        drop(unpin);
        Ok(())
    }

    fn record_use(&self, block: BlockId, stream: StreamId) -> ResourceResult<()> {
        let meta = self.tracker().table.find_by_id(block)?;
        let raw = self.tracker().stream(stream)?;
        if !meta.state.is_live(generation_bits(block.generation)) {
            return Err(stale(block));
        }
        self.publish_block(meta);
        let owner = meta.owner();
        let own = raw.clock().slot() == owner;
        let (stamp, failed) = self.stamp_finished(raw, own, &mut None);
        let live = meta.with_uses(|uses| {
            let live = inflate(meta, uses, generation_bits(block.generation));
            if live {
                uses.finished(owner, raw.clock().slot(), stamp, true, None);
                deflate_if_quiet(meta, uses);
            }
            live
        });
        if live { recorded(failed) } else { Err(stale(block)) }
    }
}

/// Unpins a block, even if the work panics.
struct Unpin<'a, R: UseTracking + ?Sized> {
    resource: &'a R,
    meta: &'a BlockMeta,
    generation: Generation,
}

impl<R: UseTracking + ?Sized> Drop for Unpin<'_, R> {
    fn drop(&mut self) {
        let Self { resource, meta, generation } = *self;
        let ended = meta.with_uses(|uses| {
            uses.unpin();
            deflate_if_quiet(meta, uses)
        });
        if ended == EndUse::FreeNow {
            // A reap reports a failed free.
            let _ = resource.free(generation, meta);
        }
    }
}

/// Whether such a use is open on another stream than the block's own: ids are issued again after 2^32 leases.
#[cold]
fn is_open_elsewhere(meta: &BlockMeta, finished: NamedUse) -> bool {
    meta.with_uses(|uses| uses.find_open(finished)).is_some_and(|slot| slot != meta.owner())
}

/// Converts the failure of a use's event. Boxed: the error is rare, and a box is one word.
#[inline(always)]
fn recorded(failed: Option<Box<DriverError>>) -> ResourceResult<()> {
    match failed {
        None => Ok(()),
        Some(error) => Err((*error).into()),
    }
}

#[cold]
fn not_open(block: BlockId, missing: NamedUse) -> ResourceError {
    let NamedUse { stream, access } = missing;
    let generation = block.generation;
    ResourceError::StreamMisuse(format!("no {access:?} use of {generation} is open on {stream}"))
}

#[cold]
fn stale(block: BlockId) -> ResourceError {
    ResourceError::UseAfterFree { generation: block.generation }
}

/// Implements the hooks of a resource by [`UseTracking`]. The resource has the fields `device` and `tracker`.
macro_rules! tracked_hooks {
    () => {
        fn record_block_use(
            &self,
            block: &DeviceBlock,
            use_stream: StreamId,
        ) -> ResourceResult<()> {
            self.record_use(BlockId::from_block(block), use_stream)
        }

        fn supports_block_use_tracking(&self) -> bool {
            true
        }

        #[inline]
        fn prepare_block_use(
            &self,
            block: BlockId,
            use_stream: StreamId,
            access: Access,
        ) -> ResourceResult<()> {
            self.prepare(block, use_stream, access)
        }

        #[inline]
        fn finish_block_use(
            &self,
            block: BlockId,
            use_stream: StreamId,
            access: Access,
        ) -> ResourceResult<()> {
            self.finish(block, use_stream, access)
        }

        fn finish_block_uses(
            &self,
            uses: &[(BlockId, Access)],
            use_stream: StreamId,
        ) -> ResourceResult<()> {
            self.finish_all(uses, use_stream)
        }

        fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
            self.run_pinned(block, work)
        }

        fn block_state(&self, block: BlockId) -> BlockState {
            self.tracker().table.state(block)
        }

        fn places_blocks(&self) -> bool {
            true
        }

        fn home(&self) -> Option<ResourceHome> {
            Some(ResourceHome::new(self.device.clone()).with_streams(self.tracker.streams.clone()))
        }
    };
}
pub(crate) use tracked_hooks;
