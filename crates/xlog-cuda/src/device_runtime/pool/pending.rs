//! Waits for pending work on free memory before the pool grows for a large request.
//!
//! Growing takes about [`HANDLE_COST`] for each handle, and a request waits at most that long. If the work completes, its
//! memory serves the request and the pool does not grow; otherwise the request takes twice as long. There is no wait for
//! small requests, nor in a pool that cannot grow, prefers queued waits over growth, or must not depend on timing. Nor is there
//! one for free memory of the requesting stream if it can be remapped, because a remap takes it at any time.

use std::convert::Infallible;
use std::time::Duration;

use super::remap::is_idle;
use super::reserve::MAX_TRANSFER;
use super::slow_path::SlowPath;
use crate::device_wait::{self, DeviceWait};
use crate::stream::{Completion, RawStream};

/// The time that creating and mapping one handle takes on an H200.
const HANDLE_COST: Duration = Duration::from_micros(53);
/// The size of a handle, and the largest number of them that a wait counts.
const HANDLE: u64 = 2 << 20;
const MAX_HANDLES: u64 = 32;
/// A request waits if at least 1/MIN_PENDING of its bytes are pending.
const MIN_PENDING: u64 = 4;

/// Free memory of a pool, by whether a request can take it without a wait.
#[derive(Clone, Copy, Debug)]
struct FreeBytes {
    /// The host has seen its last work complete, or the request follows it.
    ready: u64,
    /// Includes freed blocks that other streams still use.
    pending: u64,
}

impl SlowPath<'_> {
    /// Waits for pending work if that may save growth; false if there was no reason to wait.
    pub(super) fn wait_for_pending(&self) -> bool {
        let pool = self.pool;
        if self.size <= MAX_TRANSFER || !pool.config.reuse.opportunistic || !self.may_grow() {
            return false;
        }
        let has_deferred = pool.deferred_frees.has_deferred();
        // A wait for it is of use only for deferred frees.
        let ready_slot = pool.reserve.segments.can_move().then(|| self.owner.clock().slot());
        let streams = || {
            let all = pool.arenas.with_streams(&pool.tracker);
            all.filter(|(slot, ..)| has_deferred || Some(*slot) != ready_slot)
                .map(|(.., stream)| stream)
        };
        let is_complete = |stream: &RawStream| {
            stream.clock().is_complete(stream.clock().now()) || stream.poll_freed()
        };
        if !has_deferred && streams().all(is_complete) || self.prefer_wait_over_growth() {
            return false;
        }
        let free = self.free_by_readiness(ready_slot);
        if free.ready >= self.size || free.pending < self.size / MIN_PENDING {
            return false;
        }
        let counters = &pool.tracker.counters;
        // Stamps of now, because other threads may queue more work. A stream that cannot record is not waited for.
        let mut busy: Vec<_> = streams()
            .filter(|stream| !stream.poll_freed())
            .filter_map(|stream| Some((stream, stream.stamp_freed(counters).ok()?)))
            .collect();
        let handles = (self.size / HANDLE).clamp(1, MAX_HANDLES) as u32;
        let _limit = DeviceWait::begin(HANDLE_COST * handles);
        // Work that is still pending at the deadline is ignored.
        let Ok(_) = device_wait::poll(|| {
            busy.retain(|(stream, stamp)| stream.poll(*stamp) == Completion::Pending);
            Ok::<_, Infallible>(busy.is_empty())
        });
        self.free_completed(usize::MAX);
        true
    }

    /// All memory of `ready_slot` is ready.
    fn free_by_readiness(&self, ready_slot: Option<u32>) -> FreeBytes {
        let pool = self.pool;
        let ready = pool.reserve.with_shared_free(|tlsf| tlsf.free_bytes());
        let mut free = FreeBytes { ready, pending: 0 };
        pool.arenas.scan(|slot, arena| {
            let Some(stream) = pool.tracker.streams.at(slot) else { return };
            for range in arena.tlsf.ranges() {
                let bytes = match Some(slot) == ready_slot || is_idle(&range, stream) {
                    true => &mut free.ready,
                    false => &mut free.pending,
                };
                *bytes += range.bytes;
            }
        });
        free.pending += pool.deferred_frees.bytes(&pool.tracker.table);
        free
    }
}
