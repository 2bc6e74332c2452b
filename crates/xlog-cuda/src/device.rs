//! One open device.
//!
//! [`CudaDevice`] owns a [`Driver`], the spec that the device was opened with, and the driver memory pool of stream-ordered allocation.
//! It allocates no memory and creates no streams: see [`StreamPool`](crate::device_runtime::StreamPool).
//!
//! Invariants: the memory pool is created at most once and destroyed with the device; after a failed creation the next call tries
//! again. Everything that is created on a device holds it, so it outlives its streams.

use std::fmt;

use std::sync::{Arc, OnceLock};

use xlog_driver::cuda::CudaDriver;
#[cfg(feature = "guard")]
use xlog_driver::cuda::CudaFunction;
use xlog_driver::{
    DeviceKind, DeviceProperties, Driver, DriverError, DriverResult, MemoryInfo, PoolHandle,
    PoolOptions,
};
#[cfg(feature = "sim")]
use xlog_sim::{RaceReport, SimConfig, SimDevice};

#[cfg(feature = "sim")]
use crate::device_runtime::runtime;
use crate::{DeviceSpec, Result, XlogError};

/// One open device: a GPU, or the simulated device.
///
/// ```
/// use xlog_cuda::CudaDevice;
///
/// let device = CudaDevice::open("sim:42")?;
/// assert_eq!(device.spec(), "sim:42");
/// assert!(device.memory_info()?.free > 0);
/// assert!(device.races().is_empty());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct CudaDevice {
    driver: Arc<dyn Driver>,
    #[cfg(feature = "sim")]
    sim: Option<Arc<SimDevice>>,
    /// Whether the driver receives the names of streams and the ranges of sub-allocations.
    is_observed: bool,
    spec: String,
    memory_pool: OnceLock<PoolHandle>,
    #[cfg(feature = "guard")]
    guard_kernel: OnceLock<CudaFunction>,
}

impl CudaDevice {
    /// Opens the device that `spec` names: `"cuda:N"`, `"sim"` or `"sim:SEED"`.
    ///
    /// Each call with a simulated spec creates a separate machine.
    pub fn open(spec: &str) -> Result<Self> {
        Self::open_spec(spec.parse()?)
    }

    /// Opens GPU number `ordinal`.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::open_spec(DeviceSpec::Cuda(ordinal))
    }

    /// Returns the default device: that of `XLOG_DEVICE`, or the first GPU if that is not set.
    pub fn default_spec() -> Result<DeviceSpec> {
        Ok(DeviceSpec::from_environment()?.unwrap_or(DeviceSpec::Cuda(0)))
    }

    /// Opens the device of a parsed spec.
    pub fn open_spec(spec: DeviceSpec) -> Result<Self> {
        let opened = match spec {
            DeviceSpec::Cuda(ordinal) => {
                CudaDriver::open(ordinal).map(|driver| Self::of(driver, spec.to_string()))
            }
            DeviceSpec::Sim => Self::open_sim(None),
            DeviceSpec::SimSeeded(seed) => Self::open_sim(Some(seed)),
        };
        opened.map_err(|cause| XlogError::Open { spec: spec.to_string(), cause })
    }

    #[cfg(feature = "sim")]
    fn open_sim(seed: Option<u64>) -> DriverResult<Self> {
        let mut config = SimConfig::default();
        config.seed = seed;
        SimDevice::open(config).map(Self::from_sim)
    }

    #[cfg(not(feature = "sim"))]
    fn open_sim(_seed: Option<u64>) -> DriverResult<Self> {
        Err(DriverError::Unavailable {
            what: "this program was built without the simulated device".to_owned(),
            remedy: "build it with the feature `sim` of xlog-cuda".to_owned(),
        })
    }

    /// Opens a simulated device that the caller has built, with other capacities, several ordinals or injected faults.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn from_sim(sim: Arc<SimDevice>) -> Self {
        let mut device = Self::of(sim.clone(), Self::spec_of(&sim).to_string());
        #[cfg(feature = "trace")]
        runtime::watch_races(&sim);
        device.sim = Some(sim);
        device.is_observed = true;
        device
    }

    #[cfg(feature = "sim")]
    pub(crate) fn spec_of(sim: &SimDevice) -> DeviceSpec {
        sim.seed().map_or(DeviceSpec::Sim, DeviceSpec::SimSeeded)
    }

    /// Opens a device on any driver, such as one that wraps another to count or fail its calls.
    ///
    /// If the driver wraps a simulated device, its race reports are not available here.
    #[must_use]
    pub fn from_driver(driver: Arc<dyn Driver>) -> Self {
        let properties = driver.properties();
        let spec = match properties.kind {
            DeviceKind::Cuda => DeviceSpec::Cuda(properties.ordinal as usize).to_string(),
            kind => format!("{kind} driver"),
        };
        Self::of(driver, spec)
    }

    fn of(driver: Arc<dyn Driver>, spec: String) -> Self {
        Self {
            driver,
            #[cfg(feature = "sim")]
            sim: None,
            is_observed: false,
            spec,
            memory_pool: OnceLock::new(),
            #[cfg(feature = "guard")]
            guard_kernel: OnceLock::new(),
        }
    }

    /// The driver of this device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Returns the driver if it receives the names of streams and the ranges of sub-allocations: that of a simulated device.
    pub(crate) fn observer(&self) -> Option<&Arc<dyn Driver>> {
        self.is_observed.then_some(&self.driver)
    }

    /// The simulated device, for its kernels, faults and schedules; `None` on a GPU.
    #[cfg(feature = "sim")]
    pub fn sim(&self) -> Option<&Arc<SimDevice>> {
        self.sim.as_ref()
    }

    /// Returns whether work advances only in driver calls, in an order that a seed decides.
    pub(crate) fn is_seeded(&self) -> bool {
        #[cfg(feature = "sim")]
        return self.sim.as_ref().is_some_and(|sim| sim.seed().is_some());
        #[cfg(not(feature = "sim"))]
        return false;
    }

    /// Returns the spec that this device was opened with, or the kind of the driver for [`CudaDevice::from_driver`].
    pub fn spec(&self) -> &str {
        &self.spec
    }

    /// Returns the ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.properties().ordinal
    }

    /// Returns the properties of the device, which do not change while it is open.
    pub fn properties(&self) -> &DeviceProperties {
        self.driver.properties()
    }

    /// Returns the free and the total memory that the driver reports now.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(self.driver.memory_info()?)
    }

    /// Returns the races that the detector of a simulated device found; always empty on a GPU.
    ///
    /// Races that neither this method nor another call has returned are written to standard error when the device or the process ends.
    #[cfg(feature = "sim")]
    pub fn races(&self) -> Vec<RaceReport> {
        self.sim.as_ref().map(|sim| sim.races()).unwrap_or_default()
    }

    /// Waits until all work queued on the device has completed. On a GPU this invalidates every open stream capture of the process.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver.synchronize()?)
    }

    /// Returns the driver memory pool of this device; the first call creates it. Other users of the device's default pool do not affect it.
    ///
    /// It keeps its reserved memory across synchronisations ([`PoolOptions::default`]). On a device without stream-ordered pools this is
    /// [`DriverError::Unsupported`].
    pub fn memory_pool(&self) -> Result<PoolHandle> {
        if let Some(pool) = self.memory_pool.get() {
            return Ok(*pool);
        }
        let Some(pools) = self.driver.async_pools() else {
            return Err(DriverError::Unsupported { call: "memory_pool" }.into());
        };
        // No lock is held over the driver call: a thread that loses the race destroys its pool.
        let created = pools.pool_create(&PoolOptions::default())?;
        let kept = *self.memory_pool.get_or_init(|| created);
        if kept != created {
            #[allow(unsafe_code)]
            // SAFETY: just created, so no other thread names it.
            unsafe {
                pools.pool_destroy(created)?;
            }
        }
        Ok(kept)
    }

    /// Returns the pool of [`CudaDevice::memory_pool`] if it exists already.
    #[inline]
    pub(crate) fn known_memory_pool(&self) -> Option<PoolHandle> {
        self.memory_pool.get().copied()
    }

    /// Returns the kernel of the debug guard, which the first guard loads.
    #[cfg(feature = "guard")]
    pub(crate) fn guard_kernel(&self) -> &OnceLock<CudaFunction> {
        &self.guard_kernel
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.driver, &other.driver)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let (Some(pool), Some(pools)) = (self.memory_pool.get(), self.driver.async_pools()) {
            // A lost device has taken the pool with it; a drop cannot return the error.
            #[allow(unsafe_code)]
            // SAFETY: the device owns its pool; every user of the pool holds the device, so none is left.
            let _ = unsafe { pools.pool_destroy(*pool) };
        }
        #[cfg(feature = "sim")]
        if let Some(sim) = &self.sim {
            runtime::report_unread_races(sim);
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let properties = self.properties();
        f.debug_struct("CudaDevice")
            .field("spec", &self.spec)
            .field("ordinal", &properties.ordinal)
            .field("name", &properties.name)
            .field("memory_pool", &self.memory_pool.get())
            .finish_non_exhaustive()
    }
}
