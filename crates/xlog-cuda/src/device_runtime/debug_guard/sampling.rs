//! Sampling: the choice of guarded blocks, and the recognition of their addresses.
//!
//! Every allocation makes the choice, and every use checks an address, so each costs one or two comparisons. A free checks the address
//! only if the resource below refused it.
//!
//! A block is chosen by a multiplicative hash of its unique generation, which is at most `u64::MAX / N` for about one block in N. A
//! counter to N would fail: in a loop with two buffers and an even N it would always choose the same one.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device_runtime::resource::Generation;

/// The low 40 bits, from the golden ratio, spread the counter of a generation. The bits above, from the root of 2, spread the block's
/// slot. They differ, because a rising slot must not cancel a falling counter.
const SPREAD: u64 = 0x6a09_e69e_3779_b97f;

/// Chooses blocks, and recognises the addresses of chosen ones.
#[derive(Debug)]
pub(super) struct Sampling {
    /// The largest chosen hash.
    most: u64,
    /// The start of the addresses of guarded blocks; [`NOWHERE`] before the first one.
    from: AtomicU64,
    /// The bytes of that address range.
    span: u64,
    is_on: bool,
}

/// An address above all device memory.
const NOWHERE: u64 = 1 << 63;

impl Sampling {
    /// Samples one block in `every`, which lies in a range of `span` bytes; all blocks if `every` is `None`.
    pub(super) fn new(every: Option<NonZeroU64>, span: usize) -> Self {
        let is_on = every.is_some();
        Self {
            most: every.map_or(u64::MAX, |every| u64::MAX / every),
            from: AtomicU64::new(if is_on { NOWHERE } else { 0 }),
            span: if is_on { span as u64 } else { u64::MAX },
            is_on,
        }
    }

    /// Returns whether only some blocks are guarded.
    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns whether the block of a generation is guarded.
    #[inline(always)]
    pub(super) fn chooses(&self, generation: Generation) -> bool {
        generation.0.wrapping_mul(SPREAD) <= self.most
    }

    /// Sets the start of the addresses of guarded blocks, before the first one is returned to the user.
    pub(super) fn set_guarded(&self, from: u64) {
        if self.is_on {
            self.from.store(from, Ordering::Relaxed);
        }
    }

    /// Returns whether an address belongs to an unguarded block.
    #[inline(always)]
    pub(super) fn passes(&self, ptr: u64) -> bool {
        // A thread got a guarded block after `from` was set. For any other address both values of `from` give the same result.
        ptr.wrapping_sub(self.from.load(Ordering::Relaxed)) >= self.span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of chosen generations in a sequence, as a thread or a resource makes it.
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
        // Slots that are freed in order are allocated in the reverse order, again with every batch.
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
