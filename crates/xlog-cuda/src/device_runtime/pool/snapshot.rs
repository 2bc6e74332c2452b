//! Figures of a pool at one moment.

use super::PoolResource;
use super::arena::ArenaCounts;
use crate::device_runtime::logging::ServedBy;

/// How often each source served a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolPaths {
    /// Blocks of the same class that had just been freed on the stream.
    pub magazine: u64,
    /// Free memory of the stream.
    pub own: u64,
    /// Memory of another stream whose last work happened before the request.
    pub covered: u64,
    /// Memory whose last work had completed.
    pub completed: u64,
    /// Memory taken from the device.
    pub grown: u64,
    /// Memory of another stream, with a wait.
    pub waited: u64,
}

/// Figures of a pool. Each is consistent by itself, because streams continue while the snapshot is taken.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// The kind of segments.
    pub segment_kind: &'static str,
    /// The number of segments.
    pub segments: usize,
    /// Bytes of all segments.
    pub reserved_bytes: usize,
    /// Bytes of live blocks, and of freed ones with an open use or a failed free.
    pub live_bytes: usize,
    /// Bytes in magazines and coalesce queues.
    pub magazine_bytes: usize,
    /// Free bytes on which nothing is pending.
    pub idle_bytes: usize,
    /// Free bytes on which work of their stream may be pending.
    pub pending_bytes: usize,
    /// Bytes of freed blocks that other streams still use.
    pub deferred_bytes: usize,
    /// The largest free range, without magazines.
    pub largest_free: usize,
    /// The number of free ranges, without magazines.
    pub free_ranges: usize,
    /// How requests were served.
    pub paths: PoolPaths,
}

impl PoolSnapshot {
    /// Free bytes, without magazines.
    pub fn free_bytes(&self) -> usize {
        self.idle_bytes + self.pending_bytes
    }

    /// Free bytes on which nothing is pending, with magazines.
    pub fn cached_bytes(&self) -> usize {
        self.idle_bytes + self.magazine_bytes
    }

    /// The fraction of the free memory outside the largest range; 0 if all of it is one range.
    pub fn fragmentation(&self) -> f64 {
        match self.free_bytes() {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }
}

impl ArenaCounts {
    pub(super) fn add(&mut self, other: &Self) {
        self.deallocations += other.deallocations;
        self.retired = self.retired.wrapping_add(other.retired);
        self.undone += other.undone;
        for (sum, part) in self.sources.iter_mut().zip(other.sources) {
            *sum += part;
        }
    }
}

impl PoolResource {
    /// Takes a snapshot; locks one arena at a time, and the deferred frees after them.
    pub fn snapshot(&self) -> PoolSnapshot {
        let mut snapshot = PoolSnapshot {
            segment_kind: self.reserve.segments.kind(),
            segments: self.reserve.segments.segment_count(),
            reserved_bytes: self.reserve.segments.reserved() as usize,
            ..PoolSnapshot::default()
        };
        let mut counts = ArenaCounts::default();
        for (_, arena, stream) in self.arenas.with_streams(&self.tracker) {
            arena.with(|arena| {
                counts.add(&arena.counts);
                snapshot.live_bytes += arena.outstanding() as usize;
                snapshot.magazine_bytes += arena.cached_bytes() as usize;
                snapshot.largest_free =
                    snapshot.largest_free.max(arena.tlsf.largest_free() as usize);
                snapshot.free_ranges += arena.tlsf.free_ranges();
                for range in arena.tlsf.ranges() {
                    let idle = range.stamp == 0 || stream.clock().is_complete(range.stamp);
                    let bytes =
                        if idle { &mut snapshot.idle_bytes } else { &mut snapshot.pending_bytes };
                    *bytes += range.bytes as usize;
                }
            });
        }
        self.reserve.with_shared_free(|shared_free| {
            snapshot.idle_bytes += shared_free.free_bytes() as usize;
            snapshot.free_ranges += shared_free.free_ranges();
            snapshot.largest_free = snapshot.largest_free.max(shared_free.largest_free() as usize);
        });
        let deferred = self.deferred_frees.bytes(&self.tracker.table) as usize;
        snapshot.live_bytes = snapshot.live_bytes.saturating_sub(deferred);
        snapshot.deferred_bytes = deferred;
        let served = |source: ServedBy| counts.sources[source as usize];
        snapshot.paths = PoolPaths {
            magazine: served(ServedBy::Magazine),
            own: served(ServedBy::Own),
            covered: served(ServedBy::Covered),
            completed: served(ServedBy::Completed),
            grown: served(ServedBy::Grown),
            waited: served(ServedBy::Waited),
        };
        snapshot
    }
}
