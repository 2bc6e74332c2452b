//! Typed buffers in page-locked memory.
//!
//! Why safe code cannot race with the device:
//! - The host accesses the elements only by [`PinnedBuffer::as_slice`] and [`PinnedBuffer::as_mut_slice`]. They return after
//!   the host has seen every conflicting copy complete.
//! - A copy borrows the buffer by `&mut`, so no slice is left when the device begins to read or write.
//! - The buffer keeps the memory until it is dropped. Safe code can forge the buffer's block and free it; the resource then
//!   marks it returned and reuses nothing.
//! - Blocks come only from this library's resources, which hand out each block once.

use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::PinnedHostResource;
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, DeviceBlock, DeviceMemoryResource, MIN_ALIGN,
    ResourceError, ResourceResult, Seal, StreamId,
};
use crate::device_runtime::runtime::{FailedFree, report_failed_free, watch_pinned};
use crate::memory::BlockUse;
use crate::stream::{Completion, RawStream};
use crate::{DeviceRepr, DeviceStream, DeviceView, DeviceViewMut, Result};

/// A resource through which buffers are allocated and freed.
type SharedResource = Arc<dyn DeviceMemoryResource + Send + Sync>;

/// A buffer of `T`s in page-locked memory, which the device copies from and to asynchronously.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let streams = runtime.stream_pool().clone();
/// let pinned = Arc::new(PinnedHostResource::new(runtime.device().clone(), 0, streams.clone()));
/// let stream = streams.lease()?;
/// let mut column = GpuMemoryManager::with_runtime(runtime).alloc::<u32>(4)?;
///
/// let mut staging = pinned.alloc::<u32>(4, stream.id(), AllocTag("staging"))?;
/// staging.as_mut_slice()?.copy_from_slice(&[3, 1, 4, 1]);
/// staging.copy_to(&mut column, stream.id())?; // returns at once
/// staging.as_mut_slice()?.fill(0); // waits for that copy, and for no later work
/// staging.copy_from(&column, stream.id())?; // returns at once
/// assert_eq!(staging.as_slice()?, [3, 1, 4, 1]); // waits for the bytes
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[must_use = "dropping the buffer frees it"]
pub struct PinnedBuffer<T> {
    pinned: Arc<PinnedHostResource>,
    resource: SharedResource,
    /// `None` in an empty buffer.
    block: Option<DeviceBlock>,
    host: NonNull<T>,
    len: usize,
    /// The latest copies of each stream that the host may not have seen complete.
    copies: Vec<QueuedCopy>,
}

/// A queued copy: the work of a stream up to a stamp.
#[derive(Clone, Copy, Debug)]
struct QueuedCopy {
    slot: u32,
    stamp: u64,
    /// Whether the device writes the buffer.
    writes: bool,
}

// SAFETY: the buffer owns its elements like a box; its other fields are `Send` and `Sync`.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above. A shared buffer gives out shared slices only.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl PinnedHostResource {
    /// Allocates a buffer of `len` elements, whose values are unspecified.
    pub fn alloc<T: DeviceRepr>(
        self: &Arc<Self>,
        len: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> Result<PinnedBuffer<T>> {
        self.alloc_through(&(Arc::clone(self) as SharedResource), len, stream, tag)
    }

    /// [`alloc`](Self::alloc) through decorators over this resource: a log, statistics, a budget of its own.
    ///
    /// Decorators of other crates are refused: a buffer must know that its block is handed out once.
    pub fn alloc_through<T: DeviceRepr>(
        self: &Arc<Self>,
        resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
        len: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> Result<PinnedBuffer<T>> {
        let mut buffer = PinnedBuffer {
            pinned: Arc::clone(self),
            resource: Arc::clone(resource),
            block: None,
            host: NonNull::dangling(),
            len,
            copies: Vec::new(),
        };
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes == 0 {
            return Ok(buffer);
        }
        if !resource.is_trusted(Seal(())) {
            let detail = "a typed buffer takes its block through this library's decorators only";
            return Err(ResourceError::Unsupported { call: "alloc_through", detail }.into());
        }
        let align = align_of::<T>().max(MIN_ALIGN);
        let request = AllocRequest::new(bytes, stream, tag).aligned(align);
        let block = resource.allocate_request(request, None)?;
        match self.begin_buffer(&block, bytes) {
            Ok(host) if host.cast::<T>().is_aligned() => {
                self.watched.call_once(|| watch_pinned(self));
                buffer.host = host.cast();
                buffer.block = Some(block);
                Ok(buffer)
            }
            refused => {
                self.end_buffer(&block);
                resource.deallocate(block)?;
                let misaligned =
                    || ResourceError::Driver("page-locked memory lies askew".to_owned());
                Err(refused.err().unwrap_or_else(misaligned).into())
            }
        }
    }

    /// Registers the block of a buffer, and returns its address.
    fn begin_buffer(&self, block: &DeviceBlock, bytes: usize) -> ResourceResult<NonNull<u8>> {
        self.chunks.lock().buffers.insert(block.generation, false);
        // After the registration, which keeps a block that is returned concurrently.
        let host = self.host_ptr(block)?;
        let given = self.tracker.table.find_block(block)?.bytes();
        if given < bytes {
            return Err(ResourceError::Driver(format!("{given} bytes were given for {bytes}")));
        }
        Ok(host)
    }

    /// Unregisters the block of a buffer. Frees it if it was returned meanwhile.
    fn end_buffer(&self, block: &DeviceBlock) {
        let is_returned = self.chunks.lock().buffers.remove(&block.generation);
        if is_returned == Some(true)
            && let Some(meta) = self.tracker.table.at(block.generation)
        {
            // After a failure a reap tries again.
            let _ = self.retired.push(&self.tracker, block.generation, meta);
        }
    }

    /// Notes that all work queued on a stream so far may use the buffer of these copies.
    fn note_copy(&self, copies: &mut Vec<QueuedCopy>, stream: &DeviceStream, writes: bool) {
        let raw = stream.raw();
        let slot = raw.clock().slot();
        // Without an event the host waits for the whole stream.
        let recorded = raw.record(&self.tracker.counters);
        let stamp = recorded.unwrap_or_else(|_| raw.clock().now());
        copies.retain(|copy| copy.slot != slot || copy.writes != writes);
        copies.push(QueuedCopy { slot, stamp, writes });
    }

    /// Waits for the work of a stream up to a stamp, and for no later work.
    fn wait_up_to(&self, stream: &RawStream, stamp: u64) -> Result<()> {
        if stream.synchronize_up_to(stamp)? == Completion::Unrecorded {
            stream.synchronize(&self.tracker.counters)?;
        }
        Ok(())
    }
}

impl<T: DeviceRepr> PinnedBuffer<T> {
    /// Waits until copies to the buffer have completed, and returns the elements.
    pub fn as_slice(&self) -> Result<&[T]> {
        self.wait(|copy| copy.writes)?;
        // SAFETY: the buffer has this many elements. The device writes none of them: such copies have completed, and the next
        // one needs `&mut self`. Every bit pattern is a `T`.
        Ok(unsafe { slice::from_raw_parts(self.host.as_ptr(), self.len) })
    }

    /// Waits until all copies have completed, and returns the elements.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.wait(|_| true)?;
        self.copies.clear();
        // SAFETY: as in `as_slice`. All copies have completed, and no other slice is left.
        Ok(unsafe { slice::from_raw_parts_mut(self.host.as_ptr(), self.len) })
    }

    /// Returns whether all copies have completed, so that [`as_mut_slice`](Self::as_mut_slice) does not wait.
    pub fn is_idle(&self) -> bool {
        let streams = &self.pinned.tracker.streams;
        self.copies.iter().all(|copy| {
            let stream = streams.at(copy.slot);
            stream.is_some_and(|stream| stream.poll(copy.stamp) == Completion::Complete)
        })
    }

    /// Queues a copy of the elements to `dst`, a buffer or view of the same length, on a stream. The host does not wait.
    pub fn copy_to<'b>(
        &mut self,
        dst: impl Into<DeviceViewMut<'b, T>>,
        stream: StreamId,
    ) -> Result<()> {
        self.copy(dst.into().as_view(), stream, Access::Read)
    }

    /// Queues a copy of `src`, a buffer or view of the same length, to this buffer on a stream. The host does not wait.
    pub fn copy_from<'b>(
        &mut self,
        src: impl Into<DeviceView<'b, T>>,
        stream: StreamId,
    ) -> Result<()> {
        self.copy(src.into(), stream, Access::Write)
    }

    /// Queues a copy between the buffer and `slice` as a use of both; `access` is the access to the buffer.
    fn copy(&mut self, slice: DeviceView<'_, T>, stream: StreamId, access: Access) -> Result<()> {
        if slice.len() != self.len {
            let value = format!("a device buffer of {} elements", slice.len());
            let accepted = format!("{}, the length of the page-locked buffer", self.len);
            return Err(ResourceError::InvalidRequest { value, accepted }.into());
        }
        let Self { pinned, resource, block, copies, .. } = self;
        let Some(block) = block.as_ref() else { return Ok(()) };
        let of_slice = slice.buffer();
        let (Some(runtime), Some(other)) = (of_slice.runtime(), of_slice.runtime_block()) else {
            let message = format!("no runtime backs the slice at {:#x}", slice.ptr());
            return Err(ResourceError::StreamMisuse(message).into());
        };
        let mismatch =
            pinned.home().and_then(|home| home.mismatch(runtime.device(), runtime.stream_pool()));
        if let Some(mismatch) = mismatch {
            return Err(ResourceError::Driver(format!("a copy between {mismatch}")).into());
        }
        let queue = &*runtime.stream_pool().try_resolve(stream)?;
        queue.refuse_capture("a copy of page-locked memory")?;
        let writes = access.writes();
        let (host, other_ptr) = (block.ptr, slice.address());
        let (dst, src) = if writes { (host, other_ptr) } else { (other_ptr, host) };
        let other = BlockUse {
            resource: runtime.checked()?,
            block: other,
            stream,
            queue,
            access: if writes { Access::Read } else { Access::Write },
        };
        let own = BlockUse { resource: &**resource, block, stream, queue, access };
        other.run(|| {
            own.run(|| {
                // SAFETY: both blocks are live, have this many bytes and stay until their uses are closed and have completed.
                let queued = unsafe { queue.copy_dtod(dst, src, slice.size_bytes()) };
                pinned.note_copy(copies, queue, writes);
                queued
            })
        })
    }

    fn wait(&self, must_wait: impl Fn(&QueuedCopy) -> bool) -> Result<()> {
        for copy in self.copies.iter().filter(|copy| must_wait(copy)) {
            let Some(stream) = self.pinned.tracker.streams.at(copy.slot) else {
                let message = "the stream of a copy is unknown".to_owned();
                return Err(ResourceError::StreamMisuse(message).into());
            };
            self.pinned.wait_up_to(stream, copy.stamp)?;
        }
        Ok(())
    }
}

impl<T> PinnedBuffer<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the block, whose address is for work on the device; `None` in an empty buffer.
    pub fn block(&self) -> Option<&DeviceBlock> {
        self.block.as_ref()
    }
}

impl<T> Drop for PinnedBuffer<T> {
    /// Frees the buffer. The host does not wait: the memory is reused once the copies have completed.
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let (id, bytes, tag) = (BlockId::from_block(&block), block.bytes, block.tag);
        self.pinned.end_buffer(&block);
        if let Err(error) = self.resource.deallocate(block) {
            report_failed_free(&FailedFree { block: id, bytes, tag, error });
        }
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("element", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("block", &self.block)
            .field("copies", &self.copies)
            .finish_non_exhaustive()
    }
}
