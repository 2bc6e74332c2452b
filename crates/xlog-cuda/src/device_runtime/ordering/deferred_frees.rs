//! Returned blocks that are not freed yet: those still used on other streams, and those whose free failed half way.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_driver::sync::{Mutex, MutexGuard};

use crate::device_runtime::resource::{Generation, ResourceResult};

/// More than this are freed with a wait.
const MAX_DEFERRED: usize = 1024;

/// The returned blocks of one resource that wait for something.
#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    /// Frees that failed half way.
    failed_frees: Mutex<Vec<Generation>>,
    /// Returned blocks whose uses on other streams have not completed.
    deferred: Mutex<VecDeque<Generation>>,
    deferred_count: AtomicUsize,
    /// Held while blocks are taken out of `deferred` or `failed_frees` and freed, so that a reap misses none that is on its way.
    reaper_lock: Mutex<()>,
}

/// The first failure of several steps is what is told.
pub(crate) fn keep_first(outcome: &mut ResourceResult<()>, this: ResourceResult<()>) {
    if outcome.is_ok() {
        *outcome = this;
    }
}

impl DeferredFrees {
    /// A free failed half way; a reap tries it again.
    pub(crate) fn keep_failed(&self, generation: Generation) {
        self.failed_frees.lock().push(generation);
    }

    pub(crate) fn take_failed(&self) -> Vec<Generation> {
        std::mem::take(&mut *self.failed_frees.lock())
    }

    /// Keeps a block until its uses have completed; false when too many are kept already.
    pub(crate) fn defer(&self, generation: Generation) -> bool {
        let mut deferred = self.deferred.lock();
        if deferred.len() >= MAX_DEFERRED {
            return false;
        }
        deferred.push_back(generation);
        self.deferred_count.store(deferred.len(), Ordering::Release);
        true
    }

    /// Takes up to `count` of those that are there now, the oldest first, and hands each to `body`, which may put it by again.
    pub(crate) fn drain_up_to(&self, count: usize, mut body: impl FnMut(Generation)) {
        for _ in 0..count.min(self.deferred_count.load(Ordering::Acquire)) {
            let mut deferred = self.deferred.lock();
            let Some(oldest) = deferred.pop_front() else { return };
            self.deferred_count.store(deferred.len(), Ordering::Release);
            drop(deferred);
            body(oldest);
        }
    }

    pub(crate) fn reaper_lock(&self) -> MutexGuard<'_, ()> {
        self.reaper_lock.lock()
    }

    pub(crate) fn try_reaper_lock(&self) -> Option<MutexGuard<'_, ()>> {
        self.reaper_lock.try_lock()
    }

    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.deferred_count.load(Ordering::Acquire) > 0
    }
}
