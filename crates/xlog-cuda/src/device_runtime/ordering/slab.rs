//! Numbered places that never move: safe to look at by number, also when the number is stale.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use xlog_driver::sync::{BiasedMutex, thread_index};

const SHARDS: usize = 16;
/// Places in use from which on those of other threads are looked at, and how many are taken over at a time.
const STEAL_THRESHOLD: u32 = 4096;
const STEAL_BATCH: usize = 256;
/// New places that are taken at a time.
const FRESH_BATCH: u32 = 16;

/// A growing array of `T` in chunks of `CHUNK`, and which of its places are free.
#[derive(Debug)]
pub(crate) struct Slab<T, const CHUNK: usize = 512> {
    chunks: Box<[OnceLock<Box<[T; CHUNK]>>]>,
    used: AtomicU32,
    /// No chunk from this one on was ever made, so that a walk over all stays short.
    reach: AtomicU32,
    free: [Shard; SHARDS],
}

/// Which shard a thread has depends on the whole process, so a seeded scheduler must not see its lock.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard(BiasedMutex<Vec<u32>>);

/// Threads keep to a shard of their own as far as there are enough.
#[inline]
fn shard() -> usize {
    thread_index() as usize % SHARDS
}

impl<T: Default, const CHUNK: usize> Slab<T, CHUNK> {
    /// Room for up to `slots`, taken as they are needed.
    pub(crate) fn new(slots: u32) -> Self {
        let chunks = (slots as usize).div_ceil(CHUNK);
        Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            used: AtomicU32::new(0),
            reach: AtomicU32::new(0),
            free: Default::default(),
        }
    }

    /// A place nobody has, as its last owner left it; `None` when all are taken.
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
        // What one thread takes another may give back: its places are not left lying.
        if self.used.load(Ordering::Relaxed) >= STEAL_THRESHOLD
            && let Some(slot) = self.steal(mine)
        {
            return Some(slot);
        }
        // The last places may lie in the shards of other threads.
        self.fresh(mine).or_else(|| self.free.iter().find_map(|shard| shard.0.with(Vec::pop)))
    }

    /// Takes up to `maximum` free places that this thread has at hand; the last of them is the one that was given back last.
    pub(crate) fn allocate_cached(&self, slots: &mut Vec<u32>, maximum: usize) {
        self.free[shard()].0.with(|free| {
            let from = free.len().saturating_sub(maximum);
            slots.extend(free.drain(from..));
        });
    }

    /// Takes some of another thread's free places, so that this is not done often.
    #[cold]
    fn steal(&self, mine: usize) -> Option<u32> {
        let others = self.free.iter().enumerate().filter(|(at, _)| *at != mine);
        let mut slots = others.map(|(_, shard)| shard).find_map(|shard| {
            let some = |free: &mut Vec<u32>| {
                let from = free.len().saturating_sub(STEAL_BATCH);
                free.split_off(from)
            };
            shard.0.try_with(some).filter(|slots| !slots.is_empty())
        })?;
        let slot = slots.pop();
        self.free[mine].0.with(|free| free.append(&mut slots));
        slot
    }

    /// A place that was never used. Several are taken at a time, so that those of different threads do not lie side by side.
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
        // The next one is the lowest.
        self.free[mine].0.with(|free| free.extend(slots.skip(1).rev()));
        Some(slot)
    }

    /// What is at a place, made if there never was anything; `None` beyond the last place.
    pub(crate) fn get_or_make(&self, slot: u32) -> Option<&T> {
        let at = slot as usize / CHUNK;
        let chunk = self.chunks.get(at)?.get_or_init(|| {
            self.reach.fetch_max(at as u32 + 1, Ordering::Release);
            // By way of a list: so large an array must not go over the stack.
            let list: Box<[T]> = (0..CHUNK).map(|_| T::default()).collect();
            list.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| T::default())))
        });
        chunk.get(slot as usize % CHUNK)
    }

    /// All there are, used or not, with their places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let reach = self.reach.load(Ordering::Acquire) as usize;
        let reached = self.chunks.iter().take(reach).enumerate();
        let made = reached.filter_map(|(at, chunk)| Some((at, chunk.get()?)));
        made.flat_map(|(at, chunk)| {
            chunk.iter().enumerate().map(move |(n, value)| ((at * CHUNK + n) as u32, value))
        })
    }

    /// Gives places back.
    pub(crate) fn free(&self, slots: impl IntoIterator<Item = u32>) {
        self.free[shard()].0.with(|free| free.extend(slots));
    }

    /// What is at a place; `None` where there never was anything.
    #[inline(always)]
    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?.get()?;
        chunk.get(slot as usize % CHUNK)
    }
}
