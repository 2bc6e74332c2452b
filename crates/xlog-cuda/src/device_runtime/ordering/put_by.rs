//! Returned blocks that are not freed yet: those still used on other streams, and those whose free failed half way.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_driver::sync::{Mutex, MutexGuard};

use crate::device_runtime::resource::{Generation, ResourceResult};

/// More than this are freed with a wait.
const MOST_PUT_BY: usize = 1024;

/// The returned blocks of one resource that wait for something.
#[derive(Debug, Default)]
pub(crate) struct PutBy {
    /// Frees that failed half way.
    kept: Mutex<Vec<Generation>>,
    /// Returned blocks whose uses on other streams have not completed.
    put_by: Mutex<VecDeque<Generation>>,
    put_by_count: AtomicUsize,
    /// Held while blocks are taken out of `put_by` or `kept` and freed, so that a reap misses none that is on its way.
    turn: Mutex<()>,
}

/// The first failure of several steps is what is told.
pub(crate) fn keep_first(outcome: &mut ResourceResult<()>, this: ResourceResult<()>) {
    if outcome.is_ok() {
        *outcome = this;
    }
}

impl PutBy {
    /// A free failed half way; a reap tries it again.
    pub(crate) fn keep(&self, generation: Generation) {
        self.kept.lock().push(generation);
    }

    pub(crate) fn take_kept(&self) -> Vec<Generation> {
        std::mem::take(&mut *self.kept.lock())
    }

    /// Keeps a block until its uses have completed; false when too many are kept already.
    pub(crate) fn put_by(&self, generation: Generation) -> bool {
        let mut put_by = self.put_by.lock();
        if put_by.len() >= MOST_PUT_BY {
            return false;
        }
        put_by.push_back(generation);
        self.put_by_count.store(put_by.len(), Ordering::Release);
        true
    }

    /// Takes up to `count` of those that are there now, the oldest first, and hands each to `body`, which may put it by again.
    pub(crate) fn take_each(&self, count: usize, mut body: impl FnMut(Generation)) {
        for _ in 0..count.min(self.put_by_count.load(Ordering::Acquire)) {
            let mut put_by = self.put_by.lock();
            let Some(oldest) = put_by.pop_front() else { return };
            self.put_by_count.store(put_by.len(), Ordering::Release);
            drop(put_by);
            body(oldest);
        }
    }

    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    pub(crate) fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.try_lock()
    }

    #[inline]
    pub(crate) fn has_put_by(&self) -> bool {
        self.put_by_count.load(Ordering::Acquire) > 0
    }
}
