//! What several crates of the runtime share and no other crate is the place for: seeded random numbers.
//!
//! Depends on no other crate of the project.

#![forbid(unsafe_code)]

mod minstd;
mod random;

pub use minstd::Minstd;
pub use random::{Random, SplitMix};
