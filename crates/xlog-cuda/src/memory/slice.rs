//! The typed buffer.
//!
//! A [`TrackedCudaSlice`] is a [`RawBlock`] with a number of elements. The host cannot index it: copies (`copies`) and launches access
//! its bytes. The drop frees it in stream order, so scratch may be dropped as soon as the launch has recorded its use.

use std::fmt;
use std::marker::PhantomData;

use super::{DeviceRepr, RawBlock, Shown};
use crate::Result;
use crate::device_runtime::resource::{BlockId, DeviceBlock, ResourceError, StreamId};
use crate::device_runtime::runtime::XlogDeviceRuntime;

/// A buffer of `T`s on the device that frees itself through its runtime, after every recorded use.
#[must_use = "dropping the buffer frees it at once"]
pub struct TrackedCudaSlice<T> {
    pub(super) raw: RawBlock,
    len: usize,
    element: PhantomData<T>,
}

impl<T> TrackedCudaSlice<T> {
    pub(super) fn over(raw: RawBlock, len: usize) -> Self {
        Self { raw, len, element: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size of its elements in bytes.
    pub fn size_bytes(&self) -> usize {
        self.raw.bytes()
    }

    /// Returns the device address; for an empty buffer an aligned address that is not null.
    ///
    /// It is 0 for a buffer of [`GpuMemoryManager::tracked_only`](super::GpuMemoryManager::tracked_only) until a recorder's preflight has
    /// prepared a use of it.
    pub fn ptr(&self) -> u64 {
        self.raw.ptr()
    }

    /// Returns the device address, even if the buffer hides it. The caller queues work on it only within a prepared use.
    pub(crate) fn address(&self) -> u64 {
        self.raw.address()
    }

    /// Returns the flag that makes the address visible, if the buffer hides it.
    pub(crate) fn shown(&self) -> Option<&Shown> {
        self.raw.shown()
    }

    /// The stream it was allocated on and is freed on.
    pub fn stream(&self) -> StreamId {
        self.raw.stream()
    }

    /// The runtime's block; `None` for an empty buffer and for memory that no runtime backs.
    pub fn runtime_block(&self) -> Option<&DeviceBlock> {
        self.raw.runtime_block()
    }

    /// The identity of the runtime's block.
    pub fn id(&self) -> Option<BlockId> {
        self.raw.id()
    }

    /// Converts to a buffer of bytes.
    pub fn into_bytes(self) -> TrackedCudaSlice<u8> {
        let bytes = self.raw.bytes();
        TrackedCudaSlice::over(self.raw, bytes)
    }

    /// Converts to untyped memory.
    pub fn into_raw(self) -> RawBlock {
        self.raw
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn ptr_ref(&self) -> &u64 {
        self.raw.ptr_ref()
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.raw.is_foreign()
    }

    pub(crate) fn runtime(&self) -> Option<&XlogDeviceRuntime> {
        self.raw.runtime()
    }
}

impl<T: DeviceRepr> TrackedCudaSlice<T> {
    /// Wraps foreign memory, which its owner frees, as an argument of work that the caller orders.
    ///
    /// No runtime backs it: [`runtime_block`](Self::runtime_block) is `None`. The copies of this type and a strict
    /// [`LaunchRecorder`](crate::LaunchRecorder) refuse it.
    ///
    /// # Safety
    /// `ptr` is aligned for `T`, and `len` elements at it are live device memory until all work on this buffer has completed.
    pub unsafe fn from_foreign(ptr: u64, len: usize) -> Self {
        Self::over(RawBlock::foreign(ptr, len.saturating_mul(size_of::<T>())), len)
    }

    pub(super) fn from_raw(raw: RawBlock) -> Result<Self> {
        let (bytes, size, align) = (raw.bytes(), size_of::<T>(), align_of::<T>());
        let whole = if size == 0 { bytes == 0 } else { bytes.is_multiple_of(size) };
        if whole && raw.address().is_multiple_of(align as u64) {
            let len = bytes.checked_div(size).unwrap_or(0);
            return Ok(Self::over(raw, len));
        }
        Err(ResourceError::invalid(
            format!("a block of {bytes} bytes at {:#x}", raw.address()),
            format!("a whole number of elements of {size} bytes, aligned to {align}"),
        )
        .into())
    }
}

impl<T> fmt::Debug for TrackedCudaSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedCudaSlice")
            .field("element", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("raw", &self.raw)
            .finish()
    }
}
