//! A meter that grants so much and no more.

use std::sync::Mutex;

use xlog_cuda::device_runtime::{PhysicalMeter, ResourceError, ResourceResult};

/// A ledger with this much left.
#[derive(Debug)]
pub struct Nearly(Mutex<usize>);

impl Nearly {
    pub fn new(left: usize) -> Self {
        Self(Mutex::new(left))
    }

    pub fn left(&self) -> usize {
        *self.0.lock().unwrap()
    }
}

impl PhysicalMeter for Nearly {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        let mut left = self.0.lock().unwrap();
        let remaining = *left;
        *left = remaining
            .checked_sub(bytes)
            .ok_or(ResourceError::OutOfBudget { requested: bytes, remaining })?;
        Ok(())
    }

    fn release(&self, bytes: usize) {
        *self.0.lock().unwrap() += bytes;
    }
}
