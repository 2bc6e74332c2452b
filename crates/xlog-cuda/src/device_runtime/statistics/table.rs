//! The table of live blocks of one shard, by generation.
//!
//! Only a thread inside the shard's lock inserts; any thread removes, without a lock. Invariant: a generation is unique, so a slot
//! holds it until the one free that succeeds clears the slot.
//!
//! A block has a direct slot. If that is taken, it goes into a bucket of eight slots, whose keys share a cache line. If the bucket
//! is full, it goes into the next segment, which is twice as large.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::names::Ids;
use crate::device_runtime::resource::{Generation, SLOT_BITS};

/// Direct slots.
const DIRECT_SLOTS: usize = 512;
const BUCKET_SLOTS: usize = 8;
const FIRST_BUCKETS: usize = 64;
const SEGMENTS: usize = 20;

/// The facts of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LiveEntry {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    pub(super) ids: Ids,
    /// The time of its allocation, by the coarse clock.
    pub(super) born: u64,
}

/// The direct slots. Consecutive generations are neighbours, so that short-lived blocks stay in few cache lines.
#[derive(Debug)]
#[repr(align(64))]
struct DirectSlots {
    keys: [AtomicU64; DIRECT_SLOTS],
    values: [Value; DIRECT_SLOTS],
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    keys: [AtomicU64; BUCKET_SLOTS],
    values: [Value; BUCKET_SLOTS],
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
    own: OnceLock<Box<DirectSlots>>,
    segments: [OnceLock<Box<[Bucket]>>; SEGMENTS],
}

/// The key of a generation. Keys start at 1: 0 is an empty slot.
#[inline(always)]
fn key_of(generation: Generation) -> u64 {
    generation.0.wrapping_add(1)
}

/// A number that increases with the generation, also for resources that count in the slot bits or leave them 0.
#[inline(always)]
fn index_of(generation: Generation) -> usize {
    ((generation.0 >> SLOT_BITS) ^ generation.0) as usize
}

impl Table {
    pub(super) fn new() -> Self {
        Self { own: OnceLock::new(), segments: [const { OnceLock::new() }; SEGMENTS] }
    }

    /// The direct slot of a block; `None` before the first block.
    #[inline(always)]
    pub(super) fn direct_slot(&self, generation: Generation) -> Option<TableSlot<'_>> {
        let own = self.own.get()?;
        let at = index_of(generation) % DIRECT_SLOTS;
        Some(TableSlot { key: &own.keys[at], value: &own.values[at] })
    }

    /// Inserts a block, inside the shard's lock. `first` is the segment to try first, and advances past full buckets.
    ///
    /// Returns false without room, which takes more live blocks than a host's memory can describe.
    pub(super) fn insert(
        &self,
        generation: Generation,
        entry: &LiveEntry,
        first: &mut usize,
    ) -> bool {
        self.own.get_or_init(|| {
            Box::new(DirectSlots {
                keys: [const { AtomicU64::new(0) }; DIRECT_SLOTS],
                values: std::array::from_fn(|_| Value::default()),
            })
        });
        if let Some(own) = self.direct_slot(generation).filter(TableSlot::is_empty) {
            own.fill(generation, entry);
            return true;
        }
        for (at, segment) in self.segments.iter().enumerate().skip(*first) {
            let buckets = segment
                .get_or_init(|| (0..FIRST_BUCKETS << at).map(|_| Bucket::default()).collect());
            let Some(bucket) = bucket_of(buckets, generation) else { continue };
            let empty = slots(&bucket.keys, &bucket.values).find(TableSlot::is_empty);
            if let Some(slot) = empty {
                slot.fill(generation, entry);
                *first = at;
                return true;
            }
        }
        false
    }

    fn find(&self, generation: Generation) -> Option<TableSlot<'_>> {
        let own = self.direct_slot(generation).filter(|own| own.holds(generation));
        own.or_else(|| {
            for segment in &self.segments {
                let bucket = bucket_of(segment.get()?, generation)?;
                let found = slots(&bucket.keys, &bucket.values).find(|slot| slot.holds(generation));
                if found.is_some() {
                    return found;
                }
            }
            None
        })
    }

    /// Removes a block and returns its bytes and ids. Only for the one free that succeeded.
    pub(super) fn remove(&self, generation: Generation) -> Option<(u64, Ids)> {
        let slot = self.find(generation)?;
        let taken = slot.bytes_and_ids();
        slot.clear();
        Some(taken)
    }

    /// Returns whether a block is in the table.
    pub(super) fn contains(&self, generation: Generation) -> bool {
        self.find(generation).is_some()
    }

    /// Visits all blocks. Exact while the shard is locked and no free is in progress.
    pub(super) fn for_each(&self, mut see: impl FnMut(Generation, LiveEntry)) {
        let own = self.own.get().into_iter().flat_map(|own| slots(&own.keys, &own.values));
        let buckets = self.segments.iter().filter_map(OnceLock::get).flatten();
        for slot in own.chain(buckets.flat_map(|bucket| slots(&bucket.keys, &bucket.values))) {
            let found = slot.key.load(Ordering::Acquire);
            if found != 0 {
                see(Generation(found.wrapping_sub(1)), slot.value.read());
            }
        }
    }
}

/// The bucket of a generation. The number of buckets is a power of two.
fn bucket_of(buckets: &[Bucket], generation: Generation) -> Option<&Bucket> {
    buckets.get((index_of(generation) / BUCKET_SLOTS) & buckets.len().wrapping_sub(1))
}

fn slots<'a>(
    keys: &'a [AtomicU64],
    values: &'a [Value],
) -> impl Iterator<Item = TableSlot<'a>> + use<'a> {
    keys.iter().zip(values).map(|(key, value)| TableSlot { key, value })
}

/// A slot for one block.
pub(super) struct TableSlot<'a> {
    key: &'a AtomicU64,
    value: &'a Value,
}

impl TableSlot<'_> {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        // Acquire: the thread that cleared the slot has read it.
        self.key.load(Ordering::Acquire) == 0
    }

    #[inline(always)]
    pub(super) fn holds(&self, generation: Generation) -> bool {
        self.key.load(Ordering::Acquire) == key_of(generation)
    }

    /// Stores a block in an empty slot, inside the shard's lock.
    #[inline(always)]
    pub(super) fn fill(&self, generation: Generation, entry: &LiveEntry) {
        self.value.ptr.store(entry.ptr, Ordering::Relaxed);
        self.value.bytes.store(entry.bytes, Ordering::Relaxed);
        self.value.ids.store(entry.ids.0, Ordering::Relaxed);
        self.value.born.store(entry.born, Ordering::Relaxed);
        self.key.store(key_of(generation), Ordering::Release);
    }

    /// The bytes and ids of the stored block.
    #[inline(always)]
    pub(super) fn bytes_and_ids(&self) -> (u64, Ids) {
        (self.value.bytes.load(Ordering::Relaxed), Ids(self.value.ids.load(Ordering::Relaxed)))
    }

    /// Clears the slot. Only for the one free that succeeded.
    #[inline(always)]
    pub(super) fn clear(&self) {
        self.key.store(0, Ordering::Release);
    }
}

impl Value {
    fn read(&self) -> LiveEntry {
        LiveEntry {
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

    fn entry(bytes: u64) -> LiveEntry {
        LiveEntry { ptr: bytes << 8, bytes, ids: Ids(bytes), born: 0 }
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
                assert!(table.insert(of(n), &entry(n), &mut first));
            }
        }
        let mut seen = 0;
        table.for_each(|_, _| seen += 1);
        assert_eq!(seen, 40_000);
        for (number, of) in of.iter().enumerate() {
            let base = number as u64 * 100_000 + 8;
            for n in (base..base + 20_000).rev() {
                assert_eq!(table.remove(of(n)), Some((n, Ids(n))));
                assert_eq!(table.remove(of(n)), None);
            }
        }
    }
}
