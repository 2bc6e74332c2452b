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

use std::collections::VecDeque;

use super::primitive::{Arc, AtomicU64, Mutex, Ordering};

/// The part of a clock that work on the stream itself looks at: at one address for as long as anybody may look.
#[derive(Debug)]
pub(crate) struct ClockCell {
    stamp: AtomicU64,
    /// The id the stream is out under, plus one; 0 while it is not out.
    out: AtomicU64,
}

impl ClockCell {
    pub(crate) fn new() -> Self {
        Self { stamp: AtomicU64::new(1), out: AtomicU64::new(0) }
    }

    /// The stamp of work that is queued and finishes now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.stamp.load(Ordering::Acquire)
    }

    /// Moves the stamp on, for an event that is about to be recorded; returns what it will cover.
    fn step(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::AcqRel)
    }

    #[inline]
    pub(crate) fn is_out_as(&self, id: u32) -> bool {
        self.out.load(Ordering::Acquire) == u64::from(id) + 1
    }

    pub(crate) fn set_out(&self, id: Option<u32>) {
        self.out.store(id.map_or(0, |id| u64::from(id) + 1), Ordering::Release);
    }
}

/// How far a stream is ordered after each other stream. Cheap to copy, and a copy never changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(std::sync::Arc<Vec<(u64, u64)>>);

impl Seen {
    /// The stamp of stream `key` up to which everything came before.
    pub(crate) fn get(&self, key: u64) -> u64 {
        self.0.iter().find(|(at, _)| *at == key).map_or(0, |(_, stamp)| *stamp)
    }

    fn raise(&mut self, key: u64, stamp: u64) {
        if self.get(key) >= stamp {
            return;
        }
        let list = std::sync::Arc::make_mut(&mut self.0);
        match list.iter_mut().find(|(at, _)| *at == key) {
            Some(entry) => entry.1 = stamp,
            None => list.push((key, stamp)),
        }
    }

    fn join(&mut self, other: &Self) {
        for &(key, stamp) in other.0.iter() {
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
pub(crate) struct Begun {
    covers: u64,
    seen: Seen,
}

/// The clock of one stream, over events of type `E`.
#[derive(Debug)]
pub(crate) struct StreamClock<E> {
    key: u64,
    cell: Arc<ClockCell>,
    /// Every stamp up to this is known to have completed.
    completed: AtomicU64,
    inner: Mutex<Inner<E>>,
}

#[derive(Debug)]
struct Inner<E> {
    seen: Seen,
    /// Events not known to have completed, by what they cover.
    recorded: VecDeque<Recorded<E>>,
    /// How long the list may grow before somebody asks which events have completed.
    ask_at: usize,
}

const ASK_AT: usize = 64;

impl<E: Clone> StreamClock<E> {
    pub(crate) fn new(key: u64, cell: Arc<ClockCell>) -> Self {
        let inner = Inner { seen: Seen::default(), recorded: VecDeque::new(), ask_at: ASK_AT };
        let completed = AtomicU64::new(cell.now() - 1);
        Self { key, cell, completed, inner: Mutex::new(inner) }
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    pub(crate) fn cell(&self) -> &Arc<ClockCell> {
        &self.cell
    }

    pub(crate) fn now(&self) -> u64 {
        self.cell.now()
    }

    /// True when this stream is ordered after `stamp` of stream `key`.
    pub(crate) fn covers(&self, key: u64, stamp: u64) -> bool {
        self.inner.lock().seen.get(key) >= stamp
    }

    pub(crate) fn is_complete(&self, stamp: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= stamp
    }

    /// What this stream has seen by now.
    pub(crate) fn snapshot(&self) -> Seen {
        self.inner.lock().seen.clone()
    }

    /// Before an event is recorded.
    pub(crate) fn begin(&self) -> Begun {
        let covers = self.cell.step();
        Begun { covers, seen: self.snapshot() }
    }

    /// After it was recorded. Now and then there is an event to ask about: [`StreamClock::asked`] takes the answer.
    pub(crate) fn recorded(&self, begun: Begun, event: E) -> (Recorded<E>, Option<Recorded<E>>) {
        let recorded = Recorded { covers: begun.covers, event, seen: begun.seen };
        let mut inner = self.inner.lock();
        let at = inner.recorded.partition_point(|other| other.covers < recorded.covers);
        inner.recorded.insert(at, recorded.clone());
        // One question for half of the list.
        let full = inner.recorded.len() >= inner.ask_at;
        let middle = full.then(|| inner.recorded[inner.recorded.len() / 2].clone());
        (recorded, middle)
    }

    /// Whether the event asked about has completed: while the answer is no, ask more seldom.
    pub(crate) fn asked(&self, completed: bool) {
        let mut inner = self.inner.lock();
        inner.ask_at = if completed { ASK_AT } else { inner.ask_at.saturating_mul(2) };
    }

    /// The earliest event that covers `stamp`, if one was recorded.
    pub(crate) fn find(&self, stamp: u64) -> Option<Recorded<E>> {
        let inner = self.inner.lock();
        let at = inner.recorded.partition_point(|event| event.covers < stamp);
        inner.recorded.get(at).cloned()
    }

    /// Everything up to `stamp` has completed: returns the events that are no longer needed.
    pub(crate) fn completed_up_to(&self, stamp: u64) -> Vec<Recorded<E>> {
        self.completed.fetch_max(stamp, Ordering::AcqRel);
        let mut inner = self.inner.lock();
        let at = inner.recorded.partition_point(|event| event.covers <= stamp);
        inner.recorded.drain(..at).collect()
    }

    /// After a wait for an event of stream `key` was queued on this stream.
    pub(crate) fn learn(&self, key: u64, recorded: &Recorded<E>) {
        let mut inner = self.inner.lock();
        inner.seen.raise(key, recorded.covers);
        inner.seen.join(&recorded.seen);
    }
}
