//! Waits for work that is pending on free memory, before the pool grows for a large request.
//!
//! Growing takes about [`HANDLE_COST`] for each handle. A request waits at most as long as that: if the work completes meanwhile, its
//! memory serves and the pool stays as large as it is; if not, the pool grows, and the request has taken twice as long. Small
//! requests do not wait, nor those of a pool that cannot grow, that lets streams wait instead, or whose decisions must not depend
//! on timing.

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
/// A request waits if at least 1/MIN_PENDING of it is pending.
const MIN_PENDING: u64 = 4;

/// Free memory of a pool, by whether the host has seen its last work complete.
#[derive(Clone, Copy, Debug)]
struct FreeBytes {
    complete: u64,
    /// Also freed blocks that other streams still use.
    pending: u64,
}

impl SlowPath<'_> {
    /// Waits for pending work if that may save growth; false if there was no reason to wait.
    pub(super) fn wait_for_pending(&self) -> bool {
        let pool = self.pool;
        let segments = &pool.reserve.segments;
        let may_grow = segments.reserved().saturating_add(self.size) <= segments.limit();
        if self.size <= MAX_TRANSFER || !pool.config.reuse.opportunistic || !may_grow {
            return false;
        }
        let streams = || pool.arenas.with_streams(&pool.tracker).map(|(_, _, stream)| stream);
        let is_complete = |stream: &RawStream| {
            stream.clock().is_complete(stream.clock().now()) || stream.poll_tail()
        };
        if !pool.deferred_frees.has_deferred() && streams().all(is_complete)
            || self.prefer_wait_over_growth()
        {
            return false;
        }
        let free = self.free_by_completion();
        if free.complete >= self.size || free.pending < self.size / MIN_PENDING {
            return false;
        }
        let counters = &pool.tracker.counters;
        // Up to now: other threads may queue more meanwhile. A stream that cannot record is not waited for.
        let mut busy: Vec<_> = streams()
            .filter(|stream| !stream.poll_tail())
            .filter_map(|stream| Some((stream, stream.record(counters).ok()?)))
            .collect();
        let handles = (self.size / HANDLE).clamp(1, MAX_HANDLES) as u32;
        let _limit = DeviceWait::begin(HANDLE_COST * handles);
        // What has not completed by then is left to its streams.
        let Ok(_) = device_wait::poll(|| {
            busy.retain(|(stream, stamp)| stream.poll(*stamp) == Completion::Pending);
            Ok::<_, Infallible>(busy.is_empty())
        });
        self.free_completed(usize::MAX);
        true
    }

    fn free_by_completion(&self) -> FreeBytes {
        let pool = self.pool;
        let complete = pool.reserve.read_shared_free(|tlsf| tlsf.free_bytes());
        let mut free = FreeBytes { complete, pending: 0 };
        pool.arenas.scan(|slot, arena| {
            let Some(stream) = pool.tracker.streams.at(slot) else { return };
            for range in arena.tlsf.ranges() {
                let bytes = match is_idle(&range, stream) {
                    true => &mut free.complete,
                    false => &mut free.pending,
                };
                *bytes += range.bytes;
            }
        });
        free.pending += pool.deferred_frees.bytes(&pool.tracker.table);
        free
    }
}
