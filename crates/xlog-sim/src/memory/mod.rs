//! Simulated memory: addresses, the bytes behind them, stream-ordered pools and mappings.
//!
//! Addresses lie above everything that a host maps, so that a host access through one faults. They are allocated in a fixed order: one
//! program gets the same addresses in every run, except for the number of machines opened before.

mod backing;
mod pool;
mod space;

pub(crate) use backing::{Backing, BackingRange};
pub(crate) use pool::{Pool, Reuse, Standing};
pub(crate) use space::{AddressSpace, Mapping, Owner, Region, RegionKind};

/// The alignment of blocks, and the unit of their accounting.
pub(crate) const BLOCK_ALIGN: u64 = 512;

/// The next multiple of `align`, a power of two; `None` on overflow.
pub(crate) fn round_up(bytes: u64, align: u64) -> Option<u64> {
    bytes.checked_add(align - 1).map(|sum| sum & !(align - 1))
}
