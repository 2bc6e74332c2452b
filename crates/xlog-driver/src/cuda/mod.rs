//! The CUDA driver behind the seam.
//!
//! [`CudaDriver::open`] finds libcuda at run time, so the crate builds and starts on a machine that has neither a GPU
//! nor a CUDA toolkit; what is missing there is a [`DriverError::Unavailable`](crate::DriverError::Unavailable) that
//! says what to do. Types and constants come from cudarc's bindings. The calls do not: its result type is a Rust enum,
//! which a code of a newer driver would make undefined behaviour, and its functions panic when a symbol is missing.
//!
//! Invariants: every call runs in the device's primary context and leaves a foreign one current as it was; no call uses
//! the legacy or the per-thread default stream; memory the device may still touch is freed only after a
//! synchronisation; all opens of one ordinal share one context, one staging cache and one set of gates.
//!
//! An error names the CUDA function when the driver refused, and the method of the seam when the seam itself did.
//!
//! It does not select devices, cache blocks, retry, or keep books on handles: that is the work of the layers above.

mod abi;
#[macro_use]
mod api;
mod capture;
mod context;
mod core;
mod device;
mod errors;
mod gates;
mod graphs;
mod host_fn;
mod host_memory;
mod library;
mod module;
mod open;
mod pools;
mod staging;
mod streams;
mod virtual_memory;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use device::CudaDriver;
pub use library::library_path;
pub use module::{CudaFunction, CudaModule, KernelArgument, LaunchShape};
pub use open::{MINIMUM_DRIVER_VERSION, device_count, driver_version};
