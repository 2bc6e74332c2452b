//! The limit of a runtime: the smallest of configuration, ledger, driver and device.
//!
//! docs/budget.md, "The limit of a runtime", describes these four.
//!
//! This module opens and creates nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use super::RuntimeConfig;
use crate::device_runtime::budget::{EffectiveLimit, LimitSource};
use crate::{CudaDevice, Result};

/// The default reserve of a large device.
const RESERVE: u64 = 1 << 30;

/// The memory of a device, from which its limits are computed.
#[derive(Debug)]
pub(super) struct Capacity {
    total: u64,
    reserve: u64,
    /// The total that the driver reports to this process, which `xlogmem exec` changes with the quota.
    driver: AtomicU64,
    configured: Option<u64>,
}

impl Capacity {
    pub(super) fn of(device: &CudaDevice, config: &RuntimeConfig) -> Result<Self> {
        let total = device.properties().total_bytes;
        Ok(Self {
            total,
            // A sixteenth of a small device.
            reserve: config.reserve.map_or(RESERVE.min(total / 16), |size| size.of(total)),
            driver: device.memory_info()?.total.into(),
            configured: config.budget.map(|size| size.of(total)),
        })
    }

    fn driver(&self) -> u64 {
        self.driver.load(Ordering::Relaxed)
    }

    /// Returns the memory of the device that may be allocated.
    #[cfg(feature = "ledger")]
    pub(super) fn usable(&self) -> u64 {
        self.total.saturating_sub(self.reserve).min(self.driver())
    }

    /// Returns the limit of a ledger that this runtime creates.
    ///
    /// A named ledger gets the budget as its limit. The device's default ledger and one with quotas do not: the budget of one process is no
    /// limit for the others.
    #[cfg(feature = "ledger")]
    pub(super) fn of_new_ledger(&self, config: &RuntimeConfig) -> u64 {
        match config.ledger_limit {
            Some(size) => size.of(self.total),
            None if config.ledger.is_named() && config.quota.is_none() => {
                self.configured.unwrap_or_else(|| self.usable())
            }
            None => self.usable(),
        }
    }

    /// Reads the driver's total again. If the driver fails, the last total stays.
    pub(super) fn refresh(&self, device: &CudaDevice) {
        if let Ok(info) = device.memory_info() {
            self.driver.store(info.total, Ordering::Relaxed);
        }
    }

    /// The smallest of all limits.
    pub(super) fn with_ledger(&self, ledger: Option<u64>) -> EffectiveLimit {
        EffectiveLimit::device(size(self.total), size(self.reserve))
            .and(LimitSource::Driver, Some(size(self.driver())))
            .and(LimitSource::Configuration, self.configured.map(size))
            .and(LimitSource::Ledger, ledger.map(size))
    }
}

/// The limit and the ledger that a runtime would have.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LimitPreview {
    /// The effective limit.
    pub limit: EffectiveLimit,
    /// The ledger.
    pub ledger: LedgerPreview,
}

/// The ledger that a runtime would join.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LedgerPreview {
    /// No ledger is configured.
    Off,
    /// The ledger does not exist yet.
    #[cfg(feature = "ledger")]
    Absent {
        /// The path at which it would be created.
        path: std::path::PathBuf,
        /// Its limit in bytes.
        limit: u64,
    },
    /// The ledger exists and can be joined.
    #[cfg(feature = "ledger")]
    Present(xlog_ledger::Snapshot),
    /// The runtime would be built without it.
    #[cfg(feature = "ledger")]
    Unavailable {
        /// The reason.
        reason: String,
    },
    /// The runtime would not be built.
    Refused {
        /// The reason, and what to do.
        reason: String,
    },
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ByteSize;

    fn capacity(config: &RuntimeConfig) -> Capacity {
        Capacity::of(&CudaDevice::open("sim:1").unwrap(), config).unwrap()
    }

    #[test]
    fn the_least_limit_rules_and_is_named() {
        let gib = 1_usize << 30;
        let plain = RuntimeConfig::default();
        let limit = capacity(&plain).with_ledger(None);
        assert_eq!((limit.bytes(), limit.ruled_by()), (31 * gib, LimitSource::DeviceReserve));
        let limit = capacity(&plain).with_ledger(Some(5 << 30));
        assert_eq!((limit.bytes(), limit.ruled_by()), (5 * gib, LimitSource::Ledger));
        let half = plain.clone().with_budget(ByteSize::Share(50_000_000));
        let limit = capacity(&half).with_ledger(Some(20 << 30));
        assert_eq!((limit.bytes(), limit.ruled_by()), (16 * gib, LimitSource::Configuration));
        let none_kept = plain.with_reserve(ByteSize::Bytes(0));
        let less = Capacity { driver: (3 << 30).into(), ..capacity(&none_kept) };
        let limit = less.with_ledger(None);
        assert_eq!((limit.bytes(), limit.ruled_by()), (3 * gib, LimitSource::Driver));
        // What the driver reports may change while the process runs.
        less.refresh(&CudaDevice::open("sim:1").unwrap());
        assert_eq!(less.with_ledger(None).bytes(), 32 * gib);
    }

    #[test]
    fn the_budget_of_one_process_is_no_limit_of_everybodys_ledger() {
        let config = RuntimeConfig::default().with_budget(ByteSize::Bytes(1 << 20));
        assert_eq!(capacity(&config).of_new_ledger(&config), 31 << 30);
        let named = config.with_ledger(super::super::LedgerSetting::Directory("/x".into()));
        assert_eq!(capacity(&named).of_new_ledger(&named), 1 << 20);
        let tenant = named.clone().with_quota(ByteSize::Share(25_000_000));
        assert_eq!(capacity(&tenant).of_new_ledger(&tenant), 31 << 30);
        let said = named.with_ledger_limit(ByteSize::Share(25_000_000));
        assert_eq!(capacity(&said).of_new_ledger(&said), 8 << 30);
    }

    #[test]
    fn a_reserve_larger_than_the_device_leaves_nothing_and_does_not_wrap() {
        let config = RuntimeConfig::default().with_reserve(ByteSize::Bytes(u64::MAX));
        assert_eq!(capacity(&config).with_ledger(None).bytes(), 0);
    }
}
