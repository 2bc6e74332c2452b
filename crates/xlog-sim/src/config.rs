//! The settings of a simulated machine.

use std::time::Duration;

use xlog_driver::{DriverError, DriverResult};

use crate::latency::LatencyModel;

/// The shape of a simulated machine. Build one with [`SimConfig::default`] and the `with_*` calls.
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
    /// `None`: a thread per stream. `Some`: the deterministic scheduler under this seed.
    pub seed: Option<u64>,
    /// How many devices the machine has.
    pub ordinals: u32,
    /// Memory of each device in bytes. Host memory is taken only for bytes that are written.
    pub capacity: u64,
    /// Whether stream-ordered pools are offered.
    pub async_pools: bool,
    /// Whether virtual memory is offered.
    pub virtual_memory: bool,
    /// The mapping granularity, a power of two.
    pub granularity: usize,
    /// The cost of calls and work in simulated time; `None` keeps no time.
    pub latency: Option<LatencyModel>,
    /// How long nothing that a call waits for may get on before the wait is called a deadlock, where that cannot be proven.
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
        /// Runs under the deterministic scheduler: one seed, one order.
        with_seed(seed: u64) { seed: Some(seed) }
        /// The number of devices.
        with_ordinals(ordinals: u32) { ordinals: ordinals }
        /// The memory of each device in bytes.
        with_capacity(bytes: u64) { capacity: bytes }
        /// Offers stream-ordered pools, or not.
        with_async_pools(offered: bool) { async_pools: offered }
        /// Offers virtual memory, or not.
        with_virtual_memory(offered: bool) { virtual_memory: offered }
        /// The mapping granularity, a power of two of at least 4096.
        with_granularity(bytes: usize) { granularity: bytes }
        /// Keeps simulated time by this model.
        with_latency(model: LatencyModel) { latency: Some(model) }
        /// How long nothing that a call waits for may get on before the wait is called a deadlock.
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
