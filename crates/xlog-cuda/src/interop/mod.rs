//! Our streams and buffers in programs that launch through [cudarc](https://docs.rs/cudarc).
//!
//! | what cudarc wants | what is here |
//! |---|---|
//! | a `CudaStream` | [`CudarcStream`]: one of our streams, lent to cudarc |
//! | a kernel argument | a [`TrackedCudaSlice`], ordered by a [`LaunchRecorder`](crate::LaunchRecorder) around the launch; or a view |
//! | `DevicePtr`, `DevicePtrMut` | [`ReadView`], [`WriteView`]: a buffer with an open use on a [`CudarcStream`] |
//!
//! cudarc's own order is not built upon: its per-buffer events forget readers and cost driver calls on every launch. Ours
//! stays in charge. A [`TrackedCudaSlice`] does not implement `DevicePtr` itself: those calls may come with any stream of
//! cudarc's, and the guard they return can record cudarc's events only. A view is prepared on the stream it was made for and
//! closes its use when it is dropped, after the work was queued; work on another stream is ordered by an event before and a
//! synchronisation after it.
//!
//! cudarc keeps the primary context of the device and makes it current on the thread that calls; ours do not mind.

mod argument;
mod stream;
mod view;

pub use cudarc;
pub use stream::CudarcStream;
pub use view::{ReadView, WriteView};

#[cfg(doc)]
use crate::TrackedCudaSlice;
