//! Random generators that depend on their seed alone, so that a printed seed replays a run.
//!
//! Their sequences never change, because schedules, logs and check values of workloads depend on them. They are not cryptographic.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// Makes the sequences of [`Random`] and [`SplitMix`] differ for one seed.
const SALT: u64 = 0x5851_f42d_4c95_7f2d;

/// SplitMix64, the source of decisions of the simulated device's scheduler.
#[derive(Clone, Debug)]
pub struct SplitMix(SplitMix64);

impl SplitMix {
    /// Starts the sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// Returns the next 64-bit number.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `bound`, from the high bits; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }
}

/// Random numbers for tests and workloads, independent of the simulated device's schedule under the same seed.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// Starts the sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed ^ SALT))
    }

    /// Returns the next 64-bit number.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.below_u64(bound as u64) as usize
    }

    /// Returns a 64-bit number below `bound`; 0 if `bound` is 0.
    pub fn below_u64(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// Returns true with probability 1/`n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below_u64(n) == 0
    }

    /// Returns true with a probability of `percent` percent.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below_u64(100) < percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_published_sequence() {
        let mut random = SplitMix::new(1_234_567);
        let numbers: [u64; 3] = std::array::from_fn(|_| random.next_u64());
        let published =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(numbers, published);
        let mut salted = Random::new(1_234_567 ^ SALT);
        assert_eq!(salted.next_u64(), published[0]);
    }

    #[test]
    fn bounds_hold_and_zero_is_none() {
        let (mut random, mut split) = (Random::new(3), SplitMix::new(3));
        for bound in [1, 2, 7, usize::MAX] {
            for _ in 0..100 {
                assert!(random.below(bound) < bound && split.below(bound) < bound);
            }
        }
        assert_eq!((random.below(0), random.below_u64(0), split.below(0)), (0, 0, 0));
        assert!(random.chance(100) && !random.chance(0));
    }
}
