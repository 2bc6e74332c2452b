//! Steals memory from the arenas of other streams.
//!
//! Invariant: a stolen range gets a stamp of its new stream, unless its last work is known to be complete.
//! Happens-before is transitive, so a third stream that waits for the new owner also waits for the old one.

use xlog_driver::DriverError;

use super::arena::{Arena, Suballocation};
use super::segments::Span;
use super::slow_path::SlowPath;
use super::tlsf::{Range, Tlsf};
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::ordering::Lock;
use crate::device_runtime::resource::ResourceResult;
use crate::stream::RawStream;

/// Smaller ranges are never coalesced across streams.
const MIN_COALESCED: u64 = 64 << 10;

/// A free range, and the slot of its stream; no slot for a range of the shared free list.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnedRange {
    pub(super) range: Range,
    pub(super) slot: Option<u32>,
}

impl SlowPath<'_> {
    /// Steals from the arenas of other streams: ranges that need no wait, or any range `with_wait`.
    pub(super) fn steal(&mut self, with_wait: bool) -> ResourceResult<Option<Suballocation>> {
        let (pool, own) = (self.pool, self.owner.clock().slot());
        let mut known = None;
        let mut candidates = Vec::new();
        pool.arenas.scan(|slot, arena| {
            // A magazine is flushed only for a request that may wait.
            let may_hold = match with_wait {
                true => arena.free_bytes() >= self.size,
                false => arena.tlsf.may_hold(self.size),
            };
            let Some(stream) = pool.tracker.streams.at(slot).filter(|_| slot != own && may_hold)
            else {
                return;
            };
            if known.is_none() {
                // A range that is known to be complete or ordered needs no driver call.
                known = self.take_from(&mut arena.tlsf, stream, false);
            }
            candidates.push(slot);
        });
        if let Some((range, source)) = known
            && let Some(taken) = self.insert_stolen(range, source)
        {
            return Ok(Some(taken));
        }
        for slot in candidates {
            let (Some(other), Some(stream)) =
                (pool.arenas.get(slot), pool.tracker.streams.at(slot))
            else {
                continue;
            };
            let Some((range, source)) = self.steal_from(other, stream, with_wait) else {
                continue;
            };
            if source == ServedBy::Waited
                && let Err(error) =
                    self.owner.wait_on_clock(stream, range.stamp, &pool.tracker.counters)
            {
                other.with(|arena| arena.insert(range));
                self.skipped.unless_lost(Err(error))?;
                continue;
            }
            let taken = self.insert_stolen(range, source);
            if taken.is_some() {
                return Ok(taken);
            }
        }
        Ok(None)
    }

    fn insert_stolen(&self, range: Range, source: ServedBy) -> Option<Suballocation> {
        let stamp = if source == ServedBy::Completed { 0 } else { self.owner.stamp_free() };
        self.insert_and_allocate(Range { stamp, ..range }, source)
    }

    /// Removes a range from the arena of another stream; polls that stream first if reuse is opportunistic.
    fn steal_from(
        &self,
        other: &Lock<Arena>,
        stream: &RawStream,
        with_wait: bool,
    ) -> Option<(Range, ServedBy)> {
        let pool = self.pool;
        if pool.config.reuse.opportunistic {
            stream.poll_or_mark_freed();
        }
        let found = other.try_with(|arena| {
            let found = self.take_from(&mut arena.tlsf, stream, with_wait);
            if found.is_some() || !with_wait {
                return found;
            }
            // The magazine of the other stream is flushed last.
            arena.flush(&pool.tracker.table);
            self.take_from(&mut arena.tlsf, stream, with_wait)
        });
        found.flatten()
    }

    /// Removes a range from the free ranges of `stream`. Without a wait, its last work has completed or happens-before this
    /// request.
    fn take_from(
        &self,
        tlsf: &mut Tlsf,
        stream: &RawStream,
        with_wait: bool,
    ) -> Option<(Range, ServedBy)> {
        let reuse = self.pool.config.reuse;
        let (clock, here) = (stream.clock(), self.owner.clock());
        let source_of = |stamp: u64| {
            if stamp == 0 || reuse.opportunistic && clock.is_complete(stamp) {
                Some(ServedBy::Completed)
            } else if reuse.follow_dependencies && here.covers(clock.slot(), stamp) {
                Some(ServedBy::Covered)
            } else {
                with_wait.then_some(ServedBy::Waited)
            }
        };
        let usable = &mut |stamp| source_of(stamp).is_some();
        let reserve = &self.pool.reserve;
        let taken = reserve.allocate_worth_moving(tlsf, self.size, self.align, usable)?;
        let range = tlsf.remove_allocated(taken.node)?;
        Some((range, source_of(range.stamp)?))
    }

    /// Coalesces adjacent free ranges, of several streams and of the shared free list, into one that holds the request.
    /// The requesting stream waits for the last work on each. Ranges of a stream that cannot be waited for are left
    /// out.
    ///
    /// A last resort: it scans every arena. Only the ranges that the request needs change their stream. `growing` is held,
    /// since the removed ranges belong to no arena.
    pub(super) fn coalesce_across_streams(&mut self) -> ResourceResult<Option<Suballocation>> {
        let (pool, owner) = (self.pool, self.owner);
        let _growing = pool.reserve.growing();
        let minimum = (self.size / 32).max(MIN_COALESCED);
        let shared_free = pool.reserve.remove(minimum).ranges.into_iter();
        let mut parts: Vec<OwnedRange> =
            shared_free.map(|range| OwnedRange { range, slot: None }).collect();
        pool.arenas.scan(|slot, arena| {
            let removed = arena.tlsf.remove_if(minimum, &mut |range| Some(*range));
            parts.extend(
                removed.ranges.into_iter().map(|range| OwnedRange { range, slot: Some(slot) }),
            );
        });
        parts.sort_unstable_by_key(|part| part.range.ptr);
        let mut left = Vec::new();
        let mut outcome = Ok(());
        let taken = loop {
            let chosen = run_that_holds(&parts, self.size, self.align);
            let Err((stream, error)) = self.wait_on_ranges(&parts[chosen.clone()]) else {
                break chosen;
            };
            outcome = self.skipped.unless_lost(Err(error));
            if outcome.is_err() {
                break 0..0;
            }
            left.extend(parts.extract_if(.., |part| part.slot == Some(stream)));
        };
        left.extend(parts[..taken.start].iter().chain(&parts[taken.end..]));
        self.put_back(left);
        let Some((first, last)) = parts[taken.clone()].first().zip(parts[taken].last()) else {
            return outcome.map(|()| None);
        };
        let (ptr, end) = (first.range.ptr, last.range.ptr + last.range.bytes);
        Ok(self.arena.with(|arena| {
            // Read inside the lock and after the waits, so that the stamp covers all of them.
            let range = Range { ptr, bytes: end - ptr, stamp: owner.stamp_free() };
            arena.insert_and_allocate(range, self.size, self.align, ServedBy::Waited)
        }))
    }

    /// Inserts ranges into the arenas they came from, with one barrier for all.
    fn put_back(&self, mut ranges: Vec<OwnedRange>) {
        ranges.sort_by_key(|part| part.slot);
        let mut runs = Vec::new();
        let mut arenas = Vec::new();
        for run in ranges.chunk_by(|one, other| one.slot == other.slot) {
            match run.first().and_then(|part| self.pool.arenas.get(part.slot?)) {
                Some(arena) => {
                    runs.push(run);
                    arenas.push(arena);
                }
                None => run.iter().for_each(|part| {
                    self.pool.reserve.insert(part.range);
                }),
            }
        }
        Lock::with_all(&arenas, |arenas| {
            for (run, arena) in runs.into_iter().zip(arenas) {
                run.iter().for_each(|part| arena.insert(part.range));
            }
        });
    }

    /// Makes the stream wait for the last work on these ranges. An error names the slot of the stream that it cannot wait for.
    fn wait_on_ranges(&self, parts: &[OwnedRange]) -> Result<(), (u32, DriverError)> {
        let tracker = &self.pool.tracker;
        for OwnedRange { range, slot } in parts {
            if let Some(slot) = *slot
                && let Some(stream) = tracker.streams.at(slot)
            {
                let waited = self.owner.wait_on_clock(stream, range.stamp, &tracker.counters);
                waited.map_err(|error| (slot, error))?;
            }
        }
        Ok(())
    }
}

/// Returns the first run of adjacent parts, sorted by address, that together hold a request; empty if there is none.
fn run_that_holds(parts: &[OwnedRange], size: u64, align: u64) -> std::ops::Range<usize> {
    let holds = |from: usize, end: u64| {
        let ptr = parts[from].range.ptr;
        Span { ptr, bytes: end - ptr }.holds(size, align)
    };
    let (mut begin, mut end_of_last) = (0, 0);
    for (at, OwnedRange { range, .. }) in parts.iter().enumerate() {
        if range.ptr != end_of_last {
            begin = at;
        }
        end_of_last = range.ptr + range.bytes;
        // Leading parts that the request does not need are left out.
        while begin < at && holds(begin + 1, end_of_last) {
            begin += 1;
        }
        if holds(begin, end_of_last) {
            return begin..at + 1;
        }
    }
    0..0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_shortest_that_holds_the_request_at_its_alignment() {
        let part = |ptr, bytes| OwnedRange { range: Range { ptr, bytes, stamp: 1 }, slot: None };
        let parts =
            [part(0, 256), part(1024, 256), part(1280, 512), part(1792, 256), part(4096, 1024)];
        assert_eq!(run_that_holds(&parts, 768, 256), 1..3);
        assert_eq!(run_that_holds(&parts, 768, 256 << 2), 1..3);
        // Only the last part reaches an address that is a multiple of 2048.
        assert_eq!(run_that_holds(&parts, 768, 256 << 3), 4..5);
        assert_eq!(run_that_holds(&parts[1..4], 700, 256), 0..2);
        assert_eq!(run_that_holds(&parts[1..4], 768, 512), 0..2);
        assert_eq!(run_that_holds(&parts[2..4], 768, 256), 0..2);
        assert_eq!(run_that_holds(&parts, 2048, 256), 0..0);
        assert_eq!(run_that_holds(&[], 1, 256), 0..0);
        // The first part is not needed.
        assert_eq!(run_that_holds(&[part(0, 256), part(256, 4096)], 4096, 256), 1..2);
    }
}
