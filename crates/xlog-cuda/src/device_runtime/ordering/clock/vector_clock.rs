//! Vector clock of bounded size: the stamps of other streams that a stream is ordered after.
//!
//! The stream that was waited for last is one word, [`Epoch`], so a block that alternates between two streams needs no list.
//! Up to [`ENTRIES`] others are in a [`VectorClock`]. [`History`] keeps the states of the clock at which the latest events
//! were begun; each stream that waits for an event joins its state.
//!
//! Invariant: an entry `(stream, stamp)` claims that all work of that stream up to the stamp happens-before later work of
//! this one. Such a claim stays true, and a missing entry claims nothing: a use that needs that stream queues a wait. A
//! forgotten entry therefore adds a wait and never omits one, and a part or an older state of a clock is sound.
//!
//! Replacement:
//! - A wait moves the previous last stream to the front. A full clock drops the last entry, the least recently waited for.
//! - A joined clock raises existing entries and fills free ones, but replaces none: the clock of a stream with many
//!   partners does not evict the streams that this one waits for.
//! - A dropped stream returns with the next wait for it. From then on joined clocks raise it.
//!
//! The cost of a wait and the memory of a clock do not depend on the number of streams; up to 17 streams know all of each other.

/// A stream slot and a stamp in one word: all work of that stream up to the stamp happened before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Epoch(u64);

/// Bits of the stamp; the slot is above.
const STAMP_BITS: u32 = 48;
const STAMP: u64 = (1 << STAMP_BITS) - 1;

impl Epoch {
    /// `None` if the slot does not fit. A stamp that does not fit is lowered, which claims less.
    #[inline(always)]
    pub(crate) fn new(slot: u32, stamp: u64) -> Option<Self> {
        (slot >> (u64::BITS - STAMP_BITS) == 0)
            .then(|| Self(u64::from(slot) << STAMP_BITS | stamp.min(STAMP)))
    }

    #[inline(always)]
    pub(crate) fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    #[inline(always)]
    pub(crate) fn slot(self) -> u32 {
        (self.0 >> STAMP_BITS) as u32
    }

    #[inline(always)]
    pub(crate) fn is_of(self, slot: u32) -> bool {
        self.slot() == slot
    }

    #[inline(always)]
    pub(crate) fn stamp(self) -> u64 {
        self.0 & STAMP
    }

    /// Returns the epoch of that stream at another stamp; `None` for another stream, or if the stamp does not fit.
    #[inline(always)]
    pub(crate) fn raised(self, slot: u32, stamp: u64) -> Option<Self> {
        (self.is_of(slot) && stamp <= STAMP).then(|| Self(u64::from(slot) << STAMP_BITS | stamp))
    }

    /// Whether it is of another stream than `asker`.
    #[inline(always)]
    pub(crate) fn adds_to(self, asker: u32) -> bool {
        !self.is_of(asker) && self != Self::default()
    }
}

/// Streams that a clock remembers besides the one that was waited for last.
pub(crate) const ENTRIES: usize = 16;
/// States of a clock that are kept for its events.
const STATES: usize = 16;

/// The stamps of at most `N` other streams that a stream is ordered after.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct VectorClock<const N: usize = ENTRIES> {
    /// The first `len` are in use, the most recently waited for first.
    entries: [Epoch; N],
    len: usize,
}

impl<const N: usize> Default for VectorClock<N> {
    fn default() -> Self {
        Self { entries: [Epoch::default(); N], len: 0 }
    }
}

impl<const N: usize> VectorClock<N> {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline(always)]
    pub(crate) fn entries(&self) -> &[Epoch] {
        self.entries.get(..self.len).unwrap_or_default()
    }

    #[inline(always)]
    fn position(&self, slot: u32) -> Option<usize> {
        self.entries().iter().position(|entry| entry.is_of(slot))
    }

    /// Returns the stamp up to which work of stream `slot` is known to happen before; 0 if unknown.
    #[inline]
    pub(crate) fn stamp(&self, slot: u32) -> u64 {
        self.entries().iter().find(|entry| entry.is_of(slot)).map_or(0, |entry| entry.stamp())
    }

    /// Joins the epochs of another clock: raises existing entries, and adds others while there is space. Returns whether an
    /// entry changed.
    #[inline(always)]
    pub(crate) fn join(&mut self, epochs: impl Iterator<Item = Epoch>) -> bool {
        let (mut is_changed, mut guess) = (false, 0);
        for now in epochs {
            // Streams that wait for each other usually have their entries in the same order.
            let at = match self.entries().get(guess) {
                Some(entry) if entry.is_of(now.slot()) => guess,
                _ => self.position(now.slot()).unwrap_or(self.len),
            };
            guess = at + 1;
            // The clock is full: the epoch is dropped.
            let Some(entry) = self.entries.get_mut(at) else { continue };
            if at == self.len {
                self.len += 1;
            } else if *entry >= now {
                continue;
            }
            *entry = now;
            is_changed = true;
        }
        is_changed
    }

    /// Returns a copy with one more entry in front; a full clock drops its last one.
    #[inline(always)]
    pub(crate) fn with_first(&self, first: Epoch) -> Self {
        let mut copy = Self { entries: [first; N], len: (self.len + 1).min(N) };
        if let ([_, rest @ ..], [kept @ .., _]) = (&mut copy.entries[..], &self.entries[..]) {
            rest.copy_from_slice(kept);
        }
        copy
    }

    /// Inserts the stream that was waited for last in front and removes `next`, which is waited for now. Returns the removed
    /// stamp, 0 for none. A full clock drops its last entry.
    pub(crate) fn exchange(&mut self, last: Epoch, next: u32) -> u64 {
        let at = self.position(next);
        let stamp = at.and_then(|at| self.entries.get(at)).map_or(0, |entry| entry.stamp());
        if last == Epoch::default() {
            if let Some(at) = at {
                self.entries.copy_within(at + 1..self.len, at);
                self.len -= 1;
            }
            return stamp;
        }
        let end = at.unwrap_or(self.len.min(N.saturating_sub(1)));
        self.len = self.len.max(end + 1).min(N);
        self.entries.copy_within(..end, 1);
        if let Some(first) = self.entries.first_mut() {
            *first = last;
        }
        stamp
    }
}

/// The clock of a stream, and its states at the beginning of the latest events.
#[derive(Debug)]
pub(crate) struct History<const N: usize = ENTRIES> {
    now: VectorClock<N>,
    /// State `n` is at index `n - 1`, modulo [`STATES`]; the latest is `taken`.
    states: Vec<VectorClock<N>>,
    taken: u64,
    /// Whether `now` differs from the latest state.
    is_changed: bool,
}

impl<const N: usize> History<N> {
    pub(crate) const fn new() -> Self {
        let now = VectorClock { entries: [Epoch(0); N], len: 0 };
        Self { now, states: Vec::new(), taken: 0, is_changed: false }
    }

    #[inline(always)]
    pub(crate) fn now(&self) -> &VectorClock<N> {
        &self.now
    }

    /// [`VectorClock::join`] of the current clock.
    #[inline(always)]
    pub(crate) fn join(&mut self, epochs: impl Iterator<Item = Epoch>) {
        self.is_changed |= self.now.join(epochs);
    }

    /// [`VectorClock::exchange`] of the current clock.
    pub(crate) fn exchange(&mut self, last: Epoch, next: u32) -> u64 {
        self.is_changed = true;
        self.now.exchange(last, next)
    }

    /// Returns the number of the current state; 0 for an empty clock.
    #[inline(always)]
    pub(crate) fn number(&mut self) -> u64 {
        if self.now.is_empty() {
            return 0;
        }
        if self.is_changed {
            self.take();
        }
        self.taken
    }

    #[inline(never)]
    fn take(&mut self) {
        self.is_changed = false;
        match self.states.get_mut(self.taken as usize % STATES) {
            Some(state) => state.clone_from(&self.now),
            None => self.states.push(self.now.clone()),
        }
        self.taken += 1;
    }

    /// Returns the state of this number; `None` for an empty clock and for an overwritten state.
    pub(crate) fn state(&self, number: u64) -> Option<&VectorClock<N>> {
        let is_kept = number != 0 && self.taken.wrapping_sub(number) < STATES as u64;
        self.states.get(number.wrapping_sub(1) as usize % STATES).filter(|_| is_kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::iter::once;

    /// Steps from a small generator.
    fn generator(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
            (state >> 33) % below
        }
    }

    /// Converts the claims of one clock to a map.
    fn map_of<const N: usize>(vector_clock: &VectorClock<N>) -> BTreeMap<u32, u64> {
        vector_clock.entries().iter().map(|entry| (entry.slot(), entry.stamp())).collect()
    }

    /// Compares with a map that forgets nothing.
    fn compare<const N: usize>(seed: u64, streams: u64) {
        let mut next = generator(seed);
        let (mut vector_clock, mut map) = (VectorClock::<N>::default(), BTreeMap::new());
        for step in 0..60 {
            let slot = next(streams) as u32;
            let now = Epoch::new(slot, next(1000) + 1).unwrap();
            match next(3) {
                // The own entry of what is put in front is removed, so that it is there once.
                0 => assert!(
                    vector_clock.exchange(now, slot) <= map.get(&slot).copied().unwrap_or(0)
                ),
                _ => assert!(
                    !vector_clock.join(once(now)) || vector_clock.stamp(slot) == now.stamp()
                ),
            }
            let known = map.entry(slot).or_insert(0);
            *known = now.stamp().max(*known);
            let context = format!("seed {seed}, {N} entries, step {step}: {vector_clock:?}");
            let kept = map_of(&vector_clock);
            assert_eq!(kept.len(), vector_clock.entries().len(), "{context}");
            assert!(kept.len() <= N && !vector_clock.is_empty(), "{context}");
            assert!(
                kept.iter().all(|(slot, stamp)| map[slot] >= *stamp),
                "{context}: claims too much"
            );
            assert!(
                (0..40)
                    .all(|slot| vector_clock.stamp(slot) == kept.get(&slot).copied().unwrap_or(0))
            );
        }
    }

    #[test]
    fn it_claims_no_more_than_is_true_however_many_streams_there_are() {
        for seed in 1..200 {
            compare::<1>(seed, 1 + seed % 9);
            compare::<2>(seed, 1 + seed % 9);
            compare::<ENTRIES>(seed, 1 + seed % 40);
        }
    }

    #[test]
    fn as_many_streams_as_there_are_entries_are_all_known() {
        for seed in 1..100 {
            let mut next = generator(seed);
            let (mut vector_clock, mut map) = (VectorClock::<4>::default(), BTreeMap::new());
            let mut last = Epoch::default();
            for step in 0..60 {
                let (slot, stamp) = (next(5) as u32, next(1000) + 1);
                let known = map.entry(slot).or_insert(0);
                *known = stamp.max(*known);
                let now = Epoch::new(slot, *known).unwrap();
                if last.is_of(slot) {
                    last = now;
                } else if next(2) == 0 {
                    vector_clock.join(once(now));
                } else {
                    assert!(vector_clock.exchange(last, slot) <= *known);
                    last = now;
                }
                let mut kept = map_of(&vector_clock);
                if last != Epoch::default() {
                    assert_eq!(kept.insert(last.slot(), last.stamp()), None, "it is there twice");
                }
                assert_eq!(kept, map, "seed {seed}, step {step}: {vector_clock:?}, {last:?}");
            }
        }
    }

    #[test]
    fn the_least_recently_waited_for_is_dropped_and_a_joined_clock_replaces_nothing() {
        let epoch = |slot| Epoch::new(slot, 5).unwrap();
        let mut vector_clock = VectorClock::<3>::default();
        for slot in [1, 2, 3] {
            vector_clock.exchange(epoch(slot), 9);
        }
        assert!(!vector_clock.join(once(epoch(4))), "there is no room");
        assert!(
            vector_clock.join([epoch(4), Epoch::new(1, 7).unwrap()].into_iter()),
            "one is there"
        );
        assert_eq!(vector_clock.entries(), [epoch(3), epoch(2), Epoch::new(1, 7).unwrap()]);
        assert_eq!(vector_clock.exchange(epoch(4), 2), 5, "it is followed now");
        assert_eq!(vector_clock.exchange(epoch(6), 9), 0);
        assert_eq!(vector_clock.entries(), [epoch(6), epoch(4), epoch(3)]);
        assert_eq!(vector_clock.with_first(epoch(8)).entries(), [epoch(8), epoch(6), epoch(4)]);
        assert_eq!(VectorClock::<3>::default().with_first(epoch(8)).entries(), [epoch(8)]);
    }

    #[test]
    fn a_state_is_what_was_seen_when_it_was_taken_or_forgotten() {
        let mut history = History::<2>::new();
        assert_eq!((history.number(), history.state(0).is_none()), (0, true));
        let mut states = vec![BTreeMap::new()];
        for stamp in 1..100 {
            history.join(once(Epoch::new(7, stamp).unwrap()));
            let number = history.number();
            assert_eq!((number, history.number()), (stamp, stamp), "unchanged, it is the same");
            states.push(map_of(history.now()));
            for (number, taken) in states.iter().enumerate() {
                let kept = history.state(number as u64).map(map_of);
                let is_kept = number != 0 && number + STATES > stamp as usize;
                assert_eq!(kept.as_ref(), is_kept.then_some(taken), "{number} after {stamp}");
            }
            assert!(history.state(number + 1).is_none());
        }
        history.join(once(Epoch::new(7, 1).unwrap()));
        assert_eq!(history.number(), 99, "that was known");
    }

    #[test]
    fn a_word_claims_no_more_than_what_was_put_in() {
        let epoch = Epoch::new(7, 9).unwrap();
        assert_eq!(Epoch::from_word(epoch.word()), epoch);
        assert!(epoch.is_of(7) && epoch.stamp() == 9);
        assert!(epoch.adds_to(8) && !epoch.adds_to(7));
        assert!(!Epoch::default().adds_to(3), "nothing was heard");
        assert_eq!(epoch.raised(7, 12), Epoch::new(7, 12));
        assert_eq!((epoch.raised(8, 12), epoch.raised(7, STAMP + 1)), (None, None));
        assert_eq!(Epoch::new(65_535, u64::MAX).map(Epoch::stamp), Some(STAMP));
        assert_eq!(Epoch::new(65_536, 1), None);
    }
}
