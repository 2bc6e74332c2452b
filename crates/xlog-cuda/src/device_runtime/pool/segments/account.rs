//! Account of the bytes that segments take from the device, with a limit and a meter.
//!
//! Bytes are charged before they are taken and released after they are returned, so the sum is never less than the bytes
//! held. A charge in flight counts against the limit, even if the device then refuses it. The meter is called without a
//! lock: it may wait, or make other pools release memory. When it is installed, all existing charges are reported to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::Mutex;

use super::super::super::resource::{
    CapSlot, PhysicalCap, PhysicalMeter, ResourceError, ResourceResult,
};
use super::{out_of_memory, to_usize};

pub(crate) struct Account {
    /// Written only with `meter` locked.
    reserved: AtomicU64,
    limit: AtomicU64,
    cap: CapSlot,
    /// The unit in which memory is taken; a cap is rounded up to it.
    granule: u64,
    meter: Mutex<Option<Arc<dyn PhysicalMeter>>>,
}

impl Account {
    pub(super) fn new(limit: u64, granule: u64) -> Self {
        Self {
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            cap: CapSlot::default(),
            granule,
            meter: Mutex::new(None),
        }
    }

    /// Charges `bytes` that are about to be taken.
    pub(super) fn charge(&self, bytes: u64) -> ResourceResult<()> {
        let meter = {
            let meter = self.meter.lock();
            let (reserved, limit) = (self.reserved(), self.limit());
            let sum = reserved.checked_add(bytes).filter(|&sum| sum <= limit);
            let Some(sum) = sum else {
                let detail = format!("{reserved} of at most {limit} bytes are held");
                return Err(out_of_memory(bytes, detail));
            };
            self.reserved.store(sum, Ordering::Release);
            meter.clone()
        };
        let Some(meter) = meter else { return Ok(()) };
        meter.charge(to_usize(bytes)).inspect_err(|_| {
            let _meter = self.meter.lock();
            self.lower(bytes);
        })
    }

    /// Releases `bytes` that were returned to the device, or were not taken.
    pub(super) fn release(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let meter = {
            let meter = self.meter.lock();
            self.lower(bytes);
            meter.clone()
        };
        if let Some(meter) = meter {
            meter.release(to_usize(bytes));
        }
    }

    /// Corrects a charge of `charged` bytes to the `held` bytes of the block. A larger block needs no further charge of the
    /// meter or limit: the inner resource has announced its size.
    pub(super) fn adjust(&self, charged: u64, held: u64) {
        if held <= charged {
            return self.release(charged - held);
        }
        let _meter = self.meter.lock();
        self.reserved.store(self.reserved().saturating_add(held - charged), Ordering::Release);
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// The limit: the configured maximum, or the cap if that is lower.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire).min(self.cap.in_granules(self.granule))
    }

    pub(super) fn cap(&self, cap: Arc<PhysicalCap>) {
        self.cap.add(&cap);
    }

    pub(super) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Release);
    }

    /// Installs `meter` and reports the bytes charged so far to it. An account has one meter.
    pub(super) fn announce_to(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        let mut slot = self.meter.lock();
        if slot.is_some() {
            return Err(ResourceError::InvalidRequest {
                value: "a second physical meter".to_owned(),
                accepted: "one meter for the segments of a pool".to_owned(),
            });
        }
        meter.charge(to_usize(self.reserved()))?;
        *slot = Some(meter);
        Ok(())
    }

    /// Called with `meter` locked.
    fn lower(&self, bytes: u64) {
        self.reserved.store(self.reserved().saturating_sub(bytes), Ordering::Release);
    }
}
