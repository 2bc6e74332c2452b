//! Kernels and cudarc on the runtime's streams. What measures time is not here but in `gpu_overlap`, which has its process
//! and so the GPU to itself.

mod captures;
mod gpu;
mod gpu_cudarc;
mod gpu_threads;
mod graphs;
