//! How far a stream is ordered after others.
//!
//! The stream that was followed last is one word, [`Heard`], so that a block which goes to and fro between two streams needs no list;
//! the others are in [`Seen`]. What was once true of either stays true: a stamp that came before comes before for ever.

/// One stream, by its key, and the stamp up to which everything of it came before, in one word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Heard(u64);

/// Bits of a stamp; above them is a key.
const STAMP_BITS: u32 = 48;
const STAMP: u64 = (1 << STAMP_BITS) - 1;

impl Heard {
    /// `None` for a key that does not fit. A stamp that does not fit claims less.
    #[inline(always)]
    pub(crate) fn new(key: u32, stamp: u64) -> Option<Self> {
        (key >> (u64::BITS - STAMP_BITS) == 0)
            .then(|| Self(u64::from(key) << STAMP_BITS | stamp.min(STAMP)))
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
    fn key(self) -> u32 {
        (self.0 >> STAMP_BITS) as u32
    }

    #[inline(always)]
    pub(crate) fn is_of(self, key: u32) -> bool {
        self.key() == key
    }

    #[inline(always)]
    pub(crate) fn stamp(self) -> u64 {
        self.0 & STAMP
    }

    /// The same stream at another stamp; `None` if it is not that stream, or the stamp does not fit.
    #[inline(always)]
    pub(crate) fn raised(self, key: u32, stamp: u64) -> Option<Self> {
        (self.is_of(key) && stamp <= STAMP).then(|| Self(u64::from(key) << STAMP_BITS | stamp))
    }

    /// True when it is of another stream than `asker`.
    #[inline(always)]
    pub(crate) fn is_news_to(self, asker: u32) -> bool {
        !self.is_of(asker) && self != Self::default()
    }
}

/// Streams that are kept without an allocation.
const FEW: usize = 4;

/// How far a stream is ordered after each of several others. Of a few a copy is short.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct Seen {
    /// A key plus one each; 0 where there is none, and then there is none after it.
    keys: [u32; FEW],
    stamps: [u64; FEW],
    #[allow(clippy::box_collection, reason = "one word, so that a copy of a few is short")]
    more: Option<Box<Vec<(u32, u64)>>>,
}

impl Seen {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        let [first, ..] = self.keys;
        first == 0
    }

    /// The stamp of stream `key` up to which everything came before.
    #[inline]
    pub(crate) fn stamp(&self, key: u32) -> u64 {
        for (at, stamp) in self.keys.iter().zip(&self.stamps) {
            if *at == key.wrapping_add(1) {
                return *stamp;
            }
        }
        let Some(more) = &self.more else { return 0 };
        more.iter().find(|(at, _)| *at == key).map_or(0, |(_, stamp)| *stamp)
    }

    #[inline]
    pub(crate) fn raise(&mut self, key: u32, stamp: u64) {
        for (at, known) in self.keys.iter_mut().zip(&mut self.stamps) {
            // An empty place has stamp 0.
            if *at == key + 1 || *at == 0 {
                *at = key + 1;
                *known = stamp.max(*known);
                return;
            }
        }
        self.raise_more(key, stamp);
    }

    #[cold]
    fn raise_more(&mut self, key: u32, stamp: u64) {
        let more = self.more.get_or_insert_default();
        match more.iter_mut().find(|(at, _)| *at == key) {
            Some(entry) => entry.1 = entry.1.max(stamp),
            None => more.push((key, stamp)),
        }
    }

    /// Raises what it says of one stream.
    #[inline]
    pub(crate) fn hear(&mut self, heard: Heard) {
        if heard != Heard::default() {
            self.raise(heard.key(), heard.stamp());
        }
    }

    /// Makes it a copy.
    #[inline(always)]
    pub(crate) fn set(&mut self, other: &Self) {
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

    /// All there are.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u64)> {
        let few = self.keys.iter().zip(&self.stamps).take_while(|(key, _)| **key != 0);
        let more = self.more.iter().flat_map(|more| more.iter().copied());
        few.map(|(key, stamp)| (*key - 1, *stamp)).chain(more)
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
            let (mut seen, mut copy, mut map) = (Seen::default(), Seen::default(), BTreeMap::new());
            for step in 0..60 {
                let (key, stamp) = (next(1 + seed % 9) as u32, next(1000));
                match next(3) {
                    0 => seen.hear(Heard::new(key, stamp.max(1)).unwrap()),
                    _ => seen.raise(key, stamp.max(1)),
                }
                let known = map.entry(key).or_insert(0);
                *known = stamp.max(1).max(*known);
                if next(4) == 0 {
                    copy.set(&seen);
                    assert_eq!(copy.iter().collect::<BTreeMap<_, _>>(), map);
                }
                assert_eq!(seen.iter().collect::<BTreeMap<_, _>>(), map, "seed {seed}, {step}");
                assert!((0..12).all(|key| seen.stamp(key) == map.get(&key).copied().unwrap_or(0)));
                assert!(!seen.is_empty());
            }
        }
    }

    #[test]
    fn a_word_claims_no_more_than_what_was_put_in() {
        let heard = Heard::new(7, 9).unwrap();
        assert_eq!(Heard::from_word(heard.word()), heard);
        assert!(heard.is_of(7) && heard.stamp() == 9);
        assert!(heard.is_news_to(8) && !heard.is_news_to(7));
        assert!(!Heard::default().is_news_to(3), "nothing was heard");
        assert_eq!(heard.raised(7, 12), Heard::new(7, 12));
        assert_eq!((heard.raised(8, 12), heard.raised(7, STAMP + 1)), (None, None));
        assert_eq!(Heard::new(65_535, u64::MAX).map(Heard::stamp), Some(STAMP));
        assert_eq!(Heard::new(65_536, 1), None);
    }
}
