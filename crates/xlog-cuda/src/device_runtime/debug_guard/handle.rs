//! A handle on a guard that is part of a stack of resources.

use std::sync::{Arc, Weak};

use xlog_base::debug_fields;

use super::core::GuardCore;
use super::journal::Journal;
use super::post_mortem::GuardPostMortem;
use super::report::GuardReport;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceResult};

/// The operations of a handle, independent of the resource's type.
trait Guards: Send + Sync {
    fn check_now(&self) -> ResourceResult<()>;
    fn flush(&self) -> ResourceResult<()>;
    fn quarantine(&self) -> (usize, usize);
    fn describe(&self, ptr: u64) -> GuardPostMortem;
}

impl<R: DeviceMemoryResource> Guards for GuardCore<R> {
    fn check_now(&self) -> ResourceResult<()> {
        Self::check_now(self)
    }

    fn flush(&self) -> ResourceResult<()> {
        Self::flush(self)
    }

    fn quarantine(&self) -> (usize, usize) {
        self.registry.lock().quarantine()
    }

    fn describe(&self, ptr: u64) -> GuardPostMortem {
        Self::describe(self, Some(ptr))
    }
}

/// A handle on a [`DebugGuardResource`](super::DebugGuardResource).
///
/// It does not keep the guard alive. After the guard is dropped, checks do nothing, but its reports stay readable.
#[derive(Clone)]
pub struct GuardHandle {
    guard: Weak<dyn Guards>,
    journal: Arc<Journal>,
}

impl GuardHandle {
    pub(super) fn new<R: DeviceMemoryResource + 'static>(core: &Arc<GuardCore<R>>) -> Self {
        let journal = core.journal.clone();
        let guard = Arc::downgrade(core);
        Self { guard, journal }
    }

    /// See [`DebugGuardResource::check_now`](super::DebugGuardResource::check_now).
    pub fn check_now(&self) -> ResourceResult<()> {
        self.guard.upgrade().map_or(Ok(()), |guard| guard.check_now())
    }

    /// See [`DebugGuardResource::flush_quarantine`](super::DebugGuardResource::flush_quarantine).
    pub fn flush_quarantine(&self) -> ResourceResult<()> {
        self.guard.upgrade().map_or(Ok(()), |guard| guard.flush())
    }

    /// Bytes and blocks in the quarantine.
    #[must_use]
    pub fn quarantine(&self) -> (usize, usize) {
        self.guard.upgrade().map_or((0, 0), |guard| guard.quarantine())
    }

    /// The guarded blocks around an address, live or freed, the nearest first; `None` after the guard was dropped.
    #[must_use]
    pub fn describe_address(&self, ptr: u64) -> Option<GuardPostMortem> {
        self.guard.upgrade().map(|guard| guard.describe(ptr))
    }

    /// The damage found so far, the oldest first; at most 1000 reports are kept.
    #[must_use]
    pub fn reports(&self) -> Vec<GuardReport> {
        self.journal.reports()
    }
}

debug_fields!(self: GuardHandle {
    is_alive: self.guard.strong_count() > 0, reports: self.journal.total(),
});
