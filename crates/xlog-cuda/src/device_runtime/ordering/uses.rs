//! The uses of a block that its gate alone cannot hold: those of other streams, and those open while they are there.
//!
//! Changes are numbered. A finished write takes the place of exactly what was outstanding when it was prepared, and so waited
//! for, and has not changed since.
//!
//! Until the own stream has announced a use, it may work on the block without hooks: another stream's prepare then follows its tail
//! and not its last stamp, and the tail counts as its write. So does its first announced use, be it a read.

use smallvec::SmallVec;
use xlog_driver::Access;

use super::baton::Baton;
use super::few::Few;
use super::record::Record;
use crate::device_runtime::resource::StreamId;
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// Finished work of one stream that later work may have to follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    /// The stream, by its place in the pool.
    pub(crate) place: u32,
    pub(crate) stamp: u64,
    /// The number of the change that brought it.
    change: u64,
}

/// A few of them, without an allocation.
pub(crate) type OutstandingList = SmallVec<[Outstanding; 2]>;

/// What a use must still wait for: a stream, and up to which stamp.
pub(crate) type Needed<'a> = Few<(&'a RawStream, u64)>;

/// The one stream that a use must follow, up to a stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sole {
    pub(crate) place: u32,
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
    place: u32,
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
pub(crate) struct Followed {
    change: u64,
    own: u64,
}

/// Behind the lock of a block's record. Between two blocks it is as it was made.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    writes: Few<Outstanding>,
    reads: Few<Outstanding>,
    open: Few<Open>,
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
fn forget_completed(list: &mut Few<Outstanding>, streams: &StreamPool) {
    list.retain(|entry| {
        streams.at(entry.place).is_some_and(|of| !of.clock().is_complete(entry.stamp))
    });
}

/// Forgets what has completed, and adds what `stream` must wait for to `needed`, if it must follow these; returns how many
/// waits were implied.
#[inline(always)]
fn follow_list<'a>(
    list: &mut Few<Outstanding>,
    streams: &'a StreamPool,
    stream: &RawStream,
    follows: bool,
    needed: &mut Needed<'a>,
) -> u64 {
    let mut implied = 0;
    let mut completed = false;
    let place = stream.clock().key();
    let _: Result<(), ()> = list.try_each(|entry| {
        match streams.at(entry.place) {
            Some(of) if !of.clock().is_complete(entry.stamp) => {
                if follows && entry.place != place {
                    match stream.clock().covers(entry.place, entry.stamp) {
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

/// Forgets what a write of the stream at `place` that finished at `stamp` takes the place of.
#[inline(always)]
fn supersede(list: &mut Few<Outstanding>, place: u32, stamp: u64, followed: Followed) {
    list.retain(|entry| !is_superseded(entry, place, stamp, followed));
}

#[inline(always)]
fn is_superseded(entry: &Outstanding, place: u32, stamp: u64, followed: Followed) -> bool {
    match entry.place == place {
        // Work of its own stream is covered by its stamp; another thread may have finished later.
        true => entry.stamp <= stamp,
        false => entry.change <= followed.change,
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
    pub(crate) fn take_stamps(&mut self, record: &Record) {
        let (write, read) = record.stamps.take();
        self.own_write = write.max(self.own_write);
        self.own_read = read.max(self.own_read);
        self.announced |= record.gate.is_announced();
    }

    /// Before the own stream goes without the lock again, and before the block ends: nothing of it is kept here.
    #[cold]
    pub(crate) fn give_stamps(&mut self, record: &Record) {
        if std::mem::take(&mut self.announced) {
            record.gate.announce();
        }
        for (writes, stamp) in [(true, &mut self.own_write), (false, &mut self.own_read)] {
            // 0: it is in the record already.
            if *stamp != 0 {
                record.stamps.stamp(writes, std::mem::take(stamp));
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
        home: u32,
        streams: &'a StreamPool,
        (id, stream): (StreamId, &RawStream),
        access: Access,
    ) -> Opened<'a> {
        let clock = stream.clock();
        let place = clock.key();
        let writes = access.writes();
        let mut needed = Needed::default();
        let mut implied = 0;
        let home_stream = if home == place { None } else { streams.at(home) };
        if !self.announced
            && let Some(of) = home_stream
        {
            // No event covers the stamp that stands now, so one is recorded at the tail: what covers the allocation may lie before
            // work that was queued since.
            self.own_write = of.clock().now();
        }
        let own = self.own(writes);
        if own != 0
            && let Some(of) = home_stream
        {
            match of.clock().is_complete(own) || clock.covers(home, own) {
                true => implied += 1,
                false => needed.push((of, own)),
            }
        }
        if !self.writes.is_empty() {
            implied += follow_list(&mut self.writes, streams, stream, true, &mut needed);
        }
        if !self.reads.is_empty() {
            implied += follow_list(&mut self.reads, streams, stream, writes, &mut needed);
        }
        self.changes += 1;
        let number = self.changes;
        self.open.push(Open { number, id, place, access, own });
        Opened { number, implied, needed }
    }

    /// What a use of the stream at `place` must follow, if that is one stream and no use is open; with what it follows of the own one.
    #[inline(always)]
    pub(crate) fn sole(&self, home: u32, place: u32, writes: bool) -> Option<Sole> {
        // Nearly always all lists are short; `open` is, as far as it must be to get an entry without a look at the rest.
        if !self.announced
            || !self.open.is_empty()
            || !self.writes.is_plain()
            || !self.reads.is_plain()
        {
            return None;
        }
        let own = self.own(writes);
        let follows_own = own != 0 && home != place;
        let of = |entry: &Outstanding| Sole { place: entry.place, stamp: entry.stamp, own };
        match (self.writes.first(), self.reads.first()) {
            (None, None) if follows_own => Some(Sole { place: home, stamp: own, own }),
            (Some(entry), None) if !follows_own => Some(of(entry)),
            // A read does not follow another one.
            (None, Some(entry)) if !follows_own && writes => Some(of(entry)),
            _ => None,
        }
    }

    /// Opens a use that follows what is outstanding; returns its number.
    #[inline(always)]
    pub(crate) fn open_sole(&mut self, id: StreamId, place: u32, access: Access, own: u64) -> u64 {
        self.changes += 1;
        self.open.set_plain(Open { number: self.changes, id, place, access, own });
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
    pub(crate) fn unfold(&mut self, home: u32, baton: Baton, opened: Option<(StreamId, bool)>) {
        let Baton { stamp, place, by } = baton;
        let of_home = place == home;
        self.announced = true;
        self.changes += 1;
        if of_home {
            self.own_write = stamp;
        } else {
            self.writes.push(Outstanding { place, stamp, change: self.changes });
        }
        if let Some((id, writes)) = opened {
            self.changes += 1;
            let access = if writes { Access::Write } else { Access::Read };
            let own = if of_home { stamp } else { 0 };
            self.open.push(Open { number: self.changes, id, place: by, access, own });
        }
    }

    /// If there is nothing but one finished write, takes it out: its place and stamp.
    pub(crate) fn fold(&mut self, home: u32) -> Option<(u32, u64)> {
        let plain = self.writes.is_plain() && self.reads.is_plain() && self.open.is_plain();
        let alone = plain && self.reads.is_empty() && !self.has_open();
        if !alone || !self.announced || self.free_on_close {
            return None;
        }
        let sole = match self.writes.first() {
            Some(entry) if self.own_write == 0 && self.own_read == 0 => (entry.place, entry.stamp),
            // What the own stream read before came before that.
            None if self.own_write != 0 && self.own_read <= self.own_write => {
                (home, self.own_write)
            }
            _ => return None,
        };
        self.writes.clear_plain();
        (self.own_write, self.own_read) = (0, 0);
        Some(sole)
    }

    /// The place of the stream of an open use of this id and access, if there is one.
    pub(crate) fn find_open(&self, id: StreamId, access: Access) -> Option<u32> {
        self.open.iter().find(|open| open.matches(id, access)).map(|open| open.place)
    }

    /// Closes the oldest such use; says what it had been prepared to follow.
    #[inline(always)]
    pub(crate) fn close(&mut self, id: StreamId, access: Access) -> Option<Followed> {
        let followed = |open: &Open| Followed { change: open.number, own: open.own };
        self.open.take(|open| open.matches(id, access), followed)
    }

    /// Finished work of the stream at `place` joins the outstanding; a write takes the place of what it `followed`.
    #[inline(always)]
    pub(crate) fn finished(
        &mut self,
        home: u32,
        place: u32,
        stamp: u64,
        writes: bool,
        followed: Option<Followed>,
    ) {
        if !self.announced {
            self.announce(home == place, stamp, followed);
        }
        // One write that takes the place of all there was.
        if writes
            && let Some(followed) = followed
            && self.reads.is_empty()
            && self.writes.is_plain()
            && self.writes.first().is_none_or(|entry| is_superseded(entry, place, stamp, followed))
        {
            if home == place {
                self.writes.clear_plain();
                self.own_write = stamp.max(self.own_write);
            } else {
                self.supersede_own(followed.own);
                self.changes += 1;
                self.writes.set_plain(Outstanding { place, stamp, change: self.changes });
            }
            return;
        }
        self.finished_beside(home, place, stamp, writes, followed);
    }

    /// The first use that stands for all that the own stream queued before it without a hook: one of its own, or another stream's
    /// that was prepared. One that was not prepared followed nothing.
    #[cold]
    fn announce(&mut self, own: bool, stamp: u64, followed: Option<Followed>) {
        self.announced = own || followed.is_some();
        if own {
            self.own_write = stamp.max(self.own_write);
        }
    }

    #[inline(never)]
    fn finished_beside(
        &mut self,
        home: u32,
        place: u32,
        stamp: u64,
        writes: bool,
        followed: Option<Followed>,
    ) {
        if writes && let Some(followed) = followed {
            supersede(&mut self.writes, place, stamp, followed);
            supersede(&mut self.reads, place, stamp, followed);
            if home != place {
                self.supersede_own(followed.own);
            }
        }
        if home == place {
            let own = if writes { &mut self.own_write } else { &mut self.own_read };
            *own = stamp.max(*own);
            return;
        }
        self.changes += 1;
        let change = self.changes;
        let list = if writes { &mut self.writes } else { &mut self.reads };
        match list.find_mut(|entry| entry.place == place) {
            Some(entry) if entry.stamp < stamp => {
                entry.stamp = stamp;
                entry.change = change;
            }
            Some(entry) => entry.change = change,
            None => list.push(Outstanding { place, stamp, change }),
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
    pub(crate) fn is_followed_by(&self, streams: &StreamPool, stream: &RawStream) -> bool {
        self.outstanding().all(|entry| {
            entry.place == stream.clock().key()
                || streams.at(entry.place).is_none_or(|of| of.clock().is_complete(entry.stamp))
                || stream.clock().covers(entry.place, entry.stamp)
        })
    }

    /// Everything outstanding, to be asked about without the lock.
    pub(crate) fn copy_outstanding(&self) -> OutstandingList {
        self.outstanding().copied().collect()
    }

    /// Everything a free must follow. Nothing is left.
    pub(crate) fn take_outstanding(&mut self, streams: &StreamPool) -> OutstandingList {
        let pending = |entry: &&Outstanding| {
            streams.at(entry.place).is_some_and(|of| !of.clock().is_complete(entry.stamp))
        };
        let all = self.outstanding().filter(pending).copied().collect();
        self.writes.retain(|_| false);
        self.reads.retain(|_| false);
        all
    }

    /// The free could not be queued: it must still follow these.
    pub(crate) fn put_back(&mut self, outstanding: OutstandingList) {
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
            uses.open.push(Open { number, id, place: 2, access, own: 0 });
        }
        uses.cancel_newest(StreamId(3), Access::Write);
        let left = uses.close(StreamId(3), Access::Write);
        assert_eq!(left.map(|followed| followed.change), Some(1));
        assert!(!uses.has_open());
    }
}
