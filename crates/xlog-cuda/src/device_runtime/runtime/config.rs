//! The configuration of a shared runtime: in code, or from the environment variables that the README lists.
//!
//! With `sim` or `sim:SEED` in `XLOG_DEVICE`, every ordinal n is device n of a simulated machine. Otherwise ordinal n is GPU n; `cuda:N`
//! only selects a program's default GPU.
//!
//! [`XlogDeviceRuntime::open`] reads only the ledger and the quota from the environment: they are limits of the process.
//!
//! A value that is not accepted is an error that names it, never a silent default.

#[cfg(feature = "guard")]
mod guard;
#[cfg(not(feature = "guard"))]
#[path = "config/no_guard.rs"]
mod guard;
mod layer;
mod ledger;
mod resource;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use self::layer::Layer;

pub use self::guard::GuardSetting;
pub use self::ledger::LedgerSetting;
pub use self::resource::ResourceKind;
use super::XlogDeviceRuntime;
use super::log_file::LogFile;
use crate::device_runtime::pool::{PoolConfig, PoolSanitizer};
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::{Backtraces, StatisticsConfig};
use crate::device_runtime::stream_pool::DEFAULT_MAX_STREAMS;
use crate::{ByteSize, CudaDevice, DeviceSpec, Result, XlogError};

/// The environment variable that names the memory resource of shared runtimes.
pub const RESOURCE_VARIABLE: &str = "XLOG_DEVICE_RESOURCE";

/// The environment variable that makes pools of shared runtimes work for a memory checker.
pub const SANITIZER_VARIABLE: &str = "XLOG_DEVICE_SANITIZER";

/// The environment variable that limits shared runtimes.
pub const BUDGET_VARIABLE: &str = "XLOG_DEVICE_BUDGET";

/// The environment variable that selects the ledger of shared runtimes.
pub const LEDGER_VARIABLE: &str = "XLOG_DEVICE_LEDGER";

/// The environment variable for the quota of shared runtimes in their ledger.
pub const QUOTA_VARIABLE: &str = "XLOG_DEVICE_QUOTA";

/// The environment variable for the name of that quota.
pub const QUOTA_NAME_VARIABLE: &str = "XLOG_DEVICE_QUOTA_NAME";

/// The environment variable that selects the guard of shared runtimes.
pub const GUARD_VARIABLE: &str = "XLOG_DEVICE_GUARD";

/// The environment variable for the log file of shared runtimes: `FILE.xtrace` or `FILE.csv`, where `%p` is the process and `%d` the
/// device.
pub const LOG_VARIABLE: &str = "XLOG_DEVICE_LOG";

/// The environment variable that selects the allocations of shared runtimes that have a stack, in their statistics and log.
pub const STACKS_VARIABLE: &str = "XLOG_DEVICE_STACKS";

/// The configuration of a runtime, and its builder.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let config = RuntimeConfig::default().with_device("sim:7".parse()?).with_budget(ByteSize::mib(64));
/// let runtime = config.with_max_streams(4).open()?;
/// assert_eq!(runtime.effective_limit().map(|limit| limit.bytes()), Some(64 << 20));
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The device. `None` is the GPU whose number is the runtime's ordinal; for [`RuntimeConfig::open`] it is
    /// [`CudaDevice::default_spec`].
    pub device: Option<DeviceSpec>,
    /// The memory resource.
    pub resource: ResourceKind,
    /// The settings of the pool, if that is the resource.
    pub pool: PoolConfig,
    /// Whether a pool works for a memory checker. `Automatic` replaces only `Off` in [`RuntimeConfig::pool`]; any other value replaces it.
    pub sanitizer: PoolSanitizer,
    /// The maximum number of streams leased at a time, without the default one; 0 counts as 1.
    pub max_streams: usize,
    /// The maximum bytes of blocks; `None` is what the device and the ledger allow. A percentage is of the device's memory.
    pub budget: Option<ByteSize>,
    /// The part of the device's memory that is left to other users; `None` is 1 GiB, or a sixteenth of a device with less than 16 GiB.
    pub reserve: Option<ByteSize>,
    /// The ledger to join.
    pub ledger: LedgerSetting,
    /// The limit of a ledger that this runtime creates; `None` is the budget if the ledger was named and there is no quota, else what the
    /// device allows.
    pub ledger_limit: Option<ByteSize>,
    /// The quota of this process in the ledger: the maximum physical memory that it may hold. `xlogmem ledger` changes it while the
    /// process runs. `None` sets no quota. A percentage is of the ledger's limit.
    pub quota: Option<ByteSize>,
    /// The name of the quota, which `xlogmem top` shows.
    pub quota_name: Option<String>,
    /// The maximum wait for the ledger's file lock, which a stopped process may hold; `None` is two seconds.
    pub ledger_deadline: Option<Duration>,
    /// The log file; its ending selects the format: `.xtrace` or `.csv`. An existing file is replaced; a file that has a writer is
    /// refused. `%p` stands for the process, `%d` for the device, `%%` for a percent sign.
    pub log: Option<PathBuf>,
    /// The size at which the log continues in a new file, at least 4096; `None` keeps one file. Finished files are renamed to
    /// `FILE.1`, `FILE.2` and so on.
    pub log_rotate_bytes: Option<u64>,
    /// The number of finished log files that are kept.
    pub log_keep: u32,
    /// Whether uses of blocks are logged too.
    pub log_uses: bool,
    /// The settings of the statistics.
    pub statistics: StatisticsConfig,
    /// Layers around the stack, the first one innermost.
    pub layers: Vec<Layer>,
    /// Whether blocks are guarded. Redzones are charged to the budget.
    pub guard: GuardSetting,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            device: None,
            resource: ResourceKind::default(),
            pool: PoolConfig::default(),
            sanitizer: PoolSanitizer::Automatic,
            max_streams: DEFAULT_MAX_STREAMS,
            budget: None,
            reserve: None,
            ledger: LedgerSetting::default(),
            ledger_limit: None,
            quota: None,
            quota_name: None,
            ledger_deadline: None,
            log: None,
            log_rotate_bytes: None,
            log_keep: 0,
            log_uses: false,
            statistics: StatisticsConfig::default(),
            layers: Vec::new(),
            guard: GuardSetting::default(),
        }
    }
}

impl RuntimeConfig {
    /// Reads the environment; variables that are not set leave the default.
    ///
    /// `XLOG_DEVICE=cuda:N` selects a program's default GPU, not the device of an ordinal. It leaves [`RuntimeConfig::device`] at `None`.
    pub fn from_environment() -> Result<Self> {
        let device = DeviceSpec::from_environment()?.filter(|spec| spec.is_simulated());
        let mut config = Self { device, ..Self::default() };
        if let Some(resource) = variable(RESOURCE_VARIABLE)? {
            config.resource = resource;
        }
        if let Some(sanitizer) = variable(SANITIZER_VARIABLE)? {
            config.sanitizer = sanitizer;
        }
        config.budget = variable(BUDGET_VARIABLE)?;
        config = config.with_quota_from_environment()?;
        if let Some(guard) = variable(GUARD_VARIABLE)? {
            config.guard = guard;
        }
        config.log = variable::<LogFile>(LOG_VARIABLE)?.map(|file| file.0);
        if let Some(stacks) = variable(STACKS_VARIABLE)? {
            config.statistics.backtraces = stacks;
        }
        Ok(config)
    }

    /// Sets the ledger, the quota and its name from the environment; variables that are not set change nothing.
    pub fn with_quota_from_environment(mut self) -> Result<Self> {
        if let Some(ledger) = variable(LEDGER_VARIABLE)? {
            self.ledger = ledger;
        }
        if let Some(quota) = variable(QUOTA_VARIABLE)? {
            self.quota = Some(quota);
        }
        if let Some(name) = text(QUOTA_NAME_VARIABLE)? {
            self.quota_name = Some(name);
        }
        Ok(self)
    }

    /// Opens the device and builds an unshared runtime on it.
    pub fn open(&self) -> Result<Arc<XlogDeviceRuntime>> {
        let device = CudaDevice::open_spec(self.device.map_or_else(CudaDevice::default_spec, Ok)?)?;
        XlogDeviceRuntime::with_config(Arc::new(device), self).map(Arc::new)
    }

    xlog_base::setters! {
        /// Sets the device. A GPU of a shared runtime must be the one whose number is the runtime's ordinal.
        with_device(device: DeviceSpec) { device: Some(device) }
        /// Sets the memory resource.
        with_resource(resource: ResourceKind) { resource: resource }
        /// Sets the settings of the pool.
        with_pool(pool: PoolConfig) { pool: pool }
        /// Sets whether a pool works for a memory checker.
        with_sanitizer(sanitizer: PoolSanitizer) { sanitizer: sanitizer }
        /// Sets the maximum number of streams leased at a time, without the default one.
        with_max_streams(max_streams: usize) { max_streams: max_streams }
        /// Sets the maximum bytes of blocks.
        with_budget(budget: ByteSize) { budget: Some(budget) }
        /// Sets the part of the device's memory that is left to other users.
        with_reserve(reserve: ByteSize) { reserve: Some(reserve) }
        /// Sets the ledger to join.
        with_ledger(ledger: LedgerSetting) { ledger: ledger }
        /// Sets the limit of a ledger that this runtime creates. An existing ledger keeps its limit.
        with_ledger_limit(limit: ByteSize) { ledger_limit: Some(limit) }
        /// Sets the quota of this process in the ledger.
        with_quota(quota: ByteSize) { quota: Some(quota) }
        /// Sets the name of the quota.
        with_quota_name(name: impl Into<String>) { quota_name: Some(name.into()) }
        /// Sets the maximum wait for the ledger's file lock.
        with_ledger_deadline(deadline: Duration) { ledger_deadline: Some(deadline) }
        /// Sets the log file; see [`RuntimeConfig::log`].
        with_log(file: impl Into<PathBuf>) { log: Some(file.into()) }
        /// Sets whether uses of blocks are logged too.
        with_use_logging(enabled: bool) { log_uses: enabled }
        /// Sets what the statistics store: ages, backtraces.
        with_statistics(statistics: StatisticsConfig) { statistics: statistics }
        /// Sets whether and how blocks are guarded.
        with_guard(guard: impl Into<GuardSetting>) { guard: guard.into() }
    }

    /// Sets rotation of the log: a new file at `bytes`, with `keep` finished ones kept.
    #[must_use]
    pub fn with_log_rotation(mut self, bytes: u64, keep: u32) -> Self {
        (self.log_rotate_bytes, self.log_keep) = (Some(bytes), keep);
        self
    }

    /// Sets which allocations have a stack, in the statistics and in the log: the backtraces of [`RuntimeConfig::statistics`].
    ///
    /// ```
    /// use xlog_cuda::prelude::*;
    ///
    /// let stacks = "sampled:100".parse()?;
    /// let runtime = RuntimeConfig::default().with_device("sim".parse()?).with_stacks(stacks).open()?;
    /// # drop(runtime);
    /// # Ok::<(), XlogError>(())
    /// ```
    #[must_use]
    pub fn with_stacks(mut self, stacks: Backtraces) -> Self {
        self.statistics.backtraces = stacks;
        self
    }

    /// Adds a layer around the budget, the log and the layers added before. `wrap` is called once for each runtime that is built.
    /// docs/decorators.md shows how to write a layer.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use xlog_cuda::device_runtime::{InMemorySink, LoggingResource};
    /// use xlog_cuda::prelude::*;
    ///
    /// let sink = Arc::new(InMemorySink::new());
    /// let kept = sink.clone();
    /// let config = RuntimeConfig::default().with_device("sim".parse()?);
    /// let runtime = config.with_layer(move |inner| Box::new(LoggingResource::new(inner, sink.clone()))).open()?;
    /// drop(GpuMemoryManager::with_runtime(runtime).alloc::<u32>(8)?);
    /// assert_eq!(kept.len(), 2); // an allocation and a free
    /// # Ok::<(), xlog_cuda::XlogError>(())
    /// ```
    #[must_use]
    pub fn with_layer<F>(mut self, wrap: F) -> Self
    where
        F: Fn(
            Box<dyn DeviceMemoryResource + Send + Sync>,
        ) -> Box<dyn DeviceMemoryResource + Send + Sync>,
        F: Send + Sync + 'static,
    {
        self.layers.push(Layer::new(wrap));
        self
    }

    /// Returns the device of the runtime of `ordinal`.
    pub(super) fn device_of(&self, ordinal: u32) -> DeviceSpec {
        self.device.unwrap_or(DeviceSpec::Cuda(ordinal as usize))
    }
}

/// Reads an environment variable; an error names the variable.
fn variable<T: std::str::FromStr<Err = XlogError>>(name: &'static str) -> Result<Option<T>> {
    let Some(text) = text(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|error| match error {
        XlogError::BadSetting { value, reason, accepted, .. } => {
            XlogError::bad_setting(name, value, reason, accepted)
        }
        other => other,
    })
}

/// Reads an environment variable as text.
fn text(name: &'static str) -> Result<Option<String>> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    value.into_string().map(Some).map_err(|value| {
        let value = value.to_string_lossy();
        XlogError::bad_setting(name, value, "it is not UTF-8", "text in UTF-8")
    })
}
