//! What a pool does when the arena of the asking stream has nothing left, and how memory goes back.
//!
//! In this order: blocks of the own stream that only wait to be merged; memory that belongs to no stream; memory of other streams that
//! the asking one already follows, or whose last work has completed; the device; memory of other streams with a wait; blocks whose uses
//! elsewhere have not completed, with waits; pieces of free memory moved together. Only then is the request refused.
//!
//! Memory that changes its stream gets a stamp of its new one, unless the host has seen its last work complete: whoever takes it from
//! there follows the new stream, and through it the old one. Without that, a third stream would miss the first.
//!
//! The arena of another stream is looked at only if nobody stays inside it, and no arena is held while another one is looked at.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::arena::{Arena, ArenaCounts, Path, Piece, UNIT};
use super::index::Range;
use super::sanitizer::Sanitizer;
use super::segments::Span;
use super::{Growth, PoolResource};
use crate::device_runtime::ordering::primitive::Lock;
use crate::device_runtime::resource::{ResourceError, ResourceResult, StreamId};
use crate::stream::RawStream;

/// Blocks put by that a request looks at.
const LOOK_AT: usize = 2;
/// Memory moves between streams in pieces of up to this size where there is enough, so that it does not move often.
const MOST_MOVED: u64 = 2 << 20;

/// A request that the arena of its stream could not serve.
struct Request<'a> {
    stream: StreamId,
    home: &'a RawStream,
    arena: &'a Lock<Arena>,
    size: u64,
    align: u64,
}

impl PoolResource {
    pub(super) fn take_initial(&self) -> ResourceResult<()> {
        let mut left = self.config.initial_bytes as u64;
        while left > 0 {
            // In several pieces, so that each can go back by itself.
            let span =
                self.segments.grow(left.min(self.config.growth_bytes as u64), StreamId::DEFAULT)?;
            self.spare.lock().add(Range { ptr: span.ptr, bytes: span.bytes, stamp: 0 }, true);
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
        if let Some(piece) = self.take_from_others(&request, false)? {
            return Ok(piece);
        }
        let full = match self.grow(&request) {
            Ok(piece) => return Ok(piece),
            Err(error) if is_full(&error) => error,
            Err(error) => return Err(error),
        };
        if self.config.reuse.insert_waits
            && let Some(piece) = self.take_from_others(&request, true)?
        {
            return Ok(piece);
        }
        let turn = self.put_by.turn();
        self.put_by_with_waits()?;
        self.release_with_waits()?;
        drop(turn);
        if let Some(piece) = self.take_own(&request) {
            return Ok(piece);
        }
        if self.config.reuse.insert_waits
            && let Some(piece) = self.take_from_others(&request, true)?
        {
            return Ok(piece);
        }
        self.settle_streams()?;
        if let Some(piece) = self.move_together(&request)? {
            return Ok(piece);
        }
        Err(self.refusal(&request, full))
    }

    #[cold]
    fn refusal(&self, request: &Request<'_>, full: ResourceError) -> ResourceError {
        let snapshot = self.snapshot();
        let ResourceError::OutOfMemory { detail, .. } = full else { return full };
        ResourceError::OutOfMemory {
            requested: request.size as usize,
            detail: format!(
                "{detail}; the pool holds {} bytes, {} of them handed out, and its largest free range has {}",
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

    fn take_spare(&self, request: &Request<'_>) -> Option<Piece> {
        let range = {
            let mut spare = self.spare.lock();
            let want = request.size.max(self.moved());
            let taken = spare
                .take(want, request.align)
                .or_else(|| spare.take(request.size, request.align))?;
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
                other.with(|arena| arena.index.add(range, true));
                return Err(error.into());
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
            other.try_with(|arena| arena.index.free_bytes() + arena.magazine.bytes() >= size)?;
        if !enough {
            return None;
        }
        if reuse.opportunistic {
            stream.poll_tail();
        }
        let (clock, here) = (stream.clock(), request.home.clock());
        let mut places = Vec::new();
        let found = other.try_with(|arena| {
            if with_wait {
                arena.flush(clock.now(), &self.tracker.table, &mut places);
            }
            let path_of = |stamp: u64| {
                if stamp == 0 || reuse.opportunistic && clock.is_complete(stamp) {
                    Some(Path::Completed)
                } else if reuse.follow_dependencies && here.covers(clock.key(), stamp) {
                    Some(Path::Covered)
                } else {
                    with_wait.then_some(Path::Waited)
                }
            };
            let usable = &mut |stamp| path_of(stamp).is_some();
            let taken = arena
                .index
                .take_if(size.max(self.moved()), align, usable)
                .or_else(|| arena.index.take_if(size, align, usable))?;
            let range = arena.index.forget(taken.node)?;
            Some((range, path_of(range.stamp)?))
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

    /// From the device.
    fn grow(&self, request: &Request<'_>) -> ResourceResult<Piece> {
        let mut grown = self.growing.lock();
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
        let span = self.take_span(size + slack, request.stream)?;
        grown.last = Instant::now();
        self.share_magazines(&mut grown);
        drop(grown);
        match self.add(request, self.fresh(request, span), Path::Grown) {
            Some(piece) => Ok(piece),
            None => Err(ResourceError::OutOfMemory {
                requested: size as usize,
                detail: format!("{} bytes were taken and do not hold it", span.bytes),
            }),
        }
    }

    /// Takes at least `bytes` from the device: more while there is room, in proportion to what is held, so that a small pool stays
    /// small and a large one does not grow often.
    fn take_span(&self, bytes: u64, stream: StreamId) -> ResourceResult<Span> {
        let step = (self.segments.reserved() / 32).max(2 << 20).next_multiple_of(2 << 20);
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
        let _growing = self.growing.lock();
        let idle = self.take_idle();
        let (span, gone, outcome) = self.segments.gather(&idle, request.size, request.stream);
        self.keep_idle(idle, &gone);
        outcome?;
        match span {
            Some(span) => Ok(self.add(request, self.fresh(request, span), Path::Grown)),
            None => Ok(self.take_spare(request)),
        }
    }

    /// Gives free memory on which nothing is pending back to the device, until the pool holds no more than `bytes`; returns how
    /// many bytes went back.
    pub fn trim_to(&self, bytes: usize) -> ResourceResult<usize> {
        if self.sanitizer.is_some()
            && let Some(_turn) = self.put_by.try_turn()
        {
            self.release_completed(usize::MAX)?;
        }
        let mut growing = self.growing.lock();
        let excess = self.segments.reserved().saturating_sub(bytes as u64);
        if excess == 0 {
            return Ok(0);
        }
        self.empty_magazines();
        for (place, _) in self.arenas_with_places() {
            if let Some(stream) = self.tracker.streams.at(place) {
                stream.poll_tail();
            }
        }
        let idle = self.take_idle();
        let (gone, outcome) = self.segments.release(&idle, excess);
        self.keep_idle(idle, &gone);
        self.share_magazines(&mut growing);
        outcome.map(|()| gone.iter().map(|span| span.bytes as usize).sum())
    }

    /// Changes how much of the device the pool may hold. What it already holds stays.
    pub fn set_maximum(&self, bytes: usize) {
        self.segments.set_limit(bytes as u64);
    }

    /// Lets memory go that has been free for long enough, if the configuration says so.
    pub(super) fn decay(&self) -> ResourceResult<()> {
        let Some(idle) = self.config.idle_decay else { return Ok(()) };
        let due = self.growing.lock().last.elapsed() >= idle;
        if due { self.trim_to(self.config.release_threshold).map(|_| ()) } else { Ok(()) }
    }

    /// Takes everything free on which nothing is pending out of all arenas, joined by address.
    fn take_idle(&self) -> Vec<Span> {
        let mut idle: Vec<Span> = Vec::new();
        for (place, arena) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            let clock = stream.clock();
            arena.with(|arena| {
                let leaves = &mut |range: &Range| {
                    (range.stamp == 0 || clock.is_complete(range.stamp)).then_some(*range)
                };
                idle.extend(arena.index.extract(0, leaves).iter().map(span_of));
            });
        }
        idle.extend(self.spare.lock().extract(0, &mut |range| Some(*range)).iter().map(span_of));
        idle.sort_unstable_by_key(|span| span.ptr);
        let mut joined: Vec<Span> = Vec::with_capacity(idle.len());
        for span in idle {
            match joined.last_mut() {
                Some(last) if last.ptr + last.bytes == span.ptr => last.bytes += span.bytes,
                _ => joined.push(span),
            }
        }
        joined
    }

    /// Keeps what is left of `idle` for any stream.
    fn keep_idle(&self, idle: Vec<Span>, gone: &[Span]) {
        let mut gone: Vec<Span> = gone.to_vec();
        gone.sort_unstable_by_key(|span| span.ptr);
        let mut gone = gone.into_iter().peekable();
        let mut spare = self.spare.lock();
        for span in idle {
            let (mut from, end) = (span.ptr, span.ptr + span.bytes);
            while let Some(part) = gone.next_if(|part| part.ptr < end) {
                if part.ptr > from {
                    spare.add(Range { ptr: from, bytes: part.ptr - from, stamp: 0 }, true);
                }
                from = part.ptr + part.bytes;
            }
            if from < end {
                spare.add(Range { ptr: from, bytes: end - from, stamp: 0 }, true);
            }
        }
    }

    /// Waits until the last work on all free memory has completed.
    pub(super) fn settle_streams(&self) -> ResourceResult<()> {
        self.empty_magazines();
        let mut outcome = Ok(());
        for (place, _) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            if !stream.poll_tail()
                && let Err(error) = stream.settle(&self.tracker.tally)
            {
                outcome = outcome.and(Err(error.into()));
            }
        }
        outcome
    }

    /// Shares out what all magazines together may have, if there is more or less of it, or more streams.
    pub(super) fn share_magazines(&self, growing: &mut Growth) {
        let most = (self.segments.reserved() / 50).max(self.config.magazine_bytes as u64);
        let streams = self.arenas_with_places().count() as u32;
        let (shared, among) = growing.shared;
        if streams <= among && most <= shared + shared / 4 && most >= shared {
            return;
        }
        // In doublings, since less for each is a look into all magazines.
        let among = among.max(streams.next_power_of_two());
        growing.shared = (most, among);
        let room = most / u64::from(among);
        if self.room.swap(room, Ordering::Relaxed) <= room {
            return;
        }
        let mut places = Vec::new();
        for (place, arena) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            // One that somebody stays inside keeps what it has until that is used.
            arena.try_with(|arena| {
                if arena.magazine.bytes() > room {
                    arena.flush(stream.clock().now(), &self.tracker.table, &mut places);
                }
            });
        }
        self.tracker.table.give_places(places);
    }

    /// Puts what lies ready on each stream to its free memory, with the stamp of now: before it is asked what has completed.
    fn empty_magazines(&self) {
        let mut places = Vec::new();
        for (place, arena) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            arena.with(|arena| {
                arena.flush(stream.clock().now(), &self.tracker.table, &mut places);
            });
        }
        self.tracker.table.give_places(places);
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

/// True when the device, a limit or a ledger has no more.
fn is_full(error: &ResourceError) -> bool {
    matches!(error, ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })
}

fn span_of(range: &Range) -> Span {
    Span { ptr: range.ptr, bytes: range.bytes }
}
