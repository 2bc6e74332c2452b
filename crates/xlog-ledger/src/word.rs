//! The word of one slot: the units that a process uses and those granted to it, in one 64-bit value.
//!
//! Every change of a word is one atomic replacement, so a kill between two changes loses nothing. This file has only the arithmetic;
//! callers decide which process may replace which word. The total of a word (used + granted) grows only in `refill`, which needs the file
//! lock.

/// A word, unpacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Word {
    /// Units in use.
    pub(crate) used: u32,
    /// Units granted and not in use.
    pub(crate) granted: u32,
}

/// The part of a grant that is kept after a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Keep {
    /// The units that are kept of a grant above the threshold.
    pub(crate) chunk: u32,
    /// A larger grant is reduced to `chunk`.
    pub(crate) threshold: u32,
}

impl Keep {
    /// Keeps up to two chunks, so that a segment that is repeatedly freed and allocated stays in the grant.
    pub(crate) fn of_chunk(chunk: u32) -> Self {
        Self { chunk, threshold: chunk.saturating_mul(2) }
    }
}

impl Word {
    /// Unpacks the stored form: used units in the low half, granted units in the high half.
    pub(crate) fn unpack(raw: u64) -> Self {
        Self { used: (raw & u64::from(u32::MAX)) as u32, granted: (raw >> 32) as u32 }
    }

    /// The stored form.
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.granted) << 32 | u64::from(self.used)
    }

    /// The units that the word takes from the limit.
    pub(crate) fn total(self) -> u64 {
        u64::from(self.used) + u64::from(self.granted)
    }

    /// Moves `units` from the grant into use, if the grant has them and the slot's limit allows it.
    pub(crate) fn charge(self, units: u32, limit: u32) -> Option<Self> {
        Some(Self { used: self.add(units, limit)?, granted: self.granted.checked_sub(units)? })
    }

    /// The used units plus `units`. A slot above its limit may add none.
    fn add(self, units: u32, limit: u32) -> Option<u32> {
        self.used.checked_add(units).filter(|used| *used <= limit || units == 0)
    }

    /// Releases `units` into the grant; `None` if fewer are in use.
    pub(crate) fn release(self, units: u32, keep: Keep) -> Option<Self> {
        let used = self.used.checked_sub(units)?;
        let granted = self.granted.saturating_add(units);
        let granted = if granted > keep.threshold { keep.chunk } else { granted };
        Some(Self { used, granted })
    }

    /// Charges `units` from the grant and `free`, and grants `slack(rest)` more, where `rest` is what then remains free. `None` if grant
    /// and `free` have fewer units, or the slot's `limit` forbids them.
    pub(crate) fn refill(
        self,
        units: u32,
        free: u64,
        limit: u32,
        slack: impl FnOnce(u64) -> u64,
    ) -> Option<Self> {
        let rest = (free + u64::from(self.granted)).checked_sub(u64::from(units))?;
        let used = self.add(units, limit)?;
        let most = rest.min(u64::from(limit.saturating_sub(used)));
        Some(Self { used, granted: slack(rest).min(most) as u32 })
    }

    /// Reduces the grant to what the slot's limit leaves.
    pub(crate) fn within(self, limit: u32) -> Self {
        Self { used: self.used, granted: self.granted.min(limit.saturating_sub(self.used)) }
    }

    /// Removes the grant.
    pub(crate) fn without_grant(self) -> Self {
        Self { used: self.used, granted: 0 }
    }
}

/// The units to grant beyond a request when `rest` units stay free: a chunk, but at most half of an even share, so that grants shrink as
/// the ledger fills up.
pub(crate) fn slack(rest: u64, chunk: u32, openers: u64) -> u64 {
    u64::from(chunk).min(rest / openers.max(1).saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(used: u32, granted: u32) -> Word {
        Word { used, granted }
    }

    #[test]
    fn the_stored_form_is_the_documented_one() {
        assert_eq!(word(1, 2).pack(), 0x0000_0002_0000_0001);
        for sample in [word(0, 0), word(u32::MAX, 0), word(0, u32::MAX), word(7, 9)] {
            assert_eq!(Word::unpack(sample.pack()), sample);
        }
        assert_eq!(word(u32::MAX, u32::MAX).total(), 2 * u64::from(u32::MAX));
    }

    #[test]
    fn a_take_leaves_the_total() {
        assert_eq!(word(3, 5).charge(5, u32::MAX), Some(word(8, 0)));
        assert_eq!(word(3, 5).charge(6, u32::MAX), None);
        assert_eq!(word(u32::MAX, 1).charge(1, u32::MAX), None);
    }

    #[test]
    fn a_give_never_raises_the_total_and_hands_back_above_the_threshold() {
        let keep = Keep::of_chunk(4);
        assert_eq!(word(9, 0).release(8, keep), Some(word(1, 8)));
        assert_eq!(word(9, 0).release(9, keep), Some(word(0, 4)));
        assert_eq!(word(9, 0).release(10, keep), None);
        assert_eq!(word(5, 0).release(5, Keep::of_chunk(0)), Some(word(0, 0)));
    }

    #[test]
    fn a_refill_takes_the_last_unit_and_not_one_more() {
        assert_eq!(word(1, 2).refill(5, 3, u32::MAX, |_| 9), Some(word(6, 0)));
        assert_eq!(word(1, 2).refill(6, 3, u32::MAX, |_| 9), None);
        assert_eq!(word(1, 2).refill(4, 6, u32::MAX, |rest| rest / 2), Some(word(5, 2)));
        assert_eq!(word(u32::MAX, 0).refill(1, 5, u32::MAX, |_| 0), None);
    }

    #[test]
    fn nothing_comes_into_use_above_the_limit_of_the_slot() {
        assert_eq!(word(3, 5).charge(2, 5), Some(word(5, 3)));
        assert_eq!(word(3, 5).charge(3, 5), None);
        assert_eq!(word(6, 5).charge(0, 5), Some(word(6, 5)), "nothing can always be had");
        assert_eq!(word(1, 0).refill(4, 9, 5, |_| 9), Some(word(5, 0)));
        assert_eq!(word(1, 0).refill(3, 9, 5, |_| 9), Some(word(4, 1)), "grants stay within it");
        assert_eq!(word(1, 0).refill(5, 9, 5, |_| 9), None);
        assert_eq!(word(3, 5).within(5), word(3, 2));
        assert_eq!(word(9, 5).within(5), word(9, 0));
    }

    #[test]
    fn slack_shrinks_as_the_ledger_fills_up() {
        assert_eq!(slack(1000, 64, 2), 64);
        assert_eq!(slack(100, 64, 2), 25);
        assert_eq!(slack(3, 64, 2), 0);
        assert_eq!(slack(1000, 64, 0), 64);
    }
}
