//! A memory runtime for GPUs, real or simulated: stream-ordered allocation that tracks every use across streams, enforces memory limits,
//! and logs what it does.
//!
//! ```
//! # #[cfg(feature = "sim")]
//! # fn main() -> xlog_cuda::Result<()> {
//! use xlog_cuda::prelude::*;
//!
//! let runtime = XlogDeviceRuntime::open("sim")?; // or "sim:7", or "cuda:0"
//! let (producer, consumer) = (runtime.stream_pool().lease()?, runtime.stream_pool().lease()?);
//! let memory = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(producer.id());
//! let rows = memory.alloc_from(&[7_u32; 1024])?; // queued on the producer's stream
//! assert_eq!(rows.to_vec_on(consumer.id())?, [7; 1024]); // the consumer's stream waits for that copy
//! drop(rows); // the free is ordered after the consumer's read
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sim"))]
//! # fn main() {}
//! ```
//!
//! | item | what it is |
//! |---|---|
//! | [`XlogDeviceRuntime`](device_runtime::XlogDeviceRuntime) | the runtime of one device: its streams and its memory resources |
//! | [`GpuMemoryManager`], [`TrackedCudaSlice`], [`DeviceView`] | typed buffers in device memory, and ranges of them |
//! | [`LaunchRecorder`] | orders a kernel after everything that its buffers depend on |
//! | [`DeviceMemoryResource`](device_runtime::DeviceMemoryResource) | the trait of resources: [`PoolResource`](device_runtime::PoolResource), [`AsyncCudaResource`](device_runtime::AsyncCudaResource), [`DirectCudaResource`](device_runtime::DirectCudaResource), [`PinnedHostResource`](device_runtime::PinnedHostResource), and decorators |
//! | [`StreamPool`](device_runtime::StreamPool), [`DeviceStream`] | non-blocking streams, leased by [`StreamId`] |
//! | [`CudaDevice`] | one open device: `"cuda:0"`, `"sim"` or `"sim:SEED"` |
//! | [`XlogError`] | typed errors |
//!
//! All work names its stream. Events or synchronisations order work across streams; nothing relies on the legacy default stream. A
//! simulated device detects violations of this rule ([`CudaDevice::races`]); a GPU does not.
//!
//! # Features
//!
//! The first five are on by default. Without them the crate has devices, streams, ordering, resources, budget, statistics and in-memory
//! logs. A setting that needs a missing feature is refused with the name of that feature.
//!
//! | feature | what it adds |
//! |---|---|
//! | `sim` | the simulated device behind `"sim"` and `"sim:SEED"`, with its race detector |
//! | `ledger` | one limit per GPU for all processes |
//! | `trace` | log files; the report of blocks that are live when the process ends |
//! | `nvtx` | pools whose blocks a memory checker sees one by one |
//! | `guard` | canaries, poison, a quarantine and guard pages over any resource |
//! | `cudarc` | streams and buffers of this crate in launches of the crate cudarc |
//! | `metrics` | statistics through the `metrics` facade, and as a page for Prometheus |
//! | `tracing` | spans around slow operations |

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
pub mod prelude;
mod spans;
mod spec;
#[allow(unsafe_code)]
mod stream;

/// Runs the examples of the README and of the pages for users.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../../../docs/concepts.md")]
    struct Concepts;
    #[doc = include_str!("../../../docs/cudarc.md")]
    struct Cudarc;
    #[doc = include_str!("../../../docs/async.md")]
    struct Async;
    #[doc = include_str!("../../../docs/graphs.md")]
    struct Graphs;
    #[doc = include_str!("../../../docs/from-rmm.md")]
    struct FromRmm;
    #[doc = include_str!("../../../docs/from-pytorch.md")]
    struct FromPytorch;
    #[doc = include_str!("../../../docs/troubleshooting.md")]
    struct Troubleshooting;
    #[doc = include_str!("../../../docs/features.md")]
    struct Features;
}

pub use bytes::ByteSize;
pub use device::CudaDevice;
pub use error::{Result, XlogError};
pub use launch::LaunchRecorder;
pub use memory::{
    DeviceRepr, DeviceView, DeviceViewMut, GpuMemoryManager, RawBlock, Reservation,
    TrackedCudaSlice,
};
pub use spec::{DEVICE_VARIABLE, DeviceSpec};
pub use stream::{DeviceStream, StreamDone};

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
