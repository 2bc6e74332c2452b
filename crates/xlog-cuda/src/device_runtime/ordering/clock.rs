//! The clock of a stream.
//!
//! A stamp moves only when an event is recorded: work that finishes gets the stamp as it stands, and an event covers every
//! stamp up to the one that stood before it was begun. The order of steps is what makes that true:
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

use super::primitive::{AtomicU64, Lock, Me, Ordering, with_as};
use super::row::Row;

/// Streams that are kept without an allocation.
const FEW: usize = 4;

/// How far a stream is ordered after each other stream. Of a few a copy is short.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    stamps: [u64; FEW],
    /// A key plus one each; 0 where there is none, and then there is none after it.
    keys: [u32; FEW],
    #[allow(clippy::box_collection, reason = "one word, so that a copy of a few is short")]
    more: Option<Box<Vec<(u32, u64)>>>,
}

impl Seen {
    /// The stamp of stream `key` up to which everything came before.
    #[inline]
    fn get(&self, key: u32) -> u64 {
        for (at, stamp) in self.keys.iter().zip(&self.stamps) {
            if *at == key.wrapping_add(1) {
                return *stamp;
            }
        }
        self.get_more(key)
    }

    #[inline]
    fn get_more(&self, key: u32) -> u64 {
        let Some(more) = &self.more else { return 0 };
        more.iter().find(|(at, _)| *at == key).map_or(0, |(_, stamp)| *stamp)
    }

    /// Returns how far it is then.
    #[inline(always)]
    fn raise(&mut self, key: u32, stamp: u64) -> u64 {
        for (at, known) in self.keys.iter_mut().zip(&mut self.stamps) {
            // An empty place has stamp 0.
            if *at == key + 1 || *at == 0 {
                *at = key + 1;
                *known = stamp.max(*known);
                return *known;
            }
        }
        self.raise_more(key, stamp)
    }

    #[cold]
    fn raise_more(&mut self, key: u32, stamp: u64) -> u64 {
        let more = self.more.get_or_insert_default();
        match more.iter_mut().find(|(at, _)| *at == key) {
            Some(entry) => {
                entry.1 = entry.1.max(stamp);
                entry.1
            }
            None => {
                more.push((key, stamp));
                stamp
            }
        }
    }

    /// Makes it a copy.
    #[inline(always)]
    fn set(&mut self, other: &Self) {
        self.stamps = other.stamps;
        self.keys = other.keys;
        if self.more.is_some() || other.more.is_some() {
            self.set_more(other);
        }
    }

    #[cold]
    #[inline(never)]
    fn set_more(&mut self, other: &Self) {
        self.more.clone_from(&other.more);
    }

    /// True when it is of another stream than `asker`.
    #[inline(always)]
    fn is_news_to(&self, asker: u32) -> bool {
        let [first, second, ..] = self.keys;
        first != 0 && (first != asker.wrapping_add(1) || second != 0)
    }

    /// Tells stream `asker`; nothing is done if this is of no other stream.
    #[inline]
    fn tell(&self, asker: u32, news: &mut Option<Self>) {
        if self.is_news_to(asker) {
            *news = Some(self.clone());
        }
    }

    /// Joins what another stream had seen; of the stream `own`, whose this is, it needs to know nothing.
    #[inline(never)]
    fn join(&mut self, other: &Self, own: u32) {
        for (key, stamp) in other.keys.iter().zip(&other.stamps) {
            if *key == 0 {
                return;
            }
            if *key != own + 1 {
                self.raise(*key - 1, *stamp);
            }
        }
        if let Some(more) = &other.more {
            self.join_more(more, own);
        }
    }

    #[cold]
    fn join_more(&mut self, more: &[(u32, u64)], own: u32) {
        for (key, stamp) in more {
            if *key != own {
                self.raise(*key, *stamp);
            }
        }
    }
}

/// An event of a clock: what it covers, and what its stream had seen before it.
#[derive(Debug)]
struct Entry<E> {
    covers: u64,
    /// What the one before it covers, as it was begun: nothing up to this needs this one.
    after: u64,
    /// `None` until the driver has recorded it.
    event: Option<E>,
    seen: Seen,
}

impl<E> Default for Entry<E> {
    fn default() -> Self {
        Self { covers: 0, after: 0, event: None, seen: Seen::default() }
    }
}

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

/// The part of a clock that work on the stream itself looks at.
#[derive(Debug)]
pub(crate) struct ClockCell {
    /// Moved on only under the lock of the clock.
    stamp: AtomicU64,
    /// The id the stream is out under, plus one; 0 while it is not out.
    out: AtomicU64,
    /// Not 0 once the raw handle was handed out: others may have begun to capture the stream into a graph.
    exposed: AtomicU64,
}

impl Default for ClockCell {
    fn default() -> Self {
        Self { stamp: AtomicU64::new(1), out: AtomicU64::new(0), exposed: AtomicU64::new(0) }
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
        self.exposed.load(Ordering::Acquire) != 0
    }

    pub(crate) fn expose(&self) {
        self.exposed.store(1, Ordering::Release);
    }

    pub(crate) fn set_out(&self, id: Option<u32>) {
        self.out.store(id.map_or(0, |id| u64::from(id) + 1), Ordering::Release);
    }
}

/// The clock of one stream, over events of type `E`, with its cell behind a `C`.
#[derive(Debug)]
pub(crate) struct StreamClock<E, C> {
    key: u32,
    cell: C,
    /// Every stamp up to this is known to have completed.
    completed: AtomicU64,
    /// The stream that this one followed last, and how far, in one word. It is changed under the lock, with what was seen, and so
    /// always as true as that; at first it says that nothing of stream 0 was seen.
    heard: AtomicU64,
    inner: Lock<Inner<E>>,
}

#[derive(Debug)]
struct Inner<E> {
    seen: Seen,
    /// Events not known to have completed, by what they cover.
    recorded: Row<Entry<E>>,
    /// What the event that was begun last covers.
    newest: u64,
    /// How long the list may grow before somebody asks which events have completed.
    ask_at: usize,
    /// Completed events.
    spare: Vec<E>,
    /// Completed events that somebody may still name to the driver.
    resting: Vec<E>,
    /// How many have a pinned event.
    pins: usize,
}

const ASK_AT: usize = 64;

/// Bits of a stamp in `heard`; above them is a key.
const HEARD_BITS: u32 = 48;
const HEARD: u64 = (1 << HEARD_BITS) - 1;

impl<E: Copy> Inner<E> {
    /// An event is about to be recorded; what the stream has seen now is kept with it.
    #[inline(always)]
    fn keep(&mut self, covers: u64) {
        let entry = self.recorded.push();
        entry.covers = covers;
        entry.after = std::mem::replace(&mut self.newest, covers);
        entry.event = None;
        entry.seen.set(&self.seen);
    }

    #[inline(always)]
    fn set(&mut self, covers: u64, event: E) {
        // The event that was begun is mostly the last.
        match self.recorded.last_mut() {
            Some(last) if last.covers == covers => last.event = Some(event),
            _ => self.set_earlier(covers, event),
        }
    }

    #[cold]
    fn set_earlier(&mut self, covers: u64, event: E) {
        let mut entries = self.recorded.as_mut_slice().iter_mut().rev();
        if let Some(entry) = entries.find(|entry| entry.covers == covers) {
            entry.event = Some(event);
        }
    }

    /// The earliest recorded event that covers `stamp`.
    #[inline(always)]
    fn find(&self, stamp: u64) -> Option<(E, &Entry<E>)> {
        if self.newest < stamp {
            return None;
        }
        // Whoever asks mostly asks about the latest.
        let last = self.recorded.last()?;
        match last.event {
            Some(event) if last.covers >= stamp && last.after < stamp => Some((event, last)),
            _ => self.find_earlier(stamp),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_earlier(&self, stamp: u64) -> Option<(E, &Entry<E>)> {
        let entries = self.recorded.as_slice();
        let at = entries.partition_point(|entry| entry.covers < stamp);
        entries.get(at..)?.iter().find_map(|entry| Some((entry.event?, entry)))
    }

    #[inline(always)]
    fn unpin(&mut self) {
        self.pins = self.pins.saturating_sub(1);
        if self.pins == 0 && !self.resting.is_empty() {
            self.wake();
        }
    }

    #[cold]
    fn wake(&mut self) {
        self.spare.append(&mut self.resting);
    }

    /// One question for half of the list, when it has grown long.
    #[inline(always)]
    fn ask(&mut self) -> Option<(u64, E)> {
        if self.recorded.len() < self.ask_at { None } else { self.ask_middle() }
    }

    #[cold]
    fn ask_middle(&mut self) -> Option<(u64, E)> {
        let middle = self.recorded.as_slice().get(self.recorded.len() / 2)?;
        let ask = (middle.covers, middle.event?);
        self.pins += 1;
        Some(ask)
    }
}

impl<E: Copy, C: Deref<Target = ClockCell>> StreamClock<E, C> {
    pub(crate) fn new(key: u32, cell: C) -> Self {
        let inner = Inner {
            seen: Seen::default(),
            recorded: Row::new(),
            newest: 0,
            ask_at: ASK_AT,
            spare: Vec::new(),
            resting: Vec::new(),
            pins: 0,
        };
        let (completed, heard) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { key, cell, completed, heard, inner: Lock::new(inner) }
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
        let heard = self.heard.load(Ordering::Acquire);
        if heard >> HEARD_BITS == u64::from(key) {
            return heard & HEARD >= stamp;
        }
        self.has_seen(key, stamp)
    }

    #[inline(never)]
    fn has_seen(&self, key: u32, stamp: u64) -> bool {
        self.inner.with_nested(|inner| inner.seen.get(key) >= stamp)
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
    fn begin_in(&self, inner: &mut Inner<E>) -> Begun<E> {
        let covers = self.step_in();
        // What the stream has seen by now, and not what it will have when the event is recorded.
        inner.keep(covers);
        Begun { covers, spare: inner.spare.pop() }
    }

    /// After it was recorded. Now and then there is an event to ask about, which is pinned: [`StreamClock::asked`] takes the
    /// answer.
    #[inline(always)]
    pub(crate) fn recorded(&self, me: Me<'_>, covers: u64, event: E) -> Option<(u64, E)> {
        with_as!(self.inner, me, |inner| {
            inner.set(covers, event);
            inner.ask()
        })
    }

    /// [`StreamClock::recorded`] for one who needs the event: it is pinned.
    pub(crate) fn recorded_pinned(&self, covers: u64, event: E) -> Option<(u64, E)> {
        self.inner.with(|inner| {
            inner.set(covers, event);
            inner.pins += 1;
            inner.ask()
        })
    }

    /// It was not recorded; `event` is left if there was one.
    pub(crate) fn failed(&self, covers: u64, event: Option<E>) {
        self.inner.with(|inner| {
            inner.recorded.retain(|entry| entry.covers != covers);
            inner.spare.extend(event);
        });
    }

    /// Whether the event asked about has completed: while the answer is no, ask more seldom.
    pub(crate) fn asked(&self, completed: bool) {
        self.inner.with(|inner| {
            inner.ask_at = if completed { ASK_AT } else { inner.ask_at.saturating_mul(2) };
        });
        self.unpin();
    }

    /// The earliest event that covers `stamp`, if one was recorded; pinned.
    pub(crate) fn find(&self, stamp: u64) -> Option<Recorded<E>> {
        self.inner.with(|inner| {
            let (event, Entry { covers, .. }) = inner.find(stamp)?;
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
        inner: &mut Inner<E>,
        stamp: u64,
        asker: u32,
        news: &mut Option<Seen>,
    ) -> Cover<E> {
        match inner.find(stamp) {
            Some((event, entry)) => {
                let covers = entry.covers;
                entry.seen.tell(asker, news);
                inner.pins += 1;
                Cover { covers, event: Some(event), recorded: true }
            }
            None => {
                let Begun { covers, spare } = self.begin_in(inner);
                inner.seen.tell(asker, news);
                Cover { covers, event: spare, recorded: false }
            }
        }
    }

    /// [`StreamClock::find_or_begin`] where there is an event already and nothing to tell, with what it covers; otherwise nothing is
    /// done.
    #[inline(always)]
    pub(crate) fn find_plain(&self, me: Me<'_>, stamp: u64, asker: u32) -> Option<(u64, E)> {
        let mut inner = self.inner.visit(me)?;
        let (event, entry) = inner.find(stamp)?;
        if entry.seen.is_news_to(asker) {
            return None;
        }
        let covers = entry.covers;
        inner.pins += 1;
        Some((covers, event))
    }

    /// [`StreamClock::begin`] for stream `asker`, where there is nothing to tell it; otherwise nothing is done.
    #[inline(always)]
    pub(crate) fn begin_plain(&self, me: Me<'_>, asker: u32) -> Option<Begun<E>> {
        let mut inner = self.inner.visit(me)?;
        if inner.seen.is_news_to(asker) {
            return None;
        }
        Some(self.begin_in(&mut inner))
    }

    /// [`StreamClock::learn`] where there are no news.
    #[inline(always)]
    pub(crate) fn learn_plain(&self, me: Me<'_>, key: u32, covers: u64) {
        with_as!(self.inner, me, |inner| self.learn_in(inner, key, covers));
    }

    /// One who had an event pinned needs it no longer.
    pub(crate) fn unpin(&self) {
        self.inner.with(Inner::unpin);
    }

    /// [`StreamClock::unpin`] for one who knows its name.
    #[inline(always)]
    pub(crate) fn unpin_as(&self, me: Me<'_>) {
        with_as!(self.inner, me, |inner| inner.unpin());
    }

    /// Everything up to `stamp` has completed: the events that covered it may be used again.
    pub(crate) fn completed_up_to(&self, stamp: u64) {
        self.completed.fetch_max(stamp, Ordering::AcqRel);
        self.inner.with(|inner| {
            let to = if inner.pins == 0 { &mut inner.spare } else { &mut inner.resting };
            while let Some(first) = inner.recorded.as_slice().first()
                && first.covers <= stamp
                && let Some(event) = first.event
            {
                to.push(event);
                inner.recorded.pop_front();
            }
        });
    }

    /// After a wait for an event of stream `key` was queued on this stream.
    #[inline(always)]
    pub(crate) fn learn(&self, me: Me<'_>, key: u32, covers: u64, news: &Option<Seen>) {
        with_as!(self.inner, me, |inner| {
            if let Some(news) = news {
                inner.seen.join(news, self.key);
            }
            self.learn_in(inner, key, covers);
        });
    }

    #[inline(always)]
    fn learn_in(&self, inner: &mut Inner<E>, key: u32, covers: u64) {
        let upto = inner.seen.raise(key, covers);
        // A key that does not fit is found in what was seen; a stamp that does not fit claims less.
        if key >> (u64::BITS - HEARD_BITS) == 0 {
            let heard = u64::from(key) << HEARD_BITS | upto.min(HEARD);
            self.heard.store(heard, Ordering::Release);
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
