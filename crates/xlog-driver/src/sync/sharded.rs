//! One value for each group of threads, so that threads that count or charge rarely meet.
//!
//! A thread enters the shard of its index. While there are at most `N` threads, no two of them share one. The lock of a shard is biased, so
//! its usual thread enters by plain stores. Visiting all shards at one instant costs one barrier through all running threads.

use super::biased_mutex::BiasedMutex;
use super::threads::thread_index;

/// `N` shards, each on cache lines of its own.
#[derive(Debug)]
pub struct Sharded<T, const N: usize>(Box<[Shard<T>; N]>);

#[derive(Debug)]
#[repr(align(128))]
struct Shard<T>(BiasedMutex<T>);

impl<T, const N: usize> Sharded<T, N> {
    /// Shards with the values that `value` makes.
    pub fn new(value: impl Fn() -> T) -> Self {
        Self(Box::new(std::array::from_fn(|_| Shard(BiasedMutex::new(value())))))
    }

    /// The shard of the running thread.
    #[inline(always)]
    pub fn own(&self) -> &BiasedMutex<T> {
        &self.0[thread_index() as usize % N].0
    }

    /// Runs `body` with all shards at one instant. `body` calls nothing that could wait.
    pub fn with_all<R>(&self, body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        let all: [&BiasedMutex<T>; N] = std::array::from_fn(|at| &self.0[at].0);
        BiasedMutex::with_all(&all, body)
    }
}
