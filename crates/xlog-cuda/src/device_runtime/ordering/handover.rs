//! The short way of a block from one stream to another.
//!
//! It is taken where a use follows exactly one stream and the running thread owns all locks on the way: then nothing is allocated,
//! nothing is walked, and no lock is waited for. Where that is not so nothing was done, and the hooks of
//! [`Tracks`](super::tracks::Tracks) do the same in general. Neither holds a lock over a driver call. Whether device and streams fit
//! together is not asked: where they do not, there is no block.

use super::EdgePolicy;
use super::locked::{Closed, close_foreign};
use super::primitive::{as_me, visit, with_as};
use super::record::{Record, tag_of};
use super::tally::Edges;
use super::tracker::Tracker;
use crate::device_runtime::resource::{Access, Generation, StreamId};
use crate::stream::Unfollowed;
use xlog_driver::DriverError;

/// A use that was opened, and whose wait could not be queued: it is to be cancelled.
#[derive(Debug)]
pub(crate) struct Uncovered {
    pub(crate) number: u64,
    pub(crate) error: DriverError,
}

/// Opens a use and has its stream follow the one that is to be followed. `Err(None)`: nothing was done.
#[inline(always)]
pub(crate) fn prepare(
    tracker: &Tracker,
    record: &Record,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> Result<(), Option<Box<Uncovered>>> {
    let Some(raw) = tracker.streams.raw(stream) else { return Err(None) };
    as_me(|me| {
        let clock = raw.clock();
        let mut inside = visit!(record.uses(), me, else return Err(None));
        let Some(uses) = inside.as_deref_mut() else { return Err(None) };
        // What is slow has left home.
        if !record.gate.is_live_and_slow(tag_of(generation)) {
            return Err(None);
        }
        let sole = uses.sole(record.home(), clock.key(), access.writes());
        let Some(sole) = sole else { return Err(None) };
        let Some(other) = tracker.streams.at(sole.place) else { return Err(None) };
        if sole.place == clock.key()
            || other.clock().is_complete(sole.stamp)
            || clock.covers(sole.place, sole.stamp)
            || clock.cell().is_exposed()
        {
            return Err(None);
        }
        let number = uses.open_sole(stream, clock.key(), access, sole.own);
        record.set_opened(stream, access.writes());
        drop(inside);
        match raw.follow_shortly(me, other, sole.stamp) {
            Ok(recorded) => {
                tracker.tally.count_as(me, move |counts| {
                    counts.recorded += recorded;
                    counts.inserted += 1;
                });
                Ok(())
            }
            Err(unfollowed) => Err(Some(uncovered(tracker, number, *unfollowed))),
        }
    })
}

#[cold]
fn uncovered(tracker: &Tracker, number: u64, unfollowed: Unfollowed) -> Box<Uncovered> {
    let Unfollowed { recorded, error } = unfollowed;
    tracker.tally.count(|counts| counts.add_edges(Edges { recorded, ..Edges::default() }));
    Box::new(Uncovered { number, error })
}

/// Records an event for a use of another stream than the own one, and closes it. [`Closed::Not`]: nothing was done, or, with
/// an error, no event could be recorded.
#[inline(always)]
pub(crate) fn finish(
    tracker: &Tracker,
    record: &Record,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> (Closed, Option<Box<DriverError>>) {
    // Without such a use there is nothing to record for. If the hint is wrong, because another thread closes it now, there is an event
    // more, which covers what it says and no more.
    if !record.has_opened(stream, access.writes()) || tracker.policy == EdgePolicy::Lazy {
        return (Closed::Not, None);
    }
    let Some(raw) = tracker.streams.raw(stream) else { return (Closed::Not, None) };
    let place = raw.clock().key();
    if place == record.home() || raw.clock().cell().is_exposed() {
        return (Closed::Not, None);
    }
    as_me(|me| {
        let stamp = match raw.record_shortly(me, &tracker.tally) {
            Ok(stamp) => stamp,
            Err(error) => return (Closed::Not, Some(Box::new(error))),
        };
        let closed = with_as!(record.uses(), me, |uses| {
            let uses = uses.get_or_insert_default();
            close_foreign(record, uses, generation, (stream, place, stamp), access)
        });
        (closed, None)
    })
}
