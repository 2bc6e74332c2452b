//! The hooks: uses are opened, ordered and remembered.

use std::sync::Arc;

use super::AsyncCudaResource;
use crate::device_runtime::ordering::EdgePolicy;
use crate::device_runtime::ordering::clock::ClockCell;
use crate::device_runtime::ordering::gate::Attempt;
use crate::device_runtime::ordering::record::{Record, tag_of};
use crate::device_runtime::resource::{Access, BlockId, ResourceError, ResourceResult, StreamId};
use crate::stream::RawStream;

/// How a use turned out to be when it was closed.
enum Closed {
    Open,
    /// It was the last one of a block that had been returned: free it now.
    Free,
}

impl AsyncCudaResource {
    /// The clock of the block's own stream, if `stream` is that one and may go without the lock.
    #[inline]
    fn own_clock(&self, record: &Record, stream: StreamId) -> Option<&ClockCell> {
        if record.stream_id() != stream.0 {
            return None;
        }
        self.device.clock_cells().get(record.clock_place()).map(|place| &**place)
    }

    #[inline]
    pub(super) fn prepare(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let record = self.table.find_id(block)?;
        // An id that was given back names no stream, so it must be out.
        if let Some(clock) = self.own_clock(record, stream)
            && clock.is_out_as(stream.0)
            && record.gate.open(tag_of(block.generation), access.writes()) == Attempt::Done
        {
            return Ok(());
        }
        self.prepare_locked(record, block, stream, access)
    }

    #[inline]
    pub(super) fn finish(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let record = self.table.find_id(block)?;
        if self.close_quickly(record, block, stream, access) {
            return Ok(());
        }
        self.finish_locked(record, block, access, stream, &mut None)
    }

    #[inline]
    fn close_quickly(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> bool {
        let Some(clock) = self.own_clock(record, stream) else { return false };
        let tag = tag_of(block.generation);
        record.gate.close(tag, access.writes(), clock.now()) == Attempt::Done
    }

    #[cold]
    #[inline(never)]
    fn prepare_locked(
        &self,
        record: &Record,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let stream = self.stream(stream)?;
        let raw = stream.raw();
        let mut needed = Vec::new();
        let number = {
            let mut uses = record.uses();
            if !record.gate.enter_slow(tag_of(block.generation)) {
                return Err(stale(block));
            }
            let (implied, number) = uses.open(&record.gate, &stream, access, &mut needed);
            self.counters.elided.fetch_add(implied, std::sync::atomic::Ordering::Relaxed);
            if needed.is_empty() {
                if access.writes() {
                    uses.prepared(number, raw.clock().snapshot());
                }
                return Ok(());
            }
            number
        };
        let waited = needed
            .iter()
            .try_for_each(|entry| raw.wait_for(&entry.stream, entry.stamp, &self.counters));
        let mut uses = record.uses();
        if let Err(error) = waited {
            uses.cancel(number);
            let free = self.settle_record(record, &mut uses);
            drop(uses);
            if matches!(free, Closed::Free) {
                // The block was returned meanwhile; its free is reported by a reap if it fails.
                let _ = self.free(block.generation, record);
            }
            return Err(error.into());
        }
        if access.writes() {
            uses.prepared(number, raw.clock().snapshot());
        }
        Ok(())
    }

    /// Closes uses of one launch: one event serves all that need one.
    #[inline(never)]
    pub(super) fn finish_all(
        &self,
        uses: &[(BlockId, Access)],
        stream: StreamId,
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut edge: Option<u64> = None;
        for &(block, access) in uses {
            let this = self.table.find_id(block).and_then(|record| {
                if self.close_quickly(record, block, stream, access) {
                    return Ok(());
                }
                self.finish_locked(record, block, access, stream, &mut edge)
            });
            outcome = outcome.and(this);
        }
        outcome
    }

    #[cold]
    #[inline(never)]
    fn finish_locked(
        &self,
        record: &Record,
        block: BlockId,
        access: Access,
        stream: StreamId,
        edge: &mut Option<u64>,
    ) -> ResourceResult<()> {
        self.check_parts()?;
        let own = record.stream_id() == stream.0;
        // Uses opened without the lock are the oldest, and superseded nothing.
        let raw = {
            let uses = record.uses();
            // Under the lock, so that a claim which went stale meanwhile closes nobody else's use.
            if record.generation() != block.generation {
                return Err(stale(block));
            }
            let home = || uses.home.as_ref().map(|home| Arc::clone(home.raw()));
            match own && record.gate.has_counted(access.writes()) {
                true => home(),
                false => uses.find_open(stream, access),
            }
        };
        let Some(raw) = raw else { return Err(not_open(block, stream, access)) };
        let (stamp, recorded) = self.edge(&raw, own, edge);
        let closed = {
            let mut uses = record.uses();
            if record.generation() != block.generation {
                return Err(stale(block));
            }
            let snapshot = if own && record.gate.close_counted(access.writes()) {
                None
            } else {
                match uses.close(stream, access) {
                    Some(snapshot) => snapshot,
                    None => return Err(not_open(block, stream, access)),
                }
            };
            uses.finished(&record.gate, &raw, stamp, access.writes(), snapshot.as_ref());
            self.settle_record(record, &mut uses)
        };
        match closed {
            Closed::Open => recorded,
            Closed::Free => recorded.and(self.free(block.generation, record)),
        }
    }

    /// The stamp of work that is queued on `stream`, with an event recorded for it where the policy says so.
    fn edge(
        &self,
        stream: &RawStream,
        own: bool,
        edge: &mut Option<u64>,
    ) -> (u64, ResourceResult<()>) {
        let exact = match self.policy {
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
        match stream.record(&self.counters) {
            Ok(recorded) => {
                *edge = Some(recorded.covers);
                (recorded.covers, Ok(()))
            }
            // Without an event whoever needs this work records the tail.
            Err(error) => (stream.clock().now(), Err(error.into())),
        }
    }

    pub(super) fn record_use(&self, block: BlockId, stream: StreamId) -> ResourceResult<()> {
        let record = self.table.find_id(block)?;
        let stream = self.stream(stream)?;
        if !record.gate.is_live(tag_of(block.generation)) {
            return Err(stale(block));
        }
        let own = record.stream_id() == stream.id().0;
        let (stamp, recorded) = self.edge(stream.raw(), own, &mut None);
        let mut uses = record.uses();
        if !record.gate.enter_slow(tag_of(block.generation)) {
            return Err(stale(block));
        }
        uses.finished(&record.gate, stream.raw(), stamp, true, None);
        self.settle_record(record, &mut uses);
        recorded
    }

    /// After a change under the lock: back to the quick way where only the own stream is left, and whether to free.
    fn settle_record(
        &self,
        record: &Record,
        uses: &mut crate::device_runtime::ordering::uses::Uses,
    ) -> Closed {
        if uses.free_on_close && !uses.has_open() && !record.gate.has_open() {
            uses.free_on_close = false;
            return Closed::Free;
        }
        if !uses.free_on_close && uses.is_quiet() {
            record.gate.leave_slow();
        }
        Closed::Open
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
