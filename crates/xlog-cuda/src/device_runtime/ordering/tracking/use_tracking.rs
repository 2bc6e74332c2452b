//! Hooks of a resource that tracks uses: they open, order and close uses.
//!
//! A resource provides its [`Tracker`] and how it frees a block; [`UseTracking`] provides the hooks.

use super::striped_counters::WaitCounts;
use super::tracker::Tracker;
use super::use_slow_path::{
    BeginUse, EndUse, close_foreign, close_own, deflate_if_quiet, inflate, open,
};
use super::wait_fast_path::{self, FastFinish, FastPrepare};
use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::block::state_word::Attempt;
use crate::device_runtime::ordering::block::uses::{NamedUse, Opened};
use crate::device_runtime::resource::{
    Access, BlockId, Generation, ResourceError, ResourceResult, StreamId,
};
use crate::stream::RawStream;

/// Use tracking of a resource with a tracker.
pub(crate) trait UseTracking {
    fn tracker(&self) -> &Tracker;

    /// Frees a retired block on which no use is open.
    fn free(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()>;

    /// Makes an unshared block shared; see [`StateWord`](crate::device_runtime::ordering::block::state_word::StateWord).
    fn publish_block(&self, _record: &BlockMeta) {}

    /// Opens a use. Only the common case is inline.
    #[inline]
    fn prepare(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(meta) = self.tracker().table.lookup(block) else {
            return self.tracker().refuse(block);
        };
        // A released id names no stream, so the stream must be leased under it.
        if meta.state.is_biased()
            && let Some(clock) = self.tracker().own_header(meta, stream)
            && clock.is_leased_as(stream.0)
            && meta.state.open_biased(generation_bits(block.generation), access.writes())
        {
            return Ok(());
        }
        // An inflated block is never unshared.
        if meta.state.is_inflated() {
            return self.prepare_inflated(meta, block, stream, access);
        }
        self.prepare_shared(meta, block, stream, access)
    }

    #[inline(never)]
    fn prepare_shared(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if let Some(clock) = self.tracker().own_header(meta, stream)
            && clock.is_leased_as(stream.0)
        {
            self.publish_block(meta);
            match meta.state.open(generation_bits(block.generation), access.writes()) {
                Attempt::Done => return Ok(()),
                Attempt::DoneBiasable => {
                    // This thread keeps using the block: bias it, to avoid locked instructions.
                    meta.with_uses(|_| {
                        meta.state.bias_to_current(generation_bits(block.generation))
                    });
                    return Ok(());
                }
                Attempt::NeedsLock | Attempt::Stale => {}
            }
        }
        self.prepare_locked(meta, block, stream, access)
    }

    /// Opens a use of an inflated block: on the fast path, or else under the lock.
    #[inline(never)]
    fn prepare_inflated(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match wait_fast_path::prepare(self, meta, block.generation, stream, access) {
            FastPrepare::Opened => Ok(()),
            FastPrepare::Declined => self.prepare_locked(meta, block, stream, access),
            FastPrepare::WaitFailed(error) => {
                self.cancel(meta, block, None, NamedUse { stream, access }, (*error).into())
            }
        }
    }

    /// Closes a use on another stream: on the fast path, or else under the lock.
    #[inline(never)]
    fn finish_foreign_fast(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match wait_fast_path::finish(self, meta, block.generation, stream, access) {
            FastFinish::Ended(EndUse::Live) => Ok(()),
            FastFinish::Declined => self.finish_foreign(meta, block, access, stream, &mut None),
            FastFinish::NotRecorded(error) => {
                self.finish_unrecorded(meta, block, NamedUse { stream, access }, (*error).into())
            }
            FastFinish::Ended(closed) => {
                self.conclude(closed, meta, block, NamedUse { stream, access }, Ok(()))
            }
        }
    }

    /// Closes a use on another stream after no event could be recorded. The first stream that needs its work records
    /// the tail.
    #[cold]
    fn finish_unrecorded(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        finished: NamedUse,
        error: ResourceError,
    ) -> ResourceResult<()> {
        let NamedUse { stream, access } = finished;
        let Some(raw) = self.tracker().streams.raw(stream) else {
            // The stream was released meanwhile.
            return self.finish_locked(meta, block, access, stream, &mut None);
        };
        let (slot, stamp) = (raw.clock().slot(), raw.clock().now());
        let closed = meta
            .with_uses(|uses| close_foreign(meta, uses, block.generation, finished, slot, stamp));
        self.conclude(closed, meta, block, finished, Err(error))
    }

    /// Closes a use. Only the common case is inline.
    #[inline]
    fn finish(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(meta) = self.tracker().table.lookup(block) else {
            return self.tracker().refuse(block);
        };
        let Some(clock) = self.tracker().own_header(meta, stream) else {
            return self.finish_foreign_fast(meta, block, stream, access);
        };
        let stamp = clock.now();
        let bits = generation_bits(block.generation);
        if meta.state.is_biased()
            && meta.state.close_biased(bits, access.writes(), stamp, &meta.stamps)
        {
            return Ok(());
        }
        if meta.state.is_inflated() && self.tracker().policy != EventPolicy::Exact {
            return self.finish_own(meta, block, access, stamp);
        }
        self.finish_shared(meta, block, stream, access)
    }

    #[inline(never)]
    fn finish_shared(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if self.close_fast(meta, block, stream, access) {
            return Ok(());
        }
        match self.tracker().own_header(meta, stream) {
            Some(clock) if self.tracker().policy != EventPolicy::Exact => {
                self.finish_own(meta, block, access, clock.now())
            }
            _ => self.finish_locked(meta, block, access, stream, &mut None),
        }
    }

    /// Closes a use on the block's own stream, for which no event is recorded. `stamp` was read when its work was
    /// queued.
    #[inline(never)]
    fn finish_own(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        access: Access,
        stamp: u64,
    ) -> ResourceResult<()> {
        let generation = block.generation;
        // If the slot holds another block by now, the generation differs too.
        let finished = NamedUse { stream: StreamId(meta.stream_id()), access };
        let shared_state = meta.shared_state();
        let closed = shared_state.use_state().with(|use_state| {
            close_own(meta, shared_state, use_state, generation, finished, stamp)
        });
        match closed {
            EndUse::Live => Ok(()),
            closed => self.conclude(closed, meta, block, finished, Ok(())),
        }
    }

    /// Concludes a closed use that does not leave the block as it is. `recorded` is the outcome of its event.
    #[inline(never)]
    fn conclude(
        &self,
        closed: EndUse,
        meta: &BlockMeta,
        block: BlockId,
        finished: NamedUse,
        recorded: ResourceResult<()>,
    ) -> ResourceResult<()> {
        match closed {
            EndUse::Live => recorded,
            EndUse::FreeNow => recorded.and(self.free(block.generation, meta)),
            EndUse::Stale => Err(stale(block)),
            EndUse::Missing => Err(not_open(block, finished)),
        }
    }

    #[inline]
    fn close_fast(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> bool {
        let Some(clock) = self.tracker().own_header(meta, stream) else { return false };
        let bits = generation_bits(block.generation);
        meta.state.close(bits, access.writes(), clock.now(), &meta.stamps) == Attempt::Done
    }

    #[inline(never)]
    fn prepare_locked(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let raw = self.tracker().stream(stream)?;
        self.publish_block(meta);
        self.prepare_on(meta, block, raw, NamedUse { stream, access })
    }

    /// Opens a use of a shared block, and makes its stream wait for what it depends on.
    #[inline(always)]
    fn prepare_on(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        raw: &RawStream,
        opened: NamedUse,
    ) -> ResourceResult<()> {
        let tracker = self.tracker();
        let bits = generation_bits(block.generation);
        let begun = meta.use_state().with(|use_state| {
            let uses = use_state.uses(meta);
            open(meta, uses, bits, &tracker.streams, raw, opened)
        });
        let Opened { number, implied, needed } = match begun {
            BeginUse::Opened(opened) => opened,
            BeginUse::OpenedUnlocked => return Ok(()),
            BeginUse::Stale => return Err(stale(block)),
        };
        if implied == 0 && needed.is_empty() {
            return Ok(());
        }
        let mut waits = WaitCounts { elided: implied, ..WaitCounts::default() };
        let waited = needed.iter().try_for_each(|(other, stamp)| {
            // Boxed: the error is rare, and a box keeps the result at one word.
            raw.wait_on(other, *stamp, &mut waits).map_err(Box::new)
        });
        tracker.counters.count(|counts| counts.add_waits(waits));
        match waited {
            Ok(()) => Ok(()),
            Err(error) => {
                let error = (*error).into();
                self.cancel(meta, block, Some(number), opened, error)
            }
        }
    }

    /// Cancels a use whose waits could not be queued.
    #[cold]
    fn cancel(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        number: Option<u64>,
        opened: NamedUse,
        error: ResourceError,
    ) -> ResourceResult<()> {
        let closed = meta.with_uses(|uses| {
            match number {
                Some(number) => uses.cancel(number),
                None => uses.cancel_newest(opened.stream, opened.access),
            }
            meta.set_closed(opened.name());
            deflate_if_quiet(meta, uses)
        });
        if matches!(closed, EndUse::FreeNow) {
            // The block was returned meanwhile; a reap reports a failed free.
            let _ = self.free(block.generation, meta);
        }
        Err(error)
    }

    /// Closes the uses of one launch. One event serves all that need one.
    #[inline(never)]
    fn finish_all(&self, uses: &[(BlockId, Access)], stream: StreamId) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut shared_event: Option<u64> = None;
        for &(block, access) in uses {
            let this = self.tracker().table.find_by_id(block).and_then(|meta| {
                if self.close_fast(meta, block, stream, access) {
                    return Ok(());
                }
                match self.tracker().own_header(meta, stream) {
                    Some(clock) if self.tracker().policy != EventPolicy::Exact => {
                        self.finish_own(meta, block, access, clock.now())
                    }
                    _ => self.finish_foreign(meta, block, access, stream, &mut shared_event),
                }
            });
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Closes a use on another stream that is still leased.
    #[inline(never)]
    fn finish_foreign(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        access: Access,
        stream: StreamId,
        shared_event: &mut Option<u64>,
    ) -> ResourceResult<()> {
        self.tracker().check_parts()?;
        let owner = meta.owner();
        let Some(raw) =
            self.tracker().streams.raw(stream).filter(|raw| raw.clock().slot() != owner)
        else {
            return self.finish_locked(meta, block, access, stream, shared_event);
        };
        // Without such an open use there is nothing to record for. The hint may be outdated if another thread closes
        // the use now; then the event is superfluous, but covers no more than it claims.
        let finished = NamedUse { stream, access };
        if !meta.has_opened(finished.name()) {
            return self.finish_locked(meta, block, access, stream, shared_event);
        }
        let (stamp, recorded) = self.stamp_finished(raw, false, shared_event);
        let generation = block.generation;
        let slot = raw.clock().slot();
        let closed = meta.use_state().with(|use_state| {
            close_foreign(meta, use_state.uses(meta), generation, finished, slot, stamp)
        });
        match closed {
            EndUse::Live => recorded,
            closed => self.conclude(closed, meta, block, finished, recorded),
        }
    }

    #[inline(never)]
    fn finish_locked(
        &self,
        meta: &BlockMeta,
        block: BlockId,
        access: Access,
        stream: StreamId,
        shared_event: &mut Option<u64>,
    ) -> ResourceResult<()> {
        self.tracker().check_parts()?;
        let owner = meta.owner();
        // Uses opened without the lock do not come here: they are on the own stream, and the policy is not exact.
        let slot = meta.with_uses(|uses| {
            // Checked under the lock, so that a stale claim closes no use of another block.
            if meta.generation() != block.generation {
                return Err(stale(block));
            }
            Ok(uses.find_open(stream, access))
        })?;
        let Some(raw) = slot.and_then(|slot| self.tracker().streams.at(slot)) else {
            return Err(not_open(block, NamedUse { stream, access }));
        };
        let own = raw.clock().slot() == owner;
        let (stamp, recorded) = self.stamp_finished(raw, own, shared_event);
        let closed = meta.with_uses(|uses| {
            if meta.generation() != block.generation {
                return EndUse::Stale;
            }
            let ordered_after = uses.close(stream, access);
            if ordered_after.is_none() {
                return EndUse::Missing;
            }
            meta.set_closed(NamedUse { stream, access }.name());
            uses.finished(owner, raw.clock().slot(), stamp, access.writes(), ordered_after);
            deflate_if_quiet(meta, uses)
        });
        self.conclude(closed, meta, block, NamedUse { stream, access }, recorded)
    }

    /// The stamp of work that is queued on `stream`, with an event recorded for it if the policy says so.
    #[inline(always)]
    fn stamp_finished(
        &self,
        stream: &RawStream,
        own: bool,
        shared_event: &mut Option<u64>,
    ) -> (u64, ResourceResult<()>) {
        let exact = match self.tracker().policy {
            EventPolicy::ForeignExact => !own,
            EventPolicy::Exact => true,
            EventPolicy::Lazy => false,
        };
        if !exact {
            return (stream.clock().now(), Ok(()));
        }
        if let Some(stamp) = *shared_event {
            return (stamp, Ok(()));
        }
        match stream.record(&self.tracker().counters) {
            Ok(covers) => {
                *shared_event = Some(covers);
                (covers, Ok(()))
            }
            // Without an event the first stream that needs this work records the tail.
            Err(error) => (stream.clock().now(), Err(error.into())),
        }
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
        let (stamp, recorded) = self.stamp_finished(raw, own, &mut None);
        let live = meta.with_uses(|uses| {
            let live = inflate(meta, uses, generation_bits(block.generation));
            if live {
                uses.finished(owner, raw.clock().slot(), stamp, true, None);
                deflate_if_quiet(meta, uses);
            }
            live
        });
        if live { recorded } else { Err(stale(block)) }
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

/// The hooks of a resource that implements [`UseTracking`].
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

        fn block_state(&self, block: BlockId) -> BlockState {
            self.tracker().table.state(block)
        }
    };
}
pub(crate) use tracked_hooks;
