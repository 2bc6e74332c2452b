//! Remaps free handles of all streams to one range of addresses.
//!
//! A remap costs about what growth costs, per handle and whatever its size, and waits for no running work. So a request
//! remaps before the pool grows, if the free handles are at least half of what it needs. Searches, and remaps of many
//! small handles, are paid with credits that growth earns: a program whose sizes never settle then grows a little instead
//! of searching for ever.
//!
//! Invariants:
//! - A handle is unmapped only after the host has seen all work on it complete. `find_idle` checks without locks;
//!   `remove_idle_in` checks again while it holds the lock of the arena.
//! - `growing` is held, since the ranges belong to no arena meanwhile.

use super::arena::{Source, Suballocation};
use super::reserve::is_full;
use super::segments::Span;
use super::slow_path::SlowPath;
use super::steal::OwnedRange;
use super::tlsf::Range;
use super::trim::coalesce;
use crate::device_runtime::resource::ResourceResult;
use crate::stream::RawStream;

/// The maximum of handles that one request remaps, unless it is large: they take about 2 ms.
const MAX_REMAPPED: usize = 32;
/// Ranges that a search looks at for one credit.
const RANGES_PER_CREDIT: usize = 64;
/// Credits that a search costs in addition if it finds too little.
const VAIN_SEARCH: usize = 64;
/// A request of this size may remap any number of handles.
const UNBOUNDED: u64 = 256 << 20;

impl SlowPath<'_> {
    /// Serves the request from free memory without pending work, wherever it is: from adjacent ranges of several
    /// streams, or from completely free handles. Fresh memory adds what these lack. After a failure the pool grows.
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
        if !growth.pay_for_remap(self.size, 1) {
            return Ok(None);
        }
        let found = self.find_idle();
        growth.charge_search(self.size, found.len() / RANGES_PER_CREDIT);
        let idle = coalesce(found.iter().map(|part| part.range.into()).collect());
        if let Some(part) = self.smallest_that_holds(&idle) {
            let removed = self.remove_idle_in(&found, &[part]);
            reserve.insert_idle(removed, &[]);
            return Ok(self.allocate_shared_free());
        }
        // A free handle holds any smaller request where it is.
        if self.size <= granularity || !can_move {
            return Ok(None);
        }
        let chosen = reserve.segments.choose(&idle, self.needed());
        let bytes: u64 = chosen.iter().map(|span| span.bytes).sum();
        if bytes < self.size / 2 {
            // While a pool grows, most searches are in vain: they are made for a part of the requests.
            growth.charge_search(self.size, VAIN_SEARCH);
            return Ok(None);
        }
        if self.size < UNBOUNDED && chosen.len() > MAX_REMAPPED
            || !growth.pay_for_remap(self.size, chosen.len())
        {
            return Ok(None);
        }
        let idle = self.remove_idle_in(&found, &coalesce(chosen));
        self.remap_idle(idle, Source::Completed)
    }

    /// Remaps completely free handles, small ranges included. The last resort of a pool that cannot grow.
    pub(super) fn defragment(&self) -> ResourceResult<Option<Suballocation>> {
        let reserve = &self.pool.reserve;
        let _growing = reserve.growing();
        let idle = self.pool.remove_idle();
        if idle.iter().any(|span| span.holds(self.size, self.align)) {
            reserve.insert_idle(idle, &[]);
            return Ok(self.allocate_shared_free());
        }
        self.remap_idle(idle, Source::Grown)
    }

    /// Remaps handles inside `idle`, which belongs to no arena. What is left goes to the shared free list.
    fn remap_idle(&self, idle: Vec<Span>, source: Source) -> ResourceResult<Option<Suballocation>> {
        let reserve = &self.pool.reserve;
        let (span, gone, outcome) = reserve.segments.defragment(&idle, self.needed(), self.stream);
        reserve.insert_idle(idle, &gone);
        outcome?;
        Ok(match span {
            Some(span) => self.insert_and_allocate(self.fresh(span), source),
            None => self.allocate_shared_free(),
        })
    }

    /// The part of the smallest span that holds the request: what it needs, and up to what is worth moving.
    fn smallest_that_holds(&self, idle: &[Span]) -> Option<Span> {
        let holds = idle.iter().filter(|span| span.holds(self.size, self.align));
        let smallest = holds.min_by_key(|span| span.bytes)?;
        let skipped = smallest.ptr.next_multiple_of(self.align) - smallest.ptr;
        let worth_moving = self.size.max(self.pool.reserve.transfer_bytes());
        Some(Span { bytes: (skipped + worth_moving).min(smallest.bytes), ..*smallest })
    }

    /// Finds the free ranges without pending work, by arena; the shared free list is last. Small ones too: between large
    /// ones they would break a run.
    fn find_idle(&self) -> Vec<OwnedRange> {
        let pool = self.pool;
        let mut found = Vec::new();
        pool.arenas.scan(|slot, arena| {
            let ranges = arena.tlsf.ranges();
            found.extend(ranges.map(|range| OwnedRange { range, slot: Some(slot) }));
        });
        let mut polled = None;
        found.retain(|part: &OwnedRange| {
            let stream = part.slot.and_then(|slot| pool.tracker.streams.at(slot));
            let Some(stream) = stream else { return false };
            if !is_idle(&part.range, stream) && polled != part.slot {
                polled = part.slot;
                stream.poll_tail();
            }
            is_idle(&part.range, stream)
        });
        let shared_free = pool.reserve.ranges().into_iter();
        found.extend(shared_free.map(|range| OwnedRange { range, slot: None }));
        found
    }

    /// Removes `chosen`, sorted by address, from the ranges that were found, as far as these are still free without
    /// pending work.
    fn remove_idle_in(&self, found: &[OwnedRange], chosen: &[Span]) -> Vec<Span> {
        let pool = self.pool;
        let part_of = |range: &Range| {
            let end = range.ptr + range.bytes;
            let first = chosen.partition_point(|span| span.end() <= range.ptr);
            let span = chosen.get(first).filter(|span| span.ptr < end)?;
            let ptr = span.ptr.max(range.ptr);
            Some(Range { ptr, bytes: span.end().min(end) - ptr, stamp: range.stamp })
        };
        let mut removed: Vec<Range> = Vec::new();
        for parts in found.chunk_by(|one, other| one.slot == other.slot) {
            let Some(minimum) = parts.iter().map(|part| part.range.bytes).min() else { continue };
            let Some(slot) = parts.first().and_then(|part| part.slot) else {
                removed.extend(pool.reserve.remove_if(minimum, &mut |range| part_of(range)));
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
            removed.extend(arena.with(|arena| {
                let leave = &mut |range: &Range| part_of(range).filter(|_| is_idle(range, stream));
                arena.tlsf.remove_if(minimum, leave)
            }));
        }
        coalesce(removed.into_iter().map(Span::from).collect())
    }
}

/// Whether the host has seen all work on a free range of `stream` complete.
fn is_idle(range: &Range, stream: &RawStream) -> bool {
    range.stamp == 0 || stream.clock().is_complete(range.stamp)
}
