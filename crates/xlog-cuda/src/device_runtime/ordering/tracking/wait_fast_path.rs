//! Fast path of a use that waits on exactly one other stream.
//!
//! It applies if the current thread owns the bias of every lock on the way: it allocates nothing, walks no list and
//! waits for no lock. Otherwise it declines with nothing changed, and [`UseTracking`] takes the general path. No lock
//! is held over a driver call. It does not check that device and streams belong together: if they do not, there is no
//! block.

use super::striped_counters::WaitCounts;
use super::tracker::Tracker;
use super::use_slow_path::{EndUse, close_foreign_fast};
use super::use_tracking::UseTracking;
use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::block::use_state::LastWriter;
use crate::device_runtime::ordering::block::uses::NamedUse;
use crate::device_runtime::resource::{Access, Generation, StreamId};
use crate::stream::{RawStream, WaitFailed};
use xlog_driver::DriverError;

/// The outcome of [`prepare`].
#[derive(Debug)]
#[must_use]
pub(crate) enum FastPrepare {
    /// The use is open, and its stream waits for what it depends on.
    Opened,
    /// The fast path does not apply; nothing has changed.
    Declined,
    /// The use is open and its wait could not be queued: the caller cancels the use.
    WaitFailed(Box<DriverError>),
}

/// The outcome of [`finish`].
#[derive(Debug)]
#[must_use]
pub(crate) enum FastFinish {
    /// An event was recorded, and the use closed with this outcome.
    Ended(EndUse),
    /// The fast path does not apply; nothing has changed.
    Declined,
    /// No event could be recorded; the use is still open.
    NotRecorded(Box<DriverError>),
}

/// Opens a use and makes its stream wait on the one stream that it depends on.
///
/// Generic over the resource `R`, so that each resource inlines its own copy.
#[inline(always)]
pub(crate) fn prepare<R: UseTracking + ?Sized>(
    resource: &R,
    meta: &BlockMeta,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> FastPrepare {
    let tracker = resource.tracker();
    let Some(raw) = tracker.stream_table.raw_private(stream) else { return FastPrepare::Declined };
    let opened = NamedUse { stream, access };
    let clock = raw.clock();
    let shared_state = meta.shared_state();
    let Some(mut use_state) = shared_state.use_state().enter_scheduled() else {
        return FastPrepare::Declined;
    };
    let Some(last_writer) = use_state.idle(shared_state) else {
        drop(use_state);
        return prepare_single_dependency(tracker, meta, generation, raw, opened);
    };
    let (slot, stamp) = (last_writer.slot, last_writer.stamp);
    if meta.generation() != generation {
        return FastPrepare::Declined;
    }
    let Some(other) = tracker.stream_table.at(slot) else { return FastPrepare::Declined };
    // The general path drops what has completed.
    if other.clock().is_complete(stamp) {
        return FastPrepare::Declined;
    }
    if slot == clock.slot() || clock.covers(slot, stamp) {
        return prepare_implied(tracker, meta, last_writer, clock.slot(), opened);
    }
    last_writer.user = clock.slot();
    shared_state.set_opened(opened.name());
    drop(use_state);
    wait_on(tracker, raw, other, stamp)
}

/// Opens a use of a stream that is already ordered after the last writer. The lock is held.
#[inline(never)]
fn prepare_implied(
    tracker: &Tracker,
    meta: &BlockMeta,
    last_writer: &mut LastWriter,
    user: u32,
    opened: NamedUse,
) -> FastPrepare {
    if last_writer.slot != user {
        tracker.counters.count(|counts| counts.elided += 1);
    } else if user == meta.owner() {
        // Only the block's own stream is left: the general path deflates the block.
        return FastPrepare::Declined;
    }
    last_writer.user = user;
    meta.shared_state().set_opened(opened.name());
    FastPrepare::Opened
}

/// Makes the stream of an opened use wait on another stream.
#[inline(always)]
fn wait_on(tracker: &Tracker, raw: &RawStream, other: &RawStream, stamp: u64) -> FastPrepare {
    match raw.wait_on_fast(other, stamp) {
        Ok(recorded) => {
            tracker.counters.count_waits(recorded, 1);
            FastPrepare::Opened
        }
        Err(failed) => FastPrepare::WaitFailed(wait_failed(tracker, *failed)),
    }
}

/// [`prepare`] of a block with more state than a last writer, whose use depends on one stream.
#[inline(never)]
fn prepare_single_dependency(
    tracker: &Tracker,
    meta: &BlockMeta,
    generation: Generation,
    raw: &RawStream,
    opened: NamedUse,
) -> FastPrepare {
    let clock = raw.clock();
    let Some(mut use_state) = meta.use_state().enter_scheduled() else {
        return FastPrepare::Declined;
    };
    // An inflated block is never unshared.
    if !meta.state.is_live_and_inflated(generation_bits(generation)) {
        return FastPrepare::Declined;
    }
    let uses = use_state.uses(meta);
    let single_dependency =
        uses.single_dependency(meta.owner(), clock.slot(), opened.access.writes());
    let Some(single_dependency) = single_dependency else { return FastPrepare::Declined };
    let Some(other) = tracker.stream_table.at(single_dependency.slot) else {
        return FastPrepare::Declined;
    };
    if single_dependency.slot == clock.slot()
        || other.clock().is_complete(single_dependency.stamp)
        || clock.covers(single_dependency.slot, single_dependency.stamp)
    {
        return FastPrepare::Declined;
    }
    uses.open_after_single(opened.stream, clock.slot(), opened.access, single_dependency.own);
    meta.shared_state().set_opened(opened.name());
    drop(use_state);
    wait_on(tracker, raw, other, single_dependency.stamp)
}

#[cold]
fn wait_failed(tracker: &Tracker, failed: WaitFailed) -> Box<DriverError> {
    let WaitFailed { recorded, error } = failed;
    tracker
        .counters
        .count(|counts| counts.add_waits(WaitCounts { recorded, ..WaitCounts::default() }));
    Box::new(error)
}

/// Records an event for a use on another stream than the block's own, and closes the use. Generic as [`prepare`].
#[inline(always)]
pub(crate) fn finish<R: UseTracking + ?Sized>(
    resource: &R,
    meta: &BlockMeta,
    generation: Generation,
    stream: StreamId,
    access: Access,
) -> FastFinish {
    let tracker = resource.tracker();
    // Without such an open use there is nothing to record for. The hint may be outdated if another thread closes the
    // use now; then the event is superfluous, but covers no more than it claims.
    let Some(shared_state) = meta.state.shared() else { return FastFinish::Declined };
    let finished = NamedUse { stream, access };
    if !shared_state.has_opened(finished.name()) || tracker.policy == EventPolicy::Lazy {
        return FastFinish::Declined;
    }
    let Some(raw) = tracker.stream_table.raw_private(stream) else {
        return FastFinish::Declined;
    };
    let slot = raw.clock().slot();
    if slot == meta.owner() {
        return FastFinish::Declined;
    }
    let stamp = match raw.record_fast(&tracker.counters) {
        Ok(stamp) => stamp,
        Err(error) => return FastFinish::NotRecorded(Box::new(error)),
    };
    let closed = shared_state.use_state().with(|use_state| {
        close_foreign_fast(meta, shared_state, use_state, generation, finished, slot, stamp)
    });
    FastFinish::Ended(closed)
}
