//! What the commands of `xlogmem` and the benches share: workloads, the stacks they run on, and sizes as people write them.

#![deny(unsafe_code)]

pub mod relational;
pub mod size;
pub mod stack;
pub mod workload;
