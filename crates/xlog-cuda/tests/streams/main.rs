//! A device, its streams and its memory.

mod async_streams;
mod device;
mod held_streams;
mod memory;
mod stream_order;
mod stream_pool;
mod stream_reuse;
