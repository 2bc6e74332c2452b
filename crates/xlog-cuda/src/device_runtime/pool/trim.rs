//! Free memory as a whole: joined over streams, given back to the device, shared out to the magazines.
//!
//! What is given back or belongs to no stream has been seen complete by the host; whatever is still pending stays with its stream.

use std::sync::atomic::Ordering;

use super::arena::{Arena, Path, Piece};
use super::index::Range;
use super::reuse::Request;
use super::segments::Span;
use super::{Growth, PoolResource};
use crate::device_runtime::resource::ResourceResult;

/// Pieces smaller than this stay where they are when memory of several streams is joined.
const LEAST_JOINED: u64 = 64 << 10;

/// The smallest piece that is worth being joined for a request.
fn least_joined(size: u64) -> u64 {
    (size / 32).max(LEAST_JOINED)
}

impl PoolResource {
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
        let idle = self.take_idle(0);
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

    /// Puts free memory of all streams on which nothing is pending to what belongs to none, where neighbours become one. False when
    /// there is not enough for `size`, or nothing to be joined.
    ///
    /// Memory moves between streams in pieces, and those come to lie between each other: what several streams have free can hold a
    /// request that none of them can serve. Small pieces stay, they add little and are what a stream serves most requests from.
    pub(super) fn join_free(&self, size: u64) -> bool {
        if !self.config.reuse.opportunistic || !self.can_join(size, true) {
            return false;
        }
        let idle = self.take_idle(least_joined(size));
        self.keep_idle(idle, &[]);
        true
    }

    /// True when several streams have free memory, and enough for `size`; asks, where `polls`, what of it has completed.
    fn can_join(&self, size: u64, polls: bool) -> bool {
        if size < LEAST_JOINED {
            return false;
        }
        let (mut streams, mut free) = (0, self.spare.lock().free_bytes());
        for (place, arena) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            // One that somebody stays inside is not waited for.
            let bytes = arena.try_with(|arena| arena.index.free_bytes()).unwrap_or(0);
            if bytes >= LEAST_JOINED {
                (streams, free) = (streams + 1, free + bytes);
                if polls {
                    stream.poll_tail();
                }
            }
        }
        streams > 1 && free >= size
    }

    /// The same with all that is free, whatever is pending on it: the asking stream waits for the others, and gets it.
    pub(super) fn join_with_waits(&self, request: &Request<'_>) -> ResourceResult<Option<Piece>> {
        let Request { home, size, align, .. } = *request;
        if !self.can_join(size, false) {
            return Ok(None);
        }
        let mut joined = self.spare.lock().extract(0, &mut |range| Some(*range));
        let mut outcome = Ok(());
        for (place, other) in self.arenas_with_places() {
            let stream = self.tracker.streams.at(place);
            let Some(stream) = stream.filter(|_| place != home.clock().key()) else { continue };
            let take = |arena: &mut Arena| {
                arena.index.extract(least_joined(size), &mut |range| Some(*range))
            };
            let Some(ranges) = other.try_with(take).filter(|ranges| !ranges.is_empty()) else {
                continue;
            };
            let last = ranges.iter().map(|range| range.stamp).max().unwrap_or(0);
            match home.wait_for(stream, last, &self.tracker.tally) {
                Ok(()) => joined.extend(ranges),
                Err(error) => {
                    outcome = Err(error.into());
                    other.with(|arena| ranges.iter().for_each(|range| arena.keep(*range)));
                    break;
                }
            }
        }
        let piece = request.arena.with(|arena| {
            // Read inside, and after the waits: what is added here follows all of them.
            let stamp = home.clock().now();
            joined.iter().for_each(|range| arena.keep(Range { stamp, ..*range }));
            arena.take_free(size, align, Path::Waited)
        });
        match (piece, outcome) {
            (Some(piece), _) => Ok(Some(piece)),
            (None, outcome) => outcome.map(|()| None),
        }
    }

    /// Takes the free ranges of at least `min` bytes on which nothing is pending out of all arenas, joined by address.
    pub(super) fn take_idle(&self, min: u64) -> Vec<Span> {
        let mut idle: Vec<Span> = Vec::new();
        for (place, arena) in self.arenas_with_places() {
            let Some(stream) = self.tracker.streams.at(place) else { continue };
            let clock = stream.clock();
            let take = |arena: &mut Arena| {
                let leaves = &mut |range: &Range| {
                    (range.stamp == 0 || clock.is_complete(range.stamp)).then_some(*range)
                };
                idle.extend(arena.index.extract(min, leaves).iter().map(span_of));
            };
            // Who wants all waits for it.
            if min == 0 {
                arena.with(take);
            } else {
                arena.try_with(take);
            }
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
    pub(super) fn keep_idle(&self, idle: Vec<Span>, gone: &[Span]) {
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
}

fn span_of(range: &Range) -> Span {
    Span { ptr: range.ptr, bytes: range.bytes }
}
