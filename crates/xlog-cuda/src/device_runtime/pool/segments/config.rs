//! Sizes of segments.

use super::super::super::resource::{ResourceError, ResourceResult};
use super::UNIT;

const MIB: u64 = 1 << 20;

/// Sizes of segments, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentConfig {
    /// Validated only: the pool takes its initial memory itself.
    pub initial: u64,
    /// The maximum; `u64::MAX` for no limit.
    pub maximum: u64,
    /// The minimum of one growth, while the limit allows it.
    pub growth: u64,
    /// The size of a physical handle for small requests. A handle is returned whole.
    pub handle_bytes: u64,
    /// The size of the largest handle for a large request.
    pub largest_handle: u64,
    /// A larger request gets handles of its own; up to this size, requests share small ones.
    pub private_bytes: u64,
}

impl Default for SegmentConfig {
    fn default() -> Self {
        Self {
            initial: 0,
            maximum: u64::MAX,
            growth: 32 * MIB,
            handle_bytes: 32 * MIB,
            largest_handle: 1024 * MIB,
            private_bytes: 0,
        }
    }
}

impl SegmentConfig {
    /// Refuses sizes that no segments can have; the error names the field.
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

    /// Refuses sizes that physical handles cannot have on a device with this mapping granularity.
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
