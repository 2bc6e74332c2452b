//! Returned blocks that are not freed yet: other streams still use them, or their free failed.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_driver::sync::{Mutex, MutexGuard};

use super::tracker::Tracker;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, BlockTable};
use crate::device_runtime::resource::{Generation, ResourceResult, first_error};
use crate::stream::RawStream;

/// The maximum of deferred frees; further frees queue waits.
const MAX_DEFERRED: usize = 1024;

/// The deferred and failed frees of one resource.
#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    /// Frees that failed; a reap retries them.
    failed_frees: Mutex<Vec<Generation>>,
    /// Returned blocks whose uses on other streams have not completed.
    deferred: Mutex<VecDeque<Generation>>,
    deferred_count: AtomicUsize,
    /// Held while blocks are removed from `deferred` or `failed_frees` and freed, so that a reap misses no free in flight.
    reaper_lock: Mutex<()>,
}

/// Keeps the first failure.
fn keep_first(outcome: &mut ResourceResult<()>, this: ResourceResult<()>) {
    if outcome.is_ok() {
        *outcome = this;
    }
}

impl DeferredFrees {
    pub(crate) fn keep_failed(&self, generation: Generation) {
        self.failed_frees.lock().push(generation);
    }

    /// Frees a block by `free`, which keeps it after a failure. A block whose stream is being captured is kept without an error.
    pub(crate) fn free_unless_captured(
        &self,
        owner: &RawStream,
        generation: Generation,
        free: impl FnOnce() -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        let is_captured = || owner.check_not_capturing("free").is_err();
        if is_captured() {
            self.keep_failed(generation);
            return Ok(());
        }
        match free() {
            // A capture has begun since.
            Err(_) if is_captured() => Ok(()),
            freed => freed,
        }
    }

    /// Defers a free until the uses of the block have completed; false if too many are deferred.
    pub(crate) fn defer(&self, generation: Generation) -> bool {
        let mut deferred = self.deferred.lock();
        if deferred.len() >= MAX_DEFERRED {
            return false;
        }
        deferred.push_back(generation);
        self.deferred_count.store(deferred.len(), Ordering::Release);
        true
    }

    /// Removes the oldest deferred block that `is_wanted`. The caller holds the reaper lock.
    pub(crate) fn remove_first(
        &self,
        mut is_wanted: impl FnMut(Generation) -> bool,
    ) -> Option<Generation> {
        let mut deferred = self.deferred.lock();
        let at = deferred.iter().position(|&generation| is_wanted(generation))?;
        let removed = deferred.remove(at);
        self.deferred_count.store(deferred.len(), Ordering::Release);
        removed
    }

    /// Removes deferred blocks, oldest first, and passes each to `body` until that breaks. `body` may defer a block again.
    fn drain(&self, mut body: impl FnMut(Generation) -> ControlFlow<()>) {
        for _ in 0..self.deferred_count.load(Ordering::Acquire) {
            let mut deferred = self.deferred.lock();
            let Some(oldest) = deferred.pop_front() else { return };
            self.deferred_count.store(deferred.len(), Ordering::Release);
            drop(deferred);
            if body(oldest).is_break() {
                return;
            }
        }
    }

    /// Frees completed deferred blocks, oldest first; stops after `pending` blocks that are still in use, which move to the back.
    /// Each block is freed once, so only blocks in use cost extra.
    pub(crate) fn free_completed(
        &self,
        pending: usize,
        tracker: &Tracker,
        mut free: impl FnMut(Generation, &BlockMeta) -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut left = pending;
        self.drain(|generation| {
            let Some(meta) = tracker.table.at(generation) else { return ControlFlow::Continue(()) };
            if tracker.is_complete(meta) {
                keep_first(&mut outcome, free(generation, meta));
                return ControlFlow::Continue(());
            }
            if !self.defer(generation) {
                keep_first(&mut outcome, free(generation, meta));
            }
            left = left.saturating_sub(1);
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        outcome
    }

    /// Frees all deferred blocks by `free`, which queues the necessary waits.
    pub(crate) fn free_all(
        &self,
        tracker: &Tracker,
        mut free: impl FnMut(Generation, &BlockMeta) -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        self.drain(|generation| {
            if let Some(meta) = tracker.table.at(generation) {
                keep_first(&mut outcome, free(generation, meta));
            }
            ControlFlow::Continue(())
        });
        outcome
    }

    pub(crate) fn retry_failed(
        &self,
        tracker: &Tracker,
        mut free: impl FnMut(Generation, &BlockMeta) -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        let failed = std::mem::take(&mut *self.failed_frees.lock());
        first_error(failed, |generation| {
            tracker.table.at(generation).map_or(Ok(()), |meta| free(generation, meta))
        })
    }

    pub(crate) fn reaper_lock(&self) -> MutexGuard<'_, ()> {
        self.reaper_lock.lock()
    }

    pub(crate) fn try_reaper_lock(&self) -> Option<MutexGuard<'_, ()>> {
        self.reaper_lock.try_lock()
    }

    pub(crate) fn bytes(&self, table: &BlockTable) -> u64 {
        let deferred = self.deferred.lock();
        let blocks = deferred.iter().filter_map(|&generation| table.at(generation));
        blocks.map(|meta| meta.bytes() as u64).sum()
    }

    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.deferred_count.load(Ordering::Acquire) > 0
    }
}
