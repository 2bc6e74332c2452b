//! Per-thread shards of a value, which keep threads that count or charge from contending.
//!
//! A thread uses the shard of its index modulo `N`, so up to `N` threads with consecutive indices share none. The lock of a shard is
//! biased, so its usual thread enters by plain stores. Reading all shards at one instant costs one process-wide barrier.

use super::biased_mutex::BiasedMutex;
use super::threads::thread_index;

/// `N` shards, each on its own cache lines.
#[derive(Debug)]
pub struct Sharded<T, const N: usize>(Box<[Shard<T>; N]>);

#[derive(Debug)]
#[repr(align(128))]
struct Shard<T>(BiasedMutex<T>);

impl<T, const N: usize> Sharded<T, N> {
    /// Makes shards with the values of `value`.
    pub fn new(value: impl Fn() -> T) -> Self {
        Self(Box::new(std::array::from_fn(|_| Shard(BiasedMutex::new(value())))))
    }

    /// The shard of the calling thread.
    #[inline(always)]
    pub fn own(&self) -> &BiasedMutex<T> {
        &self.0[thread_index() as usize % N].0
    }

    /// Runs `body` with all shards at one instant. `body` must not call anything that could wait.
    pub fn with_all<R>(&self, body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        let all: [&BiasedMutex<T>; N] = std::array::from_fn(|at| &self.0[at].0);
        BiasedMutex::with_all(&all, body)
    }
}
