//! Memory of one stream: a magazine of blocks ready to hand out, and a TLSF of free ranges.
//!
//! Invariants:
//! - Everything here is free in the order of the arena's stream, so that stream reuses it at once.
//! - Another stream may take a range only if it is ordered after the range's stamp, or the host has seen that stamp
//!   complete.
//! - A block in the magazine keeps its node and its metadata; handing it out again changes only its generation.
//!
//! The arena does not lock: its owner holds the lock of the shard that contains it.

use super::coalesce_queue::{self, CoalesceQueue};
use super::magazine::{MAX_CACHED, Magazine, class_of};
use super::tlsf::{Range, Tlsf, TlsfAllocation};
use crate::device_runtime::logging::{ServedBy, note_path};
use crate::device_runtime::ordering::block::block_meta::{BlockMemory, BlockMeta, BlockTable};
use crate::device_runtime::resource::Generation;

pub(super) const UNIT: u64 = 256;
/// Slots that an arena keeps for its next blocks: the maximum, and the number that is allocated or released at a time.
const MAX_CACHED_SLOTS: usize = 1024;
const SLOT_BATCH: usize = 256;

/// The source of the memory that served a request.
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
    /// The word for this source in a log.
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

/// How often each source served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SourceCounts(pub(super) [u64; 6]);

/// Memory that is allocated in the TLSF of its arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suballocation {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    pub(super) node: u32,
    /// The slot of its metadata, or [`NO_SLOT`].
    pub(super) slot: u32,
}

impl Suballocation {
    /// Its memory, for the block that begins there.
    #[inline(always)]
    pub(super) fn memory(&self) -> BlockMemory {
        BlockMemory { ptr: self.ptr, bytes: self.bytes as usize, node: self.node }
    }
}

/// A block whose metadata has ended, and whose memory returns to its arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreedBlock<'a> {
    pub(super) slot: u32,
    pub(super) meta: &'a BlockMeta,
    pub(super) units: u32,
}

impl<'a> FreedBlock<'a> {
    /// A block, with the size that its metadata has.
    pub(super) fn of(generation: Generation, meta: &'a BlockMeta) -> Self {
        Self { slot: generation.slot(), meta, units: meta.units() }
    }
}

/// The slot of memory that has none yet.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Counters of an arena. The number of blocks handed out and their bytes follow from these and from the TLSF.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArenaCounts {
    pub(super) deallocations: u64,
    /// Returned blocks that other streams still use.
    pub(super) retired: u64,
    /// Allocations that were taken back before their block was handed out.
    pub(super) undone: u64,
    pub(super) sources: SourceCounts,
}

impl ArenaCounts {
    /// The number of blocks handed out.
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
    /// Free slots for the next blocks.
    slots: Vec<u32>,
    pub(super) counts: ArenaCounts,
}

impl Arena {
    /// Bytes of live and retired blocks.
    pub(super) fn outstanding(&self) -> u64 {
        self.tlsf.allocated_bytes() - self.cached_bytes()
    }

    /// Bytes of free blocks that are not coalesced yet.
    pub(super) fn cached_bytes(&self) -> u64 {
        self.magazine.bytes() + self.coalesce_queue.bytes()
    }

    /// Bytes that the stream can reuse.
    pub(super) fn free_bytes(&self) -> u64 {
        self.tlsf.free_bytes() + self.cached_bytes()
    }

    /// Whether the magazine or the coalesce queue holds more than `capacity` allows.
    pub(super) fn exceeds(&self, capacity: u64) -> bool {
        self.magazine.bytes() > capacity
            || self.coalesce_queue.bytes() > capacity / coalesce_queue::PART
    }

    /// Allocates exactly `bytes`, a whole class, from the magazine or the TLSF.
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

    /// Allocates whole units from the TLSF without further alignment.
    #[inline(always)]
    pub(super) fn allocate_units(&mut self, bytes: u64) -> Option<Suballocation> {
        let taken = self.tlsf.allocate_units(bytes)?;
        Some(self.suballocated(taken, Source::Own))
    }

    #[inline(always)]
    fn suballocated(&mut self, taken: TlsfAllocation, source: Source) -> Suballocation {
        let (ptr, bytes, node) = (taken.ptr, taken.bytes, taken.node);
        self.count(source);
        let slot = self.slots.pop().unwrap_or(NO_SLOT);
        Suballocation { ptr, bytes, node, slot }
    }

    #[inline]
    pub(super) fn count(&mut self, source: Source) {
        note_path(source.logged());
        self.counts.sources.0[source as usize] += 1;
    }

    /// Inserts free memory.
    pub(super) fn insert(&mut self, range: Range) {
        self.tlsf.insert_span(range, true);
    }

    /// Inserts memory and allocates from it in one step, so that no other thread takes it in between.
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

    /// Frees a block of `units` whose metadata has ended: into the magazine, or else towards the TLSF.
    #[inline(always)]
    pub(super) fn free(
        &mut self,
        freed: FreedBlock<'_>,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        if !self.magazine.push(freed.slot, freed.meta, freed.units, capacity) {
            self.free_uncached(freed, stamp, capacity, table);
        }
    }

    /// Frees a block for which the magazine has no capacity.
    #[inline(never)]
    fn free_uncached(
        &mut self,
        freed: FreedBlock<'_>,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        let FreedBlock { slot, meta, units } = freed;
        meta.forget();
        if self.slots.len() >= MAX_CACHED_SLOTS {
            self.free_slots(table);
        }
        if CoalesceQueue::accepts(units, capacity) {
            let bytes = u64::from(units) * UNIT;
            self.coalesce_queue.push(meta.node(), bytes, &mut self.tlsf, stamp);
        } else {
            self.tlsf.free(meta.node(), stamp);
        }
        self.slots.push(slot);
    }

    /// Allocates a slot, and some more for the next blocks; `None` if the table is full.
    #[cold]
    #[inline(never)]
    pub(super) fn fresh_slot(&mut self, table: &BlockTable) -> Option<u32> {
        table.allocate_slots(&mut self.slots, SLOT_BATCH);
        self.slots.pop().or_else(|| table.allocate_slot())
    }

    #[cold]
    #[inline(never)]
    fn free_slots(&mut self, table: &BlockTable) {
        // The slots used last stay: their metadata is in the cache.
        table.free_slots(self.slots.drain(..MAX_CACHED_SLOTS - SLOT_BATCH));
    }

    /// Takes back an allocation whose block was not handed out.
    #[cold]
    pub(super) fn undo(&mut self, suballocation: Suballocation, stamp: u64) {
        self.counts.undone += 1;
        self.tlsf.free(suballocation.node, stamp);
        if suballocation.slot != NO_SLOT {
            self.slots.push(suballocation.slot);
        }
    }

    /// Flushes the magazine and the coalesce queue into the TLSF; surplus slots are added to `slots`.
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
