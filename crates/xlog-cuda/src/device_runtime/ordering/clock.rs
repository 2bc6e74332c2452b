//! The clock of a stream.
//!
//! A stamp moves only when an event is recorded, or the driver is asked about all that is queued: work that finishes gets the stamp as
//! it stands, and an event covers every stamp up to the one that stood before it was begun. The order of steps is what makes that true:
//!
//! - a finish reads the stamp *after* its work was queued;
//! - a record moves the stamp on, and looks at what its stream has seen, *before* it calls the driver;
//! - a wait is published in `seen` *after* the driver has queued it.
//!
//! So a stamp that an event claims to cover was read before the event was begun, and its work queued before that; and nobody
//! skips a wait that is not there yet. The driver puts the calls on one stream in one order, as it must.
//!
//! Events belong to the clock that recorded them and are used again by it, once they completed and nobody has one pinned.

use std::ops::Deref;

use super::events::{Entry, Events, news_of};
use super::primitive::{AtomicU64, Lock, Me, Ordering, visit, with_as};
use super::seen::{Heard, Seen};

/// A recorded event, pinned: it is not used again before [`StreamClock::unpin`].
#[derive(Debug)]
pub(crate) struct Recorded<E> {
    pub(crate) covers: u64,
    pub(crate) event: E,
}

/// An event that is about to be recorded. Until the clock is told that it was, nobody else comes by it.
#[derive(Clone, Copy, Debug)]
#[must_use = "it is recorded or failed"]
pub(crate) struct Begun<E> {
    pub(crate) covers: u64,
    /// An event to use again, if there is one.
    pub(crate) spare: Option<E>,
}

/// What there is to follow a stamp by.
#[derive(Debug)]
pub(crate) struct Cover<E> {
    pub(crate) covers: u64,
    /// The event; one to use again, if there is one, where it is about to be recorded.
    pub(crate) event: Option<E>,
    /// It was recorded, and is pinned; otherwise it is recorded or failed now, as what [`StreamClock::begin`] returns.
    pub(crate) recorded: bool,
}

/// The part of a clock that work on the stream itself looks at, on a cache line of its own: a stream mostly has another thread than
/// the one beside it.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ClockCell {
    /// Moved on only under the lock of the clock.
    stamp: AtomicU64,
    /// The id the stream is out under, plus one; 0 while it is not out.
    out: AtomicU64,
    /// The same, until the raw handle was handed out: from then on it is [`EXPOSED`], and others may have begun to capture the stream
    /// into a graph.
    private: AtomicU64,
}

/// No id is so large.
const EXPOSED: u64 = u64::MAX;

impl Default for ClockCell {
    fn default() -> Self {
        Self { stamp: AtomicU64::new(1), out: AtomicU64::new(0), private: AtomicU64::new(0) }
    }
}

impl ClockCell {
    /// The stamp of work that is queued and finishes now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.stamp.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_out_as(&self, id: u32) -> bool {
        self.out.load(Ordering::Acquire) == u64::from(id) + 1
    }

    #[inline]
    pub(crate) fn is_exposed(&self) -> bool {
        self.private.load(Ordering::Acquire) == EXPOSED
    }

    /// True when the stream is out under this id and its raw handle was never handed out.
    #[inline]
    pub(crate) fn is_private_as(&self, id: u32) -> bool {
        self.private.load(Ordering::Acquire) == u64::from(id) + 1
    }

    pub(crate) fn expose(&self) {
        self.private.store(EXPOSED, Ordering::Release);
    }

    pub(crate) fn set_out(&self, id: Option<u32>) {
        let out = id.map_or(0, |id| u64::from(id) + 1);
        self.out.store(out, Ordering::Release);
        let next = |now: u64| (now != EXPOSED).then_some(out);
        // What was handed out once stays so, whoever has the stream.
        let _ = self.private.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }
}

/// The clock of one stream, over events of type `E`, with its cell behind a `C`. What is looked at most comes first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct StreamClock<E, C> {
    cell: C,
    key: u32,
    /// Every stamp up to this is known to have completed.
    completed: AtomicU64,
    /// The stream that this one followed last, and how far: a [`Heard`]. It is raised by plain stores, and changed to another stream
    /// under the lock. Where two do so at once one may be forgotten, which costs another wait and no order.
    heard: AtomicU64,
    /// What the event covers that [`StreamClock::begin_open`] began, until the driver has recorded it; 0 when there is none. It is set
    /// under the lock, by who finds 0, and set back by the same without it.
    open: AtomicU64,
    /// Not 0 while somebody has an event pinned by [`StreamClock::find_plain`]; set and set back like `open`.
    held: AtomicU64,
    inner: Lock<Events<E>>,
}

impl<E: Copy, C: Deref<Target = ClockCell>> StreamClock<E, C> {
    pub(crate) fn new(key: u32, cell: C) -> Self {
        let [completed, heard, open, held] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { key, cell, completed, heard, open, held, inner: Lock::new(Events::new()) }
    }

    #[inline]
    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    #[inline]
    pub(crate) fn cell(&self) -> &ClockCell {
        &self.cell
    }

    /// The stamp of work that is queued and finishes now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.cell.now()
    }

    /// True when this stream is ordered after `stamp` of stream `key`. Also called from inside the lock of a block.
    #[inline]
    pub(crate) fn covers(&self, key: u32, stamp: u64) -> bool {
        let heard = self.heard();
        if heard.is_of(key) {
            return heard.stamp() >= stamp;
        }
        self.has_seen(key, stamp)
    }

    /// Acquire: the wait that it speaks of was queued before.
    #[inline(always)]
    fn heard(&self) -> Heard {
        Heard::from_word(self.heard.load(Ordering::Acquire))
    }

    #[inline(never)]
    fn has_seen(&self, key: u32, stamp: u64) -> bool {
        self.inner.with_nested(|inner| inner.seen.stamp(key) >= stamp)
    }

    #[inline]
    pub(crate) fn is_complete(&self, stamp: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= stamp
    }

    /// Before an event is recorded. [`StreamClock::recorded`] or [`StreamClock::failed`] follows.
    #[inline(always)]
    pub(crate) fn begin(&self, me: Me<'_>) -> Begun<E> {
        with_as!(self.inner, me, |inner| self.begin_in(inner))
    }

    /// True when this thread can use the clock without disturbing another.
    pub(crate) fn is_near(&self) -> bool {
        self.inner.is_near()
    }

    /// Moves the stamp on, before the driver is asked whether everything up to the one returned has completed.
    pub(crate) fn step(&self) -> u64 {
        self.inner.with(|_| self.step_in())
    }

    #[inline(always)]
    fn step_in(&self) -> u64 {
        let cell: &ClockCell = &self.cell;
        let stamp = cell.stamp.load(Ordering::Relaxed);
        cell.stamp.store(stamp + 1, Ordering::Release);
        stamp
    }

    #[inline(always)]
    fn begin_in(&self, inner: &mut Events<E>) -> Begun<E> {
        let covers = self.step_in();
        // What the stream has seen by now, and not what it will have when the event is recorded.
        inner.keep(covers, None, self.heard());
        let spare = inner.spare.pop();
        Begun { covers, spare: if spare.is_some() { spare } else { self.wake_one(inner) } }
    }

    #[cold]
    fn wake_one(&self, inner: &mut Events<E>) -> Option<E> {
        self.wake(inner);
        inner.spare.pop()
    }

    /// Events that rest may be used again if nobody has one pinned.
    fn wake(&self, inner: &mut Events<E>) {
        // Acquire: whoever had one pinned has named it to the driver before.
        if inner.pins == 0 && self.held.load(Ordering::Acquire) == 0 {
            inner.spare.append(&mut inner.resting);
        }
    }

    /// What the event covers that was begun and is not known to be recorded. Called with the lock held; acquire: what is not any
    /// longer, the driver has.
    #[inline(always)]
    fn open(&self) -> u64 {
        self.open.load(Ordering::Acquire)
    }

    /// [`StreamClock::begin`] with an event that was used before, for one who then needs the lock no more: after it was recorded it is
    /// [`StreamClock::recorded_open`]. `None`, and nothing done, where there is no such event, another one is begun like this, or a
    /// question is due; or, if it is for stream `asker`, where there is something to tell it.
    #[inline(always)]
    pub(crate) fn begin_open(&self, me: Me<'_>, asker: Option<u32>) -> Option<(u64, E)> {
        let mut inner = visit!(self.inner, me, else return None);
        let heard = self.heard();
        let is_news = asker.is_some_and(|asker| !inner.seen.is_empty() || heard.is_news_to(asker));
        if is_news || self.open.load(Ordering::Relaxed) != 0 || inner.is_long() {
            return None;
        }
        let event = inner.spare.pop()?;
        let covers = self.step_in();
        self.open.store(covers, Ordering::Relaxed);
        inner.keep(covers, Some(event), heard);
        Some((covers, event))
    }

    /// What [`StreamClock::begin_open`] began was recorded: now others can come by it.
    #[inline(always)]
    pub(crate) fn recorded_open(&self) {
        self.open.store(0, Ordering::Release);
    }

    /// It was not recorded.
    pub(crate) fn failed_open(&self, covers: u64, event: E) {
        self.failed(covers, Some(event));
        self.open.store(0, Ordering::Release);
    }

    /// After it was recorded. Now and then there is an event to ask about, which is pinned: [`StreamClock::asked`] takes the
    /// answer.
    #[inline(always)]
    pub(crate) fn recorded(&self, me: Me<'_>, covers: u64, event: E) -> Option<(u64, E)> {
        with_as!(self.inner, me, |inner| {
            inner.set(covers, event);
            inner.ask(self.open())
        })
    }

    /// [`StreamClock::recorded`] for one who needs the event: it is pinned.
    pub(crate) fn recorded_pinned(&self, covers: u64, event: E) -> Option<(u64, E)> {
        self.inner.with(|inner| {
            inner.set(covers, event);
            inner.pins += 1;
            inner.ask(self.open())
        })
    }

    /// It was not recorded; `event` is left if there was one.
    pub(crate) fn failed(&self, covers: u64, event: Option<E>) {
        self.inner.with(|inner| {
            inner.recorded.retain(|entry| entry.covers != covers);
            inner.spare.extend(event);
        });
    }

    /// Whether the event asked about has completed.
    pub(crate) fn asked(&self, completed: bool) {
        self.inner.with(|inner| inner.asked(completed));
        self.unpin();
    }

    /// The earliest event that covers `stamp`, if one was recorded; pinned.
    pub(crate) fn find(&self, stamp: u64) -> Option<Recorded<E>> {
        self.inner.with(|inner| {
            let (event, Entry { covers, .. }) = inner.find(stamp, self.open())?;
            let recorded = Recorded { covers: *covers, event };
            inner.pins += 1;
            Some(recorded)
        })
    }

    /// The earliest event that covers `stamp`, pinned; or else one that is about to be recorded. It is for stream `asker`, which
    /// gets to know, in `news`, what this stream had seen before it.
    #[inline(always)]
    pub(crate) fn find_or_begin(
        &self,
        me: Me<'_>,
        stamp: u64,
        asker: u32,
        news: &mut Option<Seen>,
    ) -> Cover<E> {
        with_as!(self.inner, me, |inner| self.find_or_begin_in(inner, stamp, asker, news))
    }

    #[inline(always)]
    fn find_or_begin_in(
        &self,
        inner: &mut Events<E>,
        stamp: u64,
        asker: u32,
        news: &mut Option<Seen>,
    ) -> Cover<E> {
        match inner.find(stamp, self.open()) {
            Some((event, entry)) => {
                let covers = entry.covers;
                if entry.is_news_to(asker) {
                    *news = Some(news_of(entry.seen(), entry.heard));
                }
                inner.pins += 1;
                Cover { covers, event: Some(event), recorded: true }
            }
            None => {
                let Begun { covers, spare } = self.begin_in(inner);
                let heard = self.heard();
                if !inner.seen.is_empty() || heard.is_news_to(asker) {
                    *news = Some(news_of(Some(&inner.seen), heard));
                }
                Cover { covers, event: spare, recorded: false }
            }
        }
    }

    /// [`StreamClock::find_or_begin`] where there is an event already and nothing to tell, with what it covers, for one who then needs
    /// the lock no more: it is pinned until [`StreamClock::unpin_plain`]. Otherwise, or where somebody has one pinned like this,
    /// nothing is done.
    #[inline(always)]
    pub(crate) fn find_plain(&self, me: Me<'_>, stamp: u64, asker: u32) -> Option<(u64, E)> {
        let inner = visit!(self.inner, me, else return None);
        let (event, entry) = inner.find(stamp, self.open())?;
        if entry.is_news_to(asker) || self.held.load(Ordering::Relaxed) != 0 {
            return None;
        }
        self.held.store(1, Ordering::Relaxed);
        Some((entry.covers, event))
    }

    /// One who had an event pinned by [`StreamClock::find_plain`] has named it to the driver.
    #[inline(always)]
    pub(crate) fn unpin_plain(&self) {
        self.held.store(0, Ordering::Release);
    }

    /// [`StreamClock::learn`] where there are no news, and so much is not covered yet.
    #[inline(always)]
    pub(crate) fn learn_plain(&self, me: Me<'_>, key: u32, covers: u64) {
        match self.heard().raised(key, covers) {
            // Release: the wait that it speaks of is queued.
            Some(now) => self.heard.store(now.word(), Ordering::Release),
            None => with_as!(self.inner, me, |inner| self.learn_in(inner, key, covers)),
        }
    }

    #[inline(always)]
    fn raise_heard(&self, heard: Heard, now: Heard) {
        if heard < now {
            // Release: the wait that it speaks of is queued.
            self.heard.store(now.word(), Ordering::Release);
        }
    }

    /// One who had an event pinned needs it no longer.
    pub(crate) fn unpin(&self) {
        self.inner.with(|inner| self.unpin_in(inner));
    }

    #[inline(always)]
    fn unpin_in(&self, inner: &mut Events<E>) {
        inner.pins = inner.pins.saturating_sub(1);
        if inner.pins == 0 && !inner.resting.is_empty() {
            self.wake(inner);
        }
    }

    /// [`StreamClock::unpin`] for one who knows its name.
    #[inline(always)]
    pub(crate) fn unpin_as(&self, me: Me<'_>) {
        with_as!(self.inner, me, |inner| self.unpin_in(inner));
    }

    /// Everything up to `stamp` has completed: the events that covered it may be used again.
    pub(crate) fn completed_up_to(&self, stamp: u64) {
        self.completed.fetch_max(stamp, Ordering::AcqRel);
        self.inner.with(|inner| {
            // Not what is still being recorded, nor what comes after that: 0 is none, and wraps around.
            let last = stamp.min(self.open().wrapping_sub(1));
            let entries = inner.recorded.as_slice();
            let count = entries.partition_point(|entry| entry.covers <= last);
            let complete = entries.get(..count).unwrap_or_default().iter();
            let before = inner.resting.len();
            inner.resting.extend(complete.map_while(|entry| entry.event));
            inner.recorded.drop_front(inner.resting.len() - before);
            self.wake(inner);
        });
    }

    /// After a wait for an event of stream `key` was queued on this stream.
    #[inline(always)]
    pub(crate) fn learn(&self, me: Me<'_>, key: u32, covers: u64, news: &Option<Seen>) {
        with_as!(self.inner, me, |inner| {
            if let Some(news) = news {
                self.join(inner, news);
            }
            self.learn_in(inner, key, covers);
        });
    }

    /// Joins what another stream had seen; of itself a stream needs to know nothing.
    #[inline(never)]
    fn join(&self, inner: &mut Events<E>, news: &Seen) {
        let heard = self.heard();
        for (key, stamp) in news.iter().filter(|(key, _)| *key != self.key) {
            match Heard::new(key, stamp) {
                Some(now) if heard.is_of(key) => self.raise_heard(heard, now),
                _ => inner.seen.raise(key, stamp),
            }
        }
    }

    #[inline(always)]
    fn learn_in(&self, inner: &mut Events<E>, key: u32, covers: u64) {
        let heard = self.heard();
        match Heard::new(key, covers) {
            Some(now) if heard.is_of(key) => self.raise_heard(heard, now),
            Some(_) => self.hear_another(inner, heard, (key, covers)),
            // It is found with the others.
            None => inner.seen.raise(key, covers),
        }
    }

    /// Another stream than the one that was followed last.
    #[inline(never)]
    fn hear_another(&self, inner: &mut Events<E>, heard: Heard, (key, covers): (u32, u64)) {
        inner.seen.hear(heard);
        if let Some(now) = Heard::new(key, covers.max(inner.seen.stamp(key))) {
            self.heard.store(now.word(), Ordering::Release);
        }
    }

    /// All its events, which nobody needs any longer.
    pub(crate) fn drain(&self) -> Vec<E> {
        self.inner.with(|inner| {
            let recorded = inner.recorded.as_slice().iter();
            let mut events: Vec<E> = recorded.filter_map(|done| done.event).collect();
            inner.recorded.clear();
            events.append(&mut inner.spare);
            events.append(&mut inner.resting);
            events
        })
    }
}
