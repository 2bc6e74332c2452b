//! Returns free memory to the device.
//!
//! Invariant: memory leaves its stream only after the host has seen its last work complete.

use xlog_driver::DriverResult;

use super::PoolResource;
use super::segments::{Span, coalesce};
use crate::device_runtime::ordering::StripedCounters;
use crate::device_runtime::resource::{ResourceResult, first_error};
use crate::stream::RawStream;

/// Polls of a stream of which only events may be queried. An event on an idle stream completes within a few polls.
const EVENT_POLLS: u32 = 32;

/// The extent of a trim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trim {
    /// The bytes that the pool keeps.
    pub(super) keep: usize,
    /// Whether the magazines are flushed first.
    pub(super) flushes: bool,
    /// If set, at most these bytes go back, and none that a request has needed since the last check.
    pub(super) unneeded: Option<u64>,
}

/// Free memory without pending work, of no arena and not on the shared free list.
#[derive(Debug, Default)]
pub(super) struct IdleMemory {
    /// By address, coalesced.
    pub(super) spans: Vec<Span>,
    /// The part of it that no request has needed since the last check of the decay.
    pub(super) unneeded: u64,
}

impl PoolResource {
    /// Returns free memory without pending work to the device until the pool holds at most `bytes`. Returns the number
    /// of bytes that went back.
    pub fn trim_to(&self, bytes: usize) -> ResourceResult<usize> {
        self.trim_by(Trim { keep: bytes, flushes: true, unneeded: None })
    }

    pub(super) fn trim_by(&self, trim: Trim) -> ResourceResult<usize> {
        if self.sanitizer.is_some()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            self.release_completed(usize::MAX)?;
        }
        let _growing = self.reserve.growing();
        let excess = self.reserve.segments.reserved().saturating_sub(trim.keep as u64);
        if excess == 0 {
            return Ok(0);
        }
        if trim.flushes {
            self.arenas.flush(&self.tracker);
        }
        self.poll_streams();
        self.unmap_stale(usize::MAX);
        let idle = self.remove_idle();
        let maximum = trim.unneeded.map_or(u64::MAX, |unneeded| self.releasable(&idle, unneeded));
        let (gone, outcome) = self.reserve.segments.release(&idle.spans, excess.min(maximum));
        self.reserve.insert_idle(&idle, &gone);
        if self.reserve.segments.is_stream_ordered() && !gone.is_empty() {
            // The inner resource has queued frees, so a wait for free memory must also cover them.
            for (_, _, stream) in self.arenas.with_streams(&self.tracker) {
                stream.stamp_free();
            }
        }
        self.rebalance_magazines();
        outcome.map(|()| gone.iter().map(|span| span.bytes as usize).sum())
    }

    /// Returns how many bytes of `idle` a trim may release if `unneeded` bytes of all free memory are. Parts of segments, which
    /// cannot be released, count as unneeded first.
    fn releasable(&self, idle: &IdleMemory, unneeded: u64) -> u64 {
        let all: u64 = idle.spans.iter().map(|span| span.bytes).sum();
        let parts = all.saturating_sub(self.reserve.segments.releasable(&idle.spans));
        unneeded.min(idle.unneeded).saturating_sub(parts)
    }

    /// Polls all streams for completed work.
    fn poll_streams(&self) {
        let mut by_event: Vec<&RawStream> = Vec::new();
        for (_, _, stream) in self.arenas.with_streams(&self.tracker) {
            if !stream.poll_or_mark_freed() {
                stream.poll_events();
                if stream.handle_escaped() {
                    by_event.push(stream);
                }
            }
        }
        for _ in 0..EVENT_POLLS {
            by_event.retain(|stream| {
                stream.poll_events();
                stream.clock().pending_events() > 0
            });
            if by_event.is_empty() {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Unmaps at most `most` of the addresses that remapped handles have left, where the host has seen all work complete.
    pub(super) fn unmap_stale(&self, most: usize) {
        self.reserve.segments.unmap_stale(most, &|work| {
            let stream = self.tracker.streams.at(work.slot);
            stream.is_some_and(|stream| stream.clock().is_complete(work.stamp))
        });
    }

    /// Whether returning a segment waits for all work on the device, as `cuMemFree` does. Then only explicit trims return memory.
    pub(super) fn return_waits(&self) -> bool {
        let segments = &self.reserve.segments;
        !segments.can_move() && !segments.is_stream_ordered()
    }

    /// Records an event on each busy stream, because frees on the own stream record none. A later trim finds what has completed.
    pub(super) fn mark_busy_streams(&self) {
        for (_, _, stream) in self.arenas.with_streams(&self.tracker) {
            if !stream.poll_freed() {
                // A stream that cannot record keeps its memory.
                let _ = stream.stamp_freed(&self.tracker.counters);
            }
        }
    }

    /// Sets the maximum number of bytes that the pool takes from the device. Memory above it is kept.
    pub fn set_maximum(&self, bytes: usize) {
        self.reserve.segments.set_limit(bytes as u64);
    }

    /// Removes all free ranges without pending work from all arenas and the shared free list, coalesced by address. The
    /// caller holds the growth lock.
    pub(super) fn remove_idle(&self) -> IdleMemory {
        let removed = [self.arenas.remove_idle(&self.tracker), self.reserve.remove(0)];
        let unneeded = removed.iter().map(|removed| removed.unneeded).sum();
        let spans = removed.into_iter().flat_map(|removed| removed.ranges).map(Span::from);
        IdleMemory { spans: coalesce(spans.collect()), unneeded }
    }

    /// Bytes that are free on the shared free list and in the arenas that no other thread is inside of.
    pub(super) fn free_bytes(&self) -> u64 {
        let mut free = self.reserve.with_shared_free(|tlsf| tlsf.free_bytes());
        self.arenas.scan(|_, arena| free += arena.free_bytes());
        free
    }

    /// Calls `synchronize` for every stream with pending work on free memory. Continues after a failure.
    pub(super) fn synchronize_streams<T>(
        &self,
        synchronize: impl Fn(&RawStream, &StripedCounters) -> DriverResult<T>,
    ) -> DriverResult<()> {
        self.arenas.flush(&self.tracker);
        first_error(self.arenas.with_streams(&self.tracker), |(_, _, stream)| {
            match stream.poll_freed() {
                true => Ok(()),
                false => synchronize(stream, &self.tracker.counters).map(drop),
            }
        })
    }

    /// Divides the capacity of the magazines among the streams.
    pub(super) fn rebalance_magazines(&self) {
        let held = self.reserve.segments.reserved();
        let maximum = (held / 50).max(self.config.magazine_bytes as u64);
        self.arenas.rebalance_magazines(maximum, &self.tracker);
    }
}
