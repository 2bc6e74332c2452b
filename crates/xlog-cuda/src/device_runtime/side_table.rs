//! Data of live blocks, by generation: the charges of a budget, the blocks that statistics list.
//!
//! If the resource below gives each live block a slot of its own ([`DeviceMemoryResource::places_blocks`]), the data are a few
//! plain words in that slot. Otherwise they are in maps.
//!
//! Invariants:
//! - The words are written before the block is handed out. No other block has the slot until this one is freed below.
//! - A free takes the entry before it calls the resource below, so the table never lists a free block. Of several frees of
//!   one block only the first finds the entry; the others are refused here and cannot overtake it. A refused free restores it.
//!
//! [`DeviceMemoryResource::places_blocks`]: super::resource::DeviceMemoryResource::places_blocks

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use xlog_base::{IntMap, Mutex};

use super::resource::{Generation, ResourceError, ResourceResult, SLOT_BITS};

/// Slots of a run. A thread owns whole runs, each a whole number of pairs of cache lines.
const RUN: usize = 16;
const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNKS: usize = 1 << (SLOT_BITS - CHUNK_BITS);
const MAPS: usize = 16;

/// A table of `N` words for each live block.
#[derive(Debug)]
pub(crate) enum SideTable<const N: usize> {
    BySlot(Box<[Chunk<N>]>),
    ByGeneration(Box<[Map<N>; MAPS]>),
}

/// Created when its first slot is used.
type Chunk<const N: usize> = OnceLock<Box<[Run<N>]>>;
type Map<const N: usize> = Mutex<IntMap<Generation, MapEntry<N>>>;

#[derive(Debug)]
pub(crate) struct MapEntry<const N: usize> {
    words: [u64; N],
    is_taken: bool,
}

#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Run<const N: usize>([Slot<N>; RUN]);

#[derive(Debug)]
struct Slot<const N: usize> {
    /// 0 before the first entry: generations are larger. The complement of the generation once a free has taken the entry: it
    /// is no generation of this slot, since the slot is a part of the generation.
    generation: AtomicU64,
    words: [AtomicU64; N],
}

/// The entry of a block whose free is in progress. Dropping it, after a refusal or a panic, restores the entry.
#[derive(Debug)]
#[must_use]
pub(crate) struct TakenEntry<'a, const N: usize> {
    table: &'a SideTable<N>,
    generation: Generation,
    pub(crate) words: [u64; N],
}

impl<const N: usize> TakenEntry<'_, N> {
    /// Ends the entry: the resource below has freed the block.
    #[inline(always)]
    pub(crate) fn discard(self) {
        if let SideTable::ByGeneration(maps) = self.table {
            map_of(maps, self.generation).lock().remove(&self.generation);
        }
        std::mem::forget(self);
    }
}

impl<const N: usize> Drop for TakenEntry<'_, N> {
    fn drop(&mut self) {
        self.table.restore(self.generation, self.words);
    }
}

impl<const N: usize> SideTable<N> {
    /// Creates an empty table. `by_slot` is `places_blocks` of the resource below.
    pub(crate) fn new(by_slot: bool) -> Self {
        if by_slot {
            Self::BySlot(std::iter::repeat_with(OnceLock::new).take(CHUNKS).collect())
        } else {
            Self::ByGeneration(Box::new(std::array::from_fn(|_| Mutex::default())))
        }
    }

    /// Stores the words of a block that is about to be handed out.
    #[inline(always)]
    pub(crate) fn insert(&self, generation: Generation, words: [u64; N]) {
        match self {
            Self::BySlot(chunks) => {
                let slot = slot_of(chunks, generation);
                // A concurrent listing finds no generation, or another one.
                slot.generation.store(0, Ordering::Relaxed);
                fence(Ordering::Release);
                for (word, value) in slot.words.iter().zip(words) {
                    word.store(value, Ordering::Relaxed);
                }
                slot.generation.store(generation.0, Ordering::Release);
            }
            Self::ByGeneration(maps) => {
                let entry = MapEntry { words, is_taken: false };
                map_of(maps, generation).lock().insert(generation, entry);
            }
        }
    }

    /// Takes the entry of a block that is about to be freed. `None` if the table never had the block; an error if another free
    /// has taken the entry.
    #[inline(always)]
    pub(crate) fn take(&self, generation: Generation) -> ResourceResult<Option<TakenEntry<'_, N>>> {
        let words = match self {
            Self::BySlot(chunks) => {
                let slot = slot_of(chunks, generation);
                // Read first: once the entry is gone, another block may be in the slot.
                let words = std::array::from_fn(|at| slot.words[at].load(Ordering::Relaxed));
                let taken = slot.generation.compare_exchange(
                    generation.0,
                    !generation.0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                match taken {
                    Ok(_) => words,
                    Err(found) if found == !generation.0 => {
                        return Err(freed_elsewhere(generation));
                    }
                    Err(_) => return Ok(None),
                }
            }
            Self::ByGeneration(maps) => {
                match map_of(maps, generation).lock().get_mut(&generation) {
                    Some(entry) if entry.is_taken => return Err(freed_elsewhere(generation)),
                    Some(entry) => {
                        entry.is_taken = true;
                        entry.words
                    }
                    None => return Ok(None),
                }
            }
        };
        Ok(Some(TakenEntry { table: self, generation, words }))
    }

    #[cold]
    fn restore(&self, generation: Generation, words: [u64; N]) {
        match self {
            Self::BySlot(chunks) => {
                // Fails if the slot has another block: this one was freed without the table.
                let slot = &slot_of(chunks, generation).generation;
                let _ = slot.compare_exchange(
                    !generation.0,
                    generation.0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
            }
            Self::ByGeneration(_) => self.insert(generation, words),
        }
    }

    /// Visits all entries. May miss entries that are inserted or removed concurrently.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(Generation, [u64; N])) {
        match self {
            Self::BySlot(chunks) => {
                let slots =
                    chunks.iter().filter_map(OnceLock::get).flatten().flat_map(|run| &run.0);
                for slot in slots {
                    let generation = Generation(slot.generation.load(Ordering::Acquire));
                    let words = std::array::from_fn(|at| slot.words[at].load(Ordering::Relaxed));
                    fence(Ordering::Acquire);
                    // The words belong to this block if it still has the slot.
                    if std::ptr::eq(slot_of(chunks, generation), slot)
                        && generation.0 != 0
                        && slot.generation.load(Ordering::Relaxed) == generation.0
                    {
                        visit(generation, words);
                    }
                }
            }
            Self::ByGeneration(maps) => {
                for map in maps.iter() {
                    let map = map.lock();
                    let live = map.iter().filter(|(_, entry)| !entry.is_taken);
                    live.for_each(|(generation, entry)| visit(*generation, entry.words));
                }
            }
        }
    }
}

#[inline(always)]
fn slot_of<const N: usize>(chunks: &[Chunk<N>], generation: Generation) -> &Slot<N> {
    let index = generation.slot() as usize;
    let chunk = chunks[(index >> CHUNK_BITS) % CHUNKS].get_or_init(new_chunk);
    &chunk[index % CHUNK / RUN].0[index % RUN]
}

#[cold]
fn freed_elsewhere(generation: Generation) -> ResourceError {
    ResourceError::UseAfterFree { generation }
}

#[cold]
fn new_chunk<const N: usize>() -> Box<[Run<N>]> {
    let slot = |_| Slot { generation: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; N] };
    (0..CHUNK / RUN).map(|_| Run(std::array::from_fn(slot))).collect()
}

fn map_of<const N: usize>(maps: &[Map<N>; MAPS], generation: Generation) -> &Map<N> {
    &maps[(generation.0 ^ (generation.0 >> SLOT_BITS)) as usize % MAPS]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn count(table: &SideTable<2>) -> usize {
        let mut seen = 0;
        table.for_each(|_, _| seen += 1);
        seen
    }

    fn take(table: &SideTable<2>, generation: Generation) -> Option<[u64; 2]> {
        let taken = table.take(generation).ok()??;
        let words = taken.words;
        taken.discard();
        Some(words)
    }

    /// A resource of other code may always use slot 0, or count in the slot.
    #[test]
    fn blocks_of_one_slot_and_of_one_sequence_are_all_found() {
        let table = SideTable::<2>::new(false);
        let of = [|n: u64| Generation(n << SLOT_BITS), |n: u64| Generation((7 << SLOT_BITS) | n)];
        for (number, of) in of.iter().enumerate() {
            let base = number as u64 * 100_000 + 8;
            (base..base + 20_000).for_each(|n| table.insert(of(n), [n, 1]));
        }
        assert_eq!(count(&table), 40_000);
        for (number, of) in of.iter().enumerate() {
            let base = number as u64 * 100_000 + 8;
            for n in (base..base + 20_000).rev() {
                assert_eq!(take(&table, of(n)), Some([n, 1]));
                assert_eq!(take(&table, of(n)), None);
            }
        }
        assert_eq!(count(&table), 0);
    }

    #[test]
    fn a_late_free_leaves_the_next_block_of_the_slot() {
        let table = SideTable::<2>::new(true);
        let of = |n: u64| Generation(n << SLOT_BITS | 5000);
        table.insert(of(1), [1, 1]);
        table.insert(of(2), [2, 2]);
        assert_eq!((take(&table, of(1)), take(&table, of(2))), (None, Some([2, 2])));
        assert_eq!((count(&table), take(&table, of(2))), (0, None));
    }

    #[test]
    fn a_refused_free_is_found_again_unless_the_slot_has_another_block() {
        for by_slot in [true, false] {
            let table = SideTable::<2>::new(by_slot);
            let of = |n: u64| Generation(n << SLOT_BITS | 7);
            table.insert(of(1), [1, 2]);
            let taken = table.take(of(1)).unwrap();
            assert_eq!((count(&table), taken.is_some()), (0, true));
            // A concurrent free of the block is refused.
            assert!(matches!(table.take(of(1)), Err(ResourceError::UseAfterFree { .. })));
            drop(taken);
            assert_eq!(count(&table), 1);
            let taken = table.take(of(1)).unwrap();
            if by_slot {
                table.insert(of(2), [3, 4]);
            }
            drop(taken);
            assert_eq!(take(&table, of(1)), (!by_slot).then_some([1, 2]));
            assert_eq!(take(&table, of(2)), by_slot.then_some([3, 4]));
        }
    }
}
