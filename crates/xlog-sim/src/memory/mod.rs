//! Simulated memory: addresses, the bytes behind them, stream-ordered pools and mappings.
//!
//! Addresses lie above everything a host maps, so that a host that follows one faults. They are handed out in a fixed
//! order: the same program sees the same addresses in every run, up to the number of machines opened before.

mod backing;
mod pool;
mod space;

pub(crate) use backing::{Backing, BackingRange};
pub(crate) use pool::{Pool, Reuse, Standing};
pub(crate) use space::{AddressSpace, Mapping, Owner, Region, RegionKind};

/// Blocks start at multiples of this, and are accounted in it.
pub(crate) const BLOCK_ALIGN: u64 = 512;

/// The next multiple of `align`, a power of two; `None` past the end of all numbers.
pub(crate) fn round_up(bytes: u64, align: u64) -> Option<u64> {
    bytes.checked_add(align - 1).map(|sum| sum & !(align - 1))
}
