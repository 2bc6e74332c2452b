//! Memory whose last use is on an unknown stream: it is freed after the host has seen the device idle.
//!
//! A wait for the device would break every open capture of a graph, and fail. So while a framework has announced a capture
//! there is no wait: the memory is parked until the next successful wait for its runtime. A wait that breaks a capture that was not
//! announced fails, with the same result.
//!
//! Invariants:
//! - Nothing is freed before a wait that began after it was parked has succeeded, or the device is lost.
//! - No lock is held over a wait or a free.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_base::Mutex;
use xlog_cuda::device_runtime::{ResourceError, XlogDeviceRuntime};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{Result, XlogError};

/// The captures that PyTorch has begun on GPUs and not ended.
static ON_GPUS: AtomicUsize = AtomicUsize::new(0);
/// The same on simulated devices.
static SIMULATED: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of announced captures on devices of this kind.
pub(crate) fn open_captures(runtime: &XlogDeviceRuntime) -> &'static AtomicUsize {
    match runtime.device().properties().kind {
        DeviceKind::Cuda => &ON_GPUS,
        _ => &SIMULATED,
    }
}

/// The caller of a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A Python function, without the GIL. Freeing what it parked may call other libraries.
    Python,
    /// PyTorch, which may hold its own locks, so it frees only what PyTorch parked.
    Torch,
}

/// A free that must wait.
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

    /// Waits until everything queued on the device has completed, and frees the parked memory. Refused during a capture.
    pub(crate) fn wait(self, runtime: &Arc<XlogDeviceRuntime>) -> Result<()> {
        if open_captures(runtime).load(Ordering::Acquire) > 0 {
            return Err(ResourceError::StreamMisuse(
                "PyTorch captures a CUDA graph, and a wait for the device would break it; wait after the capture".to_owned(),
            )
            .into());
        }
        let parked: Vec<_> =
            PARKED.lock().extract_if(.., |each| self.frees(each, runtime)).collect();
        let waited = runtime.device().synchronize();
        // A lost device runs nothing to wait for.
        let is_lost = matches!(&waited, Err(XlogError::Driver(error)) if error.is_device_lost());
        match waited.is_ok() || is_lost {
            true => parked.into_iter().for_each(|each| (each.free)()),
            false => PARKED.lock().extend(parked),
        }
        waited
    }

    /// Defers the free to a later wait.
    pub(crate) fn park(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        free: impl FnOnce() + Send + 'static,
    ) {
        let parked = Parked { by: self, runtime: runtime.clone(), free: Box::new(free) };
        PARKED.lock().push(parked);
    }

    /// Frees after a wait or, if that fails, after a later one.
    pub(crate) fn free(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        free: impl FnOnce() + Send + 'static,
    ) {
        self.park(runtime, free);
        // After a failed wait the memory stays parked.
        let _ = self.wait(runtime);
    }

    /// Calls [`By::wait`] if something is parked; returns whether it was freed.
    pub(crate) fn sweep(self, runtime: &Arc<XlogDeviceRuntime>) -> Result<bool> {
        let has_parked = PARKED.lock().iter().any(|each| self.frees(each, runtime));
        if has_parked { self.wait(runtime).map(|()| true) } else { Ok(false) }
    }

    /// Allocates. If memory is short, frees what is parked and tries once more.
    pub(crate) fn with_room<T>(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        allocate: impl Fn() -> Result<T>,
    ) -> Result<T> {
        allocate().or_else(|refused| self.make_room(runtime, refused, allocate))
    }

    /// The second half of [`By::with_room`], after a refusal.
    pub(crate) fn make_room<T>(
        self,
        runtime: &Arc<XlogDeviceRuntime>,
        refused: XlogError,
        allocate: impl Fn() -> Result<T>,
    ) -> Result<T> {
        match is_short(&refused) && matches!(self.sweep(runtime), Ok(true)) {
            true => allocate(),
            false => Err(refused),
        }
    }
}

/// Returns whether a request was refused for lack of memory.
pub(crate) fn is_short(error: &XlogError) -> bool {
    matches!(
        error,
        XlogError::Resource(ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. })
    )
}
