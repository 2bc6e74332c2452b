//! Hash tables, sums and digits for the bodies of simulated kernels.
//!
//! Buffers are bytes, like device memory, with little-endian numbers.

use super::super::numbers::mix;
use super::super::{EMPTY, TILE};
use super::DIGITS;

pub(super) type Word = [u8; 8];
pub(super) type Half = [u8; 4];

pub(super) fn words(bytes: &[u8]) -> &[Word] {
    bytes.as_chunks().0
}

pub(super) fn words_mut(bytes: &mut [u8]) -> &mut [Word] {
    bytes.as_chunks_mut().0
}

pub(super) fn halves(bytes: &[u8]) -> &[Half] {
    bytes.as_chunks().0
}

pub(super) fn halves_mut(bytes: &mut [u8]) -> &mut [Half] {
    bytes.as_chunks_mut().0
}

/// Returns the slots of a table from the start of a key's bucket on, wrapping around.
fn places<const BUCKET: usize>(
    table: &[Word],
    of: u64,
) -> impl Iterator<Item = usize> + use<BUCKET> {
    let mask = table.len().wrapping_sub(1);
    let first = mix(of) as usize & !(BUCKET - 1);
    (0..table.len()).map(move |step| first.wrapping_add(step) & mask)
}

pub(super) fn insert(table: &mut [Word], of: u64, entry: u64) {
    let empty = places::<1>(table, of).find(|place| u64::from_le_bytes(table[*place]) == EMPTY);
    if let Some(place) = empty {
        table[place] = entry.to_le_bytes();
    }
}

/// Inserts a value at the first empty slot from the bucket of `of` on; returns `Some(false)` if it was present, and `None` if
/// `limit` slots are taken.
pub(super) fn insert_unique<const BUCKET: usize>(
    table: &mut [Word],
    of: u64,
    value: u64,
    limit: usize,
) -> Option<bool> {
    for place in places::<BUCKET>(table, of).take(limit) {
        match u64::from_le_bytes(table[place]) {
            EMPTY => {
                table[place] = value.to_le_bytes();
                return Some(true);
            }
            other if other == value => return Some(false),
            _ => {}
        }
    }
    None
}

/// Returns the entries of a key.
pub(super) fn matches<const BUCKET: usize>(table: &[Word], key: u32) -> impl Iterator<Item = u64> {
    places::<BUCKET>(table, u64::from(key))
        .map(|place| u64::from_le_bytes(table[place]))
        .take_while(|entry| *entry != EMPTY)
        .filter(move |entry| entry >> 32 == u64::from(key))
}

/// Counts the matches of keys, and sums them by tile.
pub(super) fn count_matches(
    keys: impl Iterator<Item = u32>,
    table: &[Word],
    counts: &mut [u8],
    sums: &mut [u8],
) {
    let sums = words_mut(sums);
    sums.fill([0; 8]);
    for (row, (key, count)) in keys.zip(halves_mut(counts)).enumerate() {
        let found = matches::<1>(table, key).count() as u32;
        *count = found.to_le_bytes();
        add(&mut sums[row / TILE], u64::from(found));
    }
}

pub(super) fn add(word: &mut Word, more: u64) {
    *word = u64::from_le_bytes(*word).wrapping_add(more).to_le_bytes();
}

/// Writes the matches of keys, each tile from the offset in its sum.
pub(super) fn write_matches(
    keys: impl Iterator<Item = u32>,
    table: &[Word],
    sums: &[Word],
    out: &mut [Word],
    pair: impl Fn(usize, u64) -> u64,
) {
    let mut next = 0;
    for (row, key) in keys.enumerate() {
        if row % TILE == 0 {
            next = u64::from_le_bytes(sums[row / TILE]) as usize;
        }
        for entry in matches::<1>(table, key) {
            store(out, next, pair(row, entry).to_le_bytes());
            next = next.wrapping_add(1);
        }
    }
}

/// Stores at an index that was read from the device. In a test of missing order the index may be arbitrary, so a store outside
/// the range is dropped.
pub(super) fn store(out: &mut [Word], at: usize, word: Word) {
    if let Some(place) = out.get_mut(at) {
        *place = word;
    }
}

pub(super) fn low(word: &Word) -> u32 {
    u64::from_le_bytes(*word) as u32
}

pub(super) fn digit(word: &Word, shift: u32) -> usize {
    (u64::from_le_bytes(*word) >> shift) as usize % DIGITS
}
