//! The clock of a stream.
//!
//! A stamp moves only when an event is recorded, or the driver is asked about all that is queued: work that finishes gets the stamp as
//! it stands, and an event covers every stamp up to the one that stood before it was begun. The order of steps is what makes that true:
//!
//! - a finish reads the stamp *after* its work was queued;
//! - a record moves the stamp on, and looks at what its stream has seen, *before* it calls the driver;
//! - a wait is published in `vector` *after* the driver has queued it.
//!
//! So a stamp that an event claims to cover was read before the event was begun, and its work queued before that; and nobody
//! skips a wait that is not there yet. The driver puts the calls on one stream in one order, as it must.
//!
//! Events belong to the clock that recorded them and are used again by it, once they completed and nobody has one pinned.

use std::ops::Deref;

use super::events::{EventEntry, Events};
use super::primitive::{AtomicU64, CurrentThread, Lock, Ordering, visit, with_as};
use super::vector_clock::{ENTRIES, Epoch, VectorClock};

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
    pub(crate) recycled: Option<E>,
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
pub(crate) struct ClockHeader {
    /// Moved on only under the lock of the clock.
    stamp: AtomicU64,
    /// The id the stream is out under, plus one; 0 while it is not out.
    leased: AtomicU64,
    /// The same, until the raw handle was handed out: from then on it is [`HANDLE_ESCAPED`], and others may have begun to capture the stream
    /// into a graph.
    private: AtomicU64,
}

/// No id is so large.
const HANDLE_ESCAPED: u64 = u64::MAX;

impl Default for ClockHeader {
    fn default() -> Self {
        Self { stamp: AtomicU64::new(1), leased: AtomicU64::new(0), private: AtomicU64::new(0) }
    }
}

impl ClockHeader {
    /// The stamp of work that is queued and finishes now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.stamp.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_leased_as(&self, id: u32) -> bool {
        self.leased.load(Ordering::Acquire) == u64::from(id) + 1
    }

    #[inline]
    pub(crate) fn handle_escaped(&self) -> bool {
        self.private.load(Ordering::Acquire) == HANDLE_ESCAPED
    }

    /// True when the stream is out under this id and its raw handle was never handed out.
    #[inline]
    pub(crate) fn is_private_as(&self, id: u32) -> bool {
        self.private.load(Ordering::Acquire) == u64::from(id) + 1
    }

    pub(crate) fn mark_handle_escaped(&self) {
        self.private.store(HANDLE_ESCAPED, Ordering::Release);
    }

    pub(crate) fn set_leased(&self, id: Option<u32>) {
        let leased = id.map_or(0, |id| u64::from(id) + 1);
        self.leased.store(leased, Ordering::Release);
        let next = |now: u64| (now != HANDLE_ESCAPED).then_some(leased);
        // What was handed out once stays so, whoever has the stream.
        let _ = self.private.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }
}

/// The clock of one stream, over events of type `E`, with its cell behind a `C`; it remembers `N` other streams besides the one
/// followed last. What is looked at most comes first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct StreamClock<E, C, const N: usize = ENTRIES> {
    header: C,
    slot: u32,
    /// Every stamp up to this is known to have completed.
    completed: AtomicU64,
    /// The stream that this one followed last, and how far: a [`Epoch`]. It is raised by plain stores, and changed to another stream
    /// under the lock. Where two do so at once one may be forgotten, which costs another wait and no order.
    last_epoch: AtomicU64,
    /// What the event covers that [`StreamClock::begin_open`] began, until the driver has recorded it; 0 when there is none. It is set
    /// under the lock, by who finds 0, and set back by the same without it.
    open: AtomicU64,
    /// Not 0 while somebody has an event pinned by [`StreamClock::find_plain`]; set and set back like `open`.
    held: AtomicU64,
    inner: Lock<Events<E, N>>,
}

impl<E: Copy, C: Deref<Target = ClockHeader>, const N: usize> StreamClock<E, C, N> {
    pub(crate) fn new(slot: u32, header: C) -> Self {
        let [completed, last_epoch, open, held] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { slot, header, completed, last_epoch, open, held, inner: Lock::new(Events::new()) }
    }

    #[inline]
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    #[inline]
    pub(crate) fn header(&self) -> &ClockHeader {
        &self.header
    }

    /// The stamp of work that is queued and finishes now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.header.now()
    }

    /// True when this stream is ordered after `stamp` of stream `slot`. Also called from inside the lock of a block.
    #[inline]
    pub(crate) fn covers(&self, slot: u32, stamp: u64) -> bool {
        let last_epoch = self.last_epoch();
        if last_epoch.is_of(slot) {
            return last_epoch.stamp() >= stamp;
        }
        self.vector_covers(slot, stamp)
    }

    /// Acquire: the wait that it speaks of was queued before.
    #[inline(always)]
    fn last_epoch(&self) -> Epoch {
        Epoch::from_word(self.last_epoch.load(Ordering::Acquire))
    }

    #[inline(never)]
    fn vector_covers(&self, slot: u32, stamp: u64) -> bool {
        self.inner.with_nested(|inner| inner.vector.now().stamp(slot) >= stamp)
    }

    #[inline]
    pub(crate) fn is_complete(&self, stamp: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= stamp
    }

    /// Before an event is recorded. [`StreamClock::recorded`] or [`StreamClock::failed`] follows.
    #[inline(always)]
    pub(crate) fn begin(&self, current: CurrentThread<'_>) -> Begun<E> {
        with_as!(self.inner, current, |inner| self.begin_in(inner))
    }

    /// True when this thread can use the clock without disturbing another.
    pub(crate) fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    /// Moves the stamp on, before the driver is asked whether everything up to the one returned has completed.
    pub(crate) fn step(&self) -> u64 {
        self.inner.with(|_| self.step_in())
    }

    #[inline(always)]
    fn step_in(&self) -> u64 {
        let header: &ClockHeader = &self.header;
        let stamp = header.stamp.load(Ordering::Relaxed);
        header.stamp.store(stamp + 1, Ordering::Release);
        stamp
    }

    #[inline(always)]
    fn begin_in(&self, inner: &mut Events<E, N>) -> Begun<E> {
        let covers = self.step_in();
        // What the stream has seen by now, and not what it will have when the event is recorded.
        inner.keep(covers, None, self.last_epoch());
        let recycled = inner.free_events.pop();
        Begun {
            covers,
            recycled: if recycled.is_some() { recycled } else { self.recycle_one(inner) },
        }
    }

    #[cold]
    fn recycle_one(&self, inner: &mut Events<E, N>) -> Option<E> {
        self.recycle(inner);
        inner.free_events.pop()
    }

    /// Events that rest may be used again if nobody has one pinned.
    fn recycle(&self, inner: &mut Events<E, N>) {
        // Acquire: whoever had one pinned has named it to the driver before.
        if inner.pins == 0 && self.held.load(Ordering::Acquire) == 0 {
            inner.free_events.append(&mut inner.retired_events);
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
    pub(crate) fn begin_open(
        &self,
        current: CurrentThread<'_>,
        asker: Option<u32>,
    ) -> Option<(u64, E)> {
        let mut inner = visit!(self.inner, current, else return None);
        let last_epoch = self.last_epoch();
        let adds =
            asker.is_some_and(|asker| !inner.vector.now().is_empty() || last_epoch.adds_to(asker));
        if adds || self.open.load(Ordering::Relaxed) != 0 || inner.is_long() {
            return None;
        }
        let event = inner.free_events.pop()?;
        let covers = self.step_in();
        self.open.store(covers, Ordering::Relaxed);
        inner.keep(covers, Some(event), last_epoch);
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
    pub(crate) fn recorded(
        &self,
        current: CurrentThread<'_>,
        covers: u64,
        event: E,
    ) -> Option<(u64, E)> {
        with_as!(self.inner, current, |inner| {
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
            inner.free_events.extend(event);
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
            let (event, EventEntry { covers, .. }) = inner.find(stamp, self.open())?;
            let recorded = Recorded { covers: *covers, event };
            inner.pins += 1;
            Some(recorded)
        })
    }

    /// The earliest event that covers `stamp`, pinned; or else one that is about to be recorded. It is for stream `asker`, which
    /// gets to know, in `joined_clock`, what this stream had seen before it.
    #[inline(always)]
    pub(crate) fn find_or_begin(
        &self,
        current: CurrentThread<'_>,
        stamp: u64,
        asker: u32,
        joined_clock: &mut Option<VectorClock<N>>,
    ) -> Cover<E> {
        with_as!(self.inner, current, |inner| self.find_or_begin_in(
            inner,
            stamp,
            asker,
            joined_clock
        ))
    }

    #[inline(always)]
    fn find_or_begin_in(
        &self,
        inner: &mut Events<E, N>,
        stamp: u64,
        asker: u32,
        joined_clock: &mut Option<VectorClock<N>>,
    ) -> Cover<E> {
        match inner.find(stamp, self.open()) {
            Some((event, entry)) => {
                let covers = entry.covers;
                *joined_clock = inner.joined_clock(entry, asker);
                inner.pins += 1;
                Cover { covers, event: Some(event), recorded: true }
            }
            None => {
                let Begun { covers, recycled } = self.begin_in(inner);
                *joined_clock = inner.newest_joined_clock(asker);
                Cover { covers, event: recycled, recorded: false }
            }
        }
    }

    /// [`StreamClock::find_or_begin`] where there is an event already and nothing to tell, with what it covers, for one who then needs
    /// the lock no more: it is pinned until [`StreamClock::unpin_plain`]. Otherwise, or where somebody has one pinned like this,
    /// nothing is done.
    #[inline(always)]
    pub(crate) fn find_plain(
        &self,
        current: CurrentThread<'_>,
        stamp: u64,
        asker: u32,
    ) -> Option<(u64, E)> {
        let inner = visit!(self.inner, current, else return None);
        let (event, entry) = inner.find(stamp, self.open())?;
        if entry.adds_to(asker) || self.held.load(Ordering::Relaxed) != 0 {
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

    /// [`StreamClock::join`] where there are no news, and so much is not covered yet.
    #[inline(always)]
    pub(crate) fn join_plain(&self, current: CurrentThread<'_>, slot: u32, covers: u64) {
        match self.last_epoch().raised(slot, covers) {
            // Release: the wait that it speaks of is queued.
            Some(now) => self.last_epoch.store(now.word(), Ordering::Release),
            None => with_as!(self.inner, current, |inner| self.join_in(inner, slot, covers)),
        }
    }

    #[inline(always)]
    fn raise_last_epoch(&self, last_epoch: Epoch, now: Epoch) {
        if last_epoch < now {
            // Release: the wait that it speaks of is queued.
            self.last_epoch.store(now.word(), Ordering::Release);
        }
    }

    /// One who had an event pinned needs it no longer.
    pub(crate) fn unpin(&self) {
        self.inner.with(|inner| self.unpin_in(inner));
    }

    #[inline(always)]
    fn unpin_in(&self, inner: &mut Events<E, N>) {
        inner.pins = inner.pins.saturating_sub(1);
        if inner.pins == 0 && !inner.retired_events.is_empty() {
            self.recycle(inner);
        }
    }

    /// [`StreamClock::unpin`] for one who knows its name.
    #[inline(always)]
    pub(crate) fn unpin_as(&self, current: CurrentThread<'_>) {
        with_as!(self.inner, current, |inner| self.unpin_in(inner));
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
            let before = inner.retired_events.len();
            inner.retired_events.extend(complete.map_while(|entry| entry.event));
            inner.recorded.drop_front(inner.retired_events.len() - before);
            self.recycle(inner);
        });
    }

    /// After a wait for an event of stream `slot` was queued on this stream.
    #[inline(always)]
    pub(crate) fn join(
        &self,
        current: CurrentThread<'_>,
        slot: u32,
        covers: u64,
        joined_clock: &Option<VectorClock<N>>,
    ) {
        with_as!(self.inner, current, |inner| {
            if let Some(joined_clock) = joined_clock {
                self.join_vector(inner, joined_clock);
            }
            self.join_in(inner, slot, covers);
        });
    }

    /// Joins what another stream had seen; of itself a stream needs to know nothing.
    #[inline(never)]
    fn join_vector(&self, inner: &mut Events<E, N>, joined_clock: &VectorClock<N>) {
        let last_epoch = self.last_epoch();
        let others = joined_clock.entries().iter().copied().filter(|epoch| !epoch.is_of(self.slot));
        inner.vector.join(others.filter(|epoch| {
            let is_last = last_epoch.is_of(epoch.slot());
            if is_last {
                self.raise_last_epoch(last_epoch, *epoch);
            }
            !is_last
        }));
    }

    #[inline(always)]
    fn join_in(&self, inner: &mut Events<E, N>, slot: u32, covers: u64) {
        let last_epoch = self.last_epoch();
        match Epoch::new(slot, covers) {
            Some(now) if last_epoch.is_of(slot) => self.raise_last_epoch(last_epoch, now),
            Some(now) => self.replace_last_epoch(inner, last_epoch, now),
            // An epoch that does not fit is forgotten.
            None => {}
        }
    }

    /// Another stream than the one that was followed last.
    #[inline(never)]
    fn replace_last_epoch(&self, inner: &mut Events<E, N>, last_epoch: Epoch, now: Epoch) {
        let known = inner.vector.exchange(last_epoch, now.slot());
        let now = now.raised(now.slot(), known.max(now.stamp())).unwrap_or(now);
        self.last_epoch.store(now.word(), Ordering::Release);
    }

    /// All its events, which nobody needs any longer.
    pub(crate) fn drain(&self) -> Vec<E> {
        self.inner.with(|inner| {
            let recorded = inner.recorded.as_slice().iter();
            let mut events: Vec<E> = recorded.filter_map(|done| done.event).collect();
            inner.recorded.clear();
            events.append(&mut inner.free_events);
            events.append(&mut inner.retired_events);
            events
        })
    }
}
