//! Typed device memory that frees itself.
//!
//! | item | what it is |
//! |---|---|
//! | [`GpuMemoryManager`] | allocates on one stream of one runtime, within a limit, and counts |
//! | [`TrackedCudaSlice`] | a buffer of `T`s; freed through its runtime when it is dropped |
//! | [`DeviceView`], [`DeviceViewMut`] | a range of a buffer's elements |
//! | [`RawBlock`] | a buffer without a type |
//! | [`Reservation`] | reserved bytes of the limit, for later allocations |
//! | [`DeviceRepr`] | the types that device memory may hold |
//!
//! Invariants:
//! - A copy accesses only memory of the buffer's device, and only while the buffer's block is live.
//! - A buffer owns its block and keeps the runtime's parts alive, so the order of drops does not matter.
//! - No safe call gives the block away, so it is freed once. An empty buffer has no block.
//!
//! Managers count requested bytes; the budget charges the bytes that blocks take.

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
