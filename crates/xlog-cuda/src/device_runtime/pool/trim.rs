//! Free memory of all streams: coalesced across streams, returned to the device, shared out to the magazines.
//!
//! Invariant: memory leaves its stream, for the device or the shared free list, only after the host has seen its last
//! work complete. [`PoolResource::coalesce_across_streams`] is the exception: there the receiving stream waits.

use std::sync::atomic::Ordering;

use xlog_driver::{DriverError, DriverResult};

use super::arena::{Arena, Source, Suballocation};
use super::segments::Span;
use super::slow_path::{Request, SkippedStreams};
use super::tlsf::Range;
use super::{Growth, PoolResource, coalesce_queue};
use crate::device_runtime::ordering::striped_counters::StripedCounters;
use crate::device_runtime::resource::ResourceResult;
use crate::stream::RawStream;

/// Smaller ranges are left alone when ranges of several streams are coalesced.
const MIN_COALESCED: u64 = 64 << 10;

/// The smallest range that is coalesced for a request.
fn min_coalesced(size: u64) -> u64 {
    (size / 32).max(MIN_COALESCED)
}

impl PoolResource {
    /// Returns free memory without pending work to the device until the pool holds at most `bytes`. Returns the number
    /// of bytes that went back.
    pub fn trim_to(&self, bytes: usize) -> ResourceResult<usize> {
        if self.sanitizer.is_some()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            self.release_completed(usize::MAX)?;
        }
        let mut growing = self.slow_path.growing.lock();
        let excess = self.segments.reserved().saturating_sub(bytes as u64);
        if excess == 0 {
            return Ok(0);
        }
        self.flush_magazines();
        for (slot, _) in self.arenas_with_slots() {
            if let Some(stream) = self.tracker.streams.at(slot) {
                stream.poll_tail();
            }
        }
        let idle = self.remove_idle();
        let (gone, outcome) = self.segments.release(&idle, excess);
        self.insert_idle(idle, &gone);
        self.rebalance_magazines(&mut growing);
        outcome.map(|()| gone.iter().map(|span| span.bytes as usize).sum())
    }

    /// Changes how much of the device the pool may hold. Memory that it already holds stays.
    pub fn set_maximum(&self, bytes: usize) {
        self.segments.set_limit(bytes as u64);
    }

    /// Returns memory that has been free for `idle_decay`, if that is configured.
    pub(super) fn decay(&self) -> ResourceResult<()> {
        let Some(idle) = self.config.idle_decay else { return Ok(()) };
        let due = self.slow_path.growing.lock().last.elapsed() >= idle;
        if due { self.trim_to(self.config.release_threshold).map(|_| ()) } else { Ok(()) }
    }

    /// Coalesces adjacent free ranges, of several streams and of the shared free list, into one that holds the request.
    /// The requesting stream waits for the last work on each. Ranges of a stream that cannot be waited for are left
    /// out.
    ///
    /// The last resort of a pool that cannot grow: it scans every arena. Only what the request needs changes its
    /// stream. `growing` is held, since the ranges belong to no arena meanwhile: a request that finds nothing elsewhere
    /// waits for it.
    pub(super) fn coalesce_across_streams(
        &self,
        request: &Request<'_>,
        skipped: &mut SkippedStreams,
    ) -> ResourceResult<Option<Suballocation>> {
        let _growing = self.slow_path.growing.lock();
        let Request { owner, size, align, .. } = *request;
        let minimum = min_coalesced(size);
        let shared_free =
            self.slow_path.shared_free.lock().remove_if(minimum, &mut |range| Some(*range));
        let mut parts: Vec<(Range, Option<u32>)> =
            shared_free.into_iter().map(|range| (range, None)).collect();
        for (slot, arena) in self.arenas_with_slots() {
            let take = |arena: &mut Arena| arena.tlsf.remove_if(minimum, &mut |range| Some(*range));
            let ranges = arena.try_with(take).unwrap_or_default();
            parts.extend(ranges.into_iter().map(|range| (range, Some(slot))));
        }
        parts.sort_unstable_by_key(|(range, _)| range.ptr);
        let mut left = Vec::new();
        let mut outcome = Ok(());
        let taken = loop {
            let chosen = run_that_holds(&parts, size, align);
            let Err((stream, error)) = self.wait_on_ranges(owner, &parts[chosen.clone()]) else {
                break chosen;
            };
            outcome = skipped.unless_lost(Err(error));
            if outcome.is_err() {
                break 0..0;
            }
            left.extend(parts.extract_if(.., |(_, slot)| *slot == Some(stream)));
        };
        left.extend(parts[..taken.start].iter().chain(&parts[taken.end..]));
        left.sort_by_key(|(_, slot)| *slot);
        // One visit for each arena.
        for same in left.chunk_by(|one, other| one.1 == other.1) {
            let ranges = same.iter().map(|(range, _)| *range);
            let shard = same.first().and_then(|(_, slot)| self.arenas.get((*slot)?));
            match shard {
                Some(shard) => {
                    shard.0.with_temporary_revocation(|arena| ranges.for_each(|r| arena.insert(r)))
                }
                None => {
                    let mut shared_free = self.slow_path.shared_free.lock();
                    ranges.for_each(|range| {
                        shared_free.insert_span(range, true);
                    });
                }
            }
        }
        let Some((first, last)) = parts[taken.clone()].first().zip(parts[taken].last()) else {
            return outcome.map(|()| None);
        };
        let (ptr, end) = (first.0.ptr, last.0.ptr + last.0.bytes);
        Ok(request.arena.with(|arena| {
            // Read inside the lock and after the waits, so that the stamp covers all of them.
            let stamp = owner.clock().now();
            arena.insert_and_allocate(
                Range { ptr, bytes: end - ptr, stamp },
                size,
                align,
                Source::StolenWithWait,
            )
        }))
    }

    /// Makes a stream wait for the last work on these ranges. A failure comes with the slot of the stream that could
    /// not be waited for.
    fn wait_on_ranges(
        &self,
        owner: &RawStream,
        parts: &[(Range, Option<u32>)],
    ) -> Result<(), (u32, DriverError)> {
        for (range, slot) in parts {
            if let Some(slot) = *slot
                && let Some(stream) = self.tracker.streams.at(slot)
            {
                let waited = owner.wait_on_clock(stream, range.stamp, &self.tracker.counters);
                waited.map_err(|error| (slot, error))?;
            }
        }
        Ok(())
    }

    /// Removes all free ranges without pending work from all arenas, coalesced by address.
    pub(super) fn remove_idle(&self) -> Vec<Span> {
        let mut idle: Vec<Span> = Vec::new();
        for (slot, arena) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot) else { continue };
            let clock = stream.clock();
            arena.with(|arena| {
                let leaves = &mut |range: &Range| {
                    (range.stamp == 0 || clock.is_complete(range.stamp)).then_some(*range)
                };
                idle.extend(arena.tlsf.remove_if(0, leaves).iter().map(span_of));
            });
        }
        idle.extend(
            self.slow_path
                .shared_free
                .lock()
                .remove_if(0, &mut |range| Some(*range))
                .iter()
                .map(span_of),
        );
        idle.sort_unstable_by_key(|span| span.ptr);
        let mut coalesced: Vec<Span> = Vec::with_capacity(idle.len());
        for span in idle {
            match coalesced.last_mut() {
                Some(last) if last.ptr + last.bytes == span.ptr => last.bytes += span.bytes,
                _ => coalesced.push(span),
            }
        }
        coalesced
    }

    /// Inserts what is left of `idle`, without `gone`, into the shared free list.
    pub(super) fn insert_idle(&self, idle: Vec<Span>, gone: &[Span]) {
        let mut gone: Vec<Span> = gone.to_vec();
        gone.sort_unstable_by_key(|span| span.ptr);
        let mut gone = gone.into_iter().peekable();
        let mut shared_free = self.slow_path.shared_free.lock();
        for span in idle {
            let (mut from, end) = (span.ptr, span.ptr + span.bytes);
            while let Some(part) = gone.next_if(|part| part.ptr < end) {
                if part.ptr > from {
                    shared_free
                        .insert_span(Range { ptr: from, bytes: part.ptr - from, stamp: 0 }, true);
                }
                from = part.ptr + part.bytes;
            }
            if from < end {
                shared_free.insert_span(Range { ptr: from, bytes: end - from, stamp: 0 }, true);
            }
        }
    }

    /// Waits by `synchronize` until the last work on all free memory has completed. Goes on after a stream that fails.
    pub(super) fn synchronize_streams<T>(
        &self,
        synchronize: impl Fn(&RawStream, &StripedCounters) -> DriverResult<T>,
    ) -> DriverResult<()> {
        self.flush_magazines();
        let mut outcome = Ok(());
        for (slot, _) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot) else { continue };
            if !stream.poll_tail()
                && let Err(error) = synchronize(stream, &self.tracker.counters)
            {
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }

    /// Divides the magazine bytes among the streams again, if their total or the number of streams has changed.
    pub(super) fn rebalance_magazines(&self, growing: &mut Growth) {
        let maximum = (self.segments.reserved() / 50).max(self.config.magazine_bytes as u64);
        let streams = self.arenas_with_slots().count() as u32;
        let (shared, among) = growing.shared;
        if streams <= among && maximum <= shared + shared / 4 && maximum >= shared {
            return;
        }
        // In powers of two: a smaller share means a visit of every magazine.
        let among = among.max(streams.next_power_of_two());
        growing.shared = (maximum, among);
        // A share without what the coalesce queue may hold.
        let capacity =
            maximum / u64::from(among) / (coalesce_queue::PART + 1) * coalesce_queue::PART;
        if self.magazine_capacity.swap(capacity, Ordering::Relaxed) <= capacity {
            return;
        }
        let mut slots = Vec::new();
        for (slot, arena) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot) else { continue };
            // A busy arena keeps its surplus until it is used.
            arena.try_with(|arena| {
                if arena.exceeds(capacity) {
                    arena.flush(stream.clock().now(), &self.tracker.table, &mut slots);
                }
            });
        }
        self.tracker.table.free_slots(slots);
    }

    /// Flushes all magazines with the current stamp, before the caller polls which work has completed.
    fn flush_magazines(&self) {
        let mut slots = Vec::new();
        for (slot, arena) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot) else { continue };
            arena.with(|arena| {
                arena.flush(stream.clock().now(), &self.tracker.table, &mut slots);
            });
        }
        self.tracker.table.free_slots(slots);
    }
}

fn span_of(range: &Range) -> Span {
    Span { ptr: range.ptr, bytes: range.bytes }
}

/// The first run of adjacent parts, sorted by address, that together hold a request; empty if there is none.
fn run_that_holds(parts: &[(Range, Option<u32>)], size: u64, align: u64) -> std::ops::Range<usize> {
    let (mut begin, mut end_of_last) = (0, 0);
    for (at, (range, _)) in parts.iter().enumerate() {
        if range.ptr != end_of_last {
            begin = at;
        }
        end_of_last = range.ptr + range.bytes;
        // Parts at the front that the request does not need stay where they are.
        while begin < at && holds(parts[begin + 1].0.ptr, end_of_last, size, align) {
            begin += 1;
        }
        if holds(parts[begin].0.ptr, end_of_last, size, align) {
            return begin..at + 1;
        }
    }
    0..0
}

/// Whether `ptr..end` holds a request at its alignment.
pub(super) fn holds(ptr: u64, end: u64, size: u64, align: u64) -> bool {
    ptr.checked_next_multiple_of(align)
        .and_then(|start| end.checked_sub(start))
        .is_some_and(|bytes| bytes >= size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_shortest_that_holds_the_request_at_its_alignment() {
        let part = |ptr, bytes| (Range { ptr, bytes, stamp: 1 }, None);
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
