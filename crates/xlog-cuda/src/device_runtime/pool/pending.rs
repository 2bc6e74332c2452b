//! Waits for pending work on free memory before the pool grows for a large request.
//!
//! Growing takes about [`HANDLE_COST`] for each handle, and a request waits at most that long. If the work completes, its
//! memory serves the request and the pool does not grow; otherwise the request takes twice as long. There is no wait for
//! small requests, nor in a pool that cannot grow, prefers queued waits over growth, or must not depend on timing.
//!
//! A very large request may wait longer, up to the [`WaitAllowance`], because the pool would keep the memory that it adds.
//! A program that repeats itself grows, and therefore waits, in its first rounds only.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_driver::sync::is_scheduled;

use super::remap::is_idle;
use super::reserve::MAX_TRANSFER;
use super::slow_path::{SlowPath, VERY_LARGE};
use crate::device_wait::{self, DeviceWait};
use crate::stream::{Completion, RawStream};

/// The time that creating and mapping one handle takes on an H200.
const HANDLE_COST: Duration = Duration::from_micros(53);
/// The size of a handle, and the largest number of them that a wait counts.
const HANDLE: u64 = 2 << 20;
const MAX_HANDLES: u64 = 32;
/// A request waits if at least 1/MIN_PENDING of its bytes are pending.
const MIN_PENDING: u64 = 4;

/// A very large request waits if at least 1/MIN_PENDING_OF_LARGE of its bytes are pending.
const MIN_PENDING_OF_LARGE: u64 = 128;

/// The time that very large requests of a pool may wait in all: ALLOWANCE, and 1/SHARE of the age of the pool.
const ALLOWANCE: Duration = Duration::from_millis(200);
const SHARE: u32 = 128;

/// The time that very large requests of a pool have waited, and may still wait.
#[derive(Debug)]
pub(super) struct WaitAllowance {
    since: Instant,
    spent_nanos: AtomicU64,
}

impl WaitAllowance {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), spent_nanos: AtomicU64::new(0) }
    }

    fn left(&self) -> Duration {
        // A seeded schedule must not depend on the time.
        let share = if is_scheduled() { Duration::ZERO } else { self.since.elapsed() / SHARE };
        let spent = Duration::from_nanos(self.spent_nanos.load(Ordering::Relaxed));
        (ALLOWANCE + share).saturating_sub(spent)
    }

    /// Charges a wait: the counted pauses in a seeded schedule, otherwise the elapsed time.
    fn spend(&self, counted: Duration, began: Instant) {
        let time = if is_scheduled() { counted } else { began.elapsed() };
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.spent_nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

/// Free memory of a pool, by whether the host has seen its last work complete.
#[derive(Clone, Copy, Debug)]
struct FreeBytes {
    complete: u64,
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
        let streams = || pool.arenas.with_streams(&pool.tracker).map(|(_, _, stream)| stream);
        let is_complete = |stream: &RawStream| {
            stream.clock().is_complete(stream.clock().now()) || stream.poll_freed()
        };
        if !pool.deferred_frees.has_deferred() && streams().all(is_complete)
            || self.prefer_wait_over_growth()
        {
            return false;
        }
        let free = self.free_by_completion();
        // A tracked block would have inherited pending memory.
        let is_very_large = self.size >= VERY_LARGE && !self.is_tracked;
        let share = if is_very_large { MIN_PENDING_OF_LARGE } else { MIN_PENDING };
        if free.complete >= self.size || free.pending < self.size / share {
            return false;
        }
        let counters = &pool.tracker.counters;
        // Stamps of now, because other threads may queue more work. A stream that cannot record is not waited for.
        let mut busy: Vec<_> = streams()
            .filter(|stream| !stream.poll_freed())
            .filter_map(|stream| Some((stream, stream.stamp_freed(counters).ok()?)))
            .collect();
        let handles = (self.size / HANDLE).clamp(1, MAX_HANDLES) as u32;
        let while_growing = HANDLE_COST * handles;
        let allowed = if is_very_large { pool.wait_allowance.left() } else { Duration::ZERO };
        let _limit = DeviceWait::begin(while_growing.max(allowed));
        let (before, began) = (device_wait::left(), Instant::now());
        // Work that is still pending at the deadline is ignored.
        let Ok(_) = device_wait::poll(|| {
            busy.retain(|(stream, stamp)| stream.poll(*stamp) == Completion::Pending);
            Ok::<_, Infallible>(busy.is_empty())
        });
        if is_very_large {
            let left = device_wait::left().unwrap_or_default();
            pool.wait_allowance.spend(before.unwrap_or_default().saturating_sub(left), began);
        }
        self.free_completed(usize::MAX);
        true
    }

    fn free_by_completion(&self) -> FreeBytes {
        let pool = self.pool;
        let complete = pool.reserve.with_shared_free(|tlsf| tlsf.free_bytes());
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
