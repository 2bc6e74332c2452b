//! The short way of a block from one stream to another.
//!
//! It is taken where a use follows exactly one stream and the running thread owns all locks on the way: then nothing is allocated,
//! nothing is walked, and no lock is waited for. Where that is not so nothing was done, and the hooks of
//! [`Tracks`] do the same in general. Neither holds a lock over a driver call. Whether device and streams fit
//! together is not asked: where they do not, there is no block.

use super::EdgePolicy;
use super::baton::Baton;
use super::locked::{Closed, pass_on};
use super::primitive::{Me, as_me, visit, with_as};
use super::record::{Record, tag_of, use_name};
use super::tally::Edges;
use super::tracker::Tracker;
use super::tracks::Tracks;
use crate::device_runtime::resource::{Access, Generation, StreamId};
use crate::stream::{RawStream, Unfollowed};
use xlog_driver::DriverError;

/// Opens a use and has its stream follow the one that is to be followed. `Err(None)`: nothing was done; with an error the use was opened
/// and its wait could not be queued: it is to be cancelled.
///
/// Each resource `R` has its own, because what is called from one place only is not a call.
#[inline(always)]
pub(crate) fn prepare<R: Tracks + ?Sized>(
    resource: &R,
    record: &Record,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> Result<(), Option<Box<DriverError>>> {
    let tracker = resource.tracker();
    let Some(raw) = tracker.stream_table.raw_private(stream) else { return Err(None) };
    as_me(|me| {
        let clock = raw.clock();
        let far = record.far();
        let mut shared = visit!(far.shared(), me, else return Err(None));
        let Some(baton) = shared.lying(far) else {
            drop(shared);
            return prepare_sole(tracker, record, generation, (stream, raw), access);
        };
        let (place, stamp) = (baton.place, baton.stamp);
        if record.generation() != generation {
            return Err(None);
        }
        let Some(other) = tracker.stream_table.at(place) else { return Err(None) };
        // What has completed is forgotten.
        if other.clock().is_complete(stamp) {
            return Err(None);
        }
        if place == clock.key() || clock.covers(place, stamp) {
            return prepare_implied(tracker, record, baton, (stream, clock.key()), access);
        }
        baton.by = clock.key();
        far.set_opened(use_name(stream, access.writes()));
        drop(shared);
        follow(tracker, me, raw, other, stamp)
    })
}

/// Opens a use of a stream, at a place, that comes after the baton without a wait. The lock is held.
#[inline(never)]
fn prepare_implied(
    tracker: &Tracker,
    record: &Record,
    baton: &mut Baton,
    (stream, by): (StreamId, u32),
    access: Access,
) -> Result<(), Option<Box<DriverError>>> {
    if baton.place != by {
        tracker.tally.count(|counts| counts.elided += 1);
    } else if by == record.home() {
        // Only its own stream is left: it goes the quick way again.
        return Err(None);
    }
    baton.by = by;
    record.far().set_opened(use_name(stream, access.writes()));
    Ok(())
}

/// The stream of an opened use follows another one.
#[inline(always)]
fn follow(
    tracker: &Tracker,
    me: Me<'_>,
    raw: &RawStream,
    other: &RawStream,
    stamp: u64,
) -> Result<(), Option<Box<DriverError>>> {
    match raw.follow_shortly(me, other, stamp) {
        Ok(recorded) => {
            tracker.tally.count_edges(me, recorded, 1);
            Ok(())
        }
        Err(unfollowed) => Err(Some(uncovered(tracker, *unfollowed))),
    }
}

/// [`prepare`] of a block that is not simply handed on, where there is still one stream to follow.
#[inline(never)]
fn prepare_sole(
    tracker: &Tracker,
    record: &Record,
    generation: Generation,
    (stream, raw): (StreamId, &RawStream),
    access: Access,
) -> Result<(), Option<Box<DriverError>>> {
    as_me(|me| {
        let clock = raw.clock();
        let mut shared = visit!(record.shared(), me, else return Err(None));
        // What is slow has left home.
        if !record.gate.is_live_and_slow(tag_of(generation)) {
            return Err(None);
        }
        let uses = shared.all(record);
        let sole = uses.sole(record.home(), clock.key(), access.writes());
        let Some(sole) = sole else { return Err(None) };
        let Some(other) = tracker.stream_table.at(sole.place) else { return Err(None) };
        if sole.place == clock.key()
            || other.clock().is_complete(sole.stamp)
            || clock.covers(sole.place, sole.stamp)
        {
            return Err(None);
        }
        uses.open_sole(stream, clock.key(), access, sole.own);
        record.far().set_opened(use_name(stream, access.writes()));
        drop(shared);
        follow(tracker, me, raw, other, sole.stamp)
    })
}

#[cold]
fn uncovered(tracker: &Tracker, unfollowed: Unfollowed) -> Box<DriverError> {
    let Unfollowed { recorded, error } = unfollowed;
    tracker.tally.count(|counts| counts.add_edges(Edges { recorded, ..Edges::default() }));
    Box::new(error)
}

/// Records an event for a use of another stream than the own one, and closes it. [`Closed::Not`]: nothing was done, or, with
/// an error, no event could be recorded. Of `R` as in [`prepare`].
#[inline(always)]
pub(crate) fn finish<R: Tracks + ?Sized>(
    resource: &R,
    record: &Record,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> (Closed, Option<Box<DriverError>>) {
    let tracker = resource.tracker();
    // Without such a use there is nothing to record for. If the hint is wrong, because another thread closes it now, there is an event
    // more, which covers what it says and no more.
    let Some(far) = record.gate.rest() else { return (Closed::Not, None) };
    if !far.has_opened(use_name(stream, access.writes())) || tracker.policy == EdgePolicy::Lazy {
        return (Closed::Not, None);
    }
    let Some(raw) = tracker.stream_table.raw_private(stream) else { return (Closed::Not, None) };
    let place = raw.clock().key();
    if place == record.home() {
        return (Closed::Not, None);
    }
    as_me(|me| {
        let stamp = match raw.record_shortly(me, &tracker.tally) {
            Ok(stamp) => stamp,
            Err(error) => return (Closed::Not, Some(Box::new(error))),
        };
        let closed = with_as!(far.shared(), me, |shared| {
            pass_on((record, far), shared, generation, (stream, place, stamp), access)
        });
        (closed, None)
    })
}
