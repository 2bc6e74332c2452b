//! A simulated device behind the xlog driver seam.
//!
//! It runs the same programs as a GPU, with real bytes, and catches what a GPU would hide. Open it as [`SimDevice`]:
//!
//! - **Two engines.** Without a seed, every stream is a thread. With one, a scheduler decides at each driver call which
//!   streams go on: any legal order can happen, and the same seed gives the same order again.
//! - **A race detector** that decides by what the program orders, never by what overlapped in time: [`SimDevice::races`].
//!   A race also fails the next synchronisation of either stream, or of the device.
//! - **Captures and graphs**, whose replayed work the detector sees too: [`xlog_driver::Graphs`].
//! - **Fault injection**: [`SimDevice::faults`].
//! - **Simulated kernels** with declared ranges: [`SimKernel`].
//! - **Logical host threads**, scheduled from the same seed: [`SimDevice::run_threads`].
//! - **Simulated time** by a [`LatencyModel`]: [`SimDevice::simulated_time`].
//!
//! # What the detector takes as order
//!
//! Operations of one stream; an event recorded and waited for; a host that synchronised, or learned by a query that
//! something is complete, and then queued work, on whatever thread; a gate opened by the host or by a host function.
//! [`stream_is_idle`](xlog_driver::Driver::stream_is_idle) is a query that orders nothing.
//! Host threads are taken as ordered among each other as their calls came. What a host function tells a host thread by
//! other means than a gate is not seen: synchronise, or use a gate.
//!
//! # What it is not
//!
//! Not fast like a GPU, and not a model of one: no caches, no warps, no bandwidth shared between streams.

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
