//! CUDA graphs: hazards by name, random programs, faults, and captures of other code.

mod entries;
mod errors;
mod faults;
mod foreign;
mod hazards;
mod model;
mod support;
mod threads;
