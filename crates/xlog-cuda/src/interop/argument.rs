//! Buffers as arguments of cudarc's launches: each is passed as its address.
//!
//! The caller of the unsafe `LaunchArgs::launch` also guarantees:
//! - A launch with a [`TrackedCudaSlice`] is queued between the preflight and the commit of a
//!   [`LaunchRecorder`](crate::LaunchRecorder) that names the buffer, on the recorder's stream.
//! - A launch with a view is queued on the view's stream.
//! - A buffer that the kernel writes is passed by mutable reference.

use cudarc::driver::{LaunchArgs, PushKernelArg};

use super::{ReadView, WriteView};
use crate::{DeviceRepr, TrackedCudaSlice};

// SAFETY: the address is a plain number, and the reference to it lives as long as the arguments.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b TrackedCudaSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, slice: &'b TrackedCudaSlice<T>) -> &mut Self {
        self.arg(slice.ptr_ref())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b mut TrackedCudaSlice<T>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, slice: &'b mut TrackedCudaSlice<T>) -> &mut Self {
        let slice: &'b TrackedCudaSlice<T> = slice;
        self.arg(slice.ptr_ref())
    }
}

// SAFETY: as above; the view, and with it the open use, is borrowed as long as the arguments live.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: DeviceRepr> PushKernelArg<&'b ReadView<'c, T>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, view: &'b ReadView<'c, T>) -> &mut Self {
        self.arg(view.ptr())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: DeviceRepr> PushKernelArg<&'b mut WriteView<'c, T>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, view: &'b mut WriteView<'c, T>) -> &mut Self {
        let view: &'b WriteView<'c, T> = view;
        self.arg(view.ptr())
    }
}
