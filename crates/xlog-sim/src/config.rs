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
    /// Runs under the deterministic scheduler: one seed, one order.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The number of devices.
    #[must_use]
    pub fn with_ordinals(mut self, ordinals: u32) -> Self {
        self.ordinals = ordinals;
        self
    }

    /// The memory of each device in bytes.
    #[must_use]
    pub fn with_capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// Offers stream-ordered pools, or not.
    #[must_use]
    pub fn with_async_pools(mut self, offered: bool) -> Self {
        self.async_pools = offered;
        self
    }

    /// Offers virtual memory, or not.
    #[must_use]
    pub fn with_virtual_memory(mut self, offered: bool) -> Self {
        self.virtual_memory = offered;
        self
    }

    /// The mapping granularity, a power of two of at least 4096.
    #[must_use]
    pub fn with_granularity(mut self, bytes: usize) -> Self {
        self.granularity = bytes;
        self
    }

    /// Keeps simulated time by this model.
    #[must_use]
    pub fn with_latency(mut self, model: LatencyModel) -> Self {
        self.latency = Some(model);
        self
    }

    /// How long nothing that a call waits for may get on before the wait is called a deadlock.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
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
