//! The debug guard: redzones around every block, poison in it, a quarantine after its free.
//!
//! Fills and checks are queued in stream order. Over a resource that tracks uses, the host waits for none of them, except that the free
//! of an idle block between guard pages waits for its check. The next [`reap_pending`](DeviceMemoryResource::reap_pending) or
//! [`check_now`](DebugGuardResource::check_now) returns the damage found. [`reports`](DebugGuardResource::reports) lists it, and it is
//! written to the configured output.
//!
//! Invariants:
//! - A quarantined block is outstanding, and the quarantine never exceeds its limits.
//! - A block is charged with the redzones that the guard adds.
//!
//! Redzones detect neither reads outside a block nor writes beyond them.

mod checker;
mod checks;
mod config;
mod core;
mod handle;
mod journal;
mod pages;
mod post_mortem;
mod redzones;
mod registry;
mod report;
mod resource;
mod sampling;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::core::GuardCore;
use super::resource::{DeviceMemoryResource, ResourceError, ResourceHome, ResourceResult};
use super::stream_pool::StreamPool;
use crate::CudaDevice;

pub use config::{GuardConfig, GuardMode, GuardOutput, PagePlacement};
pub use handle::GuardHandle;
pub use post_mortem::{GuardPostMortem, NearbyBlock};
pub use report::{DamageKind, FoundBy, GuardReport, Moment};

/// The time that the drop of a guard waits for the last checks, and the number of times that it looks at least: on a busy machine its
/// thread may not run for that long.
const LAST_CHECKS: Duration = Duration::from_secs(2);
const LAST_LOOKS: u32 = 1000;

/// Guards the blocks of the resource below.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, AsyncCudaResource, DamageKind, DebugGuardResource, DeviceMemoryResource, GuardConfig, GuardOutput,
///     ResourceError, StreamPool,
/// };
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let pool = Arc::new(StreamPool::with_defaults(device.clone()));
/// let inner = AsyncCudaResource::new(device.clone(), 0, pool.clone());
/// let config = GuardConfig::default().with_output(GuardOutput::Silent);
/// let guard = DebugGuardResource::new(Box::new(inner), config);
/// let stream = pool.lease()?;
///
/// let rows = guard.allocate(100, stream.id(), AllocTag("rows"))?;
/// let generation = rows.generation;
/// // SAFETY: the byte after the block lies in the guard's redzone; the write is the damage to detect.
/// unsafe { stream.memset(rows.ptr, 0, 101)? };
/// guard.deallocate(rows)?; // queues the check, and waits for nothing
///
/// assert_eq!(guard.reap_pending(), Err(ResourceError::OutOfBounds { generation }));
/// let report = &guard.reports()[0];
/// assert_eq!((report.kind, report.offset, report.damaged), (DamageKind::OutOfBounds, 100, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DebugGuardResource<R: DeviceMemoryResource = Box<dyn DeviceMemoryResource + Send + Sync>>
{
    core: Arc<GuardCore<R>>,
}

impl DebugGuardResource {
    /// Guards the blocks of `inner`.
    ///
    /// The guard queues its work on the device and streams of [`DeviceMemoryResource::home`]. If `inner` has none, the first call fails:
    /// use [`DebugGuardResource::over`].
    #[must_use]
    pub fn new(inner: Box<dyn DeviceMemoryResource + Send + Sync>, config: GuardConfig) -> Self {
        Self::on_home(inner, config)
    }
}

impl<R: DeviceMemoryResource> DebugGuardResource<R> {
    /// [`DebugGuardResource::new`] over a resource of known type.
    #[must_use]
    pub fn on_home(inner: R, config: GuardConfig) -> Self {
        let home = inner.home();
        Self { core: Arc::new(GuardCore::new(inner, config, home)) }
    }

    /// Guards a resource without [`home`](DeviceMemoryResource::home).
    ///
    /// If its home is another one, the first call returns a [`ResourceError::Driver`] that names both.
    #[must_use]
    pub fn over(
        inner: R,
        device: Arc<CudaDevice>,
        streams: Arc<StreamPool>,
        config: GuardConfig,
    ) -> Self {
        let home = ResourceHome::new(device).with_streams(streams);
        Self { core: Arc::new(GuardCore::new(inner, config, Some(home))) }
    }

    /// Checks every block that is live or in the quarantine, waits for the results, and returns the first damage that no call has
    /// returned yet.
    pub fn check_now(&self) -> ResourceResult<()> {
        self.core.check_now()
    }

    /// Evicts every block from the quarantine, after a check. It does not wait.
    pub fn flush_quarantine(&self) -> ResourceResult<()> {
        self.core.flush()
    }

    /// Bytes and blocks in the quarantine.
    #[must_use]
    pub fn quarantine(&self) -> (usize, usize) {
        self.core.registry.lock().quarantine()
    }

    /// The damage found so far, the oldest first; at most 1000 reports are kept.
    #[must_use]
    pub fn reports(&self) -> Vec<GuardReport> {
        self.core.journal.reports()
    }

    /// The guarded blocks around an address, live or freed, the nearest first.
    #[must_use]
    pub fn describe_address(&self, ptr: u64) -> GuardPostMortem {
        self.core.describe(Some(ptr))
    }

    /// Returns a handle that may outlive the guard.
    #[must_use]
    pub fn handle(&self) -> GuardHandle
    where
        R: 'static,
    {
        GuardHandle::new(&self.core)
    }

    /// The resource below.
    #[must_use]
    pub fn inner(&self) -> &R {
        &self.core.inner
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &GuardConfig {
        &self.core.config
    }
}

impl<R: DeviceMemoryResource> GuardCore<R> {
    fn check_now(&self) -> ResourceResult<()> {
        let checked = self.check_all(FoundBy::CheckNow);
        let collected = self.collect(true);
        self.with_post_mortem(self.or_unreported(checked.and(collected)))
    }

    /// Returns the error of the call, or else the oldest damage that no call has returned.
    fn or_unreported(&self, outcome: ResourceResult<()>) -> ResourceResult<()> {
        outcome?;
        self.journal.pop_unreported().map_or(Ok(()), Err::<(), ResourceError>)
    }

    /// Runs the last checks. The wait is bounded: the program may hold a stream.
    fn end(&self) {
        let Ok(parts) = &self.parts else { return };
        let is_lost =
            || matches!(parts.device.driver().memory_info(), Err(error) if error.is_device_lost());
        if is_lost() {
            // Its work will never complete.
            return;
        }
        let _ = self.check_all(FoundBy::Drop);
        let _ = self.flush();
        let until = Instant::now() + LAST_CHECKS;
        for look in 1.. {
            let is_late = look > LAST_LOOKS && Instant::now() > until;
            let is_collected = self.collect(false).is_ok();
            let is_done = {
                let registry = self.registry.lock();
                registry.pending.is_empty() && registry.unmapping.is_empty()
            };
            if !is_collected || is_done || is_late || is_lost() {
                break;
            }
            std::thread::yield_now();
        }
        parts.checker.end();
        if let Some(pages) = &self.pages {
            pages.end();
        }
    }
}

impl<R: DeviceMemoryResource> Drop for DebugGuardResource<R> {
    fn drop(&mut self) {
        self.core.end();
    }
}

impl<R: DeviceMemoryResource> fmt::Debug for DebugGuardResource<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DebugGuardResource")
            .field("config", &self.core.config)
            .field("quarantine", &self.quarantine())
            .field("reports", &self.core.journal.total())
            .finish_non_exhaustive()
    }
}
