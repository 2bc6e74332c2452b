//! What is done to a block under its lock: uses are opened and closed, and the block goes from the quick way of its own stream to the
//! slow one and back.
//!
//! Invariants: while a block is live and slow the stamps of its own stream are in its [`Uses`], otherwise in its record; while there is
//! anything else in its uses it is slow. Nothing here calls the driver.

use super::baton::{Baton, Shared};
use super::record::{Far, Record, tag_of, use_name};
use super::uses::{Opened, Uses};
use crate::device_runtime::resource::{Access, Generation, StreamId};
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// How a use turned out to be when it was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Closed {
    Open,
    /// It was not closed.
    Not,
    /// It was the last one of a block that had been returned: free it now.
    Free,
    /// The block is another one by now.
    Stale,
    /// There was no such use.
    Missing,
}

/// Sends everybody through the lock, which is held. False when it is not the live block.
#[inline(always)]
pub(crate) fn enter_slow(record: &Record, uses: &mut Uses, tag: u32) -> bool {
    // Mostly it is so already.
    record.gate.is_live_and_slow(tag) || make_slow(record, uses, tag)
}

#[cold]
fn make_slow(record: &Record, uses: &mut Uses, tag: u32) -> bool {
    let live = record.gate.enter_slow(tag);
    if live {
        uses.take_stamps(record);
    }
    live
}

/// Opens a use under the lock of the block. `Err` says that it needs no more: it is open without the lock, or not the live block.
#[inline(always)]
pub(crate) fn open<'a>(
    record: &Record,
    uses: &mut Uses,
    tag: u32,
    streams: &'a StreamPool,
    (stream, raw): (StreamId, &RawStream),
    access: Access,
) -> Result<Opened<'a>, bool> {
    if !enter_slow(record, uses, tag) {
        return Err(false);
    }
    // Only under the id that may go without the lock is such a use found again.
    if record.stream_id() == stream.0 && uses.is_quiet() && leave_slow(record, uses, access) {
        return Err(true);
    }
    record.far().set_opened(use_name(stream, access.writes()));
    Ok(uses.open(record.home(), streams, (stream, raw), access))
}

/// Closes a use of the own stream under the lock of the block.
#[inline(always)]
pub(crate) fn close_own(
    (record, far): (&Record, &Far),
    shared: &mut Shared,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    access: Access,
) -> Closed {
    let name = use_name(stream, access.writes());
    if access.writes()
        && record.gate.is_slow_and_uncounted(true)
        && record.generation() == generation
        && let Some(baton) = shared.carried(far, name)
    {
        *baton = Baton { stamp, place: record.home(), by: 0 };
        far.set_none_opened();
        return Closed::Open;
    }
    close_own_of_all(record, shared, generation, (stream, stamp), access)
}

#[inline(never)]
fn close_own_of_all(
    record: &Record,
    shared: &mut Shared,
    generation: Generation,
    of: (StreamId, u64),
    access: Access,
) -> Closed {
    let closed = close_own_in(record, shared.all(record), generation, of, access);
    if closed == Closed::Open {
        shared.fold(record);
    }
    closed
}

fn close_own_in(
    record: &Record,
    uses: &mut Uses,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    access: Access,
) -> Closed {
    // Under the lock, so that a claim which went stale meanwhile closes nobody else's use.
    if record.generation() != generation {
        return Closed::Stale;
    }
    let (home, writes) = (record.home(), access.writes());
    if !record.gate.is_slow_and_uncounted(writes)
        && let Some(closed) = close_counted(record, uses, generation, (stream, stamp), writes)
    {
        return closed;
    }
    let followed = uses.close(stream, access);
    if followed.is_none() {
        return Closed::Missing;
    }
    forget_opened(record, uses, stream, writes);
    uses.finished(home, home, stamp, writes, followed);
    // It stays slow even if only its own stream is left: the next use mostly comes from elsewhere again, and if not, that is seen
    // when it is prepared.
    free_if_last(record, uses)
}

/// Closes a use of the own stream that was opened without the lock, which is held now; `None` when there is none.
#[inline(never)]
fn close_counted(
    record: &Record,
    uses: &mut Uses,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    writes: bool,
) -> Option<Closed> {
    let tag = tag_of(generation);
    record.gate.share();
    if !record.gate.is_slow() && record.gate.has_counted(tag, writes) {
        // It belonged to another thread, and nothing else was in the way. Once nothing is counted the block can be freed without the
        // lock, and its place be another's: so the count goes last.
        record.gate.stamp_counted(writes, stamp, &record.stamps);
        record.set_closed(use_name(stream, writes));
        // A use that another claim to it has closed meanwhile is not there any more.
        return match record.gate.close_counted(tag, writes) {
            true => Some(Closed::Open),
            false => Some(Closed::Missing),
        };
    }
    if !record.gate.close_counted(tag, writes) {
        return None;
    }
    record.set_closed(use_name(stream, writes));
    // Uses that were opened without the lock are the oldest, and superseded nothing.
    let home = record.home();
    uses.finished(home, home, stamp, writes, None);
    Some(free_if_last(record, uses))
}

/// After a use was closed under the lock.
#[inline(always)]
fn forget_opened(record: &Record, uses: &Uses, stream: StreamId, writes: bool) {
    match uses.has_open() {
        true => record.set_closed(use_name(stream, writes)),
        false => record.far().set_none_opened(),
    }
}

/// Closes a use of another stream under the lock of the block, which may go on from hand to hand.
#[inline(always)]
pub(crate) fn pass_on(
    (record, far): (&Record, &Far),
    shared: &mut Shared,
    generation: Generation,
    (stream, place, stamp): (StreamId, u32, u64),
    access: Access,
) -> Closed {
    let name = use_name(stream, access.writes());
    if access.writes()
        && record.generation() == generation
        && let Some(baton) = shared.carried(far, name)
    {
        *baton = Baton { stamp, place, by: 0 };
        far.set_none_opened();
        return Closed::Open;
    }
    pass_on_of_all(record, shared, generation, (stream, place, stamp), access)
}

#[inline(never)]
fn pass_on_of_all(
    record: &Record,
    shared: &mut Shared,
    generation: Generation,
    of: (StreamId, u32, u64),
    access: Access,
) -> Closed {
    let closed = close_foreign(record, shared.all(record), generation, of, access);
    if closed == Closed::Open {
        shared.fold(record);
    }
    closed
}

/// Closes a use of another stream under the lock of the block.
#[inline(always)]
pub(crate) fn close_foreign(
    record: &Record,
    uses: &mut Uses,
    generation: Generation,
    (stream, place, stamp): (StreamId, u32, u64),
    access: Access,
) -> Closed {
    if record.generation() != generation {
        return Closed::Stale;
    }
    let followed = uses.close(stream, access);
    if followed.is_none() {
        return Closed::Missing;
    }
    forget_opened(record, uses, stream, access.writes());
    uses.finished(record.home(), place, stamp, access.writes(), followed);
    // It is outstanding now, so other streams are still involved.
    free_if_last(record, uses)
}

/// After a change under the lock: back to the quick way where only the own stream is left, and whether to free.
#[inline]
pub(crate) fn settle(record: &Record, uses: &mut Uses) -> Closed {
    if !uses.free_on_close && uses.is_quiet() {
        uses.give_stamps(record);
        record.gate.leave_slow();
    }
    free_if_last(record, uses)
}

/// After a use was closed under the lock: whether to free.
#[inline(always)]
fn free_if_last(record: &Record, uses: &mut Uses) -> Closed {
    if uses.free_on_close { free_after_last(record, uses) } else { Closed::Open }
}

#[cold]
fn free_after_last(record: &Record, uses: &mut Uses) -> Closed {
    uses.give_stamps(record);
    if uses.has_open() || record.gate.has_open() {
        return Closed::Open;
    }
    uses.free_on_close = false;
    Closed::Free
}

/// Opens a use of the own stream that finds nobody else there, so that it, and those after it, need no lock.
#[cold]
fn leave_slow(record: &Record, uses: &mut Uses, access: Access) -> bool {
    uses.give_stamps(record);
    let left = record.gate.leave_slow_open(access.writes());
    if !left {
        // As many are open as can be counted: it stays slow, and its stamps behind the lock.
        uses.take_stamps(record);
    }
    left
}
