//! The library that `xlogmem exec` preloads into a CUDA program.
//!
//! It exports the driver calls that allocate and free device memory, and `dlsym`. A program finds the calls by linking, `dlsym` or
//! `cuGetProcAddress`; all three lead here. Each allocation is charged to the process's limit and the device's ledger before the driver
//! sees it, and logged if there is a log.
//!
//! Invariants:
//! - Nothing runs when the library is loaded. The first allocating call in a current context creates the state.
//! - A pointer or handle that is not in the tables goes to the driver unchanged.
//! - No panic leaves the library. After a panic or an internal error it reports that once, and the program continues without it.
//! - No driver call is made while the tables are locked.
//!
//! It is cooperative: a program can evade it. It does not see memory that the driver uses for contexts and modules, or allocations of
//! statically linked or setuid programs.

#![cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]

mod account;
mod arrays;
mod blocks;
mod caller;
mod contexts;
mod driver;
mod exports;
mod graphs;
mod handles;
mod information;
mod log;
mod messages;
mod outstanding;
mod pools;
mod proc_address;
mod resolve;
mod settings;
mod state;
mod synchronization;
