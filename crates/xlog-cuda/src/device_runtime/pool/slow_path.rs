//! Slow path: the stream's own arena cannot satisfy the request.
//!
//! Sources, cheapest first:
//! 1. deferred frees that have completed; then the stream's own magazine and coalesce queue;
//! 2. the shared free list, which belongs to no stream and has no pending work;
//! 3. steal from another arena, if the range's last work happens-before this request or has completed;
//! 4. for a tracked-only buffer: memory with pending work, which the block inherits (`inherit`);
//! 5. a large request waits for pending work, as long as growing would take (`pending`); then adjacent idle ranges of several
//!    streams are coalesced, or completely free handles remapped into one range (`remap`);
//! 6. grow from the device; a pool that prefers waits over growth first steals with a wait;
//! 7. steal with a wait; drain deferred frees with waits; coalesce adjacent ranges of several streams;
//! 8. remap again after waits, or return free segments and grow again.
//!
//! Invariant: no driver call is made while arena locks are held. The searches of steps 3 to 7 skip an arena that another thread
//! is inside of; removals of the ranges that step 5 chose and the frees of step 7 wait for it, as does all of step 8. So a
//! request is refused only after all free memory was collected. A stream that cannot be waited for, such as one under capture,
//! is skipped; a refusal names the first such failure.
//!
//! A scan needs one process-wide barrier for the arenas of other threads, and one more for each from which it steals. A
//! small request pays for it with credits, and grows without enough of them. Remaps have credits of their own.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use xlog_driver::DriverResult;

use super::PoolResource;
use super::arena::{Arena, Suballocation, UNIT};
use super::inherit::Inherited;
use super::reserve::{MAX_TRANSFER, is_full};
use super::segments::Span;
use super::tlsf::{Range, SMALL};
use crate::device_runtime::logging::ServedBy;
use crate::device_runtime::ordering::{EventPolicy, Lock};
use crate::device_runtime::resource::{ResourceError, ResourceResult, StreamId};
use crate::stream::RawStream;

/// More cached bytes stay for a request that another chunk can serve.
const MANY_CACHED: u64 = 16 << 20;
/// Pending deferred frees after which a request stops looking for completed ones.
const DEFERRED_PER_REQUEST: usize = 2;
/// Pending deferred frees after which a scan or growth stops looking.
const DEFERRED_PER_SCAN: usize = 64;
/// Arenas, with or without a foreign owner, that a scan visits for one credit.
const ARENAS_PER_CREDIT: u32 = 16;
/// A pool that holds more than this for each stream scans without credits while much of it is free.
const BYTES_PER_STREAM: u64 = 2 * MAX_TRANSFER;
/// The maximum of scan credits; a pool starts with them.
const MAX_SCAN_CREDITS: u32 = 64;

/// Credits that requests have earned for scans of other arenas, on a cache line of their own.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct ScanCredits(AtomicU32);

impl ScanCredits {
    pub(super) fn new() -> Self {
        Self(AtomicU32::new(MAX_SCAN_CREDITS))
    }

    /// Earns one credit, then pays `cost`. Returns false and pays nothing if the credits do not suffice.
    fn earn_and_pay(&self, cost: u32) -> bool {
        // Two threads that store at the same time may lose a credit.
        let credits = self.0.load(Ordering::Relaxed).saturating_add(1).min(MAX_SCAN_CREDITS);
        let is_enough = credits >= cost.min(MAX_SCAN_CREDITS);
        let left = if is_enough { credits.saturating_sub(cost) } else { credits };
        self.0.store(left, Ordering::Relaxed);
        is_enough
    }
}

/// A request that the arena of its stream could not serve.
pub(super) struct SlowPath<'a> {
    pub(super) pool: &'a PoolResource,
    pub(super) stream: StreamId,
    pub(super) owner: &'a RawStream,
    pub(super) arena: &'a Lock<Arena>,
    pub(super) size: u64,
    pub(super) align: u64,
    pub(super) skipped: SkippedStreams,
    /// Whether every use of the block will be prepared, so that it may inherit dependencies with its memory.
    pub(super) is_tracked: bool,
    pub(super) inherited: Option<Inherited>,
    /// Whether growth was preferred to a remap.
    pub(super) has_declined_remap: Cell<bool>,
    /// Whether memory was taken from the device. The size of the pool does not tell: a trim may return more meanwhile.
    pub(super) has_grown: Cell<bool>,
}

impl SlowPath<'_> {
    /// Allocates from the first source that has enough.
    pub(super) fn allocate(&mut self) -> ResourceResult<Suballocation> {
        let pool = self.pool;
        if self.free_completed(DEFERRED_PER_REQUEST)
            && let Some(suballocation) = self.allocate_ready()
        {
            return Ok(suballocation);
        }
        if pool.sanitizer.is_some()
            && let Some(_reaper) = pool.deferred_frees.try_reaper_lock()
        {
            let _ = pool.release_completed(usize::MAX);
        }
        if let Some(suballocation) = self.allocate_own().or_else(|| self.allocate_shared_free()) {
            return Ok(suballocation);
        }
        let foreign_arenas = self.foreign_arenas();
        let scans = self.pay_for_scan(foreign_arenas);
        if scans {
            self.free_completed(DEFERRED_PER_SCAN);
            if let Some(suballocation) = self.steal(false)? {
                return Ok(suballocation);
            }
            if let Some(suballocation) = self.inherit() {
                return Ok(suballocation);
            }
            if self.wait_for_pending()
                && let Some(suballocation) = self.steal_ready()?
            {
                return Ok(suballocation);
            }
            if let Some(suballocation) = self.remap() {
                return Ok(suballocation);
            }
            if pool.config.reuse.insert_waits
                && self.prefer_wait_over_growth()
                && let Some(suballocation) = self.steal(true)?
            {
                return Ok(suballocation);
            }
        }
        let full = match self.grow(foreign_arenas) {
            Ok(suballocation) => return Ok(suballocation),
            Err(error) if is_full(&error) => error,
            Err(error) => return Err(error),
        };
        if !scans && let Some(suballocation) = self.steal(false)? {
            return Ok(suballocation);
        }
        if self.has_declined_remap.get()
            && let Some(suballocation) = self.remap()
        {
            return Ok(suballocation);
        }
        match self.allocate_with_waits(foreign_arenas)? {
            Some(suballocation) => Ok(suballocation),
            None => Err(self.refusal(full)),
        }
    }

    /// Allocates memory that needs no wait: from the stream's own arena, or stolen from another.
    fn steal_ready(&mut self) -> ResourceResult<Option<Suballocation>> {
        match self.allocate_ready() {
            Some(suballocation) => Ok(Some(suballocation)),
            None => self.steal(false),
        }
    }

    /// Steps 7 and 8 of the module.
    fn allocate_with_waits(
        &mut self,
        foreign_arenas: u32,
    ) -> ResourceResult<Option<Suballocation>> {
        let pool = self.pool;
        let insert_waits = pool.config.reuse.insert_waits;
        if insert_waits && let Some(suballocation) = self.steal(true)? {
            return Ok(Some(suballocation));
        }
        let reaper = pool.deferred_frees.reaper_lock();
        // A failed free keeps its block; a reap retries and reports it.
        self.skipped.note(pool.retry_failed());
        self.skipped.note(pool.free_deferred_with_waits());
        let released = pool.release_with_waits(|stream, counters| {
            self.skipped.in_time(stream.synchronize_freed_in_time(counters))
        });
        self.skipped.note(released);
        drop(reaper);
        if let Some(suballocation) = self.allocate_own() {
            return Ok(Some(suballocation));
        }
        if insert_waits {
            if let Some(suballocation) = self.steal(true)? {
                return Ok(Some(suballocation));
            }
            if let Some(suballocation) = self.coalesce_across_streams()? {
                return Ok(Some(suballocation));
            }
        }
        let can_move = pool.reserve.segments.can_move();
        if can_move
            && pool.config.reuse.opportunistic
            && let Some(suballocation) = self.defragment()?
        {
            return Ok(Some(suballocation));
        }
        self.synchronize_streams()?;
        if let Some(suballocation) = self.defragment()? {
            return Ok(Some(suballocation));
        }
        if can_move {
            return Ok(None);
        }
        // Segments that cannot be remapped are returned to the device, and taken again as one range.
        self.skipped.note(pool.trim_to(0));
        // An inner resource frees in stream order.
        self.synchronize_streams()?;
        self.skipped.note(pool.reserve.segments.reclaim());
        match self.grow(foreign_arenas) {
            Err(error) if is_full(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Waits for the last work on all free memory, until the deadline of the call.
    fn synchronize_streams(&mut self) -> ResourceResult<()> {
        let outcome = self.pool.synchronize_streams(|stream, counters| {
            self.skipped.in_time(stream.synchronize_freed_in_time(counters))
        });
        self.skipped.unless_lost(outcome)
    }

    /// Frees completed deferred blocks and stops after `pending` others. Returns false without the reaper lock or deferred blocks.
    pub(super) fn free_completed(&self, pending: usize) -> bool {
        let pool = self.pool;
        if pool.config.reuse.opportunistic
            && pool.deferred_frees.has_deferred()
            && let Some(_reaper) = pool.deferred_frees.try_reaper_lock()
        {
            // A failed free keeps its block; a reap retries and reports it.
            let _ = pool.free_completed(pending);
            return true;
        }
        false
    }

    /// Counts the arenas of other streams that other threads own. Returns 0 in a deterministic pool, whose result must not
    /// depend on threads.
    fn foreign_arenas(&self) -> u32 {
        if !self.pool.config.reuse.opportunistic {
            return 0;
        }
        let own = self.owner.clock().slot();
        let others = self.pool.arenas.iter().filter(|(slot, _)| *slot != own);
        others.filter(|(_, arena)| !arena.is_local()).count() as u32
    }

    /// Pays for a scan of the arenas of other streams; false if this request may not scan.
    ///
    /// A scan costs one credit for each foreign arena and one for every sixteen arenas; a small request earns one and must pay.
    /// Without enough credits the pool grows, until each stream has memory of its own. Large requests and pools above
    /// `eager_growth_bytes` scan without credits. A pool above `BYTES_PER_STREAM` for each stream, of which much is free, spends the
    /// credits that it has, because to ask how much is free costs more.
    fn pay_for_scan(&self, foreign_arenas: u32) -> bool {
        let held = self.pool.reserve.segments.reserved();
        let arenas = self.pool.arenas.iter().count() as u32;
        let cost = foreign_arenas + arenas / ARENAS_PER_CREDIT;
        cost == 0
            || self.size > MAX_TRANSFER
            || held > self.pool.config.eager_growth_bytes as u64
            || self.pool.scan_credits.earn_and_pay(cost)
            || held > u64::from(arenas) * BYTES_PER_STREAM && self.has_much_free()
    }

    /// Whether the limit of the segments leaves room for the request.
    pub(super) fn may_grow(&self) -> bool {
        let segments = &self.pool.reserve.segments;
        segments.reserved().saturating_add(self.size) <= segments.limit()
    }

    /// Whether to wait for free memory instead of growing: above `eager_growth_bytes`, with at least half of the pool free.
    pub(super) fn prefer_wait_over_growth(&self) -> bool {
        let pool = self.pool;
        let held = pool.reserve.segments.reserved();
        // A steal waits for all work that the other stream has queued. With exact events the pool avoids that while it can grow.
        if held <= pool.config.eager_growth_bytes as u64
            || pool.config.event_policy == EventPolicy::Exact
        {
            return false;
        }
        pool.free_bytes() >= held / 2
    }

    #[cold]
    fn refusal(&self, full: ResourceError) -> ResourceError {
        let snapshot = self.pool.snapshot();
        let ResourceError::OutOfMemory { detail, .. } = full else { return full };
        let cause = if let Some(error) = &self.skipped.first {
            format!("free memory could not be waited for ({error})")
        } else if self.skipped.is_late.get() {
            "work on free memory did not complete within the deadline".to_owned()
        } else if snapshot.free_bytes() >= self.size as usize {
            "the free memory is in pieces (fragmentation)".to_owned()
        } else {
            format!("memory is taken in granules of {}", self.pool.reserve.segments.granularity())
        };
        ResourceError::OutOfMemory {
            requested: self.size as usize,
            detail: format!(
                "{detail}; the pool holds {} bytes, {} of them handed out, and its largest free range has {}: {cause}",
                snapshot.reserved_bytes,
                snapshot.live_bytes + snapshot.deferred_bytes,
                snapshot.largest_free
            ),
        }
    }

    /// Allocates from the stream's own arena without flushing its magazine.
    pub(super) fn allocate_ready(&self) -> Option<Suballocation> {
        let table = &self.pool.tracker.table;
        self.arena.with(|arena| arena.allocate(self.size, self.align, table))
    }

    /// Allocates from the stream's own arena after flushing its cached blocks. Many cached blocks stay if a free range has room for
    /// another chunk of small ones: otherwise every chunk would cost all of them.
    fn allocate_own(&self) -> Option<Suballocation> {
        let table = &self.pool.tracker.table;
        let rechunked =
            |arena: &mut Arena| arena.allocate_rechunked(self.size, self.align, ServedBy::Own);
        self.arena.with(|arena| {
            if self.size < SMALL
                && self.align <= UNIT
                && arena.cached_bytes() > MANY_CACHED
                && let Some(suballocation) = rechunked(arena)
            {
                return Some(suballocation);
            }
            arena.flush(table);
            arena.allocate(self.size, self.align, table).or_else(|| rechunked(arena))
        })
    }

    pub(super) fn allocate_shared_free(&self) -> Option<Suballocation> {
        let range = self.pool.reserve.remove_for(self.size, self.align)?;
        self.insert_and_allocate(range, ServedBy::Completed)
    }

    /// Inserts a range into the stream's own arena and allocates from it.
    pub(super) fn insert_and_allocate(
        &self,
        range: Range,
        source: ServedBy,
    ) -> Option<Suballocation> {
        self.arena.with(|arena| arena.insert_and_allocate(range, self.size, self.align, source))
    }

    /// Returns the range of a span that was just taken from the device.
    pub(super) fn fresh(&self, span: Span) -> Range {
        let ordered = self.pool.reserve.segments.is_stream_ordered();
        let stamp = if ordered { self.owner.stamp_free() } else { 0 };
        Range { ptr: span.ptr, bytes: span.bytes, stamp }
    }

    /// Returns the size of a span that holds the request. Spans begin at multiples of the granularity; a larger alignment needs slack.
    pub(super) fn needed(&self) -> u64 {
        let slack = self.align > self.pool.reserve.segments.granularity();
        self.size + if slack { self.align } else { 0 }
    }

    /// Grows from the device. With foreign arenas the surplus goes to the shared free list.
    fn grow(&self, foreign_arenas: u32) -> ResourceResult<Suballocation> {
        let (pool, reserve) = (self.pool, &self.pool.reserve);
        let mut growth = reserve.growing();
        // Another thread of this stream may have grown meanwhile, or a trim may have left memory on the shared free list.
        if let Some(suballocation) = self.allocate_ready().or_else(|| self.allocate_shared_free()) {
            return Ok(suballocation);
        }
        let (needed, granularity) = (self.needed(), reserve.segments.granularity());
        crate::spans::slow_path!("segment_growth", bytes = needed);
        let span = reserve.grow(needed, self.stream, foreign_arenas)?;
        self.has_grown.set(true);
        growth.note();
        pool.rebalance_magazines();
        let mut own = span;
        if foreign_arenas > 0
            && !reserve.segments.is_stream_ordered()
            && let (first, Some(others)) =
                split(span, needed.max(reserve.transfer_bytes()), granularity.max(UNIT))
            // If the shared free list cannot take the surplus, the stream keeps it.
            && reserve.insert(Range { ptr: others.ptr, bytes: others.bytes, stamp: 0 })
        {
            own = first;
        }
        drop(growth);
        self.insert_and_allocate(self.fresh(own), ServedBy::Grown).ok_or_else(|| {
            ResourceError::OutOfMemory {
                requested: self.size as usize,
                detail: format!("{} bytes were taken and do not hold it", span.bytes),
            }
        })
    }
}

/// Streams that a request skipped because they could not be waited for.
#[derive(Default)]
pub(super) struct SkippedStreams {
    first: Option<ResourceError>,
    /// Whether the work of a stream did not complete within the deadline of the call.
    is_late: Cell<bool>,
}

impl SkippedStreams {
    /// Notes a stream whose work did not complete in time.
    fn in_time(&self, completed: DriverResult<bool>) -> DriverResult<()> {
        completed.map(|completed| self.is_late.set(self.is_late.get() | !completed))
    }

    /// Notes a failure.
    pub(super) fn note<T>(&mut self, outcome: ResourceResult<T>) {
        if let Err(error) = outcome {
            self.first.get_or_insert(error);
        }
    }

    /// Notes a failure, unless the device is lost.
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
