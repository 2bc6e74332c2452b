//! The memory of one stream: blocks ready to hand out in front, the index of its free memory behind.
//!
//! What lies here is free in the order of its stream: that stream takes it at once, another one only once it follows, or the host
//! has seen, the stamp that stands at the memory. Blocks in the magazine keep their place in the index and their record, so
//! handing one out again changes nothing but its generation.

use xlog_trace::ServedBy;

use super::coalesce_queue::{self, CoalesceQueue};
use super::magazine::{MAX_CACHED, Magazine, class_of};
use super::tlsf::{Range, Tlsf, TlsfAllocation};
use crate::device_runtime::logging::note_path;
use crate::device_runtime::ordering::block_meta::{BlockMeta, BlockTable};
use crate::device_runtime::resource::Generation;

pub(super) const UNIT: u64 = 256;
/// Records without a block that are kept, and how many are kept when some are given away, or are taken when there are none.
const MAX_CACHED_SLOTS: usize = 1024;
const SLOT_BATCH: usize = 256;

/// What served a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Source {
    Magazine,
    Own,
    StolenOrdered,
    Completed,
    Grown,
    StolenWithWait,
}

impl Source {
    /// The name of the path in a log.
    #[inline]
    pub(super) fn logged(self) -> ServedBy {
        match self {
            Self::Magazine => ServedBy::Magazine,
            Self::Own => ServedBy::Own,
            Self::StolenOrdered => ServedBy::Covered,
            Self::Completed => ServedBy::Completed,
            Self::Grown => ServedBy::Grown,
            Self::StolenWithWait => ServedBy::Waited,
        }
    }
}

/// How often each path served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SourceCounts(pub(super) [u64; 6]);

impl SourceCounts {
    #[inline]
    pub(super) fn count(&mut self, source: Source) {
        self.0[source as usize] += 1;
    }
}

/// A piece of memory that the index knows as taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suballocation {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    pub(super) node: u32,
    /// The record it has, or [`NO_SLOT`].
    pub(super) slot: u32,
}

impl Suballocation {
    /// The memory of a retired block.
    #[inline(always)]
    pub(super) fn of(generation: Generation, meta: &BlockMeta) -> Self {
        Self {
            ptr: meta.ptr(),
            bytes: meta.bytes() as u64,
            node: meta.node(),
            slot: generation.slot(),
        }
    }
}

/// A piece without a record.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// What was counted. How many blocks were handed out, and how many bytes are, follows from this and from the index.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArenaCounts {
    pub(super) deallocations: u64,
    /// Blocks that were returned while other streams used them, and are not free yet.
    pub(super) retired: u64,
    /// Blocks that were taken and not handed out, after all.
    pub(super) undone: u64,
    pub(super) sources: SourceCounts,
}

impl ArenaCounts {
    /// Blocks that were handed out.
    pub(super) fn allocations(&self) -> u64 {
        self.sources.0.iter().sum::<u64>() - self.undone
    }
}

/// The memory of one stream, behind its lock.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub(super) tlsf: Tlsf,
    pub(super) magazine: Magazine,
    coalesce_queue: CoalesceQueue,
    /// Records without a block, for the next ones.
    slots: Vec<u32>,
    pub(super) counts: ArenaCounts,
}

impl Arena {
    /// Bytes of live blocks, and of retired ones.
    pub(super) fn outstanding(&self) -> u64 {
        self.tlsf.allocated_bytes() - self.ready_bytes()
    }

    /// Bytes of blocks that are free and not merged.
    pub(super) fn ready_bytes(&self) -> u64 {
        self.magazine.bytes() + self.coalesce_queue.bytes()
    }

    /// True when there is more in the magazine, or beside it, than may be now.
    pub(super) fn exceeds(&self, capacity: u64) -> bool {
        self.magazine.bytes() > capacity
            || self.coalesce_queue.bytes() > capacity / coalesce_queue::PART
    }

    /// Memory of exactly `bytes`, whole classes, with what is at hand.
    #[inline]
    pub(super) fn allocate(
        &mut self,
        bytes: u64,
        align: u64,
        table: &BlockTable,
    ) -> Option<Suballocation> {
        let class = class_of(bytes);
        if bytes <= MAX_CACHED
            && let Some((slot, meta)) = self.magazine.pop(class, align, table)
        {
            self.count(Source::Magazine);
            return Some(Suballocation { ptr: meta.ptr(), bytes, node: meta.node(), slot });
        }
        self.allocate_free(bytes, align, Source::Own)
    }

    #[inline(never)]
    pub(super) fn allocate_free(
        &mut self,
        bytes: u64,
        align: u64,
        source: Source,
    ) -> Option<Suballocation> {
        let taken = self.tlsf.allocate(bytes, align)?;
        Some(self.suballocated(taken, source))
    }

    /// The same for whole units, and no alignment beyond that; mostly whole classes, unless it is `ANY`.
    #[inline(always)]
    pub(super) fn allocate_units<const ANY: bool>(&mut self, bytes: u64) -> Option<Suballocation> {
        let taken = self.tlsf.allocate_units::<ANY>(bytes)?;
        Some(self.suballocated(taken, Source::Own))
    }

    #[inline(always)]
    fn suballocated(&mut self, taken: TlsfAllocation, source: Source) -> Suballocation {
        let (ptr, bytes, node) = (taken.ptr, taken.bytes, taken.node);
        self.count(source);
        let slot = self.slots.pop().unwrap_or(NO_SLOT);
        Suballocation { ptr, bytes, node, slot }
    }

    /// The place that the next block gets.
    #[inline(always)]
    pub(super) fn next_slot(&self) -> Option<u32> {
        self.slots.last().copied()
    }

    #[inline]
    pub(super) fn count(&mut self, source: Source) {
        note_path(source.logged());
        self.counts.sources.count(source);
    }

    /// Adds memory.
    pub(super) fn insert(&mut self, range: Range) {
        self.tlsf.insert_span(range, true);
    }

    /// Adds memory and takes from it at once, so that nobody else gets it in between.
    pub(super) fn insert_and_allocate(
        &mut self,
        range: Range,
        bytes: u64,
        align: u64,
        source: Source,
    ) -> Option<Suballocation> {
        self.tlsf.insert_span(range, true);
        self.allocate_free(bytes, align, source)
    }

    /// Takes a freed block in, whose record has ended.
    #[inline(never)]
    pub(super) fn free(
        &mut self,
        suballocation: Suballocation,
        meta: &BlockMeta,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        if !self.magazine.push(suballocation.slot, (meta, meta.units()), capacity) {
            if CoalesceQueue::accepts(meta.units(), capacity) {
                self.coalesce_later(suballocation.slot, meta, stamp, table);
            } else {
                self.coalesce_now(suballocation.slot, meta, stamp, table);
            }
        }
    }

    /// What the magazine has no room for, and is merged at once.
    #[inline(always)]
    pub(super) fn coalesce_now(
        &mut self,
        slot: u32,
        meta: &BlockMeta,
        stamp: u64,
        table: &BlockTable,
    ) {
        self.bound_slots(table);
        self.tlsf.free(meta.node(), stamp);
        self.slots.push(slot);
    }

    /// What [`CoalesceQueue::accepts`], and is merged a few blocks later.
    #[inline(always)]
    pub(super) fn coalesce_later(
        &mut self,
        slot: u32,
        meta: &BlockMeta,
        stamp: u64,
        table: &BlockTable,
    ) {
        self.bound_slots(table);
        let bytes = u64::from(meta.units()) * UNIT;
        self.coalesce_queue.push((meta.node(), bytes), &mut self.tlsf, stamp);
        self.slots.push(slot);
    }

    /// A place for a record, and some more for the next ones; `None` when there are too many blocks.
    #[cold]
    #[inline(never)]
    pub(super) fn fresh_slot(&mut self, table: &BlockTable) -> Option<u32> {
        table.allocate_slots(&mut self.slots, SLOT_BATCH);
        self.slots.pop().or_else(|| table.allocate_slot())
    }

    /// Leaves no more places for records than may be kept, and room for another one.
    #[inline(always)]
    fn bound_slots(&mut self, table: &BlockTable) {
        if self.slots.len() >= MAX_CACHED_SLOTS {
            self.free_slots(table);
        }
    }

    #[cold]
    #[inline(never)]
    fn free_slots(&mut self, table: &BlockTable) {
        // Those that were used last stay: they are in the cache.
        table.free_slots(self.slots.drain(..MAX_CACHED_SLOTS - SLOT_BATCH));
    }

    /// A block that was counted as handed out was not, after all.
    #[cold]
    pub(super) fn undo(&mut self, suballocation: Suballocation, stamp: u64) {
        self.counts.undone += 1;
        self.tlsf.free(suballocation.node, stamp);
        if suballocation.slot != NO_SLOT {
            self.slots.push(suballocation.slot);
        }
    }

    /// Empties the magazine into the index; the places of records that are too many are added to `slots`.
    pub(super) fn flush(&mut self, stamp: u64, table: &BlockTable, slots: &mut Vec<u32>) {
        let (tlsf, kept) = (&mut self.tlsf, &mut self.slots);
        self.coalesce_queue.drain(tlsf, stamp);
        self.magazine.drain(table, |slot, meta| {
            tlsf.free(meta.node(), stamp);
            let to = if kept.len() < MAX_CACHED_SLOTS { &mut *kept } else { &mut *slots };
            to.push(slot);
        });
    }
}
