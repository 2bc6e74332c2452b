//! Views: ranges of a buffer.
//!
//! A view borrows its buffer, mutably or not, so the buffer outlives it. The runtime orders whole blocks: a use of a view is a use of
//! its block. `copies` has the copies of views.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use super::{DeviceRepr, TrackedCudaSlice};
use crate::Result;
use crate::device_runtime::resource::{ResourceError, StreamId};

/// A range of elements in a buffer.
#[derive(Clone, Copy)]
struct Part {
    start: usize,
    len: usize,
}

impl Part {
    /// Returns the part of these elements that a range selects.
    fn range(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len => {
                Ok(Self { start: self.start + start, len: end - start })
            }
            _ => {
                let bounds = (range.start_bound(), range.end_bound());
                Err(ResourceError::invalid(
                    format!("the elements {bounds:?}"),
                    format!("a range within 0..{}, not reversed", self.len),
                )
                .into())
            }
        }
    }
}

/// A part of a buffer for reading, by copies or by a launch that names [`DeviceView::buffer`].
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let memory = GpuMemoryManager::with_runtime(XlogDeviceRuntime::open("sim")?);
/// let column = memory.alloc_from(&[3_u32, 1, 4, 1, 5])?;
/// assert_eq!(column.slice(1..3)?.to_vec()?, [1, 4]);
/// assert!(column.slice(4..9).is_err());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct DeviceView<'a, T> {
    buffer: &'a TrackedCudaSlice<T>,
    part: Part,
}

/// A part of a buffer for writing and reading.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let memory = GpuMemoryManager::with_runtime(XlogDeviceRuntime::open("sim")?);
/// let source = memory.alloc_from(&[7_u32, 8, 9])?;
/// let mut column = memory.alloc_zeroed::<u32>(4)?;
/// column.slice_mut(2..)?.copy_from(source.slice(..2)?)?; // on the device
/// assert_eq!(column.to_vec()?, [0, 0, 7, 8]);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct DeviceViewMut<'a, T> {
    buffer: &'a mut TrackedCudaSlice<T>,
    part: Part,
}

impl<T: DeviceRepr> TrackedCudaSlice<T> {
    /// Returns a view of a range of elements. A range outside of the buffer is [`ResourceError::InvalidRequest`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceView<'_, T>> {
        DeviceView::from(self).slice(range)
    }

    /// Returns a mutable view of a range of elements; see [`TrackedCudaSlice::slice`].
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<DeviceViewMut<'_, T>> {
        let part = Part { start: 0, len: self.len() }.range(range)?;
        Ok(DeviceViewMut { buffer: self, part })
    }
}

impl<'a, T: DeviceRepr> DeviceView<'a, T> {
    /// Returns a view of a range of this view's elements.
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        Ok(Self { part: self.part.range(range)?, ..self })
    }

    /// The whole buffer, for a [`LaunchRecorder`](crate::LaunchRecorder).
    pub fn buffer(&self) -> &'a TrackedCudaSlice<T> {
        self.buffer
    }

    /// Returns the device address of the first element; 0 while the buffer hides its address ([`TrackedCudaSlice::ptr`]).
    pub fn ptr(&self) -> u64 {
        match self.buffer.ptr() {
            0 => 0,
            _ => self.address(),
        }
    }

    /// Returns the device address of the first element, even if the buffer hides it.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.address() + (self.part.start * size_of::<T>()) as u64
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.part.len
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.part.len == 0
    }

    /// The size of its elements in bytes.
    pub fn size_bytes(&self) -> usize {
        self.part.len * size_of::<T>()
    }

    /// The stream that the buffer was allocated on and is freed on.
    pub fn stream(&self) -> StreamId {
        self.buffer.stream()
    }
}

impl<T: DeviceRepr> DeviceViewMut<'_, T> {
    /// Returns a view of this part for reading.
    pub fn as_view(&self) -> DeviceView<'_, T> {
        DeviceView { buffer: self.buffer, part: self.part }
    }

    /// Returns a mutable view of a range of this view's elements.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<DeviceViewMut<'_, T>> {
        Ok(DeviceViewMut { part: self.part.range(range)?, buffer: self.buffer })
    }

    /// [`DeviceView::buffer`].
    pub fn buffer(&self) -> &TrackedCudaSlice<T> {
        self.buffer
    }

    /// [`DeviceView::ptr`].
    pub fn ptr(&self) -> u64 {
        self.as_view().ptr()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.part.len
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.part.len == 0
    }
}

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceView<'_, T> {}

impl<'a, T> From<&'a TrackedCudaSlice<T>> for DeviceView<'a, T> {
    fn from(buffer: &'a TrackedCudaSlice<T>) -> Self {
        Self { part: Part { start: 0, len: buffer.len() }, buffer }
    }
}

impl<'a, T> From<&'a mut TrackedCudaSlice<T>> for DeviceViewMut<'a, T> {
    fn from(buffer: &'a mut TrackedCudaSlice<T>) -> Self {
        Self { part: Part { start: 0, len: buffer.len() }, buffer }
    }
}

impl<'a, T: DeviceRepr> From<&'a DeviceViewMut<'_, T>> for DeviceView<'a, T> {
    fn from(view: &'a DeviceViewMut<'_, T>) -> Self {
        view.as_view()
    }
}

impl<T: DeviceRepr> fmt::Debug for DeviceView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Part { start, len } = self.part;
        f.debug_struct("DeviceView")
            .field("elements", &(start..start + len))
            .field("buffer", self.buffer)
            .finish()
    }
}

impl<T: DeviceRepr> fmt::Debug for DeviceViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceViewMut").field(&self.as_view()).finish()
    }
}
