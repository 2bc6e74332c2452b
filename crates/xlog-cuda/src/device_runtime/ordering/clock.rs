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

use std::collections::VecDeque;
use std::ops::Deref;

use smallvec::SmallVec;

use super::primitive::{AtomicU64, Lock, Ordering};

/// How far a stream is ordered after each other stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(SmallVec<[(u32, u64); 4]>);

impl Seen {
    /// The stamp of stream `key` up to which everything came before.
    fn get(&self, key: u32) -> u64 {
        self.0.iter().find(|(at, _)| *at == key).map_or(0, |(_, stamp)| *stamp)
    }

    fn raise(&mut self, key: u32, stamp: u64) {
        match self.0.iter_mut().find(|(at, _)| *at == key) {
            Some(entry) => entry.1 = entry.1.max(stamp),
            None => self.0.push((key, stamp)),
        }
    }

    fn join(&mut self, other: &Self) {
        for &(key, stamp) in &other.0 {
            self.raise(key, stamp);
        }
    }
}

/// A recorded event: what it covers, and what its stream had seen before it.
#[derive(Clone, Debug)]
pub(crate) struct Recorded<E> {
    pub(crate) covers: u64,
    pub(crate) event: E,
    seen: Seen,
}

/// An event that is about to be recorded.
#[derive(Debug)]
pub(crate) struct Begun<E> {
    covers: u64,
    seen: Seen,
    /// An event to use again, if there is one.
    pub(crate) spare: Option<E>,
}

/// The part of a clock that work on the stream itself looks at.
#[derive(Debug)]
pub(crate) struct ClockCell {
    /// Moved on only under the lock of the clock.
    stamp: AtomicU64,
    /// The id the stream is out under, plus one; 0 while it is not out.
    out: AtomicU64,
}

impl Default for ClockCell {
    fn default() -> Self {
        Self { stamp: AtomicU64::new(1), out: AtomicU64::new(0) }
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
    inner: Lock<Inner<E>>,
}

#[derive(Debug)]
struct Inner<E> {
    seen: Seen,
    /// Events not known to have completed, by what they cover.
    recorded: VecDeque<Recorded<E>>,
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

impl<E: Copy, C: Deref<Target = ClockCell>> StreamClock<E, C> {
    pub(crate) fn new(key: u32, cell: C) -> Self {
        let inner = Inner {
            seen: Seen::default(),
            recorded: VecDeque::new(),
            ask_at: ASK_AT,
            spare: Vec::new(),
            resting: Vec::new(),
            pins: 0,
        };
        Self { key, cell, completed: AtomicU64::new(0), inner: Lock::new(inner) }
    }

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
    pub(crate) fn covers(&self, key: u32, stamp: u64) -> bool {
        self.inner.with_nested(|inner| inner.seen.get(key) >= stamp)
    }

    pub(crate) fn is_complete(&self, stamp: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= stamp
    }

    /// Before an event is recorded. [`StreamClock::recorded`] or [`StreamClock::failed`] follows.
    pub(crate) fn begin(&self) -> Begun<E> {
        self.inner.with(|inner| {
            let covers = self.cell.stamp.load(Ordering::Relaxed);
            self.cell.stamp.store(covers + 1, Ordering::Release);
            Begun { covers, seen: inner.seen.clone(), spare: inner.spare.pop() }
        })
    }

    /// After it was recorded. With `pin`, the event is pinned; see [`StreamClock::find`].
    ///
    /// Now and then there is an event to ask about, which is pinned too: [`StreamClock::asked`] takes the answer.
    pub(crate) fn recorded(
        &self,
        begun: Begun<E>,
        event: E,
        pin: bool,
    ) -> (Recorded<E>, Option<(u64, E)>) {
        let recorded = Recorded { covers: begun.covers, event, seen: begun.seen };
        self.inner.with(|inner| {
            inner.pins += usize::from(pin);
            let kept = recorded.clone();
            if inner.recorded.back().is_none_or(|last| last.covers < kept.covers) {
                inner.recorded.push_back(kept);
            } else {
                let at = inner.recorded.partition_point(|other| other.covers < kept.covers);
                inner.recorded.insert(at, kept);
            }
            // One question for half of the list.
            let ask = (inner.recorded.len() >= inner.ask_at)
                .then(|| inner.recorded.get(inner.recorded.len() / 2))
                .flatten()
                .map(|middle| (middle.covers, middle.event));
            inner.pins += usize::from(ask.is_some());
            (recorded, ask)
        })
    }

    /// It was not recorded.
    pub(crate) fn failed(&self, event: E) {
        self.inner.with(|inner| inner.spare.push(event));
    }

    /// Whether the event asked about has completed: while the answer is no, ask more seldom.
    pub(crate) fn asked(&self, completed: bool) {
        self.inner.with(|inner| {
            inner.ask_at = if completed { ASK_AT } else { inner.ask_at.saturating_mul(2) };
        });
        self.unpin();
    }

    /// The earliest event that covers `stamp`, if one was recorded. It is pinned, and so not recorded again before
    /// [`StreamClock::unpin`].
    pub(crate) fn find(&self, stamp: u64) -> Option<Recorded<E>> {
        self.inner.with(|inner| {
            let at = inner.recorded.partition_point(|event| event.covers < stamp);
            let found = inner.recorded.get(at).cloned();
            inner.pins += usize::from(found.is_some());
            found
        })
    }

    /// One who had an event pinned needs it no longer.
    pub(crate) fn unpin(&self) {
        self.inner.with(|inner| {
            inner.pins = inner.pins.saturating_sub(1);
            if inner.pins == 0 && !inner.resting.is_empty() {
                inner.spare.append(&mut inner.resting);
            }
        });
    }

    /// Everything up to `stamp` has completed: the events that covered it may be used again.
    pub(crate) fn completed_up_to(&self, stamp: u64) {
        self.completed.fetch_max(stamp, Ordering::AcqRel);
        self.inner.with(|inner| {
            let at = inner.recorded.partition_point(|event| event.covers <= stamp);
            let to = if inner.pins == 0 { &mut inner.spare } else { &mut inner.resting };
            to.extend(inner.recorded.drain(..at).map(|done| done.event));
        });
    }

    /// After a wait for an event of stream `key` was queued on this stream.
    pub(crate) fn learn(&self, key: u32, recorded: &Recorded<E>) {
        self.inner.with(|inner| {
            inner.seen.raise(key, recorded.covers);
            inner.seen.join(&recorded.seen);
        });
    }

    /// All its events, which nobody needs any longer.
    pub(crate) fn drain(&self) -> Vec<E> {
        self.inner.with(|inner| {
            let mut events: Vec<E> = inner.recorded.drain(..).map(|done| done.event).collect();
            events.append(&mut inner.spare);
            events.append(&mut inner.resting);
            events
        })
    }
}
