//! How much a pool takes from the device at a time, and at most.

use super::super::super::resource::{ResourceError, ResourceResult};
use super::UNIT;

const MIB: u64 = 1 << 20;

/// Sizes of segments, in bytes. When memory is given back is not decided here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentConfig {
    /// What the pool takes before its first request; 0 for nothing.
    pub initial: u64,
    /// The most that is ever held; `u64::MAX` for no limit.
    pub maximum: u64,
    /// The least that one growth takes, while there is room for it.
    pub growth: u64,
    /// The size of a physical handle that serves small requests: a handle is given back whole or not at all.
    pub handle_bytes: u64,
    /// The largest handle that one large request makes.
    pub largest_handle: u64,
}

impl Default for SegmentConfig {
    fn default() -> Self {
        Self {
            initial: 0,
            maximum: u64::MAX,
            growth: 32 * MIB,
            handle_bytes: 32 * MIB,
            largest_handle: 1024 * MIB,
        }
    }
}

impl SegmentConfig {
    /// Refuses what no segments can follow; the error names the field.
    pub(crate) fn validate(&self) -> ResourceResult<()> {
        if self.maximum < UNIT {
            return refuse("maximum", self.maximum, format!("at least {UNIT}"));
        }
        if self.initial > self.maximum {
            let accepted = format!("at most the maximum, {}", self.maximum);
            return refuse("initial", self.initial, accepted);
        }
        whole("growth", self.growth, UNIT)
    }

    /// Refuses what segments of physical handles cannot follow, on a device that maps units of `granularity`.
    pub(super) fn validate_handles(&self, granularity: u64) -> ResourceResult<()> {
        self.validate()?;
        whole("growth", self.growth, granularity)?;
        whole("handle_bytes", self.handle_bytes, granularity)?;
        whole("largest_handle", self.largest_handle, granularity)?;
        if self.largest_handle < self.handle_bytes {
            let accepted = format!("at least handle_bytes, {}", self.handle_bytes);
            return refuse("largest_handle", self.largest_handle, accepted);
        }
        Ok(())
    }
}

fn whole(field: &str, bytes: u64, unit: u64) -> ResourceResult<()> {
    if bytes == 0 || !bytes.is_multiple_of(unit) {
        return refuse(field, bytes, format!("a multiple of {unit}, and not 0"));
    }
    Ok(())
}

fn refuse(field: &str, bytes: u64, accepted: String) -> ResourceResult<()> {
    Err(ResourceError::InvalidRequest { value: format!("{field} = {bytes}"), accepted })
}
