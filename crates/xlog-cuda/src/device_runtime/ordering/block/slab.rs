//! Slab: numbered slots that never move, so that a lookup by a stale number is safe.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use xlog_driver::sync::{BiasedMutex, thread_index};

const SHARDS: usize = 16;
/// Used slots from which on a thread steals free slots of other threads, and the number that it steals.
const STEAL_THRESHOLD: u32 = 4096;
const STEAL_BATCH: usize = 256;
/// Fresh slots that are created at a time.
const FRESH_BATCH: u32 = 16;

/// A growing array of `T` in chunks of `CHUNK`, with a free list for each shard of threads.
#[derive(Debug)]
pub(crate) struct Slab<T, const CHUNK: usize = 512> {
    chunks: Box<[OnceLock<Box<[T; CHUNK]>>]>,
    used: AtomicU32,
    /// The number of chunks created so far, which bounds a walk.
    reach: AtomicU32,
    free: [Shard; SHARDS],
}

/// The shard of a thread depends on the whole process, so a seeded scheduler must not see its lock.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard(BiasedMutex<Vec<u32>>);

/// Returns the shard of this thread, which is its own while there are enough.
#[inline]
fn shard() -> usize {
    thread_index() as usize % SHARDS
}

impl<T: Default, const CHUNK: usize> Slab<T, CHUNK> {
    /// Creates a slab of up to `slots`, which are created on demand.
    pub(crate) fn new(slots: u32) -> Self {
        let chunks = (slots as usize).div_ceil(CHUNK);
        Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            used: AtomicU32::new(0),
            reach: AtomicU32::new(0),
            free: Default::default(),
        }
    }

    /// Allocates a slot, with the value that its last user left. `None` if all slots are used.
    #[inline]
    pub(crate) fn allocate(&self) -> Option<(u32, &T)> {
        let mine = shard();
        let slot = match self.free[mine].0.enter().and_then(|mut free| free.pop()) {
            Some(slot) => slot,
            None => self.allocate_slow(mine)?,
        };
        self.get(slot).map(|value| (slot, value))
    }

    #[cold]
    #[inline(never)]
    fn allocate_slow(&self, mine: usize) -> Option<u32> {
        if let Some(slot) = self.free[mine].0.with(Vec::pop) {
            return Some(slot);
        }
        // If one thread allocates and another frees, the freed slots must return.
        if self.used.load(Ordering::Relaxed) >= STEAL_THRESHOLD
            && let Some(slot) = self.steal(mine)
        {
            return Some(slot);
        }
        // The last slots may lie in the shards of other threads.
        self.fresh(mine).or_else(|| self.free.iter().find_map(|shard| shard.0.with(Vec::pop)))
    }

    /// Allocates up to `maximum` slots from this thread's free list; the most recently freed one is last.
    pub(crate) fn allocate_cached(&self, slots: &mut Vec<u32>, maximum: usize) {
        self.free[shard()].0.with(|free| {
            let from = free.len().saturating_sub(maximum);
            slots.extend(free.drain(from..));
        });
    }

    /// Steals a batch of free slots from another thread.
    #[cold]
    fn steal(&self, mine: usize) -> Option<u32> {
        let others = self.free.iter().enumerate().filter(|(at, _)| *at != mine);
        let mut slots = others.map(|(_, shard)| shard).find_map(|shard| {
            let steal = |free: &mut [&mut Vec<u32>]| {
                let free = free.first_mut()?;
                let from = free.len().saturating_sub(STEAL_BATCH);
                Some(free.split_off(from)).filter(|slots| !slots.is_empty())
            };
            BiasedMutex::with_all(&[&shard.0], steal)
        })?;
        let slot = slots.pop();
        self.free[mine].0.with(|free| free.append(&mut slots));
        slot
    }

    /// Creates a batch of slots, so that slots of different threads share no cache line.
    fn fresh(&self, mine: usize) -> Option<u32> {
        let limit = (self.chunks.len() * CHUNK) as u32;
        let next_used = |used: u32| (used + FRESH_BATCH).min(limit);
        let slot = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used < limit).then(|| next_used(used))
            })
            .ok()?;
        let slots = slot..next_used(slot);
        for slot in slots.clone() {
            self.get_or_make(slot);
        }
        // The lowest slot is allocated next.
        self.free[mine].0.with(|free| free.extend(slots.skip(1).rev()));
        Some(slot)
    }

    /// Returns the value in a slot, and creates its chunk at the first call; `None` beyond the last slot.
    pub(crate) fn get_or_make(&self, slot: u32) -> Option<&T> {
        let at = slot as usize / CHUNK;
        let chunk = self.chunks.get(at)?.get_or_init(|| {
            self.reach.fetch_max(at as u32 + 1, Ordering::Release);
            // Through a list: an array of this size must not be built on the stack.
            let list: Box<[T]> = (0..CHUNK).map(|_| T::default()).collect();
            list.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| T::default())))
        });
        chunk.get(slot as usize % CHUNK)
    }

    /// Iterates over the values of used and free slots, with their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let reach = self.reach.load(Ordering::Acquire) as usize;
        let reached = self.chunks.iter().take(reach).enumerate();
        let made = reached.filter_map(|(at, chunk)| Some((at, chunk.get()?)));
        made.flat_map(|(at, chunk)| {
            chunk.iter().enumerate().map(move |(n, value)| ((at * CHUNK + n) as u32, value))
        })
    }

    pub(crate) fn free(&self, slots: impl IntoIterator<Item = u32>) {
        self.free[shard()].0.with(|free| free.extend(slots));
    }

    /// Returns the value in a slot; `None` if its chunk does not exist.
    #[inline(always)]
    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?.get()?;
        chunk.get(slot as usize % CHUNK)
    }
}
