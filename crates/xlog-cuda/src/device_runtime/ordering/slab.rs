//! Numbered places that never move: safe to look at by number, also when the number is stale.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

const CHUNK_BITS: u32 = 9;
const CHUNK: usize = 1 << CHUNK_BITS;
const SHARDS: usize = 16;

/// A growing array of `T`, and which of its places are free.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    chunks: Box<[OnceLock<Box<[T; CHUNK]>>]>,
    used: AtomicU32,
    free: [Shard; SHARDS],
}

/// A standard mutex: which shard a thread has depends on the whole process, so a seeded scheduler must not see it. Nothing is
/// called while it is held.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard(Mutex<Vec<u32>>);

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads keep to a shard of their own as far as there are enough.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    MINE.with(|mine| *mine)
}

impl<T: Default> Slab<T> {
    /// Room for up to `places`, taken as they are needed.
    pub(crate) fn new(places: u32) -> Self {
        let chunks = (places as usize).div_ceil(CHUNK);
        Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            used: AtomicU32::new(0),
            free: Default::default(),
        }
    }

    /// A place nobody has, as its last owner left it; `None` when all are taken.
    pub(crate) fn take(&self) -> Option<(u32, &T)> {
        let mine = shard();
        if let Some(place) = self.free[mine].lock().pop() {
            return self.get(place).map(|value| (place, value));
        }
        if let Some(place) = self.fresh() {
            return self.get(place).map(|value| (place, value));
        }
        // The last places may lie in the shards of other threads.
        let place = self.free.iter().find_map(|shard| shard.lock().pop())?;
        self.get(place).map(|value| (place, value))
    }

    fn fresh(&self) -> Option<u32> {
        let limit = (self.chunks.len() * CHUNK) as u32;
        let place = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used < limit).then_some(used + 1)
            })
            .ok()?;
        self.chunks.get((place >> CHUNK_BITS) as usize)?.get_or_init(|| {
            // By way of a list: so large an array must not go over the stack.
            let list: Box<[T]> = (0..CHUNK).map(|_| T::default()).collect();
            list.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| T::default())))
        });
        Some(place)
    }

    /// Gives places back.
    pub(crate) fn give(&self, places: impl IntoIterator<Item = u32>) {
        self.free[shard()].lock().extend(places);
    }

    /// What is at a place; `None` where there never was anything.
    #[inline]
    pub(crate) fn get(&self, place: u32) -> Option<&T> {
        let chunk = self.chunks.get((place >> CHUNK_BITS) as usize)?.get()?;
        Some(&chunk[place as usize % CHUNK])
    }
}
