//! What the commands of `xlogmem` share: sizes as people write them.

#![deny(unsafe_code)]

pub mod size;
