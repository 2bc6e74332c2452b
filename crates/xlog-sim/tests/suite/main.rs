//! The tests of the simulated device, one module each. They are one binary because every binary carries the whole
//! library, and the bundle for GPU hosts carries every binary.

mod bad_input;
mod engine;
mod faults;
mod graphs;
mod host_memory;
mod logical_threads;
mod memory;
mod programs;
mod races;
mod replay;
mod reports;
mod stale_use;
mod stream_threads;
mod support;
mod two_devices;
