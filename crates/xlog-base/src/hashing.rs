//! Fast hashing for integer keys: addresses, handles and numbers of blocks. The driver or the runtime chooses the keys, so the hash does
//! not resist chosen collisions.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map with integer keys.
pub type IntMap<K, V> = HashMap<K, V, BuildHasherDefault<IntHasher>>;
/// A set of integer keys.
pub type IntSet<K> = HashSet<K, BuildHasherDefault<IntHasher>>;

/// A multiplicative hash for integers. Addresses differ in their middle bits, and a product has its best bits at the top; `finish` rotates
/// them to the bottom, which hash tables use first.
#[derive(Default, Debug)]
pub struct IntHasher(u64);

impl Hasher for IntHasher {
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = self.0.wrapping_add(word).wrapping_mul(0xf135_7aea_2e62_a9c5);
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }
}
