//! Uses under the lock of their block: opened, closed, and the block inflated and deflated.
//!
//! Invariants: while a block is live and inflated, the stamps of its own stream are in its [`Uses`], otherwise in its
//! metadata. While its uses hold anything else, it is inflated. Nothing here calls the driver.

use crate::device_runtime::ordering::block::block_meta::{BlockMeta, SharedState, generation_bits};
use crate::device_runtime::ordering::block::use_state::{LastWriter, UseState};
use crate::device_runtime::ordering::block::uses::{NamedUse, Opened, Uses};
use crate::device_runtime::resource::{Access, Generation};
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

/// Makes every thread take the lock, which is held. False if it is not the live block.
#[inline(always)]
pub(crate) fn inflate(meta: &BlockMeta, uses: &mut Uses, bits: u32) -> bool {
    // Mostly it is inflated already.
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
    raw: &RawStream,
    opened: NamedUse,
) -> BeginUse<'a> {
    if !inflate(meta, uses, bits) {
        return BeginUse::Stale;
    }
    // Only under this id would a use without the lock be found again.
    if meta.stream_id() == opened.stream.0 && uses.is_quiet() && deflate(meta, uses, opened.access)
    {
        return BeginUse::OpenedUnlocked;
    }
    meta.shared_state().set_opened(opened.name());
    BeginUse::Opened(uses.open(meta.owner(), streams, raw, opened))
}

/// Closes a use of the own stream under the lock of the block.
#[inline(always)]
pub(crate) fn close_own(
    meta: &BlockMeta,
    shared_state: &SharedState,
    use_state: &mut UseState,
    generation: Generation,
    finished: NamedUse,
    stamp: u64,
) -> EndUse {
    if finished.access.writes()
        && meta.state.is_inflated_and_uncounted(true)
        && meta.generation() == generation
        && let Some(last_writer) = use_state.held_by(shared_state, finished.name())
    {
        *last_writer = LastWriter { stamp, slot: meta.owner(), user: 0 };
        shared_state.set_none_opened();
        return EndUse::Live;
    }
    close_own_of_all(meta, use_state, generation, finished, stamp)
}

#[inline(never)]
fn close_own_of_all(
    meta: &BlockMeta,
    use_state: &mut UseState,
    generation: Generation,
    finished: NamedUse,
    stamp: u64,
) -> EndUse {
    let closed = close_own_in(meta, use_state.uses(meta), generation, finished, stamp);
    if closed == EndUse::Live {
        use_state.deflate(meta);
    }
    closed
}

fn close_own_in(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    finished: NamedUse,
    stamp: u64,
) -> EndUse {
    let NamedUse { stream, access } = finished;
    // Checked under the lock, so that a stale claim closes no use of another block.
    if meta.generation() != generation {
        return EndUse::Stale;
    }
    let (owner, writes) = (meta.owner(), access.writes());
    if !meta.state.is_inflated_and_uncounted(writes)
        && let Some(closed) = close_counted(meta, uses, generation, finished, stamp)
    {
        return closed;
    }
    let ordered_after = uses.close(stream, access);
    if ordered_after.is_none() {
        return EndUse::Missing;
    }
    forget_opened(meta, uses, finished);
    uses.finished(owner, owner, stamp, writes, ordered_after);
    // The block stays inflated even if only its own stream is left: mostly the next use comes from another stream. If
    // not, the next prepare deflates it.
    free_if_last(meta, uses)
}

/// Closes a use of the own stream that was opened without the lock, which is held now; `None` if there is none.
#[inline(never)]
fn close_counted(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    finished: NamedUse,
    stamp: u64,
) -> Option<EndUse> {
    let writes = finished.access.writes();
    let bits = generation_bits(generation);
    meta.state.revoke_bias();
    if !meta.state.is_inflated() && meta.state.has_counted(bits, writes) {
        // The block was biased to another thread, and nothing else was in the way. Once no use is counted, another
        // thread may free the block without the lock and reuse its slot: so the count goes last.
        meta.state.stamp_counted(writes, stamp, &meta.stamps);
        meta.set_closed(finished.name());
        // Another claim to this use may have closed it meanwhile.
        return match meta.state.close_counted(bits, writes) {
            true => Some(EndUse::Live),
            false => Some(EndUse::Missing),
        };
    }
    if !meta.state.close_counted(bits, writes) {
        return None;
    }
    meta.set_closed(finished.name());
    // Uses opened without the lock are the oldest, and superseded nothing.
    let owner = meta.owner();
    uses.finished(owner, owner, stamp, writes, None);
    Some(free_if_last(meta, uses))
}

/// Updates the hint after a use was closed under the lock.
#[inline(always)]
fn forget_opened(meta: &BlockMeta, uses: &Uses, closed: NamedUse) {
    match uses.has_open() {
        true => meta.set_closed(closed.name()),
        false => meta.shared_state().set_none_opened(),
    }
}

/// Closes a use of another stream, which may become the last writer. The lock is held.
#[inline(always)]
pub(crate) fn close_foreign_fast(
    meta: &BlockMeta,
    shared_state: &SharedState,
    use_state: &mut UseState,
    generation: Generation,
    finished: NamedUse,
    slot: u32,
    stamp: u64,
) -> EndUse {
    if finished.access.writes()
        && meta.generation() == generation
        && let Some(last_writer) = use_state.held_by(shared_state, finished.name())
    {
        *last_writer = LastWriter { stamp, slot, user: 0 };
        shared_state.set_none_opened();
        return EndUse::Live;
    }
    close_foreign_of_all(meta, use_state, generation, finished, slot, stamp)
}

#[inline(never)]
fn close_foreign_of_all(
    meta: &BlockMeta,
    use_state: &mut UseState,
    generation: Generation,
    finished: NamedUse,
    slot: u32,
    stamp: u64,
) -> EndUse {
    let closed = close_foreign(meta, use_state.uses(meta), generation, finished, slot, stamp);
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
    finished: NamedUse,
    slot: u32,
    stamp: u64,
) -> EndUse {
    let NamedUse { stream, access } = finished;
    if meta.generation() != generation {
        return EndUse::Stale;
    }
    let ordered_after = uses.close(stream, access);
    if ordered_after.is_none() {
        return EndUse::Missing;
    }
    forget_opened(meta, uses, finished);
    uses.finished(meta.owner(), slot, stamp, access.writes(), ordered_after);
    // The use is outstanding now, so another stream is still involved.
    free_if_last(meta, uses)
}

/// Deflates the block if only its own stream is left, and says whether to free it.
#[inline]
pub(crate) fn deflate_if_quiet(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    if !uses.free_on_close && uses.is_quiet() {
        uses.store_stamps(meta);
        meta.state.deflate();
    }
    free_if_last(meta, uses)
}

/// Says whether to free the block after a use was closed.
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

/// Opens a use of the own stream without the lock, and deflates the block.
#[cold]
fn deflate(meta: &BlockMeta, uses: &mut Uses, access: Access) -> bool {
    uses.store_stamps(meta);
    let left = meta.state.deflate_and_open(access.writes());
    if !left {
        // The count of open uses is full: the block stays inflated, with its stamps behind the lock.
        uses.load_stamps(meta);
    }
    left
}
