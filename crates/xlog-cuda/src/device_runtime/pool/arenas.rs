//! Arenas of all streams of a pool, by the slot of the stream.
//!
//! Invariants:
//! - An arena is made at the first request of its stream and stays as long as the pool.
//! - All magazines together hold at most the bytes of the last [`Arenas::share_magazines`]; every stream has an equal share.
//! - [`Arenas::scan`] and [`Arenas::counts`] hold the locks of several arenas, taken in the order of the slots: one
//!   process-wide barrier for all of them. All other functions hold one lock at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_driver::sync::Mutex;

use super::arena::{Arena, ArenaCounts};
use super::coalesce_queue;
use super::segments::Span;
use super::tlsf::Range;
use crate::device_runtime::ordering::block::slab::Slab;
use crate::device_runtime::ordering::primitive::Lock;
use crate::device_runtime::ordering::tracking::tracker::Tracker;
use crate::device_runtime::resource::{ResourceError, ResourceResult};
use crate::stream::RawStream;

/// The number of streams that a pool can serve.
const MAX_STREAMS: u32 = 1 << 14;

/// An arena on cache lines of its own: mostly each stream is used by another thread.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ArenaShard {
    arena: Lock<Arena>,
    /// Whether the stream of this slot has asked for memory.
    is_used: AtomicBool,
}

/// The bytes that all magazines together may hold, and the number of streams that share them.
#[derive(Debug, Default)]
struct MagazineShares {
    bytes: u64,
    streams: u32,
}

/// The arenas of a pool.
#[derive(Debug)]
pub(super) struct Arenas {
    /// Made one by one: only a stream's first request pays for its arena.
    shards: Slab<ArenaShard, 1>,
    /// The bytes that the magazine of each stream may hold.
    magazine_capacity: AtomicU64,
    shares: Mutex<MagazineShares>,
    /// Held over a scan: otherwise a second scan would take all arenas of the first one as busy.
    scanning: Mutex<()>,
}

impl Arenas {
    pub(super) fn new() -> Self {
        Self {
            shards: Slab::new(MAX_STREAMS),
            magazine_capacity: AtomicU64::new(0),
            shares: Mutex::default(),
            scanning: Mutex::default(),
        }
    }

    /// The arena of a slot, if that was made.
    #[inline(always)]
    pub(super) fn get(&self, slot: u32) -> Option<&Lock<Arena>> {
        self.shards.get(slot).map(|shard| &shard.arena)
    }

    /// The arena of a stream that has asked for memory.
    #[inline]
    pub(super) fn used(&self, slot: u32) -> Option<&Lock<Arena>> {
        let shard = self.shards.get(slot)?;
        shard.is_used.load(Ordering::Acquire).then_some(&shard.arena)
    }

    /// Makes the arena of a slot.
    pub(super) fn make(&self, slot: u32) -> ResourceResult<&Lock<Arena>> {
        let Some(shard) = self.shards.get_or_make(slot) else {
            return Err(ResourceError::StreamMisuse(format!(
                "a pool serves the first {MAX_STREAMS} streams of its stream pool"
            )));
        };
        shard.is_used.store(true, Ordering::Release);
        Ok(&shard.arena)
    }

    /// The arenas in use, with the slots of their streams.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Lock<Arena>)> {
        self.shards
            .iter()
            .filter(|(_, shard)| shard.is_used.load(Ordering::Acquire))
            .map(|(slot, shard)| (slot, &shard.arena))
    }

    /// The arenas in use, with their slots and streams.
    pub(super) fn with_streams<'a>(
        &'a self,
        tracker: &'a Tracker,
    ) -> impl Iterator<Item = (u32, &'a Lock<Arena>, &'a RawStream)> {
        self.iter().filter_map(|(slot, arena)| Some((slot, arena, &**tracker.streams.at(slot)?)))
    }

    /// Visits the arenas in use that no other thread is inside of. Their owners keep their bias. Those of this thread cost
    /// no locked instruction.
    pub(super) fn scan(&self, mut body: impl FnMut(u32, &mut Arena)) {
        let (mut slots, mut foreign) = (Vec::new(), Vec::new());
        for (slot, arena) in self.iter() {
            match arena.enter() {
                Some(mut arena) => body(slot, &mut arena),
                None => {
                    slots.push(slot);
                    foreign.push(arena);
                }
            }
        }
        if foreign.is_empty() {
            return;
        }
        let _scanning = self.scanning.lock();
        let idle = slots.into_iter().zip(foreign).filter(|(_, arena)| !arena.is_busy());
        let (slots, arenas): (Vec<_>, Vec<_>) = idle.unzip();
        Lock::with_all(&arenas, |arenas| {
            slots.iter().zip(arenas).for_each(|(slot, arena)| body(*slot, arena));
        });
    }

    /// The bytes that the magazine of each stream may hold.
    #[inline(always)]
    pub(super) fn magazine_capacity(&self) -> u64 {
        self.magazine_capacity.load(Ordering::Relaxed)
    }

    /// Divides `maximum` bytes among the magazines, if that or the number of streams has changed enough.
    pub(super) fn share_magazines(&self, maximum: u64, tracker: &Tracker) {
        let mut shares = self.shares.lock();
        let streams = self.iter().count() as u32;
        let shared = shares.bytes;
        if streams <= shares.streams && maximum <= shared + shared / 4 && maximum >= shared {
            return;
        }
        // In powers of two: a smaller share means a visit of every magazine.
        let among = shares.streams.max(streams.next_power_of_two());
        *shares = MagazineShares { bytes: maximum, streams: among };
        // A share without what the coalesce queue may hold.
        let capacity =
            maximum / u64::from(among) / (coalesce_queue::PART + 1) * coalesce_queue::PART;
        if self.magazine_capacity.swap(capacity, Ordering::Relaxed) <= capacity {
            return;
        }
        let mut slots = Vec::new();
        // A busy arena keeps its surplus until it is used.
        self.scan(|slot, arena| {
            if arena.exceeds(capacity)
                && let Some(stream) = tracker.streams.at(slot)
            {
                arena.flush(stream.clock().now(), &tracker.table, &mut slots);
            }
        });
        tracker.table.free_slots(slots);
    }

    /// Flushes all magazines with the current stamp, before the caller polls which work has completed.
    pub(super) fn flush(&self, tracker: &Tracker) {
        let mut slots = Vec::new();
        for (_, arena, stream) in self.with_streams(tracker) {
            arena.with(|arena| arena.flush(stream.clock().now(), &tracker.table, &mut slots));
        }
        tracker.table.free_slots(slots);
    }

    /// Removes all free ranges without pending work.
    pub(super) fn remove_idle(&self, tracker: &Tracker) -> Vec<Span> {
        let mut idle = Vec::new();
        for (_, arena, stream) in self.with_streams(tracker) {
            let clock = stream.clock();
            arena.with(|arena| {
                let leaves = &mut |range: &Range| {
                    (range.stamp == 0 || clock.is_complete(range.stamp)).then_some(*range)
                };
                idle.extend(arena.tlsf.remove_if(0, leaves).into_iter().map(Span::from));
            });
        }
        idle
    }

    /// The counters of all arenas and the bytes handed out, at one instant.
    pub(super) fn counts(&self) -> (ArenaCounts, u64) {
        let arenas: Vec<&Lock<Arena>> = self.iter().map(|(_, arena)| arena).collect();
        Lock::with_all(&arenas, |arenas| {
            let mut sum = ArenaCounts::default();
            arenas.iter().for_each(|arena| sum.add(&arena.counts));
            (sum, arenas.iter().map(|arena| arena.outstanding()).sum())
        })
    }
}
