//! Copies and fills of buffers, ordered like any other use.
//!
//! Each call prepares the use, queues the copy and closes the use, even if the copy fails ([`BlockUse`]). If the resource tracks no
//! uses, only copies on the buffer's own stream are accepted. In both cases the resource checks that the block is live, and keeps it
//! while the copy is queued.
//!
//! A capture of the runtime records fills and device copies, and refuses host copies. A stream that other code captures is refused: the
//! copy would become a node of the graph and run while no use is open.

use std::slice;
use std::sync::Arc;

use super::{BlockUse, DeviceRepr, DeviceView, DeviceViewMut, TrackedCudaSlice};
use crate::device_runtime::XlogDeviceRuntime;
use crate::device_runtime::graph::check_not_captured;
use crate::device_runtime::resource::{Access, ResourceError, StreamId};
use crate::{DeviceStream, Result};

impl<T: DeviceRepr> TrackedCudaSlice<T> {
    /// Copies `src`, which has as many elements as the buffer, to the device on the buffer's stream.
    ///
    /// `src` may be reused when this returns; the host does not wait.
    pub fn copy_from_slice(&mut self, src: &[T]) -> Result<()> {
        self.copy_from_slice_on(src, self.stream())
    }

    /// [`TrackedCudaSlice::copy_from_slice`] on another stream of the runtime.
    pub fn copy_from_slice_on(&mut self, src: &[T], stream: StreamId) -> Result<()> {
        DeviceViewMut::from(self).copy_from_slice_on(src, stream)
    }

    /// Copies `src`, a buffer or a view with as many elements, on the device and on this buffer's stream.
    ///
    /// The host does not wait, unless both are in page-locked memory: CUDA copies between such buffers synchronously.
    pub fn copy_from<'b>(&mut self, src: impl Into<DeviceView<'b, T>>) -> Result<()> {
        DeviceViewMut::from(self).copy_from(src)
    }

    /// [`TrackedCudaSlice::copy_from`] on another stream of the runtime.
    pub fn copy_from_on<'b>(
        &mut self,
        src: impl Into<DeviceView<'b, T>>,
        stream: StreamId,
    ) -> Result<()> {
        DeviceViewMut::from(self).copy_from_on(src, stream)
    }

    /// Sets every byte of the buffer, on the buffer's stream. The host does not wait.
    pub fn fill_bytes(&mut self, value: u8) -> Result<()> {
        DeviceViewMut::from(self).fill_bytes(value)
    }

    /// Copies the buffer to `dst`, which has as many elements, on the buffer's stream, and waits for the bytes.
    pub fn copy_to_slice(&self, dst: &mut [T]) -> Result<()> {
        self.copy_to_slice_on(dst, self.stream())
    }

    /// [`TrackedCudaSlice::copy_to_slice`] on another stream of the runtime.
    pub fn copy_to_slice_on(&self, dst: &mut [T], stream: StreamId) -> Result<()> {
        DeviceView::from(self).copy_to_slice_on(dst, stream)
    }

    /// Copies the elements to a vector on the buffer's stream, and waits for them. Elements that were never written are unspecified.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.to_vec_on(self.stream())
    }

    /// [`TrackedCudaSlice::to_vec`] on another stream of the runtime.
    pub fn to_vec_on(&self, stream: StreamId) -> Result<Vec<T>> {
        DeviceView::from(self).to_vec_on(stream)
    }
}

impl<T: DeviceRepr> DeviceViewMut<'_, T> {
    /// [`TrackedCudaSlice::copy_from_slice`] for this part of the buffer.
    pub fn copy_from_slice(&mut self, src: &[T]) -> Result<()> {
        self.copy_from_slice_on(src, self.buffer().stream())
    }

    /// [`DeviceViewMut::copy_from_slice`] on another stream of the runtime.
    pub fn copy_from_slice_on(&mut self, src: &[T], stream: StreamId) -> Result<()> {
        let dst = self.as_view();
        same_len("a host slice", src.len(), dst.len())?;
        host_copy(dst, stream, Access::Write, "a copy from the host", |stream| {
            // SAFETY: the range is in a live buffer, whose free is ordered after the use opened here.
            unsafe { stream.copy_htod(dst.address(), bytes_of(src)) }
        })
    }

    /// [`TrackedCudaSlice::copy_from`] for this part of the buffer.
    pub fn copy_from<'b>(&mut self, src: impl Into<DeviceView<'b, T>>) -> Result<()> {
        self.copy_from_on(src, self.buffer().stream())
    }

    /// [`DeviceViewMut::copy_from`] on another stream of the runtime.
    pub fn copy_from_on<'b>(
        &mut self,
        src: impl Into<DeviceView<'b, T>>,
        stream: StreamId,
    ) -> Result<()> {
        let (dst, src) = (self.as_view(), src.into());
        same_len("a buffer", src.len(), dst.len())?;
        if let (Some(to), Some(from)) = (dst.buffer().runtime(), src.buffer().runtime())
            && !Arc::ptr_eq(to.stream_pool(), from.stream_pool())
        {
            return Err(ResourceError::StreamMisuse(format!(
                "a copy between buffers of stream pool {} and stream pool {}; both must be of one runtime",
                from.stream_pool().number(),
                to.stream_pool().number()
            ))
            .into());
        }
        ordered(src, stream, Access::Read, |_| {
            ordered(dst, stream, Access::Write, |stream| {
                // SAFETY: two buffers, as for the copy from the host: the destination is borrowed mutably, so they do not overlap.
                unsafe { stream.copy_dtod(dst.address(), src.address(), dst.size_bytes()) }
            })
        })
    }

    /// [`TrackedCudaSlice::fill_bytes`] for this part of the buffer.
    pub fn fill_bytes(&mut self, value: u8) -> Result<()> {
        let dst = self.as_view();
        ordered(dst, dst.stream(), Access::Write, |stream| {
            // SAFETY: as for the copy from the host.
            unsafe { stream.memset(dst.address(), value, dst.size_bytes()) }
        })
    }
}

impl<T: DeviceRepr> DeviceView<'_, T> {
    /// [`TrackedCudaSlice::copy_to_slice`] for this part of the buffer.
    pub fn copy_to_slice(self, dst: &mut [T]) -> Result<()> {
        self.copy_to_slice_on(dst, self.stream())
    }

    /// [`DeviceView::copy_to_slice`] on another stream of the runtime.
    pub fn copy_to_slice_on(self, dst: &mut [T], stream: StreamId) -> Result<()> {
        same_len("a host slice", dst.len(), self.len())?;
        host_copy(self, stream, Access::Read, "a copy to the host", |stream| {
            // SAFETY: the range is in a buffer that is borrowed until the copy has completed.
            unsafe { stream.copy_dtoh(bytes_of_mut(dst), self.address()) }
        })
    }

    /// [`TrackedCudaSlice::to_vec`] for this part of the buffer.
    pub fn to_vec(self) -> Result<Vec<T>> {
        self.to_vec_on(self.stream())
    }

    /// [`DeviceView::to_vec`] on another stream of the runtime.
    pub fn to_vec_on(self, stream: StreamId) -> Result<Vec<T>> {
        // SAFETY: every pattern of bytes is a value of `T`, zeros included.
        let zero = unsafe { std::mem::zeroed::<T>() };
        let mut elements = vec![zero; self.len()];
        self.copy_to_slice_on(&mut elements, stream)?;
        Ok(elements)
    }
}

fn same_len(what: &str, len: usize, wanted: usize) -> Result<()> {
    if len == wanted {
        return Ok(());
    }
    Err(ResourceError::invalid(
        format!("{what} of {len} elements"),
        format!("{wanted}, the length of the buffer or view"),
    )
    .into())
}

/// [`ordered_if`] for a copy between the host and the device. A capture refuses it, because its work does not run.
fn host_copy<T: DeviceRepr>(
    view: DeviceView<'_, T>,
    stream: StreamId,
    access: Access,
    call: &'static str,
    copy: impl FnOnce(&DeviceStream) -> Result<()>,
) -> Result<()> {
    ordered_if(|_, queue| queue.refuse_capture(call), view, stream, access, copy)
}

/// [`ordered_if`] for work on the device, which a capture of the runtime may record.
fn ordered<T: DeviceRepr>(
    view: DeviceView<'_, T>,
    stream: StreamId,
    access: Access,
    work: impl FnOnce(&DeviceStream) -> Result<()>,
) -> Result<()> {
    let check = |runtime: &XlogDeviceRuntime, queue: &DeviceStream| {
        if !runtime.graphs().is_capturing(stream)? {
            check_not_captured("a copy or a fill of a buffer", stream, queue.raw())?;
        }
        Ok(())
    };
    ordered_if(check, view, stream, access, work)
}

/// Runs `work` within one use of the view's buffer on `stream`, after `check`. Does nothing for an empty view.
fn ordered_if<T: DeviceRepr>(
    check: impl FnOnce(&XlogDeviceRuntime, &DeviceStream) -> Result<()>,
    view: DeviceView<'_, T>,
    stream: StreamId,
    access: Access,
    work: impl FnOnce(&DeviceStream) -> Result<()>,
) -> Result<()> {
    if view.size_bytes() == 0 {
        return Ok(());
    }
    let (Some(runtime), Some(block)) = (view.buffer().runtime(), view.buffer().runtime_block())
    else {
        return Err(ResourceError::StreamMisuse(format!(
            "no runtime backs the slice at {:#x}, so a copy of it cannot be ordered",
            view.address()
        ))
        .into());
    };
    let queue = runtime.stream_pool().try_resolve(stream)?;
    check(runtime, &queue)?;
    let block_use = BlockUse { resource: runtime.checked()?, block, stream, queue: &queue, access };
    if runtime.supports_block_use_tracking() {
        return block_use.run(|| work(&queue));
    }
    if stream != block.alloc_stream {
        return Err(ResourceError::StreamMisuse(format!(
            "a copy on {stream} is unsupported: the resource tracks no uses, so only {} is ordered",
            block.alloc_stream
        ))
        .into());
    }
    block_use.run_live(|| work(&queue))
}

fn bytes_of<T: DeviceRepr>(elements: &[T]) -> &[u8] {
    // SAFETY: plain data has no padding, so all its bytes are initialised; bytes have no alignment.
    unsafe { slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_of_mut<T: DeviceRepr>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes that are written are values of `T`.
    unsafe { slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
