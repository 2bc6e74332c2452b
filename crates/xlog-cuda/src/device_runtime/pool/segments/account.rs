//! What segments hold of the device, against their limit and a meter.
//!
//! Bytes are charged before they are taken and released after they are given back, so the sum is never less than what is held.
//! Growth asks the meter without a lock, so it may take its time, or make somebody release memory. It is told of everything that
//! is charged: a charge that began before the meter was there is announced with the rest. A charge in flight counts against the
//! limit, also one that the device will refuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::Mutex;

use super::super::super::resource::{
    CapSlot, PhysicalCap, PhysicalMeter, ResourceError, ResourceResult,
};
use super::{out_of_memory, to_usize};

pub(super) struct Account {
    /// Changed only with `meter` locked.
    reserved: AtomicU64,
    limit: AtomicU64,
    cap: CapSlot,
    /// What memory is taken in multiples of: a cap is rounded up to it.
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
        meter.take(to_usize(bytes)).inspect_err(|_| {
            let _meter = self.meter.lock();
            self.lower(bytes);
        })
    }

    /// Releases `bytes` that are back with the device, or were never taken.
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
            meter.give(to_usize(bytes));
        }
    }

    /// What was charged as `charged` bytes turned out to be `held` bytes. Neither limit nor meter is asked for more: they are there
    /// already, and whoever gave them has announced them.
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

    /// The maximum: the configured one or, if that is less, the cap.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire).min(self.cap.in_granules(self.granule))
    }

    /// Lets `cap` hold as well.
    pub(super) fn cap(&self, cap: Arc<PhysicalCap>) {
        self.cap.add(&cap);
    }

    pub(super) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Release);
    }

    /// Tells `meter` of everything, beginning with what is charged now. There is one meter for the whole life.
    pub(super) fn announce_to(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        let mut slot = self.meter.lock();
        if slot.is_some() {
            return Err(ResourceError::InvalidRequest {
                value: "a second physical meter".to_owned(),
                accepted: "one meter for the segments of a pool".to_owned(),
            });
        }
        meter.take(to_usize(self.reserved()))?;
        *slot = Some(meter);
        Ok(())
    }

    /// Called with `meter` locked.
    fn lower(&self, bytes: u64) {
        self.reserved.store(self.reserved().saturating_sub(bytes), Ordering::Release);
    }
}
