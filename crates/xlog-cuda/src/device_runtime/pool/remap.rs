//! Remaps completely free handles into one range for a request, before the pool grows.
//!
//! Remapping a handle costs about as much as creating one, whatever its size, and waits for no running work.
//! `Segments::plan` chooses the addresses where the fewest bytes are missing. Free memory there stays mapped; unmapped
//! addresses get handles that are free elsewhere, then fresh ones.
//!
//! Searches and remaps for requests below [`LARGE_REMAP`] cost credits. A pool starts with some, and growth earns more. A
//! program whose sizes never repeat then grows a little instead of searching at every request. While more than
//! 1/[`MUCH_FREE`] of the pool is free they need no credits, so the pool stays within 1 + 1/3 of the live bytes wherever free
//! memory can be remapped.
//!
//! Invariants:
//! - A handle of another stream moves only after the host has seen all work on it complete. `find_free` checks without locks;
//!   `remove_free_in` checks again under the lock of the arena.
//! - A handle of the requesting stream moves at any time, since the request follows its pending work. It stays
//!   mapped at the old address too until the host has seen that work complete (`unmap_stale`).
//! - `growing` is held, since the removed ranges belong to no arena.

use super::arena::{Arena, Suballocation};
use super::reserve::{Growth, is_full};
use super::segments::{FreeMemory, LastWork, Span, SpanRequest, coalesce};
use super::slow_path::SlowPath;
use super::steal::OwnedRange;
use super::tlsf::Range;
use super::trim::IdleMemory;
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::resource::ResourceResult;
use crate::stream::RawStream;

/// Requests from this size on may move any number of handles.
const VERY_LARGE: u64 = 256 << 20;
/// The maximum of handles that a request below [`VERY_LARGE`] moves, which takes about 2 ms, and of stale mappings that it unmaps.
const MAX_MOVED: usize = 32;
/// A request below [`LARGE_BLOCK`] extends a free range in place if the range has at least 1/MIN_EXTENDED of its bytes; a larger one
/// extends any range.
const MIN_EXTENDED: u64 = 4;
/// A larger request gets handles of its own.
const LARGE_BLOCK: u64 = 32 << 20;
/// A pool below this is small.
const SMALL_POOL: u64 = 64 << 20;
/// Ranges that a search visits for one credit.
const RANGES_PER_CREDIT: usize = 64;
/// Spans of several streams that one search moves to the shared free list.
const SPANS_PER_SEARCH: usize = 64;
/// Ranges for which a search that finds too little costs one more credit.
const RANGES_PER_FAILED_SEARCH: usize = 4;
/// A request of at least this size needs no credits: each remapped handle saves much memory.
const LARGE_REMAP: u64 = 128 << 20;
/// With more than 1/MUCH_FREE of the pool free, a remap needs no credits.
const MUCH_FREE: u64 = 4;
/// With less than 1/LITTLE_FREE of the pool free, a request of up to 1/SMALL_GROWTH of the pool moves at most
/// MAX_WHILE_LITTLE_FREE handles. Beyond that the pool grows: otherwise the next requests would move as many again.
const LITTLE_FREE: u64 = 10;
const SMALL_GROWTH: u64 = 64;
const MAX_WHILE_LITTLE_FREE: usize = 8;

/// Coalesced free memory for a remap, sorted by address.
#[derive(Debug, Default)]
struct FreeSpans {
    /// Without pending work.
    idle: IdleMemory,
    /// Of the requesting stream, with pending work.
    pending: Vec<Span>,
    /// The stamp that covers that work; 0 if there is none.
    stamp: u64,
}

/// What a search does with an arena that another thread is inside of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Busy {
    Skip,
    WaitFor,
}

impl SlowPath<'_> {
    /// Serves the request from idle memory of all arenas: from adjacent ranges of several streams, or from remapped handles.
    /// Fresh handles supply the missing bytes. Returns `None` if the pool should grow, also after a failure.
    pub(super) fn remap(&mut self) -> Option<Suballocation> {
        match self.remap_before_growth() {
            Ok(suballocation) => suballocation,
            Err(error) if is_full(&error) => None,
            Err(error) => {
                self.skipped.note::<()>(Err(error));
                None
            }
        }
    }

    fn remap_before_growth(&self) -> ResourceResult<Option<Suballocation>> {
        let (pool, reserve) = (self.pool, &self.pool.reserve);
        let granularity = reserve.segments.granularity();
        if !pool.config.reuse.opportunistic {
            return Ok(None);
        }
        let mut growth = reserve.growing();
        // Another thread of this stream may have grown meanwhile, or a remap may have left memory on the shared free list.
        if let Some(suballocation) = self.allocate_ready().or_else(|| self.allocate_shared_free()) {
            return Ok(Some(suballocation));
        }
        let can_move = reserve.segments.can_move();
        if !self.pay_credits(&mut growth, 1) {
            return Ok(None);
        }
        let found = self.find_free(Busy::Skip);
        pool.unmap_stale(self.max_moved());
        if self.size < LARGE_REMAP {
            growth.charge_search(found.len() / RANGES_PER_CREDIT);
        }
        let free = self.by_completion(found.iter().copied());
        let holding = self.spans_that_hold(&free.idle.spans);
        if !holding.is_empty() {
            let removed = self.remove_free_in(&found, &holding);
            self.put_back_free(&removed, &[]);
            return Ok(self.allocate_shared_free());
        }
        // One completely free handle holds such a request, so a remap cannot help.
        if self.size <= granularity || !can_move {
            return Ok(None);
        }
        let chosen = self.choose_remap(&free, &mut growth);
        let Some((request, uses)) = chosen else {
            // In a growing pool most searches find too little: with many ranges the charge makes them rare.
            growth.charge_search(found.len() / RANGES_PER_FAILED_SEARCH);
            return Ok(None);
        };
        let free = self.remove_free_in(&found, &coalesce(uses));
        let source = if free.pending.is_empty() { ServedBy::Completed } else { ServedBy::Own };
        self.remap_free(&free, request, source)
    }

    /// Chooses between a remap, growth behind a free range, and growth elsewhere (`None`). Returns the request and the free
    /// memory that it uses.
    fn choose_remap(
        &self,
        free: &FreeSpans,
        growth: &mut Growth,
    ) -> Option<(SpanRequest, Vec<Span>)> {
        let segments = &self.pool.reserve.segments;
        let moving = self.span_request(self.max_moved());
        let plan = segments.plan(self.free_memory(free), moving)?;
        let is_worth_it = plan.fresh <= self.size - self.minimum_free();
        if is_worth_it && !self.decline_once(plan.handles) && self.pay_credits(growth, plan.handles)
        {
            return Some((moving, plan.uses));
        }
        // The plan is where the fewest bytes are missing, so it would use a large enough free range.
        let minimum = if self.size >= LARGE_BLOCK { 1 } else { self.size / MIN_EXTENDED };
        if plan.stays < minimum {
            return None;
        }
        let extending = self.span_request(0);
        let plan = segments.plan(self.free_memory(free), extending)?;
        (plan.fresh <= self.size - minimum).then_some((extending, plan.uses))
    }

    /// Returns the free bytes that make a remap worthwhile: 1/16 of the request, 1/128 from 256 MiB. In a pool below 64 MiB,
    /// requests below 32 MiB need half: their free memory is mostly cached small blocks, and each remap would flush the magazine.
    fn minimum_free(&self) -> u64 {
        let share = match self.size {
            VERY_LARGE.. => 128,
            ..LARGE_BLOCK if self.pool.reserve.segments.reserved() < SMALL_POOL => 2,
            _ => 16,
        };
        self.size / share
    }

    /// Pays `cost` for a search or a remap; false if neither is allowed. Large requests need no credits. A pool of which much is free
    /// spends those that it has, because to ask how much is free costs more.
    fn pay_credits(&self, growth: &mut Growth, cost: usize) -> bool {
        self.size >= LARGE_REMAP || growth.pay_for_remap(cost) || self.has_much_free()
    }

    /// Declines a remap of this many handles, so that the pool grows, while little of it is free. Returns true at most once per
    /// request: if growth is then refused, the remap is tried.
    fn decline_once(&self, handles: usize) -> bool {
        let held = self.pool.reserve.segments.reserved();
        let prefers = handles > MAX_WHILE_LITTLE_FREE
            && !self.has_declined_remap.get()
            && self.size <= held / SMALL_GROWTH
            && self.may_grow()
            && self.pool.free_bytes() < held / LITTLE_FREE;
        self.has_declined_remap.set(self.has_declined_remap.get() || prefers);
        prefers
    }

    fn max_moved(&self) -> usize {
        if self.size >= VERY_LARGE { usize::MAX } else { MAX_MOVED }
    }

    fn free_memory<'a>(&self, free: &'a FreeSpans) -> FreeMemory<'a> {
        let last_work = LastWork { slot: self.owner.clock().slot(), stamp: free.stamp };
        FreeMemory { idle: &free.idle.spans, pending: &free.pending, last_work }
    }

    fn span_request(&self, max_moved: usize) -> SpanRequest {
        SpanRequest { bytes: self.size, align: self.align, max_moved }
    }

    /// Whether more than 1/[`MUCH_FREE`] of the pool is free, so that scans and searches need no credits.
    pub(super) fn has_much_free(&self) -> bool {
        let free = self.pool.free_bytes();
        free > self.pool.reserve.segments.reserved() / MUCH_FREE
    }

    /// Remaps any number of completely free handles, small ranges included. The last resort of a pool that cannot grow.
    pub(super) fn defragment(&self) -> ResourceResult<Option<Suballocation>> {
        let _growing = self.pool.reserve.growing();
        self.pool.unmap_stale(usize::MAX);
        let everywhere = [Span { ptr: 0, bytes: u64::MAX }];
        let free = self.remove_free_in(&self.find_free(Busy::WaitFor), &everywhere);
        if free.idle.spans.iter().any(|span| span.holds(self.size, self.align)) {
            self.put_back_free(&free, &[]);
            return Ok(self.allocate_shared_free());
        }
        match self.remap_free(&free, self.span_request(usize::MAX), ServedBy::Grown) {
            Err(error) if is_full(&error) => Ok(None),
            outcome => outcome,
        }
    }

    /// Remaps `free`, which belongs to no arena, into a range for the request.
    fn remap_free(
        &self,
        free: &FreeSpans,
        request: SpanRequest,
        source: ServedBy,
    ) -> ResourceResult<Option<Suballocation>> {
        let segments = &self.pool.reserve.segments;
        let memory = self.free_memory(free);
        let (span, gone, outcome) = segments.defragment(memory, request, self.stream);
        self.put_back_free(free, &gone);
        outcome?;
        let Some(span) = span else { return Ok(self.allocate_shared_free()) };
        // Its fresh handles, if it has any.
        self.has_grown.set(true);
        let range = Range { stamp: free.stamp, ..self.fresh(span) };
        Ok(self.insert_and_allocate(range, source))
    }

    /// Inserts what is left of `free`: idle memory into the shared free list, the stream's own into its arena.
    fn put_back_free(&self, free: &FreeSpans, gone: &[Span]) {
        self.pool.reserve.insert_idle(&free.idle, gone);
        for span in free.pending.iter().flat_map(|span| span.without(gone)) {
            let range = Range { ptr: span.ptr, bytes: span.bytes, stamp: free.stamp };
            self.arena.with(|arena| arena.insert(range));
        }
    }

    /// Divides free ranges into idle ones and those of this stream with pending work.
    fn by_completion(&self, found: impl Iterator<Item = OwnedRange>) -> FreeSpans {
        let own = Some(self.owner.clock().slot());
        let (mut idle, mut pending) = (Vec::with_capacity(found.size_hint().0), Vec::new());
        let mut stamp = 0;
        for part in found {
            if part.slot == own && !is_idle(&part.range, self.owner) {
                stamp = stamp.max(part.range.stamp);
                pending.push(part.range.into());
            } else {
                idle.push(part.range.into());
            }
        }
        let idle = IdleMemory { spans: coalesce(idle), unneeded: 0 };
        FreeSpans { idle, pending: coalesce(pending), stamp }
    }

    /// Returns the smallest spans that hold the request, by address: several, so that the next requests need no search.
    fn spans_that_hold(&self, idle: &[Span]) -> Vec<Span> {
        let holds = idle.iter().filter(|span| span.holds(self.size, self.align));
        let mut holding: Vec<Span> = holds.copied().collect();
        holding.sort_unstable_by_key(|span| span.bytes);
        holding.truncate(SPANS_PER_SEARCH);
        holding.sort_unstable_by_key(|span| span.ptr);
        holding
    }

    /// Returns the idle free ranges of all arenas and every free range of this stream, by arena; the shared free list is last.
    /// Small ranges are included, because they connect larger ones.
    fn find_free(&self, busy: Busy) -> Vec<OwnedRange> {
        let (pool, own) = (self.pool, self.owner.clock().slot());
        let mut found = Vec::new();
        let mut add = |slot, arena: &mut Arena| {
            let ranges = arena.tlsf.ranges();
            found.extend(ranges.map(|range| OwnedRange { range, slot: Some(slot) }));
        };
        match busy {
            Busy::Skip => pool.arenas.scan(add),
            Busy::WaitFor => {
                pool.arenas.iter().for_each(|(slot, lock)| lock.with(|arena| add(slot, arena)));
            }
        }
        let mut polled = None;
        found.retain(|part: &OwnedRange| {
            let stream = part.slot.and_then(|slot| pool.tracker.streams.at(slot));
            let Some(stream) = stream else { return false };
            if !is_idle(&part.range, stream) && polled != part.slot {
                polled = part.slot;
                stream.poll_or_mark_freed();
            }
            part.slot == Some(own) || is_idle(&part.range, stream)
        });
        let shared_free = pool.reserve.ranges().into_iter();
        found.extend(shared_free.map(|range| OwnedRange { range, slot: None }));
        found
    }

    /// Removes the parts of the found ranges that lie in `chosen` and are still free; parts of other streams must also be idle.
    /// `chosen` is sorted by address.
    fn remove_free_in(&self, found: &[OwnedRange], chosen: &[Span]) -> FreeSpans {
        let (pool, own) = (self.pool, self.owner.clock().slot());
        let part_of = |range: &Range| {
            let end = range.ptr + range.bytes;
            let first = chosen.partition_point(|span| span.end() <= range.ptr);
            let span = chosen.get(first).filter(|span| span.ptr < end)?;
            let ptr = span.ptr.max(range.ptr);
            Some(Range { ptr, bytes: span.end().min(end) - ptr, stamp: range.stamp })
        };
        let mut all: Vec<OwnedRange> = Vec::new();
        let mut unneeded = 0;
        for parts in found.chunk_by(|one, other| one.slot == other.slot) {
            let Some(minimum) = parts.iter().map(|part| part.range.bytes).min() else { continue };
            let Some(slot) = parts.first().and_then(|part| part.slot) else {
                let removed = pool.reserve.remove_if(minimum, &mut |range| part_of(range));
                unneeded += removed.unneeded;
                all.extend(
                    removed.ranges.into_iter().map(|range| OwnedRange { range, slot: None }),
                );
                continue;
            };
            let (Some(arena), Some(stream)) =
                (pool.arenas.get(slot), pool.tracker.streams.at(slot))
            else {
                continue;
            };
            if !parts.iter().any(|part| part_of(&part.range).is_some()) {
                continue;
            }
            let removed = arena.with(|arena| {
                let may_leave = |range: &Range| slot == own || is_idle(range, stream);
                let leave = &mut |range: &Range| part_of(range).filter(|_| may_leave(range));
                arena.tlsf.remove_if(minimum, leave)
            });
            let slot = Some(slot);
            unneeded += removed.unneeded;
            all.extend(removed.ranges.into_iter().map(|range| OwnedRange { range, slot }));
        }
        let mut free = self.by_completion(all.into_iter());
        free.idle.unneeded = unneeded;
        free
    }
}

/// Whether the host has seen all work on a free range of `stream` complete.
pub(super) fn is_idle(range: &Range, stream: &RawStream) -> bool {
    range.stamp == 0 || stream.clock().is_complete(range.stamp)
}
