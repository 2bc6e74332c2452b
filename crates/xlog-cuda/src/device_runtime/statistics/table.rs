//! What is known of each live block, by its generation.
//!
//! Each shard has a table. Only a thread inside the shard's lock puts blocks in; any thread takes them out, without a lock: a
//! generation never comes twice, so a place that holds it holds it until the one free that succeeds empties it. Places come in
//! rows of eight keys, one cache line; a row that is full sends the block on to the next, twice as large segment.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::names::Ids;
use crate::device_runtime::resource::{Generation, SLOT_BITS};

const ROW: usize = 8;
const FIRST_ROWS: usize = 64;
const SEGMENTS: usize = 20;

/// What is kept of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    pub(super) ids: Ids,
    /// When it was allocated, by the coarse clock.
    pub(super) born: u64,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Row {
    keys: [AtomicU64; ROW],
    values: [Value; ROW],
}

#[derive(Debug, Default)]
struct Value {
    ptr: AtomicU64,
    bytes: AtomicU64,
    ids: AtomicU64,
    born: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Table {
    segments: [OnceLock<Box<[Row]>>; SEGMENTS],
}

/// Generations from 0 on are keys from 1 on: 0 is an empty place.
#[inline(always)]
fn key_of(generation: Generation) -> u64 {
    generation.0.wrapping_add(1)
}

/// Generations that follow each other share a row, so that short lives stay in few cache lines, and each has a place of its own
/// there. `rows` is a power of two.
#[inline(always)]
fn place_of(generation: Generation, rows: usize) -> (usize, usize) {
    let index = ((generation.0 >> SLOT_BITS) ^ (generation.0 & ((1 << SLOT_BITS) - 1))) as usize;
    ((index / ROW) & rows.wrapping_sub(1), index % ROW)
}

impl Table {
    pub(super) fn new() -> Self {
        Self { segments: [const { OnceLock::new() }; SEGMENTS] }
    }

    /// Keeps a block. `first` is the segment to begin with, and is moved on past full rows. Call it inside the shard's lock only.
    ///
    /// False when there is no room, which takes more live blocks than fit in a host's memory.
    #[inline(always)]
    pub(super) fn put(&self, generation: Generation, entry: &Entry, first: &mut usize) -> bool {
        if let Some(rows) = self.segments.get(*first).and_then(OnceLock::get) {
            let (row, at) = place_of(generation, rows.len());
            // Acquire: the one that emptied the place has read it.
            if let Some(row) = rows.get(row)
                && row.keys[at].load(Ordering::Acquire) == 0
            {
                row.write(at, generation, entry);
                return true;
            }
        }
        self.put_beside(generation, entry, first)
    }

    /// [`put`](Self::put) of a block whose own place is taken.
    #[cold]
    #[inline(never)]
    fn put_beside(&self, generation: Generation, entry: &Entry, first: &mut usize) -> bool {
        for (at, segment) in self.segments.iter().enumerate().skip(*first) {
            let rows =
                segment.get_or_init(|| (0..FIRST_ROWS << at).map(|_| Row::default()).collect());
            let Some(row) = rows.get(place_of(generation, rows.len()).0) else { continue };
            // Acquire: the one that emptied the place has read it.
            let empty = row.keys.iter().position(|key| key.load(Ordering::Acquire) == 0);
            if let Some(place) = empty {
                row.write(place, generation, entry);
                *first = at;
                return true;
            }
        }
        false
    }

    #[inline(always)]
    fn find(&self, generation: Generation) -> Option<(&AtomicU64, &Value)> {
        if let Some(rows) = self.segments[0].get() {
            let (row, at) = place_of(generation, rows.len());
            if let Some(row) = rows.get(row)
                && row.keys[at].load(Ordering::Acquire) == key_of(generation)
            {
                return Some((&row.keys[at], &row.values[at]));
            }
        }
        self.find_beside(generation)
    }

    /// [`find`](Self::find) of a block that is not in its own place of the first segment.
    #[inline(never)]
    fn find_beside(&self, generation: Generation) -> Option<(&AtomicU64, &Value)> {
        let wanted = key_of(generation);
        for segment in &self.segments {
            let rows = segment.get()?;
            let row = rows.get(place_of(generation, rows.len()).0)?;
            for (key, value) in row.keys.iter().zip(&row.values) {
                if key.load(Ordering::Acquire) == wanted {
                    return Some((key, value));
                }
            }
        }
        None
    }

    /// Takes a block out: its bytes and numbers. Only for the one free that succeeded.
    #[inline(always)]
    pub(super) fn take(&self, generation: Generation) -> Option<(u64, Ids)> {
        let (key, value) = self.find(generation)?;
        let taken = (value.bytes.load(Ordering::Relaxed), Ids(value.ids.load(Ordering::Relaxed)));
        key.store(0, Ordering::Release);
        Some(taken)
    }

    /// Whether a block is here.
    pub(super) fn has(&self, generation: Generation) -> bool {
        self.find(generation).is_some()
    }

    /// All blocks. Exact while the shard is locked and no free is under way.
    pub(super) fn for_each(&self, mut see: impl FnMut(Generation, Entry)) {
        for row in self.segments.iter().filter_map(OnceLock::get).flatten() {
            for (key, value) in row.keys.iter().zip(&row.values) {
                let found = key.load(Ordering::Acquire);
                if found != 0 {
                    see(Generation(found.wrapping_sub(1)), value.read());
                }
            }
        }
    }
}

impl Row {
    /// Fills an empty place.
    #[inline(always)]
    fn write(&self, at: usize, generation: Generation, entry: &Entry) {
        let (key, value) = (&self.keys[at % ROW], &self.values[at % ROW]);
        value.ptr.store(entry.ptr, Ordering::Relaxed);
        value.bytes.store(entry.bytes, Ordering::Relaxed);
        value.ids.store(entry.ids.0, Ordering::Relaxed);
        value.born.store(entry.born, Ordering::Relaxed);
        key.store(key_of(generation), Ordering::Release);
    }
}

impl Value {
    #[inline(always)]
    fn read(&self) -> Entry {
        Entry {
            ptr: self.ptr.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            ids: Ids(self.ids.load(Ordering::Relaxed)),
            born: self.born.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: u64) -> Entry {
        Entry { ptr: bytes << 8, bytes, ids: Ids(bytes), born: 0 }
    }

    #[test]
    fn blocks_of_one_slot_and_of_one_sequence_are_all_found() {
        let table = Table::new();
        let mut first = 0;
        // A stranger's resource may leave the slot 0; another may count in it.
        let of = [|n: u64| Generation(n << SLOT_BITS), |n: u64| Generation((7 << SLOT_BITS) | n)];
        for (number, of) in of.iter().enumerate() {
            let base = number as u64 * 100_000 + 8;
            for n in base..base + 20_000 {
                assert!(table.put(of(n), &entry(n), &mut first));
            }
        }
        let mut seen = 0;
        table.for_each(|_, _| seen += 1);
        assert_eq!(seen, 40_000);
        for (number, of) in of.iter().enumerate() {
            let base = number as u64 * 100_000 + 8;
            for n in (base..base + 20_000).rev() {
                assert_eq!(table.take(of(n)), Some((n, Ids(n))));
                assert_eq!(table.take(of(n)), None);
            }
        }
    }
}
