//! What is done to a block under its lock: uses are opened and closed, and the block goes from the quick way of its own stream to the
//! slow one and back.
//!
//! Invariants: while a block is live and slow the stamps of its own stream are in its [`Uses`], otherwise in its record; while there is
//! anything else in its uses it is slow. Nothing here calls the driver.

use super::block_meta::{BlockMeta, SharedState, generation_bits, use_name};
use super::use_state::{LastWriter, UseState};
use super::uses::{Opened, Uses};
use crate::device_runtime::resource::{Access, Generation, StreamId};
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// The outcome of opening a use under the lock of its block.
#[derive(Debug)]
pub(crate) enum BeginUse<'a> {
    /// The use is open; its stream must still wait for what it depends on.
    Opened(Opened<'a>),
    /// The use is open without the lock, and depends on nothing.
    OpenedUnlocked,
    /// The claim does not name the live block.
    Stale,
}

/// The outcome of closing a use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EndUse {
    /// The use is closed; the block stays as it is.
    Live,
    /// The use was the last one of a returned block: the caller frees the block now.
    FreeNow,
    /// The slot holds another block by now.
    Stale,
    /// No such use is open.
    Missing,
}

/// Sends everybody through the lock, which is held. False when it is not the live block.
#[inline(always)]
pub(crate) fn inflate(meta: &BlockMeta, uses: &mut Uses, bits: u32) -> bool {
    // Mostly it is so already.
    meta.state.is_live_and_inflated(bits) || inflate_cold(meta, uses, bits)
}

#[cold]
fn inflate_cold(meta: &BlockMeta, uses: &mut Uses, bits: u32) -> bool {
    let live = meta.state.inflate(bits);
    if live {
        uses.load_stamps(meta);
    }
    live
}

/// Opens a use under the lock of the block.
#[inline(always)]
pub(crate) fn open<'a>(
    meta: &BlockMeta,
    uses: &mut Uses,
    bits: u32,
    streams: &'a StreamPool,
    (stream, raw): (StreamId, &RawStream),
    access: Access,
) -> BeginUse<'a> {
    if !inflate(meta, uses, bits) {
        return BeginUse::Stale;
    }
    // Only under the id that may go without the lock is such a use found again.
    if meta.stream_id() == stream.0 && uses.is_quiet() && deflate(meta, uses, access) {
        return BeginUse::OpenedUnlocked;
    }
    meta.shared_state().set_opened(use_name(stream, access.writes()));
    BeginUse::Opened(uses.open(meta.owner(), streams, (stream, raw), access))
}

/// Closes a use of the own stream under the lock of the block.
#[inline(always)]
pub(crate) fn close_own(
    (meta, shared_state): (&BlockMeta, &SharedState),
    use_state: &mut UseState,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    access: Access,
) -> EndUse {
    let name = use_name(stream, access.writes());
    if access.writes()
        && meta.state.is_inflated_and_uncounted(true)
        && meta.generation() == generation
        && let Some(last_writer) = use_state.held_by(shared_state, name)
    {
        *last_writer = LastWriter { stamp, slot: meta.owner(), user: 0 };
        shared_state.set_none_opened();
        return EndUse::Live;
    }
    close_own_of_all(meta, use_state, generation, (stream, stamp), access)
}

#[inline(never)]
fn close_own_of_all(
    meta: &BlockMeta,
    use_state: &mut UseState,
    generation: Generation,
    of: (StreamId, u64),
    access: Access,
) -> EndUse {
    let closed = close_own_in(meta, use_state.uses(meta), generation, of, access);
    if closed == EndUse::Live {
        use_state.deflate(meta);
    }
    closed
}

fn close_own_in(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    access: Access,
) -> EndUse {
    // Under the lock, so that a claim which went stale meanwhile closes nobody else's use.
    if meta.generation() != generation {
        return EndUse::Stale;
    }
    let (owner, writes) = (meta.owner(), access.writes());
    if !meta.state.is_inflated_and_uncounted(writes)
        && let Some(closed) = close_counted(meta, uses, generation, (stream, stamp), writes)
    {
        return closed;
    }
    let ordered_after = uses.close(stream, access);
    if ordered_after.is_none() {
        return EndUse::Missing;
    }
    forget_opened(meta, uses, stream, writes);
    uses.finished(owner, owner, stamp, writes, ordered_after);
    // It stays slow even if only its own stream is left: the next use mostly comes from elsewhere again, and if not, that is seen
    // when it is prepared.
    free_if_last(meta, uses)
}

/// Closes a use of the own stream that was opened without the lock, which is held now; `None` when there is none.
#[inline(never)]
fn close_counted(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    (stream, stamp): (StreamId, u64),
    writes: bool,
) -> Option<EndUse> {
    let bits = generation_bits(generation);
    meta.state.revoke_bias();
    if !meta.state.is_inflated() && meta.state.has_counted(bits, writes) {
        // It belonged to another thread, and nothing else was in the way. Once nothing is counted the block can be freed without the
        // lock, and its place be another's: so the count goes last.
        meta.state.stamp_counted(writes, stamp, &meta.stamps);
        meta.set_closed(use_name(stream, writes));
        // A use that another claim to it has closed meanwhile is not there any more.
        return match meta.state.close_counted(bits, writes) {
            true => Some(EndUse::Live),
            false => Some(EndUse::Missing),
        };
    }
    if !meta.state.close_counted(bits, writes) {
        return None;
    }
    meta.set_closed(use_name(stream, writes));
    // Uses that were opened without the lock are the oldest, and superseded nothing.
    let owner = meta.owner();
    uses.finished(owner, owner, stamp, writes, None);
    Some(free_if_last(meta, uses))
}

/// After a use was closed under the lock.
#[inline(always)]
fn forget_opened(meta: &BlockMeta, uses: &Uses, stream: StreamId, writes: bool) {
    match uses.has_open() {
        true => meta.set_closed(use_name(stream, writes)),
        false => meta.shared_state().set_none_opened(),
    }
}

/// Closes a use of another stream under the lock of the block, which may go on from hand to hand.
#[inline(always)]
pub(crate) fn close_foreign_fast(
    (meta, shared_state): (&BlockMeta, &SharedState),
    use_state: &mut UseState,
    generation: Generation,
    (stream, slot, stamp): (StreamId, u32, u64),
    access: Access,
) -> EndUse {
    let name = use_name(stream, access.writes());
    if access.writes()
        && meta.generation() == generation
        && let Some(last_writer) = use_state.held_by(shared_state, name)
    {
        *last_writer = LastWriter { stamp, slot, user: 0 };
        shared_state.set_none_opened();
        return EndUse::Live;
    }
    close_foreign_of_all(meta, use_state, generation, (stream, slot, stamp), access)
}

#[inline(never)]
fn close_foreign_of_all(
    meta: &BlockMeta,
    use_state: &mut UseState,
    generation: Generation,
    of: (StreamId, u32, u64),
    access: Access,
) -> EndUse {
    let closed = close_foreign(meta, use_state.uses(meta), generation, of, access);
    if closed == EndUse::Live {
        use_state.deflate(meta);
    }
    closed
}

/// Closes a use of another stream under the lock of the block.
#[inline(always)]
pub(crate) fn close_foreign(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    (stream, slot, stamp): (StreamId, u32, u64),
    access: Access,
) -> EndUse {
    if meta.generation() != generation {
        return EndUse::Stale;
    }
    let ordered_after = uses.close(stream, access);
    if ordered_after.is_none() {
        return EndUse::Missing;
    }
    forget_opened(meta, uses, stream, access.writes());
    uses.finished(meta.owner(), slot, stamp, access.writes(), ordered_after);
    // It is outstanding now, so other streams are still involved.
    free_if_last(meta, uses)
}

/// After a change under the lock: back to the quick way where only the own stream is left, and whether to free.
#[inline]
pub(crate) fn deflate_if_quiet(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    if !uses.free_on_close && uses.is_quiet() {
        uses.store_stamps(meta);
        meta.state.deflate();
    }
    free_if_last(meta, uses)
}

/// After a use was closed under the lock: whether to free.
#[inline(always)]
fn free_if_last(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    if uses.free_on_close { free_after_last(meta, uses) } else { EndUse::Live }
}

#[cold]
fn free_after_last(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    uses.store_stamps(meta);
    if uses.has_open() || meta.state.has_open() {
        return EndUse::Live;
    }
    uses.free_on_close = false;
    EndUse::FreeNow
}

/// Opens a use of the own stream that finds nobody else there, so that it, and those after it, need no lock.
#[cold]
fn deflate(meta: &BlockMeta, uses: &mut Uses, access: Access) -> bool {
    uses.store_stamps(meta);
    let left = meta.state.deflate_and_open(access.writes());
    if !left {
        // As many are open as can be counted: it stays slow, and its stamps behind the lock.
        uses.load_stamps(meta);
    }
    left
}
