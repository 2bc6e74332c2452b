//! A simulated device that implements [`xlog_driver::Driver`].
//!
//! It runs the same programs as a GPU, with real bytes, and finds errors that a GPU would hide. Open it as [`SimDevice`]:
//!
//! - **Two engines.** Without a seed, every stream is a thread. With a seed, a scheduler decides at each driver call which streams
//!   progress: any legal order can occur, and one seed always gives the same order.
//! - **A race detector** that uses the program's happens-before order, never overlap in time: [`SimDevice::races`]. A race also fails the
//!   next synchronisation of either stream or of the device.
//! - **Captures and graphs**, whose replayed work the detector checks too: [`xlog_driver::Graphs`].
//! - **Fault injection**: [`SimDevice::faults`].
//! - **Simulated kernels** with declared ranges: [`SimKernel`].
//! - **Logical host threads**, scheduled by the same seed: [`SimDevice::run_threads`].
//! - **Simulated time** with a [`LatencyModel`]: [`SimDevice::simulated_time`].
//!
//! # Happens-before order
//!
//! The detector orders:
//! - operations of one stream;
//! - an event record before the work that waits for it;
//! - work that the host synchronised with, or saw complete by a query, before later calls of any host thread;
//! - the opening of a gate, by the host or a host function, before the work behind it;
//! - the calls of host threads, in the order in which they came.
//!
//! [`stream_is_idle`](xlog_driver::Driver::stream_is_idle) is a query that orders nothing. What a host function passes to a host thread
//! other than by a gate is not ordered: synchronise, or use a gate.
//!
//! # Limits
//!
//! It is slower than a GPU and does not model one: no caches, no warps, no bandwidth shared between streams.

#![deny(unsafe_code)]

mod analysis;
mod clock;
mod config;
mod detector;
mod device;
mod driver;
mod engine;
mod faults;
mod graph;
mod graphs;
mod host_memory;
mod kernel;
mod latency;
mod memory;
mod op;
mod pools;
mod race;
mod shadow;
mod state;
mod threads;
mod timeline;
mod virtual_memory;

pub use config::SimConfig;
pub use device::{SimDevice, SimMachine};
pub use faults::{Call, Fault, Faults};
pub use kernel::{KernelArgs, KernelSlice, SimKernel};
pub use latency::LatencyModel;
pub use race::{RaceKind, RaceReport, RaceSide, UnreadRaces};
