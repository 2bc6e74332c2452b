//! The runtime of one device: the device, its streams and one memory resource.
//!
//! [`XlogDeviceRuntime`] is a facade over the resource, without locks or bookkeeping. It keeps the parts alive for the buffers and
//! recorders that use them, refuses parts of different devices or stream pools, and reports blocks that are live when it is dropped.
//!
//! Invariants:
//! - Construction checks once whether the parts fit. If they do not, every call that could use the device returns that error.
//! - A resource with live blocks is never dropped: work on them may still run.
//!
//! `core` holds the parts, `calls` forwards to the resource, `table` holds the shared runtimes of the process, `config` is the
//! configuration of a runtime, and `stack` builds one from it.

mod background_thread;
mod calls;
mod config;
mod core;
#[cfg(feature = "trace")]
mod exit;
mod idle_returns;
#[cfg(feature = "ledger")]
mod ledger_join;
#[cfg(not(feature = "ledger"))]
#[path = "runtime/no_ledger.rs"]
mod ledger_join;
#[cfg(feature = "ledger")]
mod ledger_listener;
mod limit_changes;
mod limits;
mod log_file;
mod refusal;
mod report;
mod stack;
mod table;

use std::sync::{Arc, OnceLock};

use xlog_base::debug_fields;
#[cfg(feature = "ledger")]
use xlog_ledger::Snapshot;

use self::core::{Instrumentation, RuntimeCore, mismatch};
use super::budget::{BudgetHandle, EffectiveLimit};
#[cfg(feature = "guard")]
use super::debug_guard::GuardHandle;
use super::graph::{Detour, GraphRegistry};
#[cfg(feature = "ledger")]
use super::ledger::LedgerMeter;
use super::logging::is_logging;
use super::resource::{DeviceMemoryResource, Seal};
use super::statistics::Statistics;
use super::stream_pool::StreamPool;
use crate::{CudaDevice, Result};

pub use config::{
    BUDGET_VARIABLE, GUARD_VARIABLE, LEDGER_VARIABLE, LOG_VARIABLE, QUOTA_NAME_VARIABLE,
    QUOTA_VARIABLE, RESOURCE_VARIABLE, RuntimeConfig, SANITIZER_VARIABLE, STACKS_VARIABLE,
};
pub use config::{GuardSetting, Layer, LedgerSetting, ResourceKind};
pub use ledger_join::LedgerStatus;
pub use limits::{LedgerPreview, LimitPreview};
pub use log_file::{check_log, open_log};
pub use report::{FailedFree, LeakReport, set_failed_free_handler, set_leak_handler};

#[cfg(feature = "trace")]
pub(crate) use exit::watch_pinned;
#[cfg(all(feature = "sim", feature = "trace"))]
pub(crate) use exit::watch_races;
#[cfg(feature = "ledger")]
pub(crate) use ledger_listener::Listener;
pub(crate) use refusal::Asked;
#[cfg(feature = "ledger")]
pub(crate) use report::print_line;
#[cfg(feature = "guard")]
pub(crate) use report::print_report;
#[cfg(feature = "sim")]
pub(crate) use report::report_unread_races;
pub(crate) use report::{catch_panic, report_failed_free, report_leak};

/// Does nothing without the exit handler of the feature `trace`.
#[cfg(not(feature = "trace"))]
pub(crate) fn watch_pinned(_: &Arc<super::PinnedHostResource>) {}

/// The number of device ordinals in the process-wide table.
pub const MAX_DEVICE_ORDINALS: usize = 16;

/// One device, its streams and its memory.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let block = runtime.allocate(1024, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert!(runtime.bytes_outstanding() >= 1024);
/// runtime.deallocate(block)?;
/// runtime.reap_pending()?;
/// assert_eq!(runtime.bytes_outstanding(), 0);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct XlogDeviceRuntime {
    core: Arc<RuntimeCore>,
}

impl XlogDeviceRuntime {
    /// Opens a device, `"cuda:N"`, `"sim"` or `"sim:SEED"`, and builds an unshared runtime on it by [`RuntimeConfig::default`], with the
    /// ledger and the quota of the environment ([`RuntimeConfig::with_quota_from_environment`]).
    ///
    /// Any other text is [`XlogError::BadDeviceSpec`](crate::XlogError::BadDeviceSpec), which lists the accepted forms.
    /// [`RuntimeConfig::open`] takes settings.
    pub fn open(spec: &str) -> Result<Arc<Self>> {
        RuntimeConfig::default().with_device(spec.parse()?).with_quota_from_environment()?.open()
    }

    /// Builds a runtime of these parts, outside the process-wide table.
    ///
    /// Parts of different devices or different stream pools are refused at first use, with a
    /// [`ResourceError::Driver`](super::ResourceError::Driver) that names both.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use xlog_cuda::device_runtime::StreamPool;
    /// use xlog_cuda::prelude::*;
    ///
    /// let device = Arc::new(CudaDevice::open("sim")?);
    /// let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    /// let resource = AsyncCudaResource::new(device.clone(), 0, pool.clone());
    /// let runtime = XlogDeviceRuntime::with_resource(device, 0, pool, Box::new(resource));
    /// assert!(runtime.supports_block_use_tracking());
    /// # Ok::<(), xlog_cuda::XlogError>(())
    /// ```
    #[must_use]
    pub fn with_resource(
        device: Arc<CudaDevice>,
        device_ordinal: u32,
        stream_pool: Arc<StreamPool>,
        resource: Box<dyn DeviceMemoryResource + Send + Sync>,
    ) -> Self {
        Self::compose(device, device_ordinal, stream_pool, resource, None)
    }

    fn compose(
        device: Arc<CudaDevice>,
        ordinal: u32,
        stream_pool: Arc<StreamPool>,
        resource: Box<dyn DeviceMemoryResource + Send + Sync>,
        instrumentation: Option<Instrumentation>,
    ) -> Self {
        let mismatch = mismatch(&device, ordinal, &stream_pool, &*resource);
        let is_trusted = resource.is_trusted(Seal(()));
        let resource: Arc<dyn DeviceMemoryResource + Send + Sync> = Arc::from(resource);
        let detour = if mismatch.is_some() { Detour::MISMATCH } else { 0 }
            | if is_logging() { Detour::LOG } else { 0 };
        let graphs =
            GraphRegistry::new(detour, resource.clone(), device.clone(), stream_pool.clone());
        let graphs = Arc::new(graphs);
        let core = Arc::new(RuntimeCore {
            graphs,
            mismatch,
            is_trusted,
            resource,
            device,
            ordinal,
            stream_pool,
            instrumentation,
            idle_returns: OnceLock::new(),
        });
        core.listen();
        limit_changes::follow(&core);
        #[cfg(feature = "trace")]
        exit::watch(&core);
        Self { core }
    }

    /// Builds an unshared runtime on an open device by a configuration: a budget over a resource, metered by a ledger.
    ///
    /// A configuration that names another device is refused; [`RuntimeConfig::open`] opens the device that it names. [`LedgerSetting`]
    /// defines when a ledger that cannot be joined is an error.
    pub fn with_config(device: Arc<CudaDevice>, config: &RuntimeConfig) -> Result<Self> {
        stack::stack(device, config)
    }

    /// Previews the limit and the ledger of a runtime that `config` would build on this device.
    ///
    /// For a missing ledger it tests whether the file could be created, and leaves nothing behind.
    pub fn preview_limits(device: &CudaDevice, config: &RuntimeConfig) -> Result<LimitPreview> {
        ledger_join::preview_limits(device, config)
    }

    /// Returns the shared runtime of this ordinal; the first call builds it.
    ///
    /// One thread builds it; concurrent callers wait and get the same runtime. [`XlogDeviceRuntime::configure`] sets its configuration;
    /// the default is that of the environment ([`RuntimeConfig::from_environment`]). The device is GPU number `ordinal`, unless a
    /// simulated device is configured.
    ///
    /// An ordinal outside the table, a bad setting and a device that cannot be opened are [`XlogError::Kernel`](crate::XlogError::Kernel),
    /// whose [`source`](std::error::Error::source) is the typed cause. The next call tries again.
    pub fn try_get(ordinal: u32) -> Result<&'static Self> {
        table::shared(ordinal).map(|runtime| &**runtime)
    }

    /// [`XlogDeviceRuntime::try_get`] as an `Arc`.
    pub fn try_get_arc(ordinal: u32) -> Result<Arc<Self>> {
        table::shared(ordinal).cloned()
    }

    /// Sets the configuration of this ordinal's shared runtime, instead of the environment. The last call before first use counts.
    ///
    /// It is an error, and changes nothing, if the runtime is already built or the configuration names another GPU.
    ///
    /// ```
    /// use xlog_cuda::DeviceSpec;
    /// use xlog_cuda::device_runtime::{ResourceKind, RuntimeConfig, XlogDeviceRuntime};
    ///
    /// let config = RuntimeConfig::default().with_device(DeviceSpec::Sim).with_resource(ResourceKind::Direct);
    /// XlogDeviceRuntime::configure(3, config.clone())?;
    /// assert_eq!(XlogDeviceRuntime::try_get(3)?.device().spec(), "sim");
    /// assert!(XlogDeviceRuntime::configure(3, config).is_err());
    /// # Ok::<(), xlog_cuda::XlogError>(())
    /// ```
    pub fn configure(ordinal: u32, config: RuntimeConfig) -> Result<()> {
        table::configure(ordinal, config)
    }

    /// Returns the ordinal of the device.
    pub fn device_ordinal(&self) -> u32 {
        self.core.ordinal
    }

    /// The device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.core.device
    }

    /// The stream pool that resolves stream ids of this runtime.
    pub fn stream_pool(&self) -> &Arc<StreamPool> {
        &self.core.stream_pool
    }

    /// The top of the memory stack.
    pub fn resource(&self) -> &dyn DeviceMemoryResource {
        &*self.core.resource
    }

    /// The budget over all blocks; `None` for a runtime that was composed of parts.
    pub fn budget(&self) -> Option<&BudgetHandle> {
        self.core.instrumentation.as_ref().map(|instrumentation| &instrumentation.budget)
    }

    /// The memory in use by tag, stream and query; `None` for a runtime that was composed of parts.
    pub fn usage(&self) -> Option<&Statistics> {
        self.core.instrumentation.as_ref().map(|instrumentation| &instrumentation.statistics)
    }

    /// The state of this runtime's ledger.
    pub fn ledger(&self) -> &LedgerStatus {
        self.core
            .instrumentation
            .as_ref()
            .map_or(&LedgerStatus::Off, |instrumentation| instrumentation.ledger.status())
    }

    /// A snapshot of the ledger's slots; `None` without a ledger.
    #[cfg(feature = "ledger")]
    pub fn ledger_snapshot(&self) -> Result<Option<Snapshot>> {
        let taken = self.ledger().ledger().map(|ledger| ledger.snapshot()).transpose();
        taken.map_err(|error| super::resource::ResourceError::Ledger(error.to_string()).into())
    }

    /// The meter that counts this runtime's physical bytes in the ledger; `None` without a ledger.
    #[cfg(feature = "ledger")]
    pub fn ledger_meter(&self) -> Option<&Arc<LedgerMeter>> {
        self.core.instrumentation.as_ref()?.ledger.meter()
    }

    /// Returns the smallest of all limits, and its source; `None` for a runtime that was composed of parts.
    ///
    /// It reads the current limit of the ledger. The budget follows that limit only at [`XlogDeviceRuntime::refresh_limit`]; physical
    /// bytes obey it at once.
    pub fn effective_limit(&self) -> Option<EffectiveLimit> {
        self.core.effective_limit()
    }

    /// Sets the budget to [`XlogDeviceRuntime::effective_limit`], after the limit of the ledger was changed. It replaces a limit that
    /// [`BudgetHandle::set_limit`] has set.
    pub fn refresh_limit(&self) -> Option<EffectiveLimit> {
        limit_changes::refresh(&self.core, false)
    }

    /// Refreshes the limits of all runtimes of this process that were built by configuration, after the quota of the process was
    /// changed. Returns their number.
    ///
    /// Each budget gets its [`effective_limit`](Self::effective_limit); a lower limit that [`BudgetHandle::set_limit`] has set stays.
    /// Cached memory above the limit is returned to the device, after a wait of up to a second for its work.
    pub fn refresh_all_limits() -> usize {
        limit_changes::refresh_all()
    }

    /// The guard, for its checks and reports; `None` without a guard, or for a runtime that was composed of parts.
    #[cfg(feature = "guard")]
    pub fn guard(&self) -> Option<&GuardHandle> {
        self.core
            .instrumentation
            .as_ref()
            .and_then(|instrumentation| instrumentation.guard.as_ref())
    }

    pub(crate) fn graphs(&self) -> &GraphRegistry {
        &self.core.graphs
    }

    pub(crate) fn share(&self) -> Self {
        Self { core: self.core.clone() }
    }

    /// The address of the shared parts: equal for all handles on one runtime.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.core).addr()
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

debug_fields!(self: XlogDeviceRuntime {
    device: self.core.device.spec(), ordinal: self.core.ordinal, stream_pool: self.core.stream_pool,
    statistics: self.statistics(), mismatch: self.core.mismatch, limit: self.effective_limit(),
    ledger: self.ledger(), ..
});
