//! Uses are opened, ordered and remembered: the hooks of every resource that tracks them.
//!
//! A resource has a [`Tracker`] and says how a block is freed; what it gets for that is [`Tracks`].

use super::EdgePolicy;
use super::gate::Attempt;
use super::handover;
use super::locked::{Closed, close_foreign, close_own, enter_slow, open, settle};
use super::primitive::{Me, as_me, with_as};
use super::record::{Record, tag_of, use_name};
use super::tally::Edges;
use super::tracker::Tracker;
use super::uses::Opened;
use crate::device_runtime::resource::{
    Access, BlockId, Generation, ResourceError, ResourceResult, StreamId,
};
use crate::stream::RawStream;

/// What a resource with a tracker can do.
pub(crate) trait Tracks {
    fn tracker(&self) -> &Tracker;

    /// Frees a retired block on which no use is open.
    fn free(&self, generation: Generation, record: &Record) -> ResourceResult<()>;

    /// Makes sure that a block is not at home any more; see [`BlockGate`](super::gate::BlockGate).
    fn take_from_home(&self, _record: &Record) {}

    /// Opens a use. What is not the common case is done elsewhere, so that this stays short.
    #[inline]
    fn prepare(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(record) = self.tracker().table.look(block) else {
            return self.tracker().refuse(block);
        };
        // An id that was given back names no stream, so it must be out.
        if record.gate.is_biased()
            && let Some(clock) = self.tracker().own_clock(record, stream)
            && clock.is_out_as(stream.0)
            && record.gate.open_mine(tag_of(block.generation), access.writes())
        {
            return Ok(());
        }
        // What is slow has left home.
        if record.gate.is_slow() {
            return self.prepare_handover(record, block, stream, access);
        }
        self.prepare_shared(record, block, stream, access)
    }

    #[inline(never)]
    fn prepare_shared(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if let Some(clock) = self.tracker().own_clock(record, stream)
            && clock.is_out_as(stream.0)
        {
            self.take_from_home(record);
            match record.gate.open(tag_of(block.generation), access.writes()) {
                Attempt::Done => return Ok(()),
                Attempt::Again => {
                    // This thread keeps using the block: from now on without locked instructions.
                    record.with_uses(|_| record.gate.grant(tag_of(block.generation)));
                    return Ok(());
                }
                Attempt::Slow | Attempt::Stale => {}
            }
        }
        self.prepare_locked(record, block, stream, access)
    }

    /// The short way from one stream to another, or the long one.
    #[inline(never)]
    fn prepare_handover(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match handover::prepare(self, record, block.generation, stream, access) {
            Ok(()) => Ok(()),
            Err(None) => self.prepare_locked(record, block, stream, access),
            Err(Some(error)) => self.cancel(record, block, None, (stream, access), (*error).into()),
        }
    }

    /// The same for the end of a use of another stream.
    #[inline(never)]
    fn finish_handover(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match handover::finish(self, record, block.generation, stream, access) {
            (Closed::Open, _) => Ok(()),
            (Closed::Not, None) => self.finish_foreign(record, block, access, stream, &mut None),
            (Closed::Not, Some(error)) => {
                self.finish_unrecorded(record, block, (stream, access), (*error).into())
            }
            (closed, _) => self.conclude(closed, record, block, (stream, access), Ok(())),
        }
    }

    /// Closes a use of another stream for which no event could be recorded: whoever needs its work records the tail.
    #[cold]
    fn finish_unrecorded(
        &self,
        record: &Record,
        block: BlockId,
        (stream, access): (StreamId, Access),
        error: ResourceError,
    ) -> ResourceResult<()> {
        let Some(raw) = self.tracker().streams.raw(stream) else {
            // It was given back meanwhile.
            return self.finish_locked(record, block, access, stream, &mut None);
        };
        let of = (stream, raw.clock().key(), raw.clock().now());
        let closed =
            record.with_uses(|uses| close_foreign(record, uses, block.generation, of, access));
        self.conclude(closed, record, block, (stream, access), Err(error))
    }

    /// Closes a use; as short as [`Tracks::prepare`].
    #[inline]
    fn finish(&self, block: BlockId, stream: StreamId, access: Access) -> ResourceResult<()> {
        let Some(record) = self.tracker().table.look(block) else {
            return self.tracker().refuse(block);
        };
        let Some(clock) = self.tracker().own_clock(record, stream) else {
            return self.finish_handover(record, block, stream, access);
        };
        let stamp = clock.now();
        let tag = tag_of(block.generation);
        if record.gate.is_biased()
            && record.gate.close_mine(tag, access.writes(), stamp, &record.stamps)
        {
            return Ok(());
        }
        if record.gate.is_slow() && self.tracker().policy != EdgePolicy::Exact {
            return self.finish_own(record, block, access, stamp);
        }
        self.finish_shared(record, block, stream, access)
    }

    #[inline(never)]
    fn finish_shared(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if self.close_quickly(record, block, stream, access) {
            return Ok(());
        }
        match self.tracker().own_clock(record, stream) {
            Some(clock) if self.tracker().policy != EdgePolicy::Exact => {
                self.finish_own(record, block, access, clock.now())
            }
            _ => self.finish_locked(record, block, access, stream, &mut None),
        }
    }

    /// Closes a use on the block's own stream, for which no event is recorded; `stamp` was read when its work was queued.
    #[inline(never)]
    fn finish_own(
        &self,
        record: &Record,
        block: BlockId,
        access: Access,
        stamp: u64,
    ) -> ResourceResult<()> {
        let generation = block.generation;
        // If that is another one by now, so is the generation.
        let stream = StreamId(record.stream_id());
        let far = record.far();
        let closed = as_me(|me| {
            with_as!(far.shared(), me, |shared| {
                close_own((record, far), shared, generation, (stream, stamp), access)
            })
        });
        match closed {
            Closed::Open => Ok(()),
            closed => self.conclude(closed, record, block, (stream, access), Ok(())),
        }
    }

    /// What follows the closing of a use that does not merely leave the block as it is; `recorded` is how its event went.
    #[inline(never)]
    fn conclude(
        &self,
        closed: Closed,
        record: &Record,
        block: BlockId,
        (stream, access): (StreamId, Access),
        recorded: ResourceResult<()>,
    ) -> ResourceResult<()> {
        match closed {
            Closed::Open | Closed::Not => recorded,
            Closed::Free => recorded.and(self.free(block.generation, record)),
            Closed::Stale => Err(stale(block)),
            Closed::Missing => Err(not_open(block, stream, access)),
        }
    }

    #[inline]
    fn close_quickly(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> bool {
        let Some(clock) = self.tracker().own_clock(record, stream) else { return false };
        let tag = tag_of(block.generation);
        record.gate.close(tag, access.writes(), clock.now(), &record.stamps) == Attempt::Done
    }

    #[inline(never)]
    fn prepare_locked(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let raw = self.tracker().stream(stream)?;
        self.take_from_home(record);
        self.prepare_on(record, block, (stream, raw), access)
    }

    /// Opens a use of a block that is not at home, and has its stream wait for what it must follow.
    #[inline(always)]
    fn prepare_on(
        &self,
        record: &Record,
        block: BlockId,
        (stream, raw): (StreamId, &RawStream),
        access: Access,
    ) -> ResourceResult<()> {
        let tracker = self.tracker();
        let tag = tag_of(block.generation);
        as_me(|me| {
            let opened = with_as!(record.shared(), me, |shared| {
                let uses = shared.all(record);
                open(record, uses, tag, &tracker.streams, (stream, raw), access)
            });
            let Opened { number, implied, needed } = match opened {
                Ok(opened) => opened,
                Err(true) => return Ok(()),
                Err(false) => return Err(stale(block)),
            };
            if implied == 0 && needed.is_empty() {
                return Ok(());
            }
            let mut edges = Edges { elided: implied, ..Edges::default() };
            let followed = needed.try_each(|(other, stamp)| {
                // What failed is worth an allocation; what did not is one word.
                raw.follow(me, other, *stamp, &mut edges).map_err(Box::new)
            });
            tracker.tally.count_as(me, |counts| counts.add_edges(edges));
            match followed {
                Ok(()) => Ok(()),
                Err(error) => {
                    let error = (*error).into();
                    self.cancel(record, block, Some(number), (stream, access), error)
                }
            }
        })
    }

    /// The waits of a use could not be queued: it is as if it had never been opened.
    #[cold]
    fn cancel(
        &self,
        record: &Record,
        block: BlockId,
        number: Option<u64>,
        (stream, access): (StreamId, Access),
        error: ResourceError,
    ) -> ResourceResult<()> {
        let closed = record.with_uses(|uses| {
            match number {
                Some(number) => uses.cancel(number),
                None => uses.cancel_newest(stream, access),
            }
            record.set_closed(use_name(stream, access.writes()));
            settle(record, uses)
        });
        if matches!(closed, Closed::Free) {
            // The block was returned meanwhile; its free is reported by a reap if it fails.
            let _ = self.free(block.generation, record);
        }
        Err(error)
    }

    /// Closes uses of one launch: one event serves all that need one.
    #[inline(never)]
    fn finish_all(&self, uses: &[(BlockId, Access)], stream: StreamId) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut edge: Option<u64> = None;
        for &(block, access) in uses {
            let this = self.tracker().table.find_id(block).and_then(|record| {
                if self.close_quickly(record, block, stream, access) {
                    return Ok(());
                }
                match self.tracker().own_clock(record, stream) {
                    Some(clock) if self.tracker().policy != EdgePolicy::Exact => {
                        self.finish_own(record, block, access, clock.now())
                    }
                    _ => self.finish_foreign(record, block, access, stream, &mut edge),
                }
            });
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Closes a use on another stream that is still out.
    #[inline(never)]
    fn finish_foreign(
        &self,
        record: &Record,
        block: BlockId,
        access: Access,
        stream: StreamId,
        edge: &mut Option<u64>,
    ) -> ResourceResult<()> {
        self.tracker().check_parts()?;
        let home = record.home();
        let Some(raw) = self.tracker().streams.raw(stream).filter(|raw| raw.clock().key() != home)
        else {
            return self.finish_locked(record, block, access, stream, edge);
        };
        // Without such a use there is nothing to record for. If the hint is wrong, because another thread closes it now, there is
        // an event more, which covers what it says and no more.
        if !record.has_opened(use_name(stream, access.writes())) {
            return self.finish_locked(record, block, access, stream, edge);
        }
        as_me(|me| {
            let (stamp, recorded) = self.edge(me, raw, false, edge);
            let generation = block.generation;
            let place = raw.clock().key();
            let closed = with_as!(record.shared(), me, |shared| {
                close_foreign(
                    record,
                    shared.all(record),
                    generation,
                    (stream, place, stamp),
                    access,
                )
            });
            match closed {
                Closed::Open => recorded,
                closed => self.conclude(closed, record, block, (stream, access), recorded),
            }
        })
    }

    #[inline(never)]
    fn finish_locked(
        &self,
        record: &Record,
        block: BlockId,
        access: Access,
        stream: StreamId,
        edge: &mut Option<u64>,
    ) -> ResourceResult<()> {
        self.tracker().check_parts()?;
        let home = record.home();
        // Uses that were opened without the lock do not come here: they are of the own stream, and of no exact policy.
        let place = record.with_uses(|uses| {
            // Under the lock, so that a claim which went stale meanwhile closes nobody else's use.
            if record.generation() != block.generation {
                return Err(stale(block));
            }
            Ok(uses.find_open(stream, access))
        })?;
        let Some(raw) = place.and_then(|place| self.tracker().streams.at(place)) else {
            return Err(not_open(block, stream, access));
        };
        let own = raw.clock().key() == home;
        let (stamp, recorded) = as_me(|me| self.edge(me, raw, own, edge));
        let closed = record.with_uses(|uses| {
            if record.generation() != block.generation {
                return Closed::Stale;
            }
            let followed = uses.close(stream, access);
            if followed.is_none() {
                return Closed::Missing;
            }
            record.set_closed(use_name(stream, access.writes()));
            uses.finished(home, raw.clock().key(), stamp, access.writes(), followed);
            settle(record, uses)
        });
        self.conclude(closed, record, block, (stream, access), recorded)
    }

    /// The stamp of work that is queued on `stream`, with an event recorded for it where the policy says so.
    #[inline(always)]
    fn edge(
        &self,
        me: Me<'_>,
        stream: &RawStream,
        own: bool,
        edge: &mut Option<u64>,
    ) -> (u64, ResourceResult<()>) {
        let exact = match self.tracker().policy {
            EdgePolicy::ForeignExact => !own,
            EdgePolicy::Exact => true,
            EdgePolicy::Lazy => false,
        };
        if !exact {
            return (stream.clock().now(), Ok(()));
        }
        if let Some(stamp) = *edge {
            return (stamp, Ok(()));
        }
        match stream.record_as(me, &self.tracker().tally) {
            Ok(covers) => {
                *edge = Some(covers);
                (covers, Ok(()))
            }
            // Without an event whoever needs this work records the tail.
            Err(error) => (stream.clock().now(), Err(error.into())),
        }
    }

    fn record_use(&self, block: BlockId, stream: StreamId) -> ResourceResult<()> {
        let record = self.tracker().table.find_id(block)?;
        let raw = self.tracker().stream(stream)?;
        if !record.gate.is_live(tag_of(block.generation)) {
            return Err(stale(block));
        }
        self.take_from_home(record);
        let home = record.home();
        let own = raw.clock().key() == home;
        let (stamp, recorded) = as_me(|me| self.edge(me, raw, own, &mut None));
        let live = record.with_uses(|uses| {
            let live = enter_slow(record, uses, tag_of(block.generation));
            if live {
                uses.finished(home, raw.clock().key(), stamp, true, None);
                settle(record, uses);
            }
            live
        });
        if live { recorded } else { Err(stale(block)) }
    }
}

#[cold]
fn not_open(block: BlockId, stream: StreamId, access: Access) -> ResourceError {
    let generation = block.generation;
    ResourceError::StreamMisuse(format!("no {access:?} use of {generation} is open on {stream}"))
}

#[cold]
fn stale(block: BlockId) -> ResourceError {
    ResourceError::UseAfterFree { generation: block.generation }
}

/// The hooks of a resource that has what [`Tracks`] asks for.
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
