//! Code that several crates of the runtime share: seeded random numbers, histograms, integer maps, size texts, setters of configurations,
//! `Debug` by named values, escapes of names for output, and a mutex without poisoning.
//!
//! It depends on no other crate of the project.

#![forbid(unsafe_code)]

mod debug_fields;
pub mod escape;
mod hashing;
mod histogram;
mod minstd;
mod mutex;
mod random;
mod setters;
mod size;

pub use hashing::{IntHasher, IntMap, IntSet};
pub use histogram::{FineHistogram, Histogram, PowerHistogram};
pub use minstd::Minstd;
pub use mutex::{Condvar, Mutex, MutexGuard};
pub use random::{Random, SplitMix};
pub use size::{size_text, size_text_up};
