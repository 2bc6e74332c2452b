//! What the tests of resources and their ordering share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod meter;
pub mod pool_rig;
pub mod program;
pub mod rig;
pub mod runner;
pub mod stranger;

pub use xlog_base::Random;

/// A number from the environment.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
