//! The library that `xlogmem exec` preloads into a CUDA program.
//!
//! It exports the driver calls that take or give device memory, and `dlsym`. A program reaches the calls by linking, by `dlsym` or by
//! `cuGetProcAddress`; all three lead here. Each call is charged to the limit of the process and to the ledger of the device before
//! the driver sees it, and is written to the log if there is one.
//!
//! Invariants:
//! - Nothing runs when the library is loaded. The first call that takes memory in a current context creates the state.
//! - A pointer or handle that is not in the tables goes to the driver unchanged.
//! - No panic leaves the library. After a panic or an error of its own it reports that once, and the program continues without it.
//! - No driver call is made while the tables are locked.
//!
//! It is cooperative: a program that wants to evade it can. It does not see memory that the driver takes for contexts and modules,
//! and allocations of statically linked or setuid programs.

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
