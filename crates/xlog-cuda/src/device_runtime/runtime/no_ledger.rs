//! The ledger of a runtime in a build without the feature `ledger`: none. A required ledger is refused.

use std::fmt;
use std::sync::Arc;

use super::RuntimeConfig;
use super::config::LEDGER_VARIABLE;
use super::limits::{Capacity, LedgerPreview, LimitPreview};
use crate::device_runtime::budget::BudgetHandle;
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::Statistics;
use crate::{CudaDevice, Result, XlogError};

/// The state of a runtime's ledger.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LedgerStatus {
    /// No ledger.
    Off,
}

impl LedgerStatus {
    pub(super) fn limit(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

impl fmt::Display for LedgerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("off")
    }
}

#[derive(Debug)]
pub(super) struct Membership(LedgerStatus);

impl Membership {
    pub(super) fn begin(
        status: LedgerStatus,
        _resource: &dyn DeviceMemoryResource,
        _budget: &BudgetHandle,
    ) -> Result<Self> {
        Ok(Self(status))
    }

    pub(super) fn listen(
        &self,
        _resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
        _budget: &BudgetHandle,
        _statistics: &Statistics,
    ) {
    }

    pub(super) fn end_listening(&self) {}

    pub(super) fn status(&self) -> &LedgerStatus {
        &self.0
    }

    pub(super) fn is_metered(&self) -> bool {
        false
    }

    pub(super) fn limit(&self) -> Option<u64> {
        None
    }
}

fn refusal() -> String {
    format!(
        "the ledger cannot be joined: this program was built without ledgers; build it with the feature `ledger` of xlog-cuda, \
         or work without one: {LEDGER_VARIABLE}=off, in code LedgerSetting::Off"
    )
}

/// Refuses a required ledger.
pub(super) fn join(
    _device: &CudaDevice,
    config: &RuntimeConfig,
    _capacity: &Capacity,
) -> Result<LedgerStatus> {
    match config.ledger.is_demanded() {
        true => Err(XlogError::Kernel(refusal())),
        false => Ok(LedgerStatus::Off),
    }
}

pub(super) fn preview_limits(device: &CudaDevice, config: &RuntimeConfig) -> Result<LimitPreview> {
    let limit = Capacity::of(device, config)?.with_ledger(None);
    let ledger = match config.ledger.is_demanded() {
        true => LedgerPreview::Refused { reason: refusal() },
        false => LedgerPreview::Off,
    };
    Ok(LimitPreview { limit, ledger })
}
