//! Arena: memory of one stream, in a magazine of blocks ready to hand out and a TLSF of free ranges. [`Arenas`] has the
//! arenas of a pool, by the slot of the stream.
//!
//! Invariants:
//! - All memory here is free in the order of the arena's stream, so that stream reuses it at once.
//! - Another stream may take a range only if it is ordered after the range's stamp, or the host has seen that stamp
//!   complete.
//! - A block in the magazine keeps its node and its metadata; handing it out again changes only its generation.
//! - An arena is created at the first request of its stream and lives as long as the pool.
//! - [`Arenas::rebalance_magazines`] gives every magazine an equal share of the total; a busy arena may exceed a reduced share.
//! - [`Arenas::scan`] and [`Arenas::visit`] hold the locks of several arenas, taken in the order of the slots: one
//!   process-wide barrier for all of them. All other functions hold one lock at a time.
//!
//! An arena does not lock itself: its caller holds its [`Lock`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_driver::sync::Mutex;

use super::coalesce_queue::{self, CoalesceQueue};
use super::magazine::{MAX_CACHED, Magazine, class_of};
use super::remap::is_idle;
use super::tlsf::{CHUNK, Range, Removed, SMALL, Tlsf, TlsfAllocation};
use crate::device_runtime::logging::{ServedBy, note_path};
use crate::device_runtime::ordering::{BlockMemory, BlockMeta, BlockTable, Lock, Slab, Tracker};
use crate::device_runtime::resource::{Generation, ResourceError, ResourceResult};
use crate::stream::RawStream;

pub(super) const UNIT: u64 = 256;
/// A request of more than FLUSHING_BYTES flushes a magazine of more than MAX_BESIDE_LARGE bytes.
pub(super) const FLUSHING_BYTES: u64 = 64 << 20;
const MAX_BESIDE_LARGE: u64 = 8 << 20;
/// Slots that an arena keeps for its next blocks: the maximum, and the number that is allocated or released at a time.
const MAX_CACHED_SLOTS: usize = 1024;
const SLOT_BATCH: usize = 256;

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
    #[inline(always)]
    pub(super) fn memory(&self) -> BlockMemory {
        BlockMemory { ptr: self.ptr, bytes: self.bytes as usize, node: self.node }
    }
}

/// A block whose memory returns to its arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreedBlock<'a> {
    pub(super) slot: u32,
    pub(super) meta: &'a BlockMeta,
    pub(super) units: u32,
}

impl<'a> FreedBlock<'a> {
    /// Takes the size from the metadata.
    pub(super) fn of(generation: Generation, meta: &'a BlockMeta) -> Self {
        Self { slot: generation.slot(), meta, units: meta.units() }
    }
}

/// The slot of memory that has no metadata yet.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Counters of an arena. The number of blocks handed out and their bytes follow from these and from the TLSF.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArenaCounts {
    pub(super) deallocations: u64,
    /// Returned blocks that other streams still use.
    pub(super) retired: u64,
    /// Allocations that were taken back before their block was handed out.
    pub(super) undone: u64,
    pub(super) sources: [u64; ServedBy::COUNT],
}

impl ArenaCounts {
    pub(super) fn allocations(&self) -> u64 {
        self.sources.iter().sum::<u64>() - self.undone
    }
}

/// The memory of one stream, behind its lock.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub(super) tlsf: Tlsf,
    pub(super) magazine: Magazine,
    coalesce_queue: CoalesceQueue,
    /// The stamp of the last free, which covers the blocks in the magazine and the coalesce queue.
    last_free: u64,
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
            self.count(ServedBy::Magazine);
            return Some(Suballocation { ptr: meta.ptr(), bytes, node: meta.node(), slot });
        }
        self.flush_magazine_for(bytes, table);
        self.allocate_free(bytes, align, ServedBy::Own)
    }

    /// Flushes a magazine of many bytes before a large request, because cached blocks keep the free ranges beside them apart.
    pub(super) fn flush_magazine_for(&mut self, bytes: u64, table: &BlockTable) {
        if bytes > FLUSHING_BYTES && self.magazine.bytes() > MAX_BESIDE_LARGE {
            self.flush_magazine(table);
        }
    }

    #[inline(never)]
    pub(super) fn allocate_free(
        &mut self,
        bytes: u64,
        align: u64,
        source: ServedBy,
    ) -> Option<Suballocation> {
        let taken = if align > UNIT {
            self.tlsf.allocate(bytes, align)?
        } else {
            self.tlsf.allocate_units(bytes)?
        };
        Some(self.suballocated(taken, source))
    }

    /// Splits off a chunk for a small block, or joins free chunks for a large one; then allocates.
    pub(super) fn allocate_rechunked(
        &mut self,
        bytes: u64,
        align: u64,
        source: ServedBy,
    ) -> Option<Suballocation> {
        if bytes < SMALL {
            self.tlsf.split_chunk();
        } else if bytes > CHUNK {
            self.tlsf.coalesce_chunks();
        }
        self.allocate_free(bytes, align, source)
    }

    /// Allocates whole units from the TLSF without further alignment; declines if a small block needs a chunk.
    #[inline(always)]
    pub(super) fn allocate_units(&mut self, bytes: u64) -> Option<Suballocation> {
        let taken = self.tlsf.allocate_units(bytes)?;
        Some(self.suballocated(taken, ServedBy::Own))
    }

    #[inline(always)]
    fn suballocated(&mut self, taken: TlsfAllocation, source: ServedBy) -> Suballocation {
        let (ptr, bytes, node) = (taken.ptr, taken.bytes, taken.node);
        self.count(source);
        let slot = self.slots.pop().unwrap_or(NO_SLOT);
        Suballocation { ptr, bytes, node, slot }
    }

    #[inline]
    pub(super) fn count(&mut self, source: ServedBy) {
        note_path(source);
        self.counts.sources[source as usize] += 1;
    }

    pub(super) fn insert(&mut self, range: Range) {
        self.tlsf.insert_span(range, true);
    }

    /// Inserts memory as an allocated block.
    pub(super) fn insert_allocated(
        &mut self,
        range: Range,
        source: ServedBy,
    ) -> Option<Suballocation> {
        let Range { ptr, bytes, stamp } = range;
        let node = self.tlsf.insert_allocated(range, true)?;
        Some(self.suballocated(TlsfAllocation { node, ptr, bytes, stamp }, source))
    }

    /// Inserts memory and allocates from it in one step, so that no other thread takes it in between.
    pub(super) fn insert_and_allocate(
        &mut self,
        range: Range,
        bytes: u64,
        align: u64,
        source: ServedBy,
    ) -> Option<Suballocation> {
        // A chunk for small blocks is not joined with its neighbours.
        let joins = bytes >= SMALL || range.bytes != CHUNK;
        self.tlsf.insert_span(range, joins);
        self.allocate_free(bytes, align, source)
            .or_else(|| self.allocate_rechunked(bytes, align, source))
    }

    /// Frees a block of `units` whose metadata has ended: into the magazine, or towards the TLSF.
    #[inline(always)]
    pub(super) fn free(
        &mut self,
        freed: FreedBlock<'_>,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        self.last_free = stamp;
        if !self.magazine.push(freed.slot, freed.meta, freed.units, capacity) {
            self.free_uncached(freed, stamp, capacity, table);
        }
    }

    /// [`Arena::free`] of a block whose last work, at `stamp`, may be older than that of earlier frees.
    pub(super) fn free_since(
        &mut self,
        freed: FreedBlock<'_>,
        stamp: u64,
        capacity: u64,
        table: &BlockTable,
    ) {
        self.last_free = self.last_free.max(stamp);
        if self.magazine.push(freed.slot, freed.meta, freed.units, capacity) {
            return;
        }
        if CoalesceQueue::accepts(freed.units, capacity) {
            // The queue frees its oldest block with this stamp, and that block may have been freed after `stamp`.
            self.free_uncached(freed, self.last_free, capacity, table);
        } else {
            self.free_uncached(freed, stamp, capacity, table);
        }
    }

    /// Frees a block that the magazine refuses.
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

    /// Allocates a slot, and a batch for the next blocks; `None` if the table is full.
    #[cold]
    #[inline(never)]
    pub(super) fn fresh_slot(&mut self, table: &BlockTable) -> Option<u32> {
        table.allocate_slots(&mut self.slots, SLOT_BATCH);
        self.slots.pop().or_else(|| table.allocate_slot())
    }

    #[cold]
    #[inline(never)]
    fn free_slots(&mut self, table: &BlockTable) {
        // The most recently used slots are kept: their metadata is in the cache.
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

    /// Flushes the magazine and the coalesce queue into the TLSF.
    pub(super) fn flush(&mut self, table: &BlockTable) {
        self.coalesce_queue.drain(&mut self.tlsf, self.last_free);
        self.flush_magazine(table);
    }

    #[cold]
    #[inline(never)]
    fn flush_magazine(&mut self, table: &BlockTable) {
        let (tlsf, kept, stamp) = (&mut self.tlsf, &mut self.slots, self.last_free);
        let mut surplus = Vec::new();
        self.magazine.drain(table, |slot, meta| {
            tlsf.free(meta.node(), stamp);
            let to = if kept.len() < MAX_CACHED_SLOTS { &mut *kept } else { &mut surplus };
            to.push(slot);
        });
        if !surplus.is_empty() {
            table.free_slots(surplus);
        }
    }
}

const MAX_STREAMS: u32 = 1 << 14;

/// An arena on cache lines of its own, since threads mostly use different streams.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ArenaSlot {
    arena: Lock<Arena>,
    /// Whether the stream of this slot has requested memory.
    is_used: AtomicBool,
}

/// The bytes that all magazines together may hold, and the number of streams that share them.
#[derive(Debug, Default)]
struct MagazineShares {
    bytes: u64,
    streams: u32,
}

#[derive(Debug)]
pub(super) struct Arenas {
    /// Only a stream's first request pays for its arena.
    slots: Slab<ArenaSlot, 1>,
    /// The bytes that the magazine of each stream may hold.
    magazine_capacity: AtomicU64,
    shares: Mutex<MagazineShares>,
    /// Serializes scans: a second scan would find the arenas of the first one busy and skip them.
    scanning: Mutex<()>,
}

impl Arenas {
    pub(super) fn new() -> Self {
        Self {
            slots: Slab::new(MAX_STREAMS),
            magazine_capacity: AtomicU64::new(0),
            shares: Mutex::default(),
            scanning: Mutex::default(),
        }
    }

    /// Returns the arena of a slot if it exists.
    #[inline(always)]
    pub(super) fn get(&self, slot: u32) -> Option<&Lock<Arena>> {
        self.slots.get(slot).map(|entry| &entry.arena)
    }

    /// Returns the arena of a stream that has requested memory.
    #[inline]
    pub(super) fn used(&self, slot: u32) -> Option<&Lock<Arena>> {
        let entry = self.slots.get(slot)?;
        entry.is_used.load(Ordering::Acquire).then_some(&entry.arena)
    }

    pub(super) fn make(&self, slot: u32) -> ResourceResult<&Lock<Arena>> {
        let Some(entry) = self.slots.get_or_make(slot) else {
            return Err(ResourceError::StreamMisuse(format!(
                "a pool serves the first {MAX_STREAMS} streams of its stream pool"
            )));
        };
        entry.is_used.store(true, Ordering::Release);
        Ok(&entry.arena)
    }

    /// The arenas in use, with the slots of their streams.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Lock<Arena>)> {
        self.slots
            .iter()
            .filter(|(_, entry)| entry.is_used.load(Ordering::Acquire))
            .map(|(slot, entry)| (slot, &entry.arena))
    }

    /// The arenas in use, with their slots and streams.
    pub(super) fn with_streams<'a>(
        &'a self,
        tracker: &'a Tracker,
    ) -> impl Iterator<Item = (u32, &'a Lock<Arena>, &'a RawStream)> {
        self.iter().filter_map(|(slot, arena)| Some((slot, arena, &**tracker.streams.at(slot)?)))
    }

    /// Visits the arenas in use that no other thread is inside of. Their owners keep their bias. Arenas of this thread need
    /// no locked instruction.
    pub(super) fn scan(&self, mut body: impl FnMut(u32, &mut Arena)) {
        let (mut slots, mut foreign) = (Vec::new(), Vec::new());
        for (slot, arena) in self.iter() {
            match arena.enter() {
                Some(mut arena) => body(slot, &mut arena),
                None => {
                    slots.push(slot);
                    foreign.push(arena);
                }
            }
        }
        if foreign.is_empty() {
            return;
        }
        let _scanning = self.scanning.lock();
        let idle = slots.into_iter().zip(foreign).filter(|(_, arena)| !arena.is_busy());
        let (slots, arenas): (Vec<_>, Vec<_>) = idle.unzip();
        Lock::with_all(&arenas, |arenas| {
            slots.iter().zip(arenas).for_each(|(slot, arena)| body(*slot, arena));
        });
    }

    /// The bytes that the magazine of each stream may hold.
    #[inline(always)]
    pub(super) fn magazine_capacity(&self) -> u64 {
        self.magazine_capacity.load(Ordering::Relaxed)
    }

    /// Divides `maximum` bytes among the magazines, if that or the number of streams has changed enough.
    pub(super) fn rebalance_magazines(&self, maximum: u64, tracker: &Tracker) {
        let mut shares = self.shares.lock();
        let streams = self.iter().count() as u32;
        let shared = shares.bytes;
        if streams <= shares.streams && maximum <= shared + shared / 4 && maximum >= shared {
            return;
        }
        // In powers of two, because a smaller share scans every arena.
        let among = shares.streams.max(streams.next_power_of_two());
        *shares = MagazineShares { bytes: maximum, streams: among };
        // The coalesce queue gets its part of the share.
        let capacity =
            maximum / u64::from(among) / (coalesce_queue::PART + 1) * coalesce_queue::PART;
        if self.magazine_capacity.swap(capacity, Ordering::Relaxed) <= capacity {
            return;
        }
        // A busy arena keeps its surplus until requests use it.
        self.scan(|_, arena| {
            if arena.exceeds(capacity) {
                arena.flush(&tracker.table);
            }
        });
    }

    /// Flushes all magazines, before the caller polls which work has completed.
    pub(super) fn flush(&self, tracker: &Tracker) {
        for (_, arena, stream) in self.with_streams(tracker) {
            arena.with(|arena| {
                arena.flush(&tracker.table);
                // Frees that began before the stream's handle was handed out did not note their stamp.
                stream.note_free(arena.last_free);
            });
        }
    }

    /// Removes all free ranges without pending work.
    pub(super) fn remove_idle(&self, tracker: &Tracker) -> Removed {
        let mut all = Removed::default();
        for (_, arena, stream) in self.with_streams(tracker) {
            let leave = &mut |range: &Range| is_idle(range, stream).then_some(*range);
            let removed = arena.with(|arena| arena.tlsf.remove_if(0, leave));
            all.ranges.extend(removed.ranges);
            all.unneeded += removed.unneeded;
        }
        all
    }

    /// Visits all arenas in use at one instant. It waits for those that other threads are inside of.
    pub(super) fn visit(&self, mut body: impl FnMut(&mut Arena)) {
        let arenas: Vec<&Lock<Arena>> = self.iter().map(|(_, arena)| arena).collect();
        Lock::with_all(&arenas, |arenas| arenas.iter_mut().for_each(|arena| body(arena)));
    }

    /// The counters of all arenas and the bytes handed out, at one instant.
    pub(super) fn counts(&self) -> (ArenaCounts, u64) {
        let (mut sum, mut outstanding) = (ArenaCounts::default(), 0);
        self.visit(|arena| {
            sum.add(&arena.counts);
            outstanding += arena.outstanding();
        });
        (sum, outstanding)
    }
}
