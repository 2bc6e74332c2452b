//! Gives memory with pending work to a block whose every use is prepared.
//!
//! Such a block inherits the dependencies of its memory: they become outstanding writes of the new block, and its first
//! prepare makes the use's stream wait for them. Often that stream already follows them, and no wait is queued. No stream
//! waits at the allocation, so the pool need not grow for a host that runs ahead of its streams.
//!
//! Two sources, each for exactly the size of the request, since no stream would be ordered after a remainder:
//! - a freed block of that size that other streams still use: its outstanding uses are the dependencies;
//! - a part of a free range of another stream: the stamp of that range is the dependency.
//!
//! For the race detector a block of the first kind continues: no stream is ordered after all its uses, so no stream can end
//! it. A missing wait appears as a race between the uses.

use smallvec::SmallVec;

use super::arena::Suballocation;
use super::slow_path::SlowPath;
use super::tlsf::{BoundedFit, Range, SMALL};
use crate::device_runtime::logging::ServedBy;
use crate::stream::RawStream;

/// Work that a block's first use must follow: a stream and its stamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Dependency {
    pub(super) slot: u32,
    pub(super) stamp: u64,
}

/// Dependencies that a block inherits with its memory.
#[derive(Debug, Default)]
pub(super) struct Inherited {
    pub(super) dependencies: SmallVec<[Dependency; 2]>,
    /// The slot of the stream on which the block begins for the race detector; `None` if the freed block continues.
    pub(super) begins_on: Option<u32>,
}

impl SlowPath<'_> {
    /// Serves the request from memory with pending work, whose dependencies the block inherits. Declines small requests.
    pub(super) fn inherit(&mut self) -> Option<Suballocation> {
        let reuse = self.pool.config.reuse;
        if !self.is_tracked || self.size < SMALL || self.pool.sanitizer.is_some() {
            return None;
        }
        let deferred = if reuse.opportunistic { self.inherit_deferred() } else { None };
        deferred.or_else(|| if reuse.insert_waits { self.inherit_range() } else { None })
    }

    /// Takes the memory of a freed block that other streams still use.
    fn inherit_deferred(&mut self) -> Option<Suballocation> {
        let pool = self.pool;
        let (tracker, table) = (&pool.tracker, &pool.tracker.table);
        let _reaper = pool.deferred_frees.try_reaper_lock()?;
        let generation = pool.deferred_frees.remove_first(|generation| {
            table.at(generation).is_some_and(|meta| {
                meta.bytes() as u64 == self.size && meta.ptr().is_multiple_of(self.align)
            })
        })?;
        // The reaper lock keeps other threads from ending it.
        let meta = table.at(generation)?;
        let slot = meta.owner();
        let (Some(stream), Some(arena)) = (tracker.streams.at(slot), pool.arenas.get(slot)) else {
            pool.deferred_frees.keep_failed(generation);
            return None;
        };
        let uses = meta.with_uses(|uses| uses.copy_outstanding());
        let streams = uses.iter().filter_map(|entry| tracker.streams.at(entry.slot));
        let can_wait = |stream: &RawStream| stream.check_not_capturing("pool allocate").is_ok();
        let removed = streams.map(|stream| &**stream).chain([&**stream]).all(can_wait).then(|| {
            arena.with(|arena| {
                let range = arena.tlsf.remove_allocated(meta.node())?;
                arena.counts.retired = arena.counts.retired.wrapping_sub(1);
                Some(range)
            })
        });
        let Some(range) = removed.flatten() else {
            if !pool.deferred_frees.defer(generation) {
                pool.deferred_frees.keep_failed(generation);
            }
            return None;
        };
        let pending = meta.with_uses(|uses| uses.take_outstanding(&tracker.streams));
        meta.end();
        table.free_slots([generation.slot()]);
        // The free is work of the block's own stream, after everything queued there.
        let own = Dependency { slot, stamp: stream.clock().now() };
        let used = pending.iter().map(|entry| Dependency { slot: entry.slot, stamp: entry.stamp });
        self.inherited =
            Some(Inherited { dependencies: used.chain([own]).collect(), begins_on: None });
        self.insert_inherited(range)
    }

    /// Takes a part of a free range of another stream.
    fn inherit_range(&mut self) -> Option<Suballocation> {
        let (pool, own) = (self.pool, self.owner.clock().slot());
        let fit = BoundedFit { bytes: self.size, maximum: self.size, align: self.align };
        // Captures are checked before the scan: no driver call is made under arena locks.
        let is_free = |stream: &RawStream| stream.check_not_capturing("pool allocate").is_ok();
        let streams = pool.arenas.with_streams(&pool.tracker);
        let usable: Vec<_> =
            streams.filter(|(.., stream)| is_free(stream)).map(|(slot, ..)| slot).collect();
        let mut found = None;
        pool.arenas.scan(|slot, arena| {
            if found.is_some()
                || slot == own
                || !arena.tlsf.may_hold(self.size)
                || !usable.contains(&slot)
            {
                return;
            }
            // Minimum and maximum are equal, so the range has no remainder.
            let taken = arena.tlsf.allocate_if(fit, &mut |_| true);
            let removed = taken.and_then(|taken| arena.tlsf.remove_allocated(taken.node));
            found = removed.map(|range| (slot, range));
        });
        let (slot, range) = found?;
        self.inherited = Some(Inherited {
            dependencies: SmallVec::from_iter([Dependency { slot, stamp: range.stamp }]),
            begins_on: Some(slot),
        });
        self.insert_inherited(range)
    }

    /// Inserts a range into the stream's own arena as allocated memory.
    fn insert_inherited(&mut self, range: Range) -> Option<Suballocation> {
        let inserted = self.arena.with(|arena| arena.insert_allocated(range, ServedBy::Covered));
        if inserted.is_none() {
            // The arena has no node left; the pool cannot use the range any more.
            self.inherited = None;
        }
        inserted
    }
}
