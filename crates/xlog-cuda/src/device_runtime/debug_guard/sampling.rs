//! Which blocks are guarded, where only some are, and which of those that come back were.
//!
//! A program that runs as it always does asks the first with every allocation and the second with every use, so each is a comparison or
//! two; a free asks only where the resource below has refused it.
//!
//! A block is chosen by its generation, of which no two blocks have the same: times a constant, which spreads the multiples of every small
//! number evenly, it is below one part in N of all numbers for about one block in N. To count to N would choose nothing but the second
//! buffer of every loop that has two, where N is even.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device_runtime::resource::Generation;

/// The golden ratio in the 40 bits that our generations count in; and above it, where it meets the places of records, another number
/// like that, the root of 2: places come in rows, too, and one that goes up by one must not make up for another that goes down.
const SPREAD: u64 = 0x6a09_e69e_3779_b97f;

/// Chooses blocks, and tells the addresses of those that were chosen.
#[derive(Debug)]
pub(super) struct Sampling {
    /// The largest product of a generation that is chosen.
    most: u64,
    /// Blocks that are guarded lie from here on; [`NOWHERE`] until there was one.
    from: AtomicU64,
    /// In so many bytes.
    span: u64,
    is_on: bool,
}

/// No device has memory from here on.
const NOWHERE: u64 = 1 << 63;

impl Sampling {
    /// One block in `every`, which then lies somewhere in a range of `span` bytes; all where there is no such number.
    pub(super) fn new(every: Option<NonZeroU64>, span: usize) -> Self {
        let is_on = every.is_some();
        Self {
            most: every.map_or(u64::MAX, |every| u64::MAX / every),
            from: AtomicU64::new(if is_on { NOWHERE } else { 0 }),
            span: if is_on { span as u64 } else { u64::MAX },
            is_on,
        }
    }

    /// Whether only some blocks are guarded.
    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// True when the block of a generation is to be guarded.
    #[inline(always)]
    pub(super) fn chooses(&self, generation: Generation) -> bool {
        generation.0.wrapping_mul(SPREAD) <= self.most
    }

    /// Blocks that are guarded lie from here on. Said before the first of them is handed out.
    pub(super) fn set_guarded(&self, from: u64) {
        if self.is_on {
            self.from.store(from, Ordering::Relaxed);
        }
    }

    /// True for the address of a block that the guard knows nothing of.
    #[inline(always)]
    pub(super) fn passes(&self, ptr: u64) -> bool {
        // Who has a guarded block got it after the range was said; of any other, both values say the same.
        ptr.wrapping_sub(self.from.load(Ordering::Relaxed)) >= self.span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the generations of a row, as a thread or a resource has them, are chosen.
    fn chosen(every: u64, row: impl Iterator<Item = u64>) -> usize {
        let sampling = Sampling::new(NonZeroU64::new(every), 4096);
        row.filter(|number| sampling.chooses(Generation(*number))).count()
    }

    #[test]
    fn about_one_in_so_many_is_chosen_of_every_row() {
        for every in [1, 2, 3, 10, 64, 100, 1000] {
            let wanted = (10_000 / every) as usize;
            let near = wanted - wanted / 50 - 5..=wanted + wanted / 50 + 5;
            for step in [1, 2, 3, 4, 7, 16, 100] {
                for slot in [0, 1, 77, 1 << 20] {
                    let row = (4096..).step_by(step).take(10_000);
                    let found = chosen(every, row.map(|number| number << 24 | slot));
                    assert!(near.contains(&found), "{found} of {wanted}, step {step}, slot {slot}");
                }
                let found = chosen(every, (1..).step_by(step).take(10_000));
                assert!(near.contains(&found), "{found} of {wanted}, plain, step {step}");
            }
        }
        // Records that come back in the order they went are found again in the other one, and all over again with the next batch.
        for batch in [1, 2, 3, 16, 64, 1000] {
            let numbers = 4096..4096 + 64_000;
            let up = |number: u64| number << 24 | (number % batch);
            let down = |number: u64| number << 24 | (batch - 1 - number % batch);
            for (name, of) in [("up", &up as &dyn Fn(u64) -> u64), ("down", &down)] {
                let found = chosen(100, numbers.clone().map(of));
                assert!((560..=720).contains(&found), "{found} of 640, {name}, batches of {batch}");
                for from in numbers.clone().step_by(64) {
                    let few = chosen(100, (from..from + 64).map(of));
                    assert!(few <= 5, "{few} of 64 side by side, {name}, batches of {batch}");
                }
            }
        }
        assert_eq!(chosen(1, 1..=100), 100, "one in one is every block");
        assert_eq!(chosen(u64::MAX, 1..=100_000), 0);
        let all = Sampling::new(None, 4096);
        assert!(!all.is_on());
    }

    #[test]
    fn addresses_are_told_apart_from_the_first_guarded_block_on() {
        let sampling = Sampling::new(NonZeroU64::new(10), 4096);
        for ptr in [0, 1 << 20, 1 << 57] {
            assert!(sampling.passes(ptr), "none is guarded yet");
        }
        sampling.set_guarded(1 << 40);
        for (ptr, passes) in [
            ((1 << 40) - 1, true),
            (1 << 40, false),
            ((1 << 40) + 4095, false),
            ((1 << 40) + 4096, true),
        ] {
            assert_eq!(sampling.passes(ptr), passes, "{ptr:x}");
        }
        let all = Sampling::new(None, 4096);
        assert!([0, 1 << 20, 1 << 40].into_iter().all(|ptr| !all.passes(ptr)));
    }
}
