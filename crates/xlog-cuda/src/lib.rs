//! The device runtime: one view of a GPU, real or simulated, whose work is ordered by streams.
//!
//! | item | what it is |
//! |---|---|
//! | [`CudaDevice`] | one open device: `"cuda:0"`, `"sim"` or `"sim:SEED"` |
//! | [`StreamPool`](device_runtime::StreamPool) | owned non-blocking streams, handed out by [`StreamId`] |
//! | [`DeviceStream`] | one stream: queues fills, copies, host functions and gates |
//! | [`XlogError`] | what can go wrong, in types |
//!
//! The rule everything obeys: work names its stream, work on another stream is ordered by an event or a synchronisation,
//! and nothing relies on the legacy default stream. The simulated devices check this rule and report who broke it
//! ([`CudaDevice::races`]); a GPU does not.
//!
//! ```
//! use std::sync::Arc;
//! use xlog_cuda::{CudaDevice, device_runtime::StreamPool};
//!
//! let device = Arc::new(CudaDevice::open("sim")?);
//! let pool = StreamPool::with_defaults(device.clone());
//! let stream = pool.lease()?;
//!
//! let block = device.driver().alloc(1024)?;
//! let mut bytes = [0; 1024];
//! // SAFETY: `block` is live and 1024 bytes long until it is freed below, after the copy has waited for all work on it.
//! unsafe {
//!     stream.memset(block, 7, 1024)?;
//!     stream.copy_dtoh(&mut bytes, block)?;
//!     device.driver().free(block)?;
//! }
//! assert_eq!(bytes, [7; 1024]);
//! # Ok::<(), xlog_cuda::XlogError>(())
//! ```
//!
//! # Features
//!
//! The first five are on by default. Without them the crate is the core alone: devices, streams, order, resources, budget, statistics and
//! logs in memory. A setting that asks for a part which is not built in is refused, with the name of its feature.
//!
//! | feature | what it adds |
//! |---|---|
//! | `sim` | the simulated device behind `"sim"` and `"sim:SEED"`, with its race detector |
//! | `ledger` | one limit per GPU for all processes |
//! | `trace` | logs as files; the report of blocks that are live when the process ends |
//! | `nvtx` | pools that a memory checker sees block by block |
//! | `guard` | canaries, poison, a quarantine and guard pages under any resource |
//! | `cudarc` | our streams and buffers in launches of the crate cudarc |
//! | `metrics` | statistics through the `metrics` facade, and as a page for Prometheus |
//! | `tracing` | spans around what may take long |

#![deny(unsafe_code)]

mod bytes;
mod device;
pub mod device_runtime;
mod device_wait;
mod error;
#[cfg(feature = "cudarc")]
#[allow(unsafe_code)]
pub mod interop;
#[allow(unsafe_code)]
pub mod kernels;
pub mod launch;
pub mod memory;
mod spans;
mod spec;
#[allow(unsafe_code)]
mod stream;

/// Runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use bytes::ByteSize;
pub use device::CudaDevice;
pub use error::{Result, XlogError};
pub use launch::LaunchRecorder;
pub use memory::{DeviceRepr, GpuMemoryManager, RawBlock, Reservation, TrackedCudaSlice};
pub use spec::{DEVICE_VARIABLE, DeviceSpec};
pub use stream::DeviceStream;

#[doc(inline)]
pub use device_runtime::StreamId;

pub use xlog_driver as driver;
pub use xlog_driver::Gate;
#[cfg(feature = "ledger")]
pub use xlog_ledger as ledger;
#[cfg(feature = "sim")]
pub use xlog_sim as sim;
#[cfg(feature = "sim")]
pub use xlog_sim::RaceReport;
