//! The uses of a block that its gate alone cannot hold: those of other streams, and those open while they are there.
//!
//! Changes are numbered. A finished write takes the place of exactly what was outstanding when it was prepared, and so waited
//! for, and has not changed since.
//!
//! Until the own stream has announced a use, it may work on the block without hooks: another stream's prepare then follows its tail
//! and not its last stamp, and the tail counts as its write. So does its first announced use, be it a read.

use smallvec::SmallVec;
use xlog_driver::Access;

use super::block_meta::BlockMeta;
use super::small_list::SmallList;
use super::use_state::LastWriter;
use crate::device_runtime::resource::StreamId;
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// Finished work of one stream that later work may have to follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    /// The stream, by its place in the pool.
    pub(crate) slot: u32,
    pub(crate) stamp: u64,
    /// The number of the change that brought it.
    change: u64,
}

/// A few of them, without an allocation.
pub(crate) type OutstandingList = SmallVec<[Outstanding; 2]>;

/// What a use must still wait for: a stream, and up to which stamp.
pub(crate) type Needed<'a> = SmallList<(&'a RawStream, u64)>;

/// The one stream that a use must follow, up to a stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SingleDependency {
    pub(crate) slot: u32,
    pub(crate) stamp: u64,
    /// The stamp of the own stream that it follows.
    pub(crate) own: u64,
}

/// A use that was opened.
#[derive(Debug)]
pub(crate) struct Opened<'a> {
    pub(crate) number: u64,
    /// How many waits were implied.
    pub(crate) implied: u64,
    pub(crate) needed: Needed<'a>,
}

/// A use between prepare and finish.
#[derive(Debug)]
struct Open {
    number: u64,
    /// The id it was opened under: it closes under the same one, also when the stream was given back meanwhile.
    id: StreamId,
    slot: u32,
    access: Access,
    /// The stamp of the own stream that it was prepared to follow.
    own: u64,
}

impl Open {
    /// What is written is closed as written: whether it was also read makes no difference to order.
    #[inline]
    fn matches(&self, id: StreamId, access: Access) -> bool {
        self.id == id && self.access.writes() == access.writes()
    }
}

/// What a closed use had been prepared to follow: everything up to a change, and up to a stamp of the own stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrderedAfter {
    change: u64,
    own: u64,
}

/// Behind the lock of a block's record. Between two blocks it is as it was made.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    writes: SmallList<Outstanding>,
    reads: SmallList<Outstanding>,
    open: SmallList<Open>,
    /// How many changes there were.
    changes: u64,
    /// The stamps of finished work of the own stream, which a block that is not slow has in its record: whoever holds the lock changes
    /// them without a locked instruction. 0 is before everything; so they are unless the block is live and slow.
    own_write: u64,
    own_read: u64,
    /// The own stream has announced a use, or another stream has finished one: from then on announcements decide. False while the
    /// stamps are in the record, whose gate knows it then.
    announced: bool,
    /// The block was returned while a use was open: the last one to close frees it.
    pub(crate) free_on_close: bool,
}

/// Forgets what the host knows to have completed.
#[cold]
fn forget_completed(list: &mut SmallList<Outstanding>, streams: &StreamPool) {
    list.retain(|entry| {
        streams.at(entry.slot).is_some_and(|of| !of.clock().is_complete(entry.stamp))
    });
}

/// Forgets what has completed, and adds what `stream` must wait for to `needed`, if it must follow these; returns how many
/// waits were implied.
#[inline(always)]
fn wait_on_list<'a>(
    list: &mut SmallList<Outstanding>,
    streams: &'a StreamPool,
    stream: &RawStream,
    must_wait: bool,
    needed: &mut Needed<'a>,
) -> u64 {
    let mut implied = 0;
    let mut completed = false;
    let slot = stream.clock().slot();
    let _: Result<(), ()> = list.try_each(|entry| {
        match streams.at(entry.slot) {
            Some(of) if !of.clock().is_complete(entry.stamp) => {
                if must_wait && entry.slot != slot {
                    match stream.clock().covers(entry.slot, entry.stamp) {
                        true => implied += 1,
                        false => needed.push((of, entry.stamp)),
                    }
                }
            }
            _ => completed = true,
        }
        Ok(())
    });
    if completed {
        forget_completed(list, streams);
    }
    implied
}

/// Forgets what a write of the stream at `slot` that finished at `stamp` takes the place of.
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
        // Work of its own stream is covered by its stamp; another thread may have finished later.
        true => entry.stamp <= stamp,
        false => entry.change <= ordered_after.change,
    }
}

impl Uses {
    /// True when only the own stream is involved: its uses need no lock.
    #[inline(always)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty() && self.open.is_empty()
    }

    /// Up to where a use must follow the own stream.
    #[inline(always)]
    fn own(&self, writes: bool) -> u64 {
        if writes { self.own_write.max(self.own_read) } else { self.own_write }
    }

    /// After the block became slow: what the own stream finished without the lock is kept here from now on. A use of it that is still
    /// being closed without the lock is open, and stamps again when it finds that it must take the lock.
    pub(crate) fn load_stamps(&mut self, meta: &BlockMeta) {
        let (write, read) = meta.stamps.swap_out();
        self.own_write = write.max(self.own_write);
        self.own_read = read.max(self.own_read);
        self.announced |= meta.state.is_announced();
    }

    /// Before the own stream goes without the lock again, and before the block ends: nothing of it is kept here.
    #[cold]
    pub(crate) fn store_stamps(&mut self, meta: &BlockMeta) {
        if std::mem::take(&mut self.announced) {
            meta.state.announce();
        }
        for (writes, stamp) in [(true, &mut self.own_write), (false, &mut self.own_read)] {
            // 0: it is in the record already.
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

    #[inline]
    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Opens a use of `stream`.
    #[inline(always)]
    pub(crate) fn open<'a>(
        &mut self,
        owner: u32,
        streams: &'a StreamPool,
        (id, stream): (StreamId, &RawStream),
        access: Access,
    ) -> Opened<'a> {
        let clock = stream.clock();
        let slot = clock.slot();
        let writes = access.writes();
        let mut needed = Needed::default();
        let mut implied = 0;
        let owner_stream = if owner == slot { None } else { streams.at(owner) };
        if !self.announced
            && let Some(of) = owner_stream
        {
            // No event covers the stamp that stands now, so one is recorded at the tail: what covers the allocation may lie before
            // work that was queued since.
            self.own_write = of.clock().now();
        }
        let own = self.own(writes);
        if own != 0
            && let Some(of) = owner_stream
        {
            match of.clock().is_complete(own) || clock.covers(owner, own) {
                true => implied += 1,
                false => needed.push((of, own)),
            }
        }
        if !self.writes.is_empty() {
            implied += wait_on_list(&mut self.writes, streams, stream, true, &mut needed);
        }
        if !self.reads.is_empty() {
            implied += wait_on_list(&mut self.reads, streams, stream, writes, &mut needed);
        }
        self.changes += 1;
        let number = self.changes;
        self.open.push(Open { number, id, slot, access, own });
        Opened { number, implied, needed }
    }

    /// What a use of the stream at `slot` must follow, if that is one stream and no use is open; with what it follows of the own one.
    #[inline(always)]
    pub(crate) fn single_dependency(
        &self,
        owner: u32,
        slot: u32,
        writes: bool,
    ) -> Option<SingleDependency> {
        // Nearly always all lists are short; `open` is, as far as it must be to get an entry without a look at the rest.
        if !self.announced
            || !self.open.is_empty()
            || !self.writes.has_at_most_one()
            || !self.reads.has_at_most_one()
        {
            return None;
        }
        let own = self.own(writes);
        let waits_on_own = own != 0 && owner != slot;
        let of =
            |entry: &Outstanding| SingleDependency { slot: entry.slot, stamp: entry.stamp, own };
        match (self.writes.first(), self.reads.first()) {
            (None, None) if waits_on_own => Some(SingleDependency { slot: owner, stamp: own, own }),
            (Some(entry), None) if !waits_on_own => Some(of(entry)),
            // A read does not follow another one.
            (None, Some(entry)) if !waits_on_own && writes => Some(of(entry)),
            _ => None,
        }
    }

    /// Opens a use that follows what is outstanding; returns its number.
    #[inline(always)]
    pub(crate) fn open_after_single(
        &mut self,
        id: StreamId,
        slot: u32,
        access: Access,
        own: u64,
    ) -> u64 {
        self.changes += 1;
        self.open.set_single(Open { number: self.changes, id, slot, access, own });
        self.changes
    }

    /// The waits could not be queued: as if it had never been opened.
    pub(crate) fn cancel(&mut self, number: u64) {
        self.open.retain(|open| open.number != number);
    }

    /// The same for a use of which no more is known: of several that are alike the newest goes, so that those that stay claim to
    /// follow no more than they do.
    pub(crate) fn cancel_newest(&mut self, id: StreamId, access: Access) {
        let alike = self.open.iter().filter(|open| open.matches(id, access));
        if let Some(number) = alike.map(|open| open.number).max() {
            self.cancel(number);
        }
    }

    /// Takes over what a baton stood for.
    pub(crate) fn inflate(
        &mut self,
        owner: u32,
        last_writer: LastWriter,
        opened: Option<(StreamId, bool)>,
    ) {
        let LastWriter { stamp, slot, user } = last_writer;
        let by_owner = slot == owner;
        self.announced = true;
        self.changes += 1;
        if by_owner {
            self.own_write = stamp;
        } else {
            self.writes.push(Outstanding { slot, stamp, change: self.changes });
        }
        if let Some((id, writes)) = opened {
            self.changes += 1;
            let access = if writes { Access::Write } else { Access::Read };
            let own = if by_owner { stamp } else { 0 };
            self.open.push(Open { number: self.changes, id, slot: user, access, own });
        }
    }

    /// If there is nothing but one finished write, takes it out: its place and stamp.
    pub(crate) fn deflate(&mut self, owner: u32) -> Option<(u32, u64)> {
        let plain = self.writes.has_at_most_one()
            && self.reads.has_at_most_one()
            && self.open.has_at_most_one();
        let alone = plain && self.reads.is_empty() && !self.has_open();
        if !alone || !self.announced || self.free_on_close {
            return None;
        }
        let single_dependency = match self.writes.first() {
            Some(entry) if self.own_write == 0 && self.own_read == 0 => (entry.slot, entry.stamp),
            // What the own stream read before came before that.
            None if self.own_write != 0 && self.own_read <= self.own_write => {
                (owner, self.own_write)
            }
            _ => return None,
        };
        self.writes.clear_single();
        (self.own_write, self.own_read) = (0, 0);
        Some(single_dependency)
    }

    /// The place of the stream of an open use of this id and access, if there is one.
    pub(crate) fn find_open(&self, id: StreamId, access: Access) -> Option<u32> {
        self.open.iter().find(|open| open.matches(id, access)).map(|open| open.slot)
    }

    /// Closes the oldest such use; says what it had been prepared to follow.
    #[inline(always)]
    pub(crate) fn close(&mut self, id: StreamId, access: Access) -> Option<OrderedAfter> {
        let ordered_after = |open: &Open| OrderedAfter { change: open.number, own: open.own };
        self.open.remove_first(|open| open.matches(id, access), ordered_after)
    }

    /// Finished work of the stream at `slot` joins the outstanding; a write takes the place of what it `ordered_after`.
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
        // One write that takes the place of all there was.
        if writes
            && let Some(ordered_after) = ordered_after
            && self.reads.is_empty()
            && self.writes.has_at_most_one()
            && self
                .writes
                .first()
                .is_none_or(|entry| is_superseded(entry, slot, stamp, ordered_after))
        {
            if owner == slot {
                self.writes.clear_single();
                self.own_write = stamp.max(self.own_write);
            } else {
                self.supersede_own(ordered_after.own);
                self.changes += 1;
                self.writes.set_single(Outstanding { slot, stamp, change: self.changes });
            }
            return;
        }
        self.finished_among_others(owner, slot, stamp, writes, ordered_after);
    }

    /// The first use that stands for all that the own stream queued before it without a hook: one of its own, or another stream's
    /// that was prepared. One that was not prepared followed nothing.
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
        match list.find_mut(|entry| entry.slot == slot) {
            Some(entry) if entry.stamp < stamp => {
                entry.stamp = stamp;
                entry.change = change;
            }
            Some(entry) => entry.change = change,
            None => list.push(Outstanding { slot, stamp, change }),
        }
    }

    /// Forgets what the own stream had finished up to a stamp.
    #[inline(always)]
    fn supersede_own(&mut self, upto: u64) {
        for own in [&mut self.own_write, &mut self.own_read] {
            if *own <= upto {
                *own = 0;
            }
        }
    }

    fn outstanding(&self) -> impl Iterator<Item = &Outstanding> {
        self.writes.iter().chain(self.reads.iter())
    }

    /// True when whatever is queued on `stream` now comes after everything outstanding, without a wait.
    pub(crate) fn is_ordered_before(&self, streams: &StreamPool, stream: &RawStream) -> bool {
        self.outstanding().all(|entry| {
            entry.slot == stream.clock().slot()
                || streams.at(entry.slot).is_none_or(|of| of.clock().is_complete(entry.stamp))
                || stream.clock().covers(entry.slot, entry.stamp)
        })
    }

    /// Everything outstanding, to be asked about without the lock.
    pub(crate) fn copy_outstanding(&self) -> OutstandingList {
        self.outstanding().copied().collect()
    }

    /// Everything a free must follow. Nothing is left.
    pub(crate) fn take_outstanding(&mut self, streams: &StreamPool) -> OutstandingList {
        let pending = |entry: &&Outstanding| {
            streams.at(entry.slot).is_some_and(|of| !of.clock().is_complete(entry.stamp))
        };
        let all = self.outstanding().filter(pending).copied().collect();
        self.writes.retain(|_| false);
        self.reads.retain(|_| false);
        all
    }

    /// The free could not be queued: it must still follow these.
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
        for number in [1, 5] {
            let (id, access) = (StreamId(3), Access::Write);
            uses.open.push(Open { number, id, slot: 2, access, own: 0 });
        }
        uses.cancel_newest(StreamId(3), Access::Write);
        let left = uses.close(StreamId(3), Access::Write);
        assert_eq!(left.map(|ordered_after| ordered_after.change), Some(1));
        assert!(!uses.has_open());
    }
}
