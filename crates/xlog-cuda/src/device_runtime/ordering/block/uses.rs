//! Outstanding and open uses of an inflated block.
//!
//! Invariants:
//! - Changes are numbered. A finished write supersedes exactly the uses that were outstanding when it was prepared, and
//!   have not changed since: it has waited for them.
//! - Until the block's own stream has announced a use, it may work on the block without hooks. A prepare on another
//!   stream then waits for the tail of the own stream, which counts as its write. Its first announced use counts as a
//!   write too, even if it is a read.

use smallvec::SmallVec;
use xlog_driver::Access;

use super::block_meta::BlockMeta;
use crate::device_runtime::resource::StreamId;
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// A use, identified by stream and access as in the hooks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedUse {
    pub(crate) stream: StreamId,
    pub(crate) access: Access,
}

/// Finished work of one stream that later work may have to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    /// The slot of the stream.
    pub(crate) slot: u32,
    pub(crate) stamp: u64,
    /// The number of the change that added it.
    change: u64,
}

/// A list that usually has at most one entry.
type SmallList<T> = SmallVec<[T; 1]>;

/// A list that holds two entries inline.
pub(crate) type OutstandingList = SmallVec<[Outstanding; 2]>;

/// The waits that a use still needs: a stream and a stamp each.
pub(crate) type Needed<'a> = SmallList<(&'a RawStream, u64)>;

/// A use between prepare and finish.
#[derive(Debug)]
struct Open {
    number: u64,
    /// The id under which the use was opened. It closes under that id, even if the stream was released meanwhile.
    id: StreamId,
    slot: u32,
    access: Access,
    /// The stamp of the own stream that the use is ordered after.
    own: u64,
}

impl Open {
    /// `Write` and `ReadWrite` close each other's uses: both order as writes.
    #[inline]
    fn matches(&self, named: NamedUse) -> bool {
        self.id == named.stream && self.access.writes() == named.access.writes()
    }
}

/// The work that a closed use was ordered after: all changes up to one, and the own stream up to a stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrderedAfter {
    change: u64,
    own: u64,
}

/// The uses of a block, behind its lock. Empty when the block ends.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    writes: SmallList<Outstanding>,
    reads: SmallList<Outstanding>,
    open: SmallList<Open>,
    /// Calls that need the live block. No finish ends them, so no other thread can free the memory under them.
    pins: u32,
    /// The number of changes so far.
    changes: u64,
    /// Stamps of finished work of the own stream while the block is live and inflated: the holder of the lock needs no
    /// locked instruction. Otherwise they are 0, which precedes all work, and the metadata has the stamps.
    own_write: u64,
    own_read: u64,
    /// Whether the own stream has announced a use, or another stream has finished one: announcements then decide. While
    /// the metadata has the stamps, this is false and the state word has the flag.
    announced: bool,
    /// Whether the block was returned while a use was open: the last use to close frees it.
    pub(crate) free_on_close: bool,
}

/// Drops entries that the host has seen complete.
#[cold]
fn forget_completed(list: &mut SmallList<Outstanding>, streams: &StreamPool) {
    list.retain(|entry| {
        streams.at(entry.slot).is_some_and(|of| !of.clock().is_complete(entry.stamp))
    });
}

/// Drops completed entries and, if `must_wait`, adds the waits of `stream` to `needed`. Returns the number of waits
/// that the clock made superfluous.
#[inline(always)]
fn collect_waits<'a>(
    list: &mut SmallList<Outstanding>,
    streams: &'a StreamPool,
    stream: &RawStream,
    must_wait: bool,
    needed: &mut Needed<'a>,
) -> u64 {
    let mut elided = 0;
    let mut completed = false;
    let slot = stream.clock().slot();
    for entry in list.iter() {
        match streams.at(entry.slot) {
            Some(of) if !of.clock().is_complete(entry.stamp) => {
                if must_wait && entry.slot != slot {
                    match stream.clock().covers(entry.slot, entry.stamp) {
                        true => elided += 1,
                        false => needed.push((of, entry.stamp)),
                    }
                }
            }
            _ => completed = true,
        }
    }
    if completed {
        forget_completed(list, streams);
    }
    elided
}

/// Drops the entries that a write in `slot`, finished at `stamp`, supersedes.
#[inline(always)]
fn supersede(
    list: &mut SmallList<Outstanding>,
    slot: u32,
    stamp: u64,
    ordered_after: OrderedAfter,
) {
    list.retain(|entry| !is_superseded(entry, slot, stamp, ordered_after));
}

#[inline(always)]
fn is_superseded(entry: &Outstanding, slot: u32, stamp: u64, ordered_after: OrderedAfter) -> bool {
    match entry.slot == slot {
        // A stamp covers the work of its own stream. Another thread may have finished later.
        true => entry.stamp <= stamp,
        false => entry.change <= ordered_after.change,
    }
}

impl Uses {
    /// Whether only the own stream is involved: then its uses need no lock.
    #[inline(always)]
    pub(crate) fn is_own_stream_only(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty() && !self.has_open()
    }

    /// The stamp of the own stream that a use must be ordered after.
    #[inline(always)]
    fn own(&self, writes: bool) -> u64 {
        if writes { self.own_write.max(self.own_read) } else { self.own_write }
    }

    /// Moves the stamps of the own stream here when the block is inflated. A use that is being closed without the lock
    /// still counts as open, and stamps again under the lock.
    pub(crate) fn load_stamps(&mut self, meta: &BlockMeta) {
        let (write, read) = meta.stamps.swap_out();
        self.own_write = write.max(self.own_write);
        self.own_read = read.max(self.own_read);
        self.announced |= meta.state.is_announced();
    }

    /// Moves the stamps of the own stream back to the metadata, before the block is deflated or ends.
    #[cold]
    pub(crate) fn store_stamps(&mut self, meta: &BlockMeta) {
        if std::mem::take(&mut self.announced) {
            meta.state.announce();
        }
        for (writes, stamp) in [(true, &mut self.own_write), (false, &mut self.own_read)] {
            // 0: the metadata has the stamp.
            if *stamp != 0 {
                meta.stamps.stamp(writes, std::mem::take(stamp));
            }
        }
    }

    /// The stamps of writes and reads of the own stream.
    #[cfg(test)]
    pub(crate) fn own_stamps(&self) -> (u64, u64) {
        (self.own_write, self.own_read)
    }

    /// Whether a use is open, or the block is pinned.
    #[inline]
    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty() || self.pins > 0
    }

    /// Pins the block, which is inflated and stays so. The last use or pin to end frees a returned block.
    pub(crate) fn pin(&mut self) {
        self.pins += 1;
    }

    pub(crate) fn unpin(&mut self) {
        self.pins -= 1;
    }

    /// Opens a use of `stream`, and adds the waits that it still needs to `needed`. Returns the number of superfluous waits.
    #[inline(always)]
    pub(crate) fn open<'a>(
        &mut self,
        owner: u32,
        streams: &'a StreamPool,
        stream: &RawStream,
        opened: NamedUse,
        needed: &mut Needed<'a>,
    ) -> u64 {
        let NamedUse { stream: id, access } = opened;
        let clock = stream.clock();
        let slot = clock.slot();
        let writes = access.writes();
        let mut elided = 0;
        let owner_stream = if owner == slot { None } else { streams.at(owner) };
        if !self.announced
            && let Some(of) = owner_stream
        {
            // No event covers the current stamp, so one will be recorded at the tail. An event that covers the
            // allocation may lie before work that was queued since.
            self.own_write = of.clock().now();
        }
        let own = self.own(writes);
        if own != 0
            && let Some(of) = owner_stream
        {
            match of.clock().is_complete(own) || clock.covers(owner, own) {
                true => elided += 1,
                false => needed.push((of, own)),
            }
        }
        if !self.writes.is_empty() {
            elided += collect_waits(&mut self.writes, streams, stream, true, needed);
        }
        if !self.reads.is_empty() {
            elided += collect_waits(&mut self.reads, streams, stream, writes, needed);
        }
        self.changes += 1;
        self.open.push(Open { number: self.changes, id, slot, access, own });
        elided
    }

    /// Cancels a use whose waits could not be queued. Of several equal uses it cancels the newest: another thread may have
    /// closed the oldest for its own, and the remaining ones claim no more than they are ordered after.
    pub(crate) fn cancel(&mut self, named: NamedUse) {
        if let Some(at) = self.open.iter().rposition(|open| open.matches(named)) {
            self.open.remove(at);
        }
    }

    /// Returns the slot of the stream of an open use, if there is such a use.
    #[inline]
    pub(crate) fn find_open(&self, named: NamedUse) -> Option<u32> {
        self.open.iter().find(|open| open.matches(named)).map(|open| open.slot)
    }

    /// Closes the oldest such use; returns the work that it was ordered after.
    #[inline(always)]
    pub(crate) fn close(&mut self, named: NamedUse) -> Option<OrderedAfter> {
        let at = self.open.iter().position(|open| open.matches(named))?;
        let Open { number, own, .. } = self.open.remove(at);
        Some(OrderedAfter { change: number, own })
    }

    /// Adds finished work in `slot` to the outstanding uses. A write supersedes what it was `ordered_after`.
    #[inline(always)]
    pub(crate) fn finished(
        &mut self,
        owner: u32,
        slot: u32,
        stamp: u64,
        writes: bool,
        ordered_after: Option<OrderedAfter>,
    ) {
        if !self.announced {
            self.announce(owner == slot, stamp, ordered_after);
        }
        // Common case: one write supersedes everything.
        if writes
            && let Some(ordered_after) = ordered_after
            && self.reads.is_empty()
            && self.writes.len() <= 1
            && self
                .writes
                .first()
                .is_none_or(|entry| is_superseded(entry, slot, stamp, ordered_after))
        {
            if owner == slot {
                self.writes.clear();
                self.own_write = stamp.max(self.own_write);
            } else {
                self.supersede_own(ordered_after.own);
                self.changes += 1;
                self.writes.clear();
                self.writes.push(Outstanding { slot, stamp, change: self.changes });
            }
            return;
        }
        self.finished_among_others(owner, slot, stamp, writes, ordered_after);
    }

    /// Notes the first use that covers all unannounced work of the own stream: a use of the own stream, or a prepared
    /// use of another stream. An unprepared use has waited for nothing.
    #[cold]
    fn announce(&mut self, own: bool, stamp: u64, ordered_after: Option<OrderedAfter>) {
        self.announced = own || ordered_after.is_some();
        if own {
            self.own_write = stamp.max(self.own_write);
        }
    }

    #[inline(never)]
    fn finished_among_others(
        &mut self,
        owner: u32,
        slot: u32,
        stamp: u64,
        writes: bool,
        ordered_after: Option<OrderedAfter>,
    ) {
        if writes && let Some(ordered_after) = ordered_after {
            supersede(&mut self.writes, slot, stamp, ordered_after);
            supersede(&mut self.reads, slot, stamp, ordered_after);
            if owner != slot {
                self.supersede_own(ordered_after.own);
            }
        }
        if owner == slot {
            let own = if writes { &mut self.own_write } else { &mut self.own_read };
            *own = stamp.max(*own);
            return;
        }
        self.changes += 1;
        let change = self.changes;
        let list = if writes { &mut self.writes } else { &mut self.reads };
        match list.iter_mut().find(|entry| entry.slot == slot) {
            Some(entry) if entry.stamp < stamp => {
                entry.stamp = stamp;
                entry.change = change;
            }
            Some(entry) => entry.change = change,
            None => list.push(Outstanding { slot, stamp, change }),
        }
    }

    /// Drops the stamps of the own stream up to `upto`.
    #[inline(always)]
    fn supersede_own(&mut self, upto: u64) {
        for own in [&mut self.own_write, &mut self.own_read] {
            if *own <= upto {
                *own = 0;
            }
        }
    }

    /// Adds earlier work on the memory, which the first use must follow. The own stream announces every use.
    pub(crate) fn inherit(&mut self, slot: u32, stamp: u64) {
        self.announced = true;
        self.changes += 1;
        let change = self.changes;
        match self.writes.iter_mut().find(|entry| entry.slot == slot) {
            Some(entry) => entry.stamp = entry.stamp.max(stamp),
            None => self.writes.push(Outstanding { slot, stamp, change }),
        }
    }

    fn outstanding(&self) -> impl Iterator<Item = &Outstanding> {
        self.writes.iter().chain(self.reads.iter())
    }

    /// Whether everything outstanding happens-before new work on `stream`.
    pub(crate) fn is_ordered_before(&self, streams: &StreamPool, stream: &RawStream) -> bool {
        self.outstanding().all(|entry| {
            entry.slot == stream.clock().slot()
                || streams.at(entry.slot).is_none_or(|of| of.clock().is_complete(entry.stamp))
                || stream.clock().covers(entry.slot, entry.stamp)
        })
    }

    /// Notes on the streams of outstanding uses that their completion makes memory free.
    pub(crate) fn note_free(&self, streams: &StreamPool) {
        for entry in self.outstanding() {
            if let Some(stream) = streams.at(entry.slot) {
                stream.note_free(entry.stamp);
            }
        }
    }

    /// Copies the outstanding uses, to be polled without the lock.
    pub(crate) fn copy_outstanding(&self) -> OutstandingList {
        self.outstanding().copied().collect()
    }

    /// Removes the outstanding uses; returns those that a free must wait for.
    pub(crate) fn take_outstanding(&mut self, streams: &StreamPool) -> OutstandingList {
        let pending = |entry: &&Outstanding| {
            streams.at(entry.slot).is_some_and(|of| !of.clock().is_complete(entry.stamp))
        };
        let all = self.outstanding().filter(pending).copied().collect();
        self.writes.clear();
        self.reads.clear();
        all
    }

    /// Restores outstanding uses after a free could not be queued.
    pub(crate) fn restore(&mut self, outstanding: OutstandingList) {
        outstanding.into_iter().for_each(|entry| self.writes.push(entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_open_uses_that_are_alike_the_one_that_follows_less_stays() {
        let mut uses = Uses::default();
        let named = NamedUse { stream: StreamId(3), access: Access::Write };
        for number in [1, 5] {
            let NamedUse { stream: id, access } = named;
            uses.open.push(Open { number, id, slot: 2, access, own: 0 });
        }
        uses.cancel(named);
        let left = uses.close(named);
        assert_eq!(left.map(|ordered_after| ordered_after.change), Some(1));
        assert!(!uses.has_open());
    }
}
