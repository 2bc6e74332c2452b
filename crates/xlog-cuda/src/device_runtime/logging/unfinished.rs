//! Frees that failed half way: the resource has the block and finishes the free at a later reap.
//!
//! The log has the failure of such a free. When the block is free, it gets a second record of the free: a success, served by a
//! reap. The list is empty unless a driver call failed, so an allocation only reads one flag.

use std::sync::atomic::{AtomicBool, Ordering};

use xlog_base::{Mutex, MutexGuard};

use crate::device_runtime::resource::BlockId;

/// Blocks whose free failed half way, each with the fields of its record.
pub(super) struct UnfinishedFrees<T> {
    has_any: AtomicBool,
    frees: Mutex<Vec<(BlockId, T)>>,
}

impl<T> UnfinishedFrees<T> {
    pub(super) fn new() -> Self {
        Self { has_any: AtomicBool::new(false), frees: Mutex::new(Vec::new()) }
    }

    /// Returns whether there is one. Relaxed suffices: the resource orders a thread that gets the memory after its free.
    #[inline(always)]
    pub(super) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Relaxed)
    }

    fn frees(&self) -> MutexGuard<'_, Vec<(BlockId, T)>> {
        self.frees.lock()
    }

    pub(super) fn add(&self, block: BlockId, about: T) {
        let mut frees = self.frees();
        frees.push((block, about));
        self.has_any.store(true, Ordering::Relaxed);
    }

    /// Removes the frees that are finished and numbers them by `order`.
    ///
    /// Numbers are issued under the lock: a thread that finds its address gone from the list gets a higher number.
    pub(super) fn drain_finished(
        &self,
        is_free: impl Fn(BlockId) -> bool,
        order: impl Fn() -> u64,
    ) -> Vec<(u64, T)> {
        let mut frees = self.frees();
        let finished =
            frees.extract_if(.., |(block, _)| is_free(*block)).map(|(_, about)| (order(), about));
        let finished = finished.collect();
        self.has_any.store(!frees.is_empty(), Ordering::Relaxed);
        finished
    }
}
