//! RMM's memory resources behind [`DeviceMemoryResource`](xlog_cuda::device_runtime::DeviceMemoryResource).
//!
//! RMM is C++. A bridge (`bench/peers/rmm_bridge.cu`), built on the GPU host against the headers and the library of RMM's own package,
//! offers it through five C functions; [`Bridge`] loads it when the program runs, so nothing here needs RMM or CUDA to build.
//!
//! It promises blocks by identity, refusals that change nothing, every byte counted, frees in the order of the block's own
//! stream. What it does not: RMM knows nothing of uses on other streams, so the hooks keep their defaults and refuse. A program that
//! needs them puts a [`PoolResource`](xlog_cuda::device_runtime::PoolResource) over it, which tracks uses by itself.

mod bridge;
mod resource;

pub use bridge::{Bridge, BridgeError, RmmKind};
pub use resource::RmmResource;
