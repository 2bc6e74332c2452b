//! What a pool does when the arena of the asking stream has nothing left, and how memory goes back.
//!
//! In this order: blocks of the own stream that only wait to be merged; memory that belongs to no stream; memory of other streams that
//! the asking one already follows, or whose last work has completed; the device; memory of other streams with a wait; blocks whose uses
//! elsewhere have not completed, with waits; adjacent free ranges of several streams, with waits; free handles remapped to one range.
//! Only then is the request refused. A stream that cannot be waited for, such as one that is being captured, is passed over in each of
//! these steps; the refusal names the first failure of that kind.
//!
//! Memory that changes its stream gets a stamp of its new one, unless the host has seen its last work complete: whoever takes it from
//! there follows the new stream, and through it the old one. Without that, a third stream would miss the first.
//!
//! The arena of another stream is looked at only if nobody stays inside it, and no arena is held while another one is looked at. To look
//! into the arena of a thread disturbs all threads, so requests that come here save up for it: where many threads run short at once, some
//! take new memory instead, and then they run short less often. Before a request is refused everybody is looked at.

use std::sync::atomic::Ordering;
use std::time::Instant;

use xlog_driver::DriverResult;

use super::PoolResource;
use super::arena::{Arena, ArenaCounts, Path, Piece, UNIT};
use super::index::{Index, Range, Taken};
use super::sanitizer::Sanitizer;
use super::segments::Span;
use super::trim::holds;
use crate::device_runtime::ordering::EdgePolicy;
use crate::device_runtime::ordering::primitive::Lock;
use crate::device_runtime::resource::{ResourceError, ResourceResult, StreamId};
use crate::stream::RawStream;

/// Blocks put by that a request looks at.
const LOOK_AT: usize = 2;
/// Memory moves between streams in pieces of up to this size where there is enough, so that it does not move often.
const MOST_MOVED: u64 = 2 << 20;

/// Looks into arenas of other threads that requests can save up for; a pool starts with as many.
pub(super) const MOST_SAVED: u32 = 64;

/// A request that the arena of its stream could not serve.
pub(super) struct Request<'a> {
    pub(super) stream: StreamId,
    pub(super) home: &'a RawStream,
    pub(super) arena: &'a Lock<Arena>,
    pub(super) size: u64,
    pub(super) align: u64,
}

impl PoolResource {
    pub(super) fn take_initial(&self) -> ResourceResult<()> {
        let mut left = self.config.initial_bytes as u64;
        while left > 0 {
            // In several pieces, so that each can go back by itself.
            let span =
                self.segments.grow(left.min(self.config.growth_bytes as u64), StreamId::DEFAULT)?;
            self.short.spare.lock().add(Range { ptr: span.ptr, bytes: span.bytes, stamp: 0 }, true);
            left = left.saturating_sub(span.bytes);
        }
        if self.config.initial_bytes > 0 && self.segments.is_stream_ordered() {
            self.tracker.stream(StreamId::DEFAULT)?.settle(&self.tracker.tally)?;
        }
        Ok(())
    }

    /// How much memory moves to a stream that asks for less.
    fn moved(&self) -> u64 {
        (self.config.growth_bytes as u64 / 16).next_multiple_of(UNIT).min(MOST_MOVED)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn serve_from_elsewhere(
        &self,
        stream: StreamId,
        home: &RawStream,
        arena: &Lock<Arena>,
        (size, align): (u64, u64),
    ) -> ResourceResult<Piece> {
        let request = Request { stream, home, arena, size, align };
        if self.config.reuse.opportunistic
            && self.put_by.has_put_by()
            && let Some(_turn) = self.put_by.try_turn()
        {
            // A failure stays with the block and comes back with a reap.
            let _ = self.put_completed(LOOK_AT);
            let take = |arena: &mut Arena| arena.take(size, align, &self.tracker.table);
            if let Some(piece) = arena.with(take) {
                return Ok(piece);
            }
        }
        if self.sanitizer.is_some()
            && let Some(_turn) = self.put_by.try_turn()
        {
            let _ = self.release_completed(usize::MAX);
        }
        if let Some(piece) = self.take_own(&request) {
            return Ok(piece);
        }
        if let Some(piece) = self.take_spare(&request) {
            return Ok(piece);
        }
        let crowd = self.crowd(&request);
        let looks = self.may_look(&request, crowd);
        let mut passed = PassedOver::default();
        if looks {
            if let Some(piece) = self.take_from_others(&request, false, &mut passed)? {
                return Ok(piece);
            }
            if self.config.reuse.insert_waits
                && self.has_plenty()
                && let Some(piece) = self.take_from_others(&request, true, &mut passed)?
            {
                return Ok(piece);
            }
        }
        let full = match self.grow(&request, crowd) {
            Ok(piece) => return Ok(piece),
            Err(error) if is_full(&error) => error,
            Err(error) => return Err(error),
        };
        if !looks && let Some(piece) = self.take_from_others(&request, false, &mut passed)? {
            return Ok(piece);
        }
        match self.take_with_waits(&request, crowd, &mut passed)? {
            Some(piece) => Ok(piece),
            None => Err(self.refusal(&request, full, passed)),
        }
    }

    /// What is left to a pool that cannot grow: memory that somebody must wait for, then pieces put together.
    fn take_with_waits(
        &self,
        request: &Request<'_>,
        crowd: u32,
        passed: &mut PassedOver,
    ) -> ResourceResult<Option<Piece>> {
        if self.config.reuse.insert_waits
            && let Some(piece) = self.take_from_others(request, true, passed)?
        {
            return Ok(Some(piece));
        }
        let turn = self.put_by.turn();
        // A failure stays with the block and comes back with a reap.
        passed.note(self.put_by_with_waits());
        passed.note(self.release_with_waits(RawStream::settle_in_time));
        drop(turn);
        if let Some(piece) = self.take_own(request) {
            return Ok(Some(piece));
        }
        if self.config.reuse.insert_waits {
            if let Some(piece) = self.take_from_others(request, true, passed)? {
                return Ok(Some(piece));
            }
            if let Some(piece) = self.join(request, passed)? {
                return Ok(Some(piece));
            }
        }
        passed.unless_lost(self.settle_streams(RawStream::settle_in_time))?;
        match self.move_together(request) {
            Err(error) if is_full(&error) => {}
            Ok(None) => {}
            other => return other,
        }
        if self.segments.can_move() {
            return Ok(None);
        }
        // What cannot be moved goes back to the device, and is taken again in one range.
        passed.note(self.trim_to(0));
        // An inner resource frees in stream order.
        passed.unless_lost(self.settle_streams(RawStream::settle_in_time))?;
        passed.note(self.segments.reclaim());
        match self.grow(request, crowd) {
            Err(error) if is_full(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Arenas of other streams that are other threads'. Which threads there are decides nothing in a pool that always does the same.
    fn crowd(&self, request: &Request<'_>) -> u32 {
        if !self.config.reuse.opportunistic {
            return 0;
        }
        let own = request.home.clock().key();
        let others = self.arenas_with_places().filter(|(place, _)| *place != own);
        others.filter(|(_, arena)| !arena.is_near()).count() as u32
    }

    /// Whether a request may look at other streams: a small one pays for each arena of another thread with what requests have saved, as
    /// long as the pool rather grows than waits.
    fn may_look(&self, request: &Request<'_>, crowd: u32) -> bool {
        let has_grown = self.segments.reserved() > self.config.eager_growth_bytes as u64;
        if crowd == 0 || request.size > MOST_MOVED || has_grown {
            return true;
        }
        // Two that save at the same time may lose one.
        let saved = self.short.looks_saved.load(Ordering::Relaxed).saturating_add(1);
        let saved = saved.min(MOST_SAVED);
        let is_enough = saved >= crowd.min(MOST_SAVED);
        let left = if is_enough { saved.saturating_sub(crowd) } else { saved };
        self.short.looks_saved.store(left, Ordering::Relaxed);
        is_enough
    }

    /// True when the pool holds enough that another stream's memory is worth a wait.
    fn has_plenty(&self) -> bool {
        let held = self.segments.reserved();
        // Such waits are for all that another stream has queued; who asked for exact ones gets no others while there is a choice.
        if held <= self.config.eager_growth_bytes as u64 || self.config.edges == EdgePolicy::Exact {
            return false;
        }
        let free = |arena: &mut Arena| arena.index.free_bytes() + arena.ready_bytes();
        let of_streams: u64 =
            self.arenas_with_places().filter_map(|(_, arena)| arena.try_with(free)).sum();
        of_streams + self.short.spare.lock().free_bytes() >= held / 2
    }

    #[cold]
    fn refusal(
        &self,
        request: &Request<'_>,
        full: ResourceError,
        passed: PassedOver,
    ) -> ResourceError {
        let snapshot = self.snapshot();
        let ResourceError::OutOfMemory { detail, .. } = full else { return full };
        let cause = if let Some(error) = passed.first {
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

    /// From the own arena, with the magazine emptied into it.
    fn take_own(&self, request: &Request<'_>) -> Option<Piece> {
        let mut places = Vec::new();
        let taken = request.arena.with(|arena| {
            // Read inside: what another thread of this stream put here meanwhile is covered, too.
            arena.flush(request.home.clock().now(), &self.tracker.table, &mut places);
            arena.take(request.size, request.align, &self.tracker.table)
        });
        self.tracker.table.give_places(places);
        taken
    }

    /// A piece that is worth being moved to another stream, or else a whole range: with a small one the next request would be here
    /// again, and what is left of a range is a splinter.
    fn take_worth_while(
        &self,
        index: &mut Index,
        (size, align): (u64, u64),
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Taken> {
        let most = self.moved();
        index
            .take_if((size.max(most), most), align, usable)
            .or_else(|| index.take_if((size, most), align, usable))
    }

    fn take_spare(&self, request: &Request<'_>) -> Option<Piece> {
        let range = {
            let mut spare = self.short.spare.lock();
            let (size, align) = (request.size, request.align);
            let taken = self
                .take_worth_while(&mut spare, (size, align), &mut |_| true)
                .or_else(|| spare.take(size, align))?;
            spare.forget(taken.node)?
        };
        self.add(request, Range { stamp: 0, ..range }, Path::Completed)
    }

    fn add(&self, request: &Request<'_>, range: Range, path: Path) -> Option<Piece> {
        request.arena.with(|arena| arena.add_and_take(range, request.size, request.align, path))
    }

    /// From the arenas of other streams: what needs no wait, or anything, `with_wait`.
    fn take_from_others(
        &self,
        request: &Request<'_>,
        with_wait: bool,
        passed: &mut PassedOver,
    ) -> ResourceResult<Option<Piece>> {
        let own = request.home.clock().key();
        for (place, other) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place).filter(|_| place != own) else {
                continue;
            };
            let Some((range, path)) = self.take_from(request, other, stream, with_wait) else {
                continue;
            };
            if path == Path::Waited
                && let Err(error) = request.home.wait_for(stream, range.stamp, &self.tracker.tally)
            {
                other.with(|arena| arena.keep(range));
                passed.unless_lost(Err(error))?;
                continue;
            }
            let stamp = if path == Path::Completed { 0 } else { request.home.clock().now() };
            if let Some(piece) = self.add(request, Range { stamp, ..range }, path) {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Takes a range out of the arena of `stream`.
    fn take_from(
        &self,
        request: &Request<'_>,
        other: &Lock<Arena>,
        stream: &RawStream,
        with_wait: bool,
    ) -> Option<(Range, Path)> {
        let reuse = self.config.reuse;
        let (size, align) = (request.size, request.align);
        let enough =
            other.try_with(|arena| arena.index.free_bytes() + arena.ready_bytes() >= size)?;
        if !enough {
            return None;
        }
        if reuse.opportunistic {
            stream.poll_tail();
        }
        let (clock, here) = (stream.clock(), request.home.clock());
        let mut places = Vec::new();
        let found = other.try_with(|arena| {
            let path_of = |stamp: u64| {
                if stamp == 0 || reuse.opportunistic && clock.is_complete(stamp) {
                    Some(Path::Completed)
                } else if reuse.follow_dependencies && here.covers(clock.key(), stamp) {
                    Some(Path::Covered)
                } else {
                    with_wait.then_some(Path::Waited)
                }
            };
            let take = |index: &mut Index| {
                let usable = &mut |stamp| path_of(stamp).is_some();
                let taken = self.take_worth_while(index, (size, align), usable)?;
                let range = index.forget(taken.node)?;
                Some((range, path_of(range.stamp)?))
            };
            let found = take(&mut arena.index);
            if found.is_some() || !with_wait {
                return found;
            }
            // What the other stream has at hand is the last that is taken from it.
            arena.flush(clock.now(), &self.tracker.table, &mut places);
            take(&mut arena.index)
        });
        self.tracker.table.give_places(places);
        found.flatten()
    }

    /// Memory that was just taken for a request.
    fn fresh(&self, request: &Request<'_>, span: Span) -> Range {
        let ordered = self.segments.is_stream_ordered();
        let stamp = if ordered { request.home.clock().now() } else { 0 };
        Range { ptr: span.ptr, bytes: span.bytes, stamp }
    }

    /// From the device; for the others of a crowd as well, where it is nobody's until they ask.
    fn grow(&self, request: &Request<'_>, crowd: u32) -> ResourceResult<Piece> {
        let mut grown = self.short.growing.lock();
        // Another thread of this stream may have grown meanwhile.
        let (size, align) = (request.size, request.align);
        if let Some(piece) =
            request.arena.with(|arena| arena.take(size, align, &self.tracker.table))
        {
            return Ok(piece);
        }
        // And a trim may have put by what it did not give back.
        if let Some(piece) = self.take_spare(request) {
            return Ok(piece);
        }
        // Pieces begin at multiples of the granularity; what must be aligned better needs room to be moved in.
        let slack = if align > self.segments.granularity() { align } else { 0 };
        crate::spans::slow_path!("segment_growth", bytes = size + slack);
        let span = self.take_span(size + slack, request.stream, crowd)?;
        grown.last = Instant::now();
        self.share_magazines(&mut grown);
        let mut own = span;
        if crowd > 0
            && !self.segments.is_stream_ordered()
            && let (first, Some(others)) =
                split(span, (size + slack).max(self.moved()), self.segments.granularity().max(UNIT))
        {
            let range = Range { ptr: others.ptr, bytes: others.bytes, stamp: 0 };
            // What cannot be kept there stays with the rest.
            if self.short.spare.lock().add(range, true) {
                own = first;
            }
        }
        drop(grown);
        match self.add(request, self.fresh(request, own), Path::Grown) {
            Some(piece) => Ok(piece),
            None => Err(ResourceError::OutOfMemory {
                requested: size as usize,
                detail: format!("{} bytes were taken and do not hold it", span.bytes),
            }),
        }
    }

    /// Takes at least `bytes` from the device: more while there is room, in proportion to what is held, so that a small pool stays
    /// small and a large one does not grow often. Where a crowd will ask soon, it is for several at a time, up to a quarter.
    fn take_span(&self, bytes: u64, stream: StreamId, crowd: u32) -> ResourceResult<Span> {
        let part = self.segments.reserved() / 32 * u64::from(crowd.min(7) + 1);
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

    /// Moves wholly free pieces of memory to other addresses, where they lie together.
    fn move_together(&self, request: &Request<'_>) -> ResourceResult<Option<Piece>> {
        let _growing = self.short.growing.lock();
        let idle = self.take_idle();
        let (size, align) = (request.size, request.align);
        if idle.iter().any(|span| holds(span.ptr, span.end(), size, align)) {
            self.keep_idle(idle, &[]);
            return Ok(self.take_spare(request));
        }
        let (span, gone, outcome) = self.segments.gather(&idle, request.size, request.stream);
        self.keep_idle(idle, &gone);
        outcome?;
        match span {
            Some(span) => Ok(self.add(request, self.fresh(request, span), Path::Grown)),
            None => Ok(self.take_spare(request)),
        }
    }

    /// The arenas that were ever used, with the places of their streams.
    pub(super) fn arenas_with_places(&self) -> impl Iterator<Item = (u32, &Lock<Arena>)> {
        self.arenas
            .iter()
            .filter(|(_, arena)| arena.is_used())
            .map(|(place, arena)| (place, &arena.0))
    }

    /// Bytes of live blocks, and of retired ones, as they were asked for where a memory checker looks on.
    pub(super) fn outstanding(&self) -> u64 {
        let taken = self.counts().1;
        taken - self.slack().min(taken)
    }

    pub(super) fn slack(&self) -> u64 {
        self.sanitizer.as_ref().map_or(0, Sanitizer::slack)
    }

    /// What all streams counted, and the bytes handed out, at one instant.
    pub(super) fn counts(&self) -> (ArenaCounts, u64) {
        let arenas: Vec<&Lock<Arena>> = self.arenas_with_places().map(|(_, arena)| arena).collect();
        Lock::with_all(&arenas, |arenas| {
            let mut sum = ArenaCounts::default();
            arenas.iter().for_each(|arena| sum.add(&arena.counts));
            (sum, arenas.iter().map(|arena| arena.outstanding()).sum())
        })
    }
}

/// Streams that a request did without since they could not be waited for.
#[derive(Default)]
pub(super) struct PassedOver {
    /// The first failure of that kind.
    first: Option<ResourceError>,
}

impl PassedOver {
    /// Goes on after a failure.
    fn note<T>(&mut self, outcome: ResourceResult<T>) {
        if let Err(error) = outcome {
            self.first.get_or_insert(error);
        }
    }

    /// Goes on after a failure, unless the device is lost: no other stream would do.
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

/// The beginning of a span, of `bytes` at least, and what is left of it if that is as much again. Each side is whole
/// pieces of the device's memory, so that it can go back by itself.
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

/// True when the device, a limit or a ledger has no more.
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
