//! The CUDA implementation of [`Driver`](crate::Driver).
//!
//! [`CudaDriver::open`] finds libcuda at run time, so the crate builds and starts on a machine without a GPU or a CUDA toolkit. A missing
//! part is a [`DriverError::Unavailable`](crate::DriverError::Unavailable) with its remedy. Types and constants come from cudarc's
//! bindings, the calls do not: cudarc's result type is a Rust enum, for which a newer driver's code would be undefined behaviour, and its
//! functions panic when a symbol is missing.
//!
//! Invariants:
//! - every call runs in the device's primary context and restores another context that was current;
//! - no call uses the per-thread default stream, and the legacy stream only as a `foreign_stream`;
//! - memory that the device may still access is freed only after a synchronisation;
//! - all opens of one ordinal share one context, one staging cache and one set of gates.
//!
//! An error names the CUDA function that refused, or the method of `Driver` that refused before any call.
//!
//! This module does not select devices, cache blocks, retry or track handles: the layers above do.

mod abi;
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
