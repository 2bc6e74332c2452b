//! The runtime's calls on its resource. Each fails with the verdict of the construction if the parts do not fit together.

use std::panic::Location;

use super::{Asked, XlogDeviceRuntime};
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, ResourceError,
    ResourceResult, ResourceStatistics, StreamId, check_memory,
};
use crate::memory::{DeviceRepr, TrackedCudaSlice};

impl XlogDeviceRuntime {
    /// The resource, if the parts fit together.
    #[inline]
    pub(crate) fn checked(&self) -> ResourceResult<&dyn DeviceMemoryResource> {
        match &self.core.mismatch {
            None => Ok(&*self.core.resource),
            Some(error) => Err(error.clone()),
        }
    }

    /// Checks that the first `bytes` bytes of a block are device memory. A block that fails the check is freed.
    #[inline]
    pub(crate) fn checked_block(
        &self,
        block: DeviceBlock,
        bytes: usize,
    ) -> ResourceResult<DeviceBlock> {
        if self.core.is_trusted {
            return Ok(block);
        }
        match check_memory(&self.core.device, &block, bytes) {
            Ok(()) => Ok(block),
            Err(error) => {
                let _ = self.deallocate(block);
                Err(error)
            }
        }
    }

    /// [`DeviceMemoryResource::allocate`]. The report of a refusal names the caller.
    #[track_caller]
    pub fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let allocated = self.checked()?.allocate(bytes, stream, tag);
        if let Err(error) = &allocated {
            let site = Location::caller();
            self.complete_report(error, Asked { bytes, stream, tag, site });
        }
        allocated
    }

    /// [`DeviceMemoryResource::deallocate`].
    pub fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.checked()?.deallocate(block)
    }

    /// [`DeviceMemoryResource::bytes_outstanding`].
    #[must_use]
    pub fn bytes_outstanding(&self) -> usize {
        self.resource().bytes_outstanding()
    }

    /// [`DeviceMemoryResource::reap_pending`].
    pub fn reap_pending(&self) -> ResourceResult<()> {
        crate::spans::slow_path!("reap_pending");
        self.checked()?.reap_pending()
    }

    /// [`DeviceMemoryResource::reap_completed`].
    pub fn reap_completed(&self) -> ResourceResult<()> {
        self.checked()?.reap_completed()
    }

    /// [`DeviceMemoryResource::physical_bytes`].
    #[must_use]
    pub fn physical_bytes(&self) -> Option<usize> {
        self.checked().ok()?.physical_bytes()
    }

    /// [`DeviceMemoryResource::trim`].
    pub fn trim(&self) -> ResourceResult<usize> {
        crate::spans::slow_path!("trim");
        self.checked()?.trim()
    }

    /// [`DeviceMemoryResource::record_block_use`].
    pub fn record_block_use(
        &self,
        block: &DeviceBlock,
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.checked()?.record_block_use(block, use_stream)
    }

    /// [`DeviceMemoryResource::supports_block_use_tracking`].
    #[must_use]
    pub fn supports_block_use_tracking(&self) -> bool {
        self.resource().supports_block_use_tracking()
    }

    /// [`DeviceMemoryResource::prepare_block_use`].
    pub fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.checked()?.prepare_block_use(block, use_stream, access)
    }

    /// [`DeviceMemoryResource::finish_block_use`].
    pub fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.checked()?.finish_block_use(block, use_stream, access)
    }

    /// [`DeviceMemoryResource::finish_block_uses`].
    pub fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.checked()?.finish_block_uses(uses, use_stream)
    }

    /// [`DeviceMemoryResource::block_state`].
    #[must_use]
    pub fn block_state(&self, block: BlockId) -> BlockState {
        self.resource().block_state(block)
    }

    /// [`DeviceMemoryResource::statistics`].
    #[must_use]
    pub fn statistics(&self) -> ResourceStatistics {
        self.resource().statistics()
    }

    /// [`XlogDeviceRuntime::prepare_block_use`] for a buffer.
    ///
    /// An empty buffer needs no order and is `Ok`; memory that no runtime backs is [`ResourceError::StreamMisuse`].
    pub fn prepare_first_use<T: DeviceRepr>(
        &self,
        slice: &TrackedCudaSlice<T>,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match named(slice, "prepare_first_use")? {
            Some(block) => self.prepare_block_use(block, use_stream, access),
            None => Ok(()),
        }
    }

    /// [`XlogDeviceRuntime::finish_block_use`] for a buffer, as [`XlogDeviceRuntime::prepare_first_use`].
    pub fn finish_first_use<T: DeviceRepr>(
        &self,
        slice: &TrackedCudaSlice<T>,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match named(slice, "finish_first_use")? {
            Some(block) => self.finish_block_use(block, use_stream, access),
            None => Ok(()),
        }
    }
}

/// The block of a buffer; `None` for an empty one.
fn named<T>(slice: &TrackedCudaSlice<T>, call: &str) -> ResourceResult<Option<BlockId>> {
    match slice.id() {
        None if slice.is_foreign() => Err(ResourceError::StreamMisuse(format!(
            "{call}: no runtime backs the slice at {:#x}, so its uses cannot be ordered",
            slice.ptr()
        ))),
        id => Ok(id),
    }
}
