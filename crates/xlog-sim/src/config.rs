//! The settings of a simulated machine.

use std::time::Duration;

use xlog_driver::{DriverError, DriverResult};

use crate::latency::LatencyModel;

/// The configuration of a simulated machine. Build one with [`SimConfig::default`] and the `with_*` calls.
///
/// ```
/// use xlog_sim::{SimConfig, SimDevice};
/// use xlog_driver::Driver;
///
/// let device = SimDevice::open(SimConfig::default().with_seed(7).with_capacity(64 << 20))?;
/// assert_eq!(device.properties().total_bytes, 64 << 20);
/// # Ok::<(), xlog_driver::DriverError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimConfig {
    /// `None`: one thread per stream. `Some`: the deterministic scheduler with this seed.
    pub seed: Option<u64>,
    /// The number of devices.
    pub ordinals: u32,
    /// The memory of each device in bytes. Host memory is committed only for bytes that are written.
    pub capacity: u64,
    /// True if stream-ordered pools are offered.
    pub async_pools: bool,
    /// True if virtual memory is offered.
    pub virtual_memory: bool,
    /// The mapping granularity, a power of two.
    pub granularity: usize,
    /// The cost of calls and work in simulated time; `None` disables simulated time.
    pub latency: Option<LatencyModel>,
    /// How long a wait may see no progress before it is reported as a deadlock that cannot be proven.
    pub patience: Duration,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: None,
            ordinals: 1,
            capacity: 32 << 30,
            async_pools: true,
            virtual_memory: true,
            granularity: 2 << 20,
            latency: None,
            patience: Duration::from_secs(60),
        }
    }
}

impl SimConfig {
    xlog_base::setters! {
        /// Uses the deterministic scheduler: one seed gives one order.
        with_seed(seed: u64) { seed: Some(seed) }
        /// The number of devices.
        with_ordinals(ordinals: u32) { ordinals: ordinals }
        /// The memory of each device in bytes.
        with_capacity(bytes: u64) { capacity: bytes }
        /// Enables or disables stream-ordered pools.
        with_async_pools(offered: bool) { async_pools: offered }
        /// Enables or disables virtual memory.
        with_virtual_memory(offered: bool) { virtual_memory: offered }
        /// The mapping granularity, a power of two of at least 4096.
        with_granularity(bytes: usize) { granularity: bytes }
        /// Keeps simulated time with this model.
        with_latency(model: LatencyModel) { latency: Some(model) }
        /// How long a wait may see no progress before it is reported as a deadlock.
        with_patience(patience: Duration) { patience: patience }
    }

    pub(crate) fn validate(&self) -> DriverResult<()> {
        let refuse = |value: String, accepted: &str| {
            Err(DriverError::invalid("open simulated device", value, accepted))
        };
        if self.ordinals == 0 || self.ordinals > 16 {
            return refuse(format!("ordinals = {}", self.ordinals), "1 to 16 devices");
        }
        if self.capacity == 0 || self.capacity > 1 << 42 {
            return refuse(format!("capacity = {}", self.capacity), "1 byte to 4 TiB");
        }
        if !self.granularity.is_power_of_two() || !(4096..=1 << 30).contains(&self.granularity) {
            return refuse(
                format!("granularity = {}", self.granularity),
                "a power of two from 4096 to 1 GiB",
            );
        }
        Ok(())
    }
}
