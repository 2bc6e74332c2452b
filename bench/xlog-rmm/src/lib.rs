//! RMM's memory resources behind [`DeviceMemoryResource`](xlog_cuda::device_runtime::DeviceMemoryResource).
//!
//! RMM is C++. A bridge (`bench/peers/rmm_bridge.cu`), built on the GPU host against RMM's own package, exposes it through five C
//! functions. [`Bridge`] loads it at run time, so this crate needs neither RMM nor CUDA to build.
//!
//! The resource provides blocks by identity, refusals without side effects, exact byte counts, and frees in the order of the block's
//! own stream. It does not track uses: RMM has no notion of uses on other streams, so the hooks keep their refusing defaults. A
//! [`PoolResource`](xlog_cuda::device_runtime::PoolResource) on top of it tracks uses itself.

mod bridge;
mod resource;

pub use bridge::{Bridge, BridgeError, RmmKind};
pub use resource::RmmResource;
