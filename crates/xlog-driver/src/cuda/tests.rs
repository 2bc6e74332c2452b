//! Tests of the CUDA implementation with the fake driver: no GPU, no libcuda.

mod beside_captures;
mod capabilities;
mod contexts;
mod copies;
mod errors;
mod graphs;
mod handles;
mod holding;
mod modules;
mod opening;
