//! Typed device memory that frees itself.
//!
//! | item | what it is |
//! |---|---|
//! | [`GpuMemoryManager`] | allocates on one stream of one runtime, within a limit, and counts |
//! | [`TrackedCudaSlice`] | a buffer of `T`s; freed through its runtime when it is dropped |
//! | [`DeviceView`], [`DeviceViewMut`] | a range of a buffer's elements |
//! | [`RawBlock`] | the same without a type |
//! | [`Reservation`] | bytes of the limit set aside for allocations to come |
//! | [`DeviceRepr`] | which types may lie in device memory |
//!
//! Invariants: a buffer reads and writes only memory that the driver knows as memory of its device, and only while its block is the live
//! one at its address; a buffer owns its block and keeps the runtime's parts alive, so the order of drops does not matter; no safe call
//! gives the block away, so it is freed once; an empty buffer has no block and costs nothing. This module meters requested bytes;
//! the runtime's resource meters what the blocks really take.

mod account;
mod block_use;
#[allow(unsafe_code)]
mod copies;
mod manager;
mod raw;
#[allow(unsafe_code)]
mod repr;
mod reservation;
mod shown;
#[allow(unsafe_code)]
mod slice;
mod view;

pub use crate::device_runtime::runtime::{FailedFree, set_failed_free_handler};
pub(crate) use block_use::BlockUse;
pub use manager::GpuMemoryManager;
pub use raw::RawBlock;
pub use repr::DeviceRepr;
pub use reservation::Reservation;
pub(crate) use shown::Shown;
pub use slice::TrackedCudaSlice;
pub use view::{DeviceView, DeviceViewMut};
