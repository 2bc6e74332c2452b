//! The post-mortem of a lost device: the guarded blocks around the faulting address.

use std::fmt;
use std::sync::atomic::Ordering;

use xlog_driver::DriverError;

use super::core::GuardCore;
use super::registry::Stage;
use super::report::{BlockInfo, Moment};
use crate::device_runtime::resource::{
    AllocTag, BlockState, DeviceMemoryResource, Generation, ResourceError, ResourceResult,
};

/// The maximum number of blocks that a post-mortem shows.
const SHOWN: usize = 8;

/// A block near an address.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NearbyBlock {
    /// Its address.
    pub ptr: u64,
    /// Its size.
    pub bytes: usize,
    /// Its label.
    pub tag: AllocTag,
    /// Distinguishes it from other blocks at its address.
    pub generation: Generation,
    /// Its state.
    pub state: BlockState,
    /// The offset of the address from the block's first byte, negative before it; `None` if the address is unknown.
    pub offset: Option<i64>,
    /// Its allocation.
    pub allocated: Moment,
    /// Its free.
    pub freed: Option<Moment>,
}

/// The guarded blocks around an address, live or freed, the nearest first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GuardPostMortem {
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// The address, if it is known. A GPU does not report the faulting address.
    pub address: Option<u64>,
    /// The driver's error.
    pub cause: Option<String>,
    /// The blocks. If the address is unknown, the most recently freed come first.
    pub blocks: Vec<NearbyBlock>,
}

impl<R: DeviceMemoryResource> GuardCore<R> {
    /// Lists the guarded blocks around an address, or the most recent ones.
    pub(super) fn describe(&self, address: Option<u64>) -> GuardPostMortem {
        let near = |info: &BlockInfo, stage: Stage| NearbyBlock {
            ptr: info.redzones.user(),
            bytes: info.redzones.bytes,
            tag: info.tag,
            generation: info.generation,
            state: match stage {
                Stage::Live => BlockState::Live,
                Stage::Returned | Stage::Evicted => BlockState::Retired,
                Stage::Quarantined(_) => BlockState::Quarantined,
                Stage::Released(_) => BlockState::Freed,
            },
            offset: address.map(|address| address.wrapping_sub(info.redzones.user()) as i64),
            allocated: info.allocated.clone(),
            freed: info.freed.get().cloned(),
        };
        let registry = self.registry.lock();
        let mut blocks: Vec<_> =
            registry.remembered().map(|(info, stage)| near(info, stage)).collect();
        drop(registry);
        let distance = |block: &NearbyBlock| match block.offset {
            Some(offset) if offset < 0 => offset.unsigned_abs(),
            Some(offset) => (offset as u64).saturating_sub(block.bytes.saturating_sub(1) as u64),
            None => 0,
        };
        let last_seen =
            |block: &NearbyBlock| block.freed.as_ref().map_or(block.allocated.at, |f| f.at);
        blocks.sort_by_key(|block| (distance(block), std::cmp::Reverse(last_seen(block))));
        blocks.truncate(SHOWN);
        GuardPostMortem { device_ordinal: self.ordinal, address, cause: None, blocks }
    }

    /// Returns `result`. The first error of a lost device writes a post-mortem.
    pub(super) fn with_post_mortem<T>(&self, result: ResourceResult<T>) -> ResourceResult<T> {
        result.map_err(|error| self.post_mortem_on(error))
    }

    /// Returns `error`, as [`GuardCore::with_post_mortem`] does.
    #[cold]
    pub(super) fn post_mortem_on(&self, error: ResourceError) -> ResourceError {
        if let ResourceError::Driver(_) = &error {
            self.detect_device_loss();
        }
        error
    }

    #[cold]
    fn detect_device_loss(&self) {
        let Ok(parts) = &self.parts else { return };
        if self.lost.load(Ordering::Acquire) {
            return;
        }
        let Err(error) = parts.device.driver().memory_info() else { return };
        if !error.is_device_lost() || self.lost.swap(true, Ordering::AcqRel) {
            return;
        }
        let address = match &error {
            DriverError::DeviceLost { reason, .. } => address_in(reason),
            _ => None,
        };
        let mut found = self.describe(address);
        found.cause = Some(error.to_string());
        self.journal.write(format_args!("{found}"));
    }
}

/// Returns the first address that a text has.
fn address_in(text: &str) -> Option<u64> {
    let digits = text.split("0x").nth(1)?;
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    u64::from_str_radix(digits.get(..end)?, 16).ok()
}

impl fmt::Display for GuardPostMortem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ordinal = self.device_ordinal;
        match &self.cause {
            Some(cause) => writeln!(f, "device {ordinal} is lost: {cause}")?,
            None => writeln!(f, "device {ordinal}")?,
        }
        match (self.address, self.blocks.is_empty()) {
            (_, true) => return write!(f, "no guarded block is known"),
            (Some(address), _) => {
                write!(f, "guarded blocks around {address:#x}, the nearest first:")?
            }
            (None, _) => write!(f, "the address is not known; the latest guarded blocks:")?,
        }
        for block in &self.blocks {
            let NearbyBlock { ptr, bytes, tag, generation, state, offset, .. } = block;
            let state = match state {
                BlockState::Live => "live",
                BlockState::Retired => "retired",
                BlockState::Quarantined => "quarantined",
                BlockState::Freed => "freed",
            };
            write!(f, "\n  {ptr:#x} {bytes} bytes ({tag}), {state}, {generation}")?;
            match offset {
                Some(offset) if *offset < 0 => {
                    write!(f, ": the address is {} bytes before it", -offset)?
                }
                Some(offset) if (*offset as u64) < *bytes as u64 => {
                    write!(f, ": the address is its byte {offset}")?;
                }
                Some(offset) => {
                    let behind = offset - *bytes as i64;
                    write!(f, ": the address is {behind} bytes behind its end")?;
                }
                None => {}
            }
            write!(f, "\n    allocated {}", block.allocated)?;
            if let Some(freed) = &block.freed {
                write!(f, "\n    freed     {freed}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::address_in;

    #[test]
    fn an_address_is_found_in_what_a_driver_says() {
        assert_eq!(
            address_in("illegal address: 4 bytes at 0x1f00 are not all mapped"),
            Some(0x1f00)
        );
        assert_eq!(address_in("an illegal memory access was encountered"), None);
        assert_eq!(address_in("0x"), None);
    }
}
