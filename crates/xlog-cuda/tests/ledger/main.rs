//! Runtimes in a ledger: the meter, the stacks that are built by configuration, and processes that share one limit.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(target_os = "linux")]

mod cells;
mod exits;
mod limits;
mod meter;
mod pinned_host;
mod pressure;
mod processes;
mod stacks;
mod support;
mod worker;
