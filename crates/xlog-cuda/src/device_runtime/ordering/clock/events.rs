//! Events of a clock: recorded ones by the stamp that they cover, and free ones.
//!
//! An entry keeps the clock of its stream as of the event's beginning; a stream that waits for the event joins that clock.
//! All of this is behind the lock of the clock.

use std::collections::VecDeque;

use super::vector_clock::{ENTRIES, Epoch, History, VectorClock};

/// An event, the stamp that it covers, and the clock of its stream at that time.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct EventEntry<E> {
    pub(super) covers: u64,
    /// The stamp covered by the previous event: earlier stamps do not need this one.
    after: u64,
    /// `None` until the driver has recorded it; until then no search finds it.
    pub(super) event: Option<E>,
    /// The last epoch of its stream.
    pub(super) last_epoch: Epoch,
    /// The other epochs: the number of a state of [`History`], 0 for none.
    state: u64,
}

impl<E> EventEntry<E> {
    /// Whether stream `asker` would join any epoch.
    #[inline(always)]
    fn adds_to(&self, asker: u32) -> bool {
        self.state != 0 || self.last_epoch.adds_to(asker)
    }
}

/// Combines a state and the last epoch into the clock that a waiting stream joins.
#[inline(never)]
fn joined_clock_of<const N: usize>(
    vector: Option<&VectorClock<N>>,
    last_epoch: Epoch,
) -> VectorClock<N> {
    let empty = VectorClock::default();
    let vector = vector.unwrap_or(&empty);
    if last_epoch == Epoch::default() { vector.clone() } else { vector.with_first(last_epoch) }
}

/// The events of a clock, behind its lock. The fields read most come first.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Events<E, const N: usize = ENTRIES> {
    /// Events that are not known to be complete, by the stamp that they cover.
    pub(super) recorded: VecDeque<EventEntry<E>>,
    /// The stamp covered by the event that was begun last.
    newest: u64,
    /// The length of `recorded` at which a poll is due.
    poll_at: usize,
    /// Completed events, to be reused.
    pub(super) free_events: Vec<E>,
    /// The epochs besides the last one; it may hold that stream too.
    pub(super) vector: History<N>,
    /// Completed events that a thread may still pass to the driver.
    pub(super) retired_events: Vec<E>,
    /// The number of pinned events.
    pub(super) pins: usize,
    /// Whether the last poll found its event complete; the next poll then chooses a later event.
    keeps_up: bool,
}

/// The length at which the first poll is due.
const POLL_AT: usize = 64;

impl<E: Copy, const N: usize> Events<E, N> {
    pub(super) fn new() -> Self {
        Self {
            recorded: VecDeque::new(),
            newest: 0,
            poll_at: POLL_AT,
            free_events: Vec::new(),
            vector: History::new(),
            retired_events: Vec::new(),
            pins: 0,
            keeps_up: false,
        }
    }

    /// Adds an event that is about to be recorded, with the clock of its stream.
    #[inline(always)]
    pub(super) fn keep(&mut self, covers: u64, last_epoch: Epoch) {
        let after = std::mem::replace(&mut self.newest, covers);
        let state = self.vector.number();
        self.recorded.push_back(EventEntry { covers, after, event: None, last_epoch, state });
    }

    /// Returns the clock that stream `asker` joins when it waits for this event; `None` if that adds nothing.
    #[inline(always)]
    pub(super) fn joined_clock(&self, entry: &EventEntry<E>, asker: u32) -> Option<VectorClock<N>> {
        entry
            .adds_to(asker)
            .then(|| joined_clock_of(self.vector.state(entry.state), entry.last_epoch))
    }

    /// [`Events::joined_clock`] of the event that was begun last.
    #[inline(always)]
    pub(super) fn newest_joined_clock(&self, asker: u32) -> Option<VectorClock<N>> {
        self.joined_clock(self.recorded.back()?, asker)
    }

    #[inline(always)]
    pub(super) fn set(&mut self, covers: u64, event: E) {
        // Usually the last entry.
        match self.recorded.back_mut() {
            Some(last) if last.covers == covers => last.event = Some(event),
            _ => self.set_earlier(covers, event),
        }
    }

    #[cold]
    fn set_earlier(&mut self, covers: u64, event: E) {
        let mut entries = self.recorded.iter_mut().rev();
        if let Some(entry) = entries.find(|entry| entry.covers == covers) {
            entry.event = Some(event);
        }
    }

    /// Returns the earliest recorded event that covers `stamp`.
    #[inline(always)]
    pub(super) fn find(&self, stamp: u64) -> Option<(E, &EventEntry<E>)> {
        // Usually the last entry.
        let last = self.recorded.back()?;
        match last.event {
            Some(event) if last.covers >= stamp && last.after < stamp => Some((event, last)),
            _ => self.find_earlier(stamp),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_earlier(&self, stamp: u64) -> Option<(E, &EventEntry<E>)> {
        if self.newest < stamp {
            return None;
        }
        let at = self.recorded.partition_point(|entry| entry.covers < stamp);
        self.recorded.range(at..).find_map(|entry| Some((entry.event?, entry)))
    }

    /// Returns the event to poll, if a poll is due: in the middle of the list, or near its end if the stream keeps up.
    #[inline(always)]
    pub(super) fn due_poll(&mut self) -> Option<(u64, E)> {
        if self.recorded.len() >= self.poll_at { self.choose_poll() } else { None }
    }

    #[cold]
    fn choose_poll(&mut self) -> Option<(u64, E)> {
        let length = self.recorded.len();
        let at = if self.keeps_up { length - length / 8 - 1 } else { length / 2 };
        let entry = self.recorded.get(at)?;
        let poll = (entry.covers, entry.event?);
        self.pins += 1;
        Some(poll)
    }

    /// Processes the result of a poll. While events are pending, polls become less frequent.
    pub(super) fn note_poll(&mut self, completed: bool) {
        self.keeps_up = completed;
        self.poll_at = if completed { POLL_AT } else { self.poll_at.saturating_mul(2) };
    }
}
