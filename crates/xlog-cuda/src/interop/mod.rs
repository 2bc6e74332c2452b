//! Streams and buffers of this crate in programs that launch through [cudarc](https://docs.rs/cudarc).
//!
//! | cudarc's type | this module |
//! |---|---|
//! | a `CudaStream` | [`CudarcStream`]: a stream of the runtime, borrowed by cudarc |
//! | a kernel argument | a [`TrackedCudaSlice`], ordered by a [`LaunchRecorder`](crate::LaunchRecorder) around the launch; or a view |
//! | `DevicePtr`, `DevicePtrMut` | [`ReadView`], [`WriteView`]: a buffer with an open use on a [`CudarcStream`] |
//!
//! The runtime orders the work, not cudarc: its per-buffer events forget readers and cost driver calls on every launch. A
//! [`TrackedCudaSlice`] does not implement `DevicePtr` itself: cudarc may pass any of its streams, and the guard that the call returns
//! can only record cudarc's events. A view opens a use on its stream and closes it when it is dropped. Work on another stream is
//! ordered by an event before it and a synchronisation after it.
//!
//! cudarc retains the primary context of the device and makes it current on the calling thread; the runtime does not depend on that.

mod argument;
mod stream;
mod view;

pub use cudarc;
pub use stream::CudarcStream;
pub use view::{OpenView, ReadView, WriteView};

#[cfg(doc)]
use crate::TrackedCudaSlice;
