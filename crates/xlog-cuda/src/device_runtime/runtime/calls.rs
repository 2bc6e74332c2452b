//! The runtime's calls on its resource. If the parts do not fit together, each returns the error that the construction found.

use std::panic::Location;

use super::{Asked, XlogDeviceRuntime};
use crate::device_runtime::graph::{CaptureError, Detour};
use crate::device_runtime::logging::SiteScope;
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, MemoryUse,
    ResourceError, ResourceResult, ResourceStatistics, StreamId, check_memory,
};
use crate::memory::{DeviceRepr, TrackedCudaSlice};

/// Defines calls that only forward to the resource, once the parts of the runtime are known to belong together.
macro_rules! forward {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        #[doc = concat!("[`DeviceMemoryResource::", stringify!($name), "`].")]
        pub fn $name(&self, $($argument: $kind),*) -> ResourceResult<()> {
            self.checked()?.$name($($argument),*)
        }
    )*};
}

impl XlogDeviceRuntime {
    /// Returns the resource if the parts fit together, or the graph router while there are captures or graphs.
    #[inline]
    pub(crate) fn checked(&self) -> ResourceResult<&dyn DeviceMemoryResource> {
        if self.core.graphs.detour.any(Detour::MISMATCH | Detour::GRAPHS) {
            return self.checked_detour();
        }
        Ok(&*self.core.resource)
    }

    #[cold]
    fn checked_detour(&self) -> ResourceResult<&dyn DeviceMemoryResource> {
        match &self.core.mismatch {
            None => Ok(&*self.core.graphs),
            Some(error) => Err(error.clone()),
        }
    }

    /// Returns the resource, or the graph router while there are captures or graphs.
    fn routed(&self) -> &dyn DeviceMemoryResource {
        match self.core.graphs.detour.any(Detour::GRAPHS) {
            true => &*self.core.graphs,
            false => &*self.core.resource,
        }
    }

    /// Allocates by `call` from the resource, if the parts fit together. A logging layer records `site`.
    #[inline]
    pub(crate) fn allocate_at<T>(
        &self,
        site: &'static Location<'static>,
        call: impl FnOnce(&dyn DeviceMemoryResource) -> ResourceResult<T>,
    ) -> ResourceResult<T> {
        if !self.core.graphs.detour.any(Detour::MISMATCH | Detour::LOG | Detour::GRAPHS) {
            return call(&*self.core.resource);
        }
        let resource = self.checked()?;
        let _site = SiteScope::enter(site);
        call(resource)
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
        let site = Location::caller();
        let allocated = self.allocate_at(site, |resource| resource.allocate(bytes, stream, tag));
        if let Err(error) = &allocated {
            self.complete_report(error, Asked { bytes, stream, tag, site });
        }
        allocated
    }

    /// [`DeviceMemoryResource::deallocate`]. In a capture that other code began and that was not joined it is [`CaptureError::NotJoined`]:
    /// a reap frees the block once that capture has ended.
    pub fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        self.checked()?.deallocate(block).map_err(|error| self.explain_free(id, error))
    }

    /// Replaces the driver's error by [`CaptureError::NotJoined`] if a capture delays the free.
    #[cold]
    fn explain_free(&self, block: BlockId, error: ResourceError) -> ResourceError {
        let stream = block.alloc_stream;
        let is_kept = matches!(error, ResourceError::Driver(_))
            && self.block_state(block) == BlockState::Retired;
        match is_kept && self.core.graphs.is_captured(stream) {
            true => CaptureError::NotJoined { stream }.into(),
            false => error,
        }
    }

    /// [`DeviceMemoryResource::bytes_outstanding`].
    pub fn bytes_outstanding(&self) -> usize {
        self.resource().bytes_outstanding()
    }

    /// [`DeviceMemoryResource::reap_pending`].
    pub fn reap_pending(&self) -> ResourceResult<()> {
        crate::spans::slow_path!("reap_pending");
        self.checked()?.reap_pending()
    }

    /// [`DeviceMemoryResource::physical_bytes`].
    pub fn physical_bytes(&self) -> Option<usize> {
        self.checked().ok()?.physical_bytes()
    }

    /// [`DeviceMemoryResource::memory_use`].
    pub fn memory_use(&self) -> Option<MemoryUse> {
        self.checked().ok()?.memory_use()
    }

    /// [`DeviceMemoryResource::trim`].
    pub fn trim(&self) -> ResourceResult<usize> {
        crate::spans::slow_path!("trim");
        self.checked()?.trim()
    }

    /// [`DeviceMemoryResource::supports_block_use_tracking`].
    pub fn supports_block_use_tracking(&self) -> bool {
        self.resource().supports_block_use_tracking()
    }

    forward! {
        reap_completed();
        record_block_use(block: &DeviceBlock, use_stream: StreamId);
        prepare_block_use(block: BlockId, use_stream: StreamId, access: Access);
        finish_block_use(block: BlockId, use_stream: StreamId, access: Access);
        finish_block_uses(uses: &[(BlockId, Access)], use_stream: StreamId);
    }

    /// [`XlogDeviceRuntime::finish_block_uses`] for uses that were opened in `capture`, or outside of captures.
    pub(crate) fn finish_opened_uses(
        &self,
        capture: Option<u64>,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        let resource = self.checked()?;
        match capture.is_some() || self.core.graphs.detour.any(Detour::GRAPHS) {
            true => self.core.graphs.finish_opened(capture, uses, use_stream),
            false => resource.finish_block_uses(uses, use_stream),
        }
    }

    /// [`DeviceMemoryResource::block_state`].
    #[must_use]
    pub fn block_state(&self, block: BlockId) -> BlockState {
        self.routed().block_state(block)
    }

    /// [`DeviceMemoryResource::statistics`].
    pub fn statistics(&self) -> ResourceStatistics {
        self.resource().statistics()
    }

    /// [`XlogDeviceRuntime::prepare_block_use`] for a buffer.
    ///
    /// An empty buffer has no uses and is `Ok`. Memory that no runtime backs is [`ResourceError::StreamMisuse`].
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

    /// [`XlogDeviceRuntime::finish_block_use`] for a buffer; see [`XlogDeviceRuntime::prepare_first_use`].
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

/// Returns the block of a buffer; `None` for an empty one.
fn named<T>(slice: &TrackedCudaSlice<T>, call: &str) -> ResourceResult<Option<BlockId>> {
    match slice.id() {
        None if slice.is_foreign() => Err(ResourceError::StreamMisuse(format!(
            "{call}: no runtime backs the slice at {:#x}, so its uses cannot be ordered",
            slice.ptr()
        ))),
        id => Ok(id),
    }
}
