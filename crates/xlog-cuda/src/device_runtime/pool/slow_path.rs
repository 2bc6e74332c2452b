//! Slow path: the stream's own arena cannot satisfy the request.
//!
//! Sources, cheapest first:
//! 1. deferred frees that have completed; then the stream's own magazine and coalesce queue;
//! 2. the shared free list, which belongs to no stream and has no pending work;
//! 3. steal from another arena, if the range's last work happens-before this request or has completed;
//! 4. grow from the device; a pool that prefers waits over growth first steals with a wait;
//! 5. steal with a wait; drain deferred frees with waits; coalesce adjacent ranges of several streams;
//! 6. remap completely free handles into one range, or return free segments and grow again.
//!
//! Invariant: a stolen range gets a stamp of its new stream, unless its last work is known to be complete.
//! Happens-before is transitive, so a third stream that waits for the new owner also waits for the old one. At most one
//! arena lock is held at a time, and a busy arena is skipped. A stream that cannot be waited for, such as one under
//! capture, is skipped too; a refusal names the first such failure.
//!
//! A scan of another thread's arena needs a process-wide barrier. So a small request pays for it with credits, and
//! grows without enough of them. A request is refused only after a scan of all arenas.

use std::sync::atomic::Ordering;
use std::time::Instant;

use xlog_driver::DriverResult;

use super::PoolResource;
use super::arena::{Arena, ArenaCounts, Source, Suballocation, UNIT};
use super::sanitizer::Sanitizer;
use super::segments::Span;
use super::tlsf::{BoundedFit, Range, Tlsf, TlsfAllocation};
use super::trim::holds;
use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::ordering::primitive::Lock;
use crate::device_runtime::resource::{ResourceError, ResourceResult, StreamId};
use crate::stream::RawStream;

/// Deferred frees that a request checks for completion.
const DEFERRED_PER_REQUEST: usize = 2;
/// The largest range that moves to another stream for a smaller request: large enough that ranges seldom move.
const MAX_TRANSFER: u64 = 2 << 20;

/// The maximum of scan credits; a pool starts with them.
pub(super) const MAX_SCAN_CREDITS: u32 = 64;

/// A request that the arena of its stream could not serve.
pub(super) struct Request<'a> {
    pub(super) stream: StreamId,
    pub(super) owner: &'a RawStream,
    pub(super) arena: &'a Lock<Arena>,
    pub(super) size: u64,
    pub(super) align: u64,
}

impl PoolResource {
    pub(super) fn grow_initial(&self) -> ResourceResult<()> {
        let mut left = self.config.initial_bytes as u64;
        while left > 0 {
            // In several spans, so that each can be returned by itself.
            let span =
                self.segments.grow(left.min(self.config.growth_bytes as u64), StreamId::DEFAULT)?;
            self.slow_path
                .shared_free
                .lock()
                .insert_span(Range { ptr: span.ptr, bytes: span.bytes, stamp: 0 }, true);
            left = left.saturating_sub(span.bytes);
        }
        if self.config.initial_bytes > 0 && self.segments.is_stream_ordered() {
            self.tracker.stream(StreamId::DEFAULT)?.synchronize(&self.tracker.counters)?;
        }
        Ok(())
    }

    /// The size of a range that moves to a stream that asks for less.
    fn transfer_bytes(&self) -> u64 {
        (self.config.growth_bytes as u64 / 16).next_multiple_of(UNIT).min(MAX_TRANSFER)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slow(
        &self,
        stream: StreamId,
        owner: &RawStream,
        arena: &Lock<Arena>,
        size: u64,
        align: u64,
    ) -> ResourceResult<Suballocation> {
        let request = Request { stream, owner, arena, size, align };
        if self.config.reuse.opportunistic
            && self.deferred_frees.has_deferred()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            // A failed free stays with its block, and a reap reports it.
            let _ = self.free_completed(DEFERRED_PER_REQUEST);
            let take = |arena: &mut Arena| arena.allocate(size, align, &self.tracker.table);
            if let Some(suballocation) = arena.with(take) {
                return Ok(suballocation);
            }
        }
        if self.sanitizer.is_some()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            let _ = self.release_completed(usize::MAX);
        }
        if let Some(suballocation) = self.allocate_own(&request) {
            return Ok(suballocation);
        }
        if let Some(suballocation) = self.allocate_shared_free(&request) {
            return Ok(suballocation);
        }
        let foreign_arenas = self.foreign_arenas(&request);
        let scans = self.may_scan(&request, foreign_arenas);
        let mut skipped = SkippedStreams::default();
        if scans {
            if let Some(suballocation) = self.steal(&request, false, &mut skipped)? {
                return Ok(suballocation);
            }
            if self.config.reuse.insert_waits
                && self.prefer_wait_over_growth()
                && let Some(suballocation) = self.steal(&request, true, &mut skipped)?
            {
                return Ok(suballocation);
            }
        }
        let full = match self.grow(&request, foreign_arenas) {
            Ok(suballocation) => return Ok(suballocation),
            Err(error) if is_full(&error) => error,
            Err(error) => return Err(error),
        };
        if !scans && let Some(suballocation) = self.steal(&request, false, &mut skipped)? {
            return Ok(suballocation);
        }
        match self.allocate_with_waits(&request, foreign_arenas, &mut skipped)? {
            Some(suballocation) => Ok(suballocation),
            None => Err(self.refusal(&request, full, skipped)),
        }
    }

    /// Steps 5 and 6: memory that needs a wait, and memory that must be put together.
    fn allocate_with_waits(
        &self,
        request: &Request<'_>,
        foreign_arenas: u32,
        skipped: &mut SkippedStreams,
    ) -> ResourceResult<Option<Suballocation>> {
        if self.config.reuse.insert_waits
            && let Some(suballocation) = self.steal(request, true, skipped)?
        {
            return Ok(Some(suballocation));
        }
        let reaper = self.deferred_frees.reaper_lock();
        // A failed free stays with its block, and a reap reports it.
        skipped.note(self.free_deferred_with_waits());
        skipped.note(self.release_with_waits(RawStream::synchronize_in_time));
        drop(reaper);
        if let Some(suballocation) = self.allocate_own(request) {
            return Ok(Some(suballocation));
        }
        if self.config.reuse.insert_waits {
            if let Some(suballocation) = self.steal(request, true, skipped)? {
                return Ok(Some(suballocation));
            }
            if let Some(suballocation) = self.coalesce_across_streams(request, skipped)? {
                return Ok(Some(suballocation));
            }
        }
        skipped.unless_lost(self.synchronize_streams(RawStream::synchronize_in_time))?;
        match self.defragment(request) {
            Err(error) if is_full(&error) => {}
            Ok(None) => {}
            other => return other,
        }
        if self.segments.can_move() {
            return Ok(None);
        }
        // Segments that cannot be remapped are returned to the device, and taken again as one range.
        skipped.note(self.trim_to(0));
        // An inner resource frees in stream order.
        skipped.unless_lost(self.synchronize_streams(RawStream::synchronize_in_time))?;
        skipped.note(self.segments.reclaim());
        match self.grow(request, foreign_arenas) {
            Err(error) if is_full(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    /// The number of arenas of other streams that other threads own. 0 in a deterministic pool, where threads must not
    /// influence the result.
    fn foreign_arenas(&self, request: &Request<'_>) -> u32 {
        if !self.config.reuse.opportunistic {
            return 0;
        }
        let own = request.owner.clock().slot();
        let others = self.arenas_with_slots().filter(|(slot, _)| *slot != own);
        others.filter(|(_, arena)| !arena.is_local()).count() as u32
    }

    /// Whether this request may scan arenas owned by other threads.
    ///
    /// Every slow-path request earns one credit; a scan costs one for each foreign arena. Large requests and pools
    /// above `eager_growth_bytes` always scan.
    fn may_scan(&self, request: &Request<'_>, foreign_arenas: u32) -> bool {
        let has_grown = self.segments.reserved() > self.config.eager_growth_bytes as u64;
        if foreign_arenas == 0 || request.size > MAX_TRANSFER || has_grown {
            return true;
        }
        // Two threads that store at the same time may lose a credit.
        let credits = self.slow_path.scan_credits.load(Ordering::Relaxed).saturating_add(1);
        let credits = credits.min(MAX_SCAN_CREDITS);
        let is_enough = credits >= foreign_arenas.min(MAX_SCAN_CREDITS);
        let left = if is_enough { credits.saturating_sub(foreign_arenas) } else { credits };
        self.slow_path.scan_credits.store(left, Ordering::Relaxed);
        is_enough
    }

    /// Whether the pool holds so much free memory that a wait is better than growth.
    fn prefer_wait_over_growth(&self) -> bool {
        let held = self.segments.reserved();
        // A steal waits for everything that the other stream has queued. A pool that was configured for exact events
        // avoids that while it can grow.
        if held <= self.config.eager_growth_bytes as u64
            || self.config.event_policy == EventPolicy::Exact
        {
            return false;
        }
        let free = |arena: &mut Arena| arena.free_bytes();
        let of_streams: u64 =
            self.arenas_with_slots().filter_map(|(_, arena)| arena.try_with(free)).sum();
        of_streams + self.slow_path.shared_free.lock().free_bytes() >= held / 2
    }

    #[cold]
    fn refusal(
        &self,
        request: &Request<'_>,
        full: ResourceError,
        skipped: SkippedStreams,
    ) -> ResourceError {
        let snapshot = self.snapshot();
        let ResourceError::OutOfMemory { detail, .. } = full else { return full };
        let cause = if let Some(error) = skipped.first {
            format!("free memory could not be waited for ({error})")
        } else if snapshot.free_bytes() >= request.size as usize {
            "the free memory is in pieces (fragmentation)".to_owned()
        } else {
            format!("memory is taken in granules of {}", self.segments.granularity())
        };
        ResourceError::OutOfMemory {
            requested: request.size as usize,
            detail: format!(
                "{detail}; the pool holds {} bytes, {} of them handed out, and its largest free range has {}: {cause}",
                snapshot.reserved_bytes, snapshot.live_bytes, snapshot.largest_free
            ),
        }
    }

    /// Allocates from the stream's own arena after flushing its magazine.
    fn allocate_own(&self, request: &Request<'_>) -> Option<Suballocation> {
        let mut slots = Vec::new();
        let taken = request.arena.with(|arena| {
            // Read inside the lock, so that the stamp covers blocks that other threads of this stream have just freed.
            arena.flush(request.owner.clock().now(), &self.tracker.table, &mut slots);
            arena.allocate(request.size, request.align, &self.tracker.table)
        });
        self.tracker.table.free_slots(slots);
        taken
    }

    /// Allocates a range that is worth moving to another stream, or a whole smaller range. A small part would bring the
    /// next request here again, and leave a splinter behind.
    fn allocate_worth_moving(
        &self,
        tlsf: &mut Tlsf,
        size: u64,
        align: u64,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<TlsfAllocation> {
        let maximum = self.transfer_bytes();
        let fit = BoundedFit { bytes: size.max(maximum), maximum, align };
        tlsf.allocate_if(fit, usable)
            .or_else(|| tlsf.allocate_if(BoundedFit { bytes: size, ..fit }, usable))
    }

    fn allocate_shared_free(&self, request: &Request<'_>) -> Option<Suballocation> {
        let range = {
            let mut shared_free = self.slow_path.shared_free.lock();
            let (size, align) = (request.size, request.align);
            let taken = self
                .allocate_worth_moving(&mut shared_free, size, align, &mut |_| true)
                .or_else(|| shared_free.allocate(size, align))?;
            shared_free.remove_allocated(taken.node)?
        };
        self.insert_and_allocate(request, Range { stamp: 0, ..range }, Source::Completed)
    }

    fn insert_and_allocate(
        &self,
        request: &Request<'_>,
        range: Range,
        source: Source,
    ) -> Option<Suballocation> {
        request
            .arena
            .with(|arena| arena.insert_and_allocate(range, request.size, request.align, source))
    }

    /// Steals from the arenas of other streams: ranges that need no wait, or any range `with_wait`.
    fn steal(
        &self,
        request: &Request<'_>,
        with_wait: bool,
        skipped: &mut SkippedStreams,
    ) -> ResourceResult<Option<Suballocation>> {
        let own = request.owner.clock().slot();
        for (slot, other) in self.arenas_with_slots() {
            let Some(stream) = self.tracker.streams.at(slot).filter(|_| slot != own) else {
                continue;
            };
            let Some((range, source)) = self.steal_from(request, other, stream, with_wait) else {
                continue;
            };
            if source == Source::StolenWithWait
                && let Err(error) =
                    request.owner.wait_on_clock(stream, range.stamp, &self.tracker.counters)
            {
                other.with(|arena| arena.insert(range));
                skipped.unless_lost(Err(error))?;
                continue;
            }
            let stamp = if source == Source::Completed { 0 } else { request.owner.clock().now() };
            if let Some(suballocation) =
                self.insert_and_allocate(request, Range { stamp, ..range }, source)
            {
                return Ok(Some(suballocation));
            }
        }
        Ok(None)
    }

    /// Removes a range from the arena of `stream`.
    fn steal_from(
        &self,
        request: &Request<'_>,
        other: &Lock<Arena>,
        stream: &RawStream,
        with_wait: bool,
    ) -> Option<(Range, Source)> {
        let reuse = self.config.reuse;
        let (size, align) = (request.size, request.align);
        if !other.try_with(|arena| arena.free_bytes() >= size)? {
            return None;
        }
        if reuse.opportunistic {
            stream.poll_tail();
        }
        let (clock, here) = (stream.clock(), request.owner.clock());
        let mut slots = Vec::new();
        let found = other.try_with(|arena| {
            let source_of = |stamp: u64| {
                if stamp == 0 || reuse.opportunistic && clock.is_complete(stamp) {
                    Some(Source::Completed)
                } else if reuse.follow_dependencies && here.covers(clock.slot(), stamp) {
                    Some(Source::StolenOrdered)
                } else {
                    with_wait.then_some(Source::StolenWithWait)
                }
            };
            let take = |tlsf: &mut Tlsf| {
                let usable = &mut |stamp| source_of(stamp).is_some();
                let taken = self.allocate_worth_moving(tlsf, size, align, usable)?;
                let range = tlsf.remove_allocated(taken.node)?;
                Some((range, source_of(range.stamp)?))
            };
            let found = take(&mut arena.tlsf);
            if found.is_some() || !with_wait {
                return found;
            }
            // The magazine of the other stream is flushed last.
            arena.flush(clock.now(), &self.tracker.table, &mut slots);
            take(&mut arena.tlsf)
        });
        self.tracker.table.free_slots(slots);
        found.flatten()
    }

    /// The range of a span that was just taken from the device.
    fn fresh(&self, request: &Request<'_>, span: Span) -> Range {
        let ordered = self.segments.is_stream_ordered();
        let stamp = if ordered { request.owner.clock().now() } else { 0 };
        Range { ptr: span.ptr, bytes: span.bytes, stamp }
    }

    /// Grows from the device. With foreign arenas the surplus goes to the shared free list.
    fn grow(&self, request: &Request<'_>, foreign_arenas: u32) -> ResourceResult<Suballocation> {
        let mut grown = self.slow_path.growing.lock();
        // Another thread of this stream may have grown meanwhile.
        let (size, align) = (request.size, request.align);
        if let Some(suballocation) =
            request.arena.with(|arena| arena.allocate(size, align, &self.tracker.table))
        {
            return Ok(suballocation);
        }
        // A trim may have left memory on the shared free list.
        if let Some(suballocation) = self.allocate_shared_free(request) {
            return Ok(suballocation);
        }
        // Spans begin at multiples of the granularity; a larger alignment needs slack.
        let slack = if align > self.segments.granularity() { align } else { 0 };
        crate::spans::slow_path!("segment_growth", bytes = size + slack);
        let span = self.grow_span(size + slack, request.stream, foreign_arenas)?;
        grown.last = Instant::now();
        self.rebalance_magazines(&mut grown);
        let mut own = span;
        if foreign_arenas > 0
            && !self.segments.is_stream_ordered()
            && let (first, Some(others)) = split(
                span,
                (size + slack).max(self.transfer_bytes()),
                self.segments.granularity().max(UNIT),
            )
        {
            let range = Range { ptr: others.ptr, bytes: others.bytes, stamp: 0 };
            // If the shared free list cannot take the surplus, the stream keeps it.
            if self.slow_path.shared_free.lock().insert_span(range, true) {
                own = first;
            }
        }
        drop(grown);
        match self.insert_and_allocate(request, self.fresh(request, own), Source::Grown) {
            Some(suballocation) => Ok(suballocation),
            None => Err(ResourceError::OutOfMemory {
                requested: size as usize,
                detail: format!("{} bytes were taken and do not hold it", span.bytes),
            }),
        }
    }

    /// Takes at least `bytes` from the device: 1/32 of what the pool holds, if that is more, so that a small pool stays
    /// small and a large one seldom grows. With foreign arenas up to 8/32, since they will ask soon.
    fn grow_span(&self, bytes: u64, stream: StreamId, foreign_arenas: u32) -> ResourceResult<Span> {
        let part = self.segments.reserved() / 32 * u64::from(foreign_arenas.min(7) + 1);
        let step = part.max(2 << 20).next_multiple_of(2 << 20);
        let step = step.min(self.config.growth_bytes as u64);
        if step > bytes {
            match self.segments.grow(step, stream) {
                Err(error) if is_full(&error) => {}
                other => return other,
            }
        }
        self.segments.grow(bytes, stream)
    }

    /// Remaps completely free handles into one contiguous range.
    fn defragment(&self, request: &Request<'_>) -> ResourceResult<Option<Suballocation>> {
        let _growing = self.slow_path.growing.lock();
        let idle = self.remove_idle();
        let (size, align) = (request.size, request.align);
        if idle.iter().any(|span| holds(span.ptr, span.end(), size, align)) {
            self.insert_idle(idle, &[]);
            return Ok(self.allocate_shared_free(request));
        }
        let (span, gone, outcome) = self.segments.defragment(&idle, request.size, request.stream);
        self.insert_idle(idle, &gone);
        outcome?;
        match span {
            Some(span) => {
                Ok(self.insert_and_allocate(request, self.fresh(request, span), Source::Grown))
            }
            None => Ok(self.allocate_shared_free(request)),
        }
    }

    /// The arenas in use, with the slots of their streams.
    pub(super) fn arenas_with_slots(&self) -> impl Iterator<Item = (u32, &Lock<Arena>)> {
        self.arenas
            .iter()
            .filter(|(_, arena)| arena.is_used())
            .map(|(slot, arena)| (slot, &arena.0))
    }

    /// Bytes of live and retired blocks; under a memory checker, the bytes that were requested.
    pub(super) fn outstanding(&self) -> u64 {
        let taken = self.counts().1;
        taken - self.slack().min(taken)
    }

    pub(super) fn slack(&self) -> u64 {
        self.sanitizer.as_ref().map_or(0, Sanitizer::slack)
    }

    /// The counters of all arenas and the bytes handed out, at one instant.
    pub(super) fn counts(&self) -> (ArenaCounts, u64) {
        let arenas: Vec<&Lock<Arena>> = self.arenas_with_slots().map(|(_, arena)| arena).collect();
        Lock::with_all(&arenas, |arenas| {
            let mut sum = ArenaCounts::default();
            arenas.iter().for_each(|arena| sum.add(&arena.counts));
            (sum, arenas.iter().map(|arena| arena.outstanding()).sum())
        })
    }
}

/// Streams that a request skipped because they could not be waited for.
#[derive(Default)]
pub(super) struct SkippedStreams {
    /// The first failure.
    first: Option<ResourceError>,
}

impl SkippedStreams {
    /// Notes a failure and goes on.
    fn note<T>(&mut self, outcome: ResourceResult<T>) {
        if let Err(error) = outcome {
            self.first.get_or_insert(error);
        }
    }

    /// Notes a failure and goes on, unless the device is lost.
    pub(super) fn unless_lost(&mut self, outcome: DriverResult<()>) -> ResourceResult<()> {
        match outcome {
            Err(error) if error.is_device_lost() => Err(error.into()),
            other => {
                self.note(other.map_err(Into::into));
                Ok(())
            }
        }
    }
}

/// Splits off the first `bytes` of a span, if at least as much is left. Both parts are multiples of `grain`, so that
/// each can be returned by itself.
fn split(span: Span, bytes: u64, grain: u64) -> (Span, Option<Span>) {
    let first = bytes.next_multiple_of(grain);
    match span.bytes.checked_sub(first) {
        Some(left) if left >= first => {
            let others = Span { ptr: span.ptr + first, bytes: left };
            (Span { ptr: span.ptr, bytes: first }, Some(others))
        }
        _ => (span, None),
    }
}

/// Whether the device, a limit or a ledger has no more memory.
fn is_full(error: &ResourceError) -> bool {
    matches!(error, ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_split_only_where_as_much_is_left_for_others() {
        let span = Span { ptr: 0x10_0000, bytes: 8 * UNIT };
        for (bytes, first) in
            [(1, 1), (UNIT + 1, 2), (4 * UNIT, 4), (4 * UNIT + 1, 8), (9 * UNIT, 8)]
        {
            let (own, others) = split(span, bytes, UNIT);
            assert_eq!((own.ptr, own.bytes), (span.ptr, first * UNIT), "{bytes}");
            let left = others.map_or(0, |others| {
                assert_eq!(others.ptr, own.ptr + own.bytes);
                others.bytes
            });
            assert_eq!(own.bytes + left, span.bytes, "nothing is lost");
        }
    }
}
