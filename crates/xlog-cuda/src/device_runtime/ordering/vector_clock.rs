//! How far a stream is ordered after others.
//!
//! The stream that was followed last is one word, [`Epoch`], so that a block which goes to and fro between two streams needs no list;
//! the others are in [`VectorClock`]. What was once true of either stays true: a stamp that came before comes before for ever.

/// One stream, by its key, and the stamp up to which everything of it came before, in one word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Epoch(u64);

/// Bits of a stamp; above them is a key.
const STAMP_BITS: u32 = 48;
const STAMP: u64 = (1 << STAMP_BITS) - 1;

impl Epoch {
    /// `None` for a key that does not fit. A stamp that does not fit claims less.
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
    fn slot(self) -> u32 {
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

    /// The same stream at another stamp; `None` if it is not that stream, or the stamp does not fit.
    #[inline(always)]
    pub(crate) fn raised(self, slot: u32, stamp: u64) -> Option<Self> {
        (self.is_of(slot) && stamp <= STAMP).then(|| Self(u64::from(slot) << STAMP_BITS | stamp))
    }

    /// True when it is of another stream than `asker`.
    #[inline(always)]
    pub(crate) fn adds_to(self, asker: u32) -> bool {
        !self.is_of(asker) && self != Self::default()
    }
}

/// Streams that are kept without an allocation.
const INLINE: usize = 4;

/// How far a stream is ordered after each of several others. Of a few a copy is short.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct VectorClock {
    /// A key plus one each; 0 where there is none, and then there is none after it.
    slots: [u32; INLINE],
    stamps: [u64; INLINE],
    #[allow(clippy::box_collection, reason = "one word, so that a copy of a few is short")]
    overflow: Option<Box<Vec<(u32, u64)>>>,
}

impl VectorClock {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        let [first, ..] = self.slots;
        first == 0
    }

    /// The stamp of stream `slot` up to which everything came before.
    #[inline]
    pub(crate) fn stamp(&self, slot: u32) -> u64 {
        for (at, stamp) in self.slots.iter().zip(&self.stamps) {
            if *at == slot.wrapping_add(1) {
                return *stamp;
            }
        }
        let Some(overflow) = &self.overflow else { return 0 };
        overflow.iter().find(|(at, _)| *at == slot).map_or(0, |(_, stamp)| *stamp)
    }

    #[inline]
    pub(crate) fn raise(&mut self, slot: u32, stamp: u64) {
        for (at, known) in self.slots.iter_mut().zip(&mut self.stamps) {
            // An empty place has stamp 0.
            if *at == slot + 1 || *at == 0 {
                *at = slot + 1;
                *known = stamp.max(*known);
                return;
            }
        }
        self.raise_overflow(slot, stamp);
    }

    #[cold]
    fn raise_overflow(&mut self, slot: u32, stamp: u64) {
        let overflow = self.overflow.get_or_insert_default();
        match overflow.iter_mut().find(|(at, _)| *at == slot) {
            Some(entry) => entry.1 = entry.1.max(stamp),
            None => overflow.push((slot, stamp)),
        }
    }

    /// Raises what it says of one stream.
    #[inline]
    pub(crate) fn join_epoch(&mut self, epoch: Epoch) {
        if epoch != Epoch::default() {
            self.raise(epoch.slot(), epoch.stamp());
        }
    }

    /// Makes it a copy.
    #[inline(always)]
    pub(crate) fn set(&mut self, other: &Self) {
        self.stamps = other.stamps;
        self.slots = other.slots;
        if self.overflow.is_some() || other.overflow.is_some() {
            self.set_overflow(other);
        }
    }

    #[cold]
    #[inline(never)]
    fn set_overflow(&mut self, other: &Self) {
        self.overflow.clone_from(&other.overflow);
    }

    /// All there are.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u64)> {
        let inline = self.slots.iter().zip(&self.stamps).take_while(|(slot, _)| **slot != 0);
        let overflow = self.overflow.iter().flat_map(|overflow| overflow.iter().copied());
        inline.map(|(slot, stamp)| (*slot - 1, *stamp)).chain(overflow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Against a map, with steps from a small generator.
    #[test]
    fn it_is_a_map_of_highest_stamps_however_many_streams_there_are() {
        for seed in 1..100_u64 {
            let mut state = seed;
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
                (state >> 33) % below
            };
            let (mut vector_clock, mut copy, mut map) =
                (VectorClock::default(), VectorClock::default(), BTreeMap::new());
            for step in 0..60 {
                let (slot, stamp) = (next(1 + seed % 9) as u32, next(1000));
                match next(3) {
                    0 => vector_clock.join_epoch(Epoch::new(slot, stamp.max(1)).unwrap()),
                    _ => vector_clock.raise(slot, stamp.max(1)),
                }
                let known = map.entry(slot).or_insert(0);
                *known = stamp.max(1).max(*known);
                if next(4) == 0 {
                    copy.set(&vector_clock);
                    assert_eq!(copy.iter().collect::<BTreeMap<_, _>>(), map);
                }
                assert_eq!(
                    vector_clock.iter().collect::<BTreeMap<_, _>>(),
                    map,
                    "seed {seed}, {step}"
                );
                assert!(
                    (0..12).all(
                        |slot| vector_clock.stamp(slot) == map.get(&slot).copied().unwrap_or(0)
                    )
                );
                assert!(!vector_clock.is_empty());
            }
        }
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
