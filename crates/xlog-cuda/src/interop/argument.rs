//! Our buffers as arguments of cudarc's launches: each is passed as its address.
//!
//! `LaunchArgs::launch` is unsafe, and this adds to what its caller promises. A [`TrackedCudaSlice`] brings no order of its own:
//! put the launch between the preflight and the commit of a [`LaunchRecorder`](crate::LaunchRecorder) on the same stream that
//! names it. A view brings the order of the stream it was opened on: launch there. What a kernel only reads may be passed by
//! shared reference; what it writes, by mutable reference.

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

// SAFETY: as above; the view, and with it the open use, is borrowed until the arguments are gone.
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
