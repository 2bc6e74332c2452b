//! Free memory as a whole: joined over streams, given back to the device, shared out to the magazines.
//!
//! What is given back or belongs to no stream has been seen complete by the host; whatever is still pending stays with its stream.

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

/// Pieces smaller than this stay where they are when memory of several streams is joined.
const MIN_COALESCED: u64 = 64 << 10;

/// The smallest piece that is worth being joined for a request.
fn min_coalesced(size: u64) -> u64 {
    (size / 32).max(MIN_COALESCED)
}

impl PoolResource {
    /// Gives free memory on which nothing is pending back to the device, until the pool holds no more than `bytes`; returns how
    /// many bytes went back.
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

    /// Changes how much of the device the pool may hold. What it already holds stays.
    pub fn set_maximum(&self, bytes: usize) {
        self.segments.set_limit(bytes as u64);
    }

    /// Lets memory go that has been free for long enough, if the configuration says so.
    pub(super) fn decay(&self) -> ResourceResult<()> {
        let Some(idle) = self.config.idle_decay else { return Ok(()) };
        let due = self.slow_path.growing.lock().last.elapsed() >= idle;
        if due { self.trim_to(self.config.release_threshold).map(|_| ()) } else { Ok(()) }
    }

    /// Coalesces adjacent free ranges of several streams, and of none, into one that holds the request; its stream waits for the
    /// last work on each. Without the ranges of a stream that cannot be waited for.
    ///
    /// The last resort of a pool that cannot grow: it scans every arena. Only what the request needs changes hands. `growing` is
    /// held, since the ranges belong to no arena meanwhile: a request that finds nothing elsewhere waits for it.
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
        // One visit for each stream.
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
            // Read inside, and after the waits: what is added here follows all of them.
            let stamp = owner.clock().now();
            arena.insert_and_allocate(
                Range { ptr, bytes: end - ptr, stamp },
                size,
                align,
                Source::StolenWithWait,
            )
        }))
    }

    /// Makes a stream follow the last work on all of these. A failure comes with the place of the stream that it is about.
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

    /// Takes everything free on which nothing is pending out of all arenas, joined by address.
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

    /// Keeps what is left of `idle` for any stream.
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

    /// Waits by `synchronize` until the last work on all free memory has completed. A stream that fails is not the last that is tried.
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

    /// Shares out what all magazines together may have, if there is more or less of it, or more streams.
    pub(super) fn rebalance_magazines(&self, growing: &mut Growth) {
        let maximum = (self.segments.reserved() / 50).max(self.config.magazine_bytes as u64);
        let streams = self.arenas_with_slots().count() as u32;
        let (shared, among) = growing.shared;
        if streams <= among && maximum <= shared + shared / 4 && maximum >= shared {
            return;
        }
        // In doublings, since less for each is a look into all magazines.
        let among = among.max(streams.next_power_of_two());
        growing.shared = (maximum, among);
        // The magazine has all but what blocks on their way to the index may have.
        let capacity =
            maximum / u64::from(among) / (coalesce_queue::PART + 1) * coalesce_queue::PART;
        if self.magazine_capacity.swap(capacity, Ordering::Relaxed) <= capacity {
            return;
        }
        let mut slots = Vec::new();
        for (slot, arena) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot) else { continue };
            // One that somebody stays inside keeps what it has until that is used.
            arena.try_with(|arena| {
                if arena.exceeds(capacity) {
                    arena.flush(stream.clock().now(), &self.tracker.table, &mut slots);
                }
            });
        }
        self.tracker.table.free_slots(slots);
    }

    /// Puts what lies ready on each stream to its free memory, with the stamp of now: before it is asked what has completed.
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

/// The first of the parts, sorted by address, that lie side by side and together hold a request; none if there are no such.
fn run_that_holds(parts: &[(Range, Option<u32>)], size: u64, align: u64) -> std::ops::Range<usize> {
    let (mut begin, mut end_of_last) = (0, 0);
    for (at, (range, _)) in parts.iter().enumerate() {
        if range.ptr != end_of_last {
            begin = at;
        }
        end_of_last = range.ptr + range.bytes;
        // Parts at the front that the rest does without stay where they are.
        while begin < at && holds(parts[begin + 1].0.ptr, end_of_last, size, align) {
            begin += 1;
        }
        if holds(parts[begin].0.ptr, end_of_last, size, align) {
            return begin..at + 1;
        }
    }
    0..0
}

/// True when `ptr..end` holds a request at its alignment.
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
        // From 2048 on, which only the last has.
        assert_eq!(run_that_holds(&parts, 768, 256 << 3), 4..5);
        assert_eq!(run_that_holds(&parts[1..4], 700, 256), 0..2);
        assert_eq!(run_that_holds(&parts[1..4], 768, 512), 0..2);
        assert_eq!(run_that_holds(&parts[2..4], 768, 256), 0..2);
        assert_eq!(run_that_holds(&parts, 2048, 256), 0..0);
        assert_eq!(run_that_holds(&[], 1, 256), 0..0);
        // What the front adds is not needed.
        assert_eq!(run_that_holds(&[part(0, 256), part(256, 4096)], 4096, 256), 1..2);
    }
}
