//! Memory whose last use no stream names: it is freed once the host has seen the device idle.
//!
//! A wait for the device fails while any code captures a graph. Then the memory is parked, and the next wait for its runtime that succeeds frees
//! it.
//!
//! Invariants:
//! - Nothing is freed before a wait that began after it was parked has succeeded, or the device is lost.
//! - No lock is held over a wait or a free.

use std::sync::Arc;

use xlog_base::Mutex;
use xlog_cuda::device_runtime::{ResourceError, XlogDeviceRuntime};
use xlog_cuda::{Result, XlogError};

/// Who calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A function of Python, without the interpreter's lock. What it parks may call other libraries when it is freed.
    Python,
    /// PyTorch, which may hold its locks: only what it has parked itself is freed then.
    Torch,
}

/// A free that has to wait.
struct Parked {
    by: By,
    runtime: Arc<XlogDeviceRuntime>,
    free: Box<dyn FnOnce() + Send>,
}

static PARKED: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

impl By {
    fn frees(self, parked: &Parked, runtime: &Arc<XlogDeviceRuntime>) -> bool {
        Arc::ptr_eq(&parked.runtime, runtime) && (self == Self::Python || self == parked.by)
    }

    /// Waits until everything queued on the device has completed, and frees what is parked.
    pub(crate) fn wait(self, runtime: &Arc<XlogDeviceRuntime>) -> Result<()> {
        let parked: Vec<_> =
            PARKED.lock().extract_if(.., |each| self.frees(each, runtime)).collect();
        let waited = runtime.device().synchronize();
        // After a lost device there is nothing to wait for.
        let is_lost = matches!(&waited, Err(XlogError::Driver(error)) if error.is_device_lost());
        match waited.is_ok() || is_lost {
            true => parked.into_iter().for_each(|each| (each.free)()),
            false => PARKED.lock().extend(parked),
        }
        waited
    }

    /// Frees after a later wait.
    pub(crate) fn park(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        free: impl FnOnce() + Send + 'static,
    ) {
        let parked = Parked { by: self, runtime: runtime.clone(), free: Box::new(free) };
        PARKED.lock().push(parked);
    }

    /// Frees after a wait, or, if that fails, after a later one.
    pub(crate) fn free(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        free: impl FnOnce() + Send + 'static,
    ) {
        self.park(runtime, free);
        // What failed stays parked.
        let _ = self.wait(runtime);
    }

    /// [`By::wait`] if something is parked; whether that was freed.
    pub(crate) fn sweep(self, runtime: &Arc<XlogDeviceRuntime>) -> Result<bool> {
        let has_parked = PARKED.lock().iter().any(|each| self.frees(each, runtime));
        if has_parked { self.wait(runtime).map(|()| true) } else { Ok(false) }
    }

    /// Allocates. If memory is short, once more without what is parked.
    pub(crate) fn with_room<T>(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        allocate: impl Fn() -> Result<T>,
    ) -> Result<T> {
        allocate().or_else(|refused| {
            match is_short(&refused) && matches!(self.sweep(runtime), Ok(true)) {
                true => allocate(),
                false => Err(refused),
            }
        })
    }
}

/// Whether a request was refused for want of memory.
pub(crate) fn is_short(error: &XlogError) -> bool {
    matches!(
        error,
        XlogError::Resource(ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. })
    )
}
