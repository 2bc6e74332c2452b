//! Numbers that depend only on a seed and a row, so that device and host can generate any of them at any time.

use std::iter::Sum;

/// The increment of the counter; odd, so that no two rows collide.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes the bits of a number; the function is a bijection.
#[inline]
#[must_use]
pub fn mix(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Returns the number of a row.
#[inline]
#[must_use]
pub fn number(seed: u64, row: u64) -> u64 {
    mix(seed.wrapping_add(row.wrapping_add(1).wrapping_mul(STEP)))
}

/// Returns the key of a row, below `domain`.
#[inline]
#[must_use]
pub fn key(seed: u64, row: u64, domain: u32) -> u32 {
    (((number(seed, row) >> 32) * u64::from(domain)) >> 32) as u32
}

/// Returns an edge between two vertices below `vertices`: its source in the high half, its target in the low one.
#[inline]
#[must_use]
pub fn edge(seed: u64, row: u64, vertices: u32) -> u64 {
    let number = number(seed, row);
    let from = ((number >> 32) * u64::from(vertices)) >> 32;
    let to = ((number & 0xffff_ffff) * u64::from(vertices)) >> 32;
    (from << 32) | to
}

/// Derives a seed for one of several purposes.
#[must_use]
pub fn seed_for(seed: u64, what: u64) -> u64 {
    mix(seed ^ mix(what.wrapping_add(STEP)))
}

/// A fingerprint of a multiset of numbers: their count, and two sums of their hashes.
///
/// It ignores the order of the numbers, and fingerprints of parts add up to that of the whole. Two different multisets have
/// equal fingerprints with a probability of about 2^-128.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Fingerprint {
    /// The count of numbers.
    pub count: u64,
    sums: [u64; 2],
}

impl Fingerprint {
    /// Adds a number.
    #[inline]
    pub fn add(&mut self, number: u64) {
        self.count += 1;
        self.sums[0] = self.sums[0].wrapping_add(mix(number ^ STEP));
        self.sums[1] = self.sums[1].wrapping_add(mix(number.rotate_left(32).wrapping_add(STEP)));
    }

    /// Adds all numbers of another fingerprint.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        for (sum, part) in self.sums.iter_mut().zip(other.sums) {
            *sum = sum.wrapping_add(part);
        }
    }
}

impl Sum for Fingerprint {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |mut all, part| {
            all.merge(&part);
            all
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_sees_what_is_lost_changed_or_twice_and_no_order() {
        let of = |numbers: &[u64]| {
            let mut print = Fingerprint::default();
            numbers.iter().for_each(|number| print.add(*number));
            print
        };
        let whole = of(&[1, 2, 3, 1 << 40]);
        assert_eq!(whole, of(&[1 << 40, 3, 1, 2]));
        for other in [&[1, 2, 3][..], &[1, 2, 2, 1 << 40], &[1, 2, 3, 1 << 8], &[0, 3, 3, 1 << 40]]
        {
            assert_ne!(whole, of(other), "{other:?}");
        }
        let mut parts = of(&[1, 2]);
        parts.merge(&of(&[3, 1 << 40]));
        assert_eq!(whole, parts);
    }

    #[test]
    fn keys_and_edges_stay_in_their_domain_and_reach_all_of_it() {
        let mut met = [false; 7];
        for row in 0..200 {
            met[key(3, row, 7) as usize] = true;
            let edge = edge(3, row, 7);
            assert!(edge >> 32 < 7 && edge & 0xffff_ffff < 7);
        }
        assert_eq!(met, [true; 7]);
        assert_eq!(key(3, 5, 1), 0);
    }
}
