//! The decorator that counts the blocks of the resource below.

use std::fmt;

use super::core::{Statistics, StatisticsConfig};
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, ResourceError,
    ResourceResult, Seal, StreamId,
};

/// Counts every block of the resource below: current, peak and total, by tag, stream and query.
///
/// A block counts from the moment it is handed out until its free has returned.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, StatisticsResource, StreamId,
/// };
///
/// let direct = DirectCudaResource::new(Arc::new(CudaDevice::open("sim")?), 0);
/// let resource = StatisticsResource::new(Box::new(direct));
/// let statistics = resource.handle();
/// let rows = resource.allocate(1000, StreamId::DEFAULT, AllocTag("rows"))?;
/// let keys = resource.allocate(500, StreamId::DEFAULT, AllocTag("keys"))?;
/// resource.deallocate(rows)?;
///
/// let now = statistics.snapshot();
/// assert_eq!((now.total.current_bytes, now.total.peak_bytes), (500, 1500));
/// assert_eq!(now.tag(AllocTag("rows")).total_bytes, 1000);
/// println!("{}", statistics.live_report());
/// # resource.deallocate(keys)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct StatisticsResource<R = Box<dyn DeviceMemoryResource + Send + Sync>> {
    inner: R,
    statistics: Statistics,
}

impl StatisticsResource {
    /// Counts the blocks that `inner` hands out from now on.
    #[must_use]
    pub fn new(inner: Box<dyn DeviceMemoryResource + Send + Sync>) -> Self {
        Self::over(inner, StatisticsConfig::new())
    }
}

impl<R: DeviceMemoryResource> StatisticsResource<R> {
    /// Counts the blocks of a resource of known type, with these settings.
    #[must_use]
    pub fn over(inner: R, config: StatisticsConfig) -> Self {
        let statistics = Statistics::new(inner.device_ordinal(), inner.places_blocks(), config);
        Self { inner, statistics }
    }

    /// Returns a handle on the counts, which may outlive the resource.
    #[must_use]
    pub fn handle(&self) -> Statistics {
        self.statistics.clone()
    }

    /// The resource below.
    #[must_use]
    pub fn inner(&self) -> &R {
        &self.inner
    }

    #[inline(always)]
    fn count(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
        result: ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        match &result {
            Ok(block) => self.statistics.0.allocated(bytes, stream, tag, block),
            Err(error) => self.statistics.0.failed(stream, tag, error),
        }
        result
    }

    /// Frees a block by `free`, and counts it.
    #[inline(always)]
    fn count_free<T>(
        &self,
        block: BlockId,
        free: impl FnOnce() -> ResourceResult<T>,
    ) -> ResourceResult<T> {
        let core = &self.statistics.0;
        let live = core.live.take(block.generation)?;
        let result = free();
        let is_freed = match &result {
            Ok(_) => true,
            Err(error) => live.is_some() && self.has_consumed(block, error),
        };
        if is_freed {
            core.freed(block.generation, live);
        }
        result
    }

    /// Returns whether a failed free has consumed the block. A free that failed half way has; a refused one has not.
    #[cold]
    #[inline(never)]
    fn has_consumed(&self, block: BlockId, error: &ResourceError) -> bool {
        // A guard below may return damage of another block with this free, which is no refusal.
        let is_refusal = matches!(error, ResourceError::UseAfterFree { generation } if *generation == block.generation);
        let is_held = |state| matches!(state, BlockState::Retired | BlockState::Quarantined);
        !is_refusal && is_held(self.inner.block_state(block))
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for StatisticsResource<R> {
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.inner)
    }

    fn is_trusted(&self, seal: Seal) -> bool {
        self.inner.is_trusted(seal)
    }

    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }

    #[inline(always)]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.count(bytes, stream, tag, self.inner.allocate(bytes, stream, tag))
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        self.count_free(id, || self.inner.deallocate(block))
    }

    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let id = BlockId::from_block(block);
        self.count_free(id, || self.inner.deallocate_with_state(block))
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.inner.finish_block_uses(uses, use_stream)
    }

    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.count(bytes, stream, tag, self.inner.allocate_aligned(bytes, align, stream, tag))
    }

    fn allocate_batch(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        let core = &self.statistics.0;
        let result = self.inner.allocate_batch(sizes, stream, tag);
        match &result {
            Ok(blocks) => {
                for (at, block) in blocks.iter().enumerate() {
                    let bytes = sizes.get(at).copied().unwrap_or(block.bytes);
                    core.allocated(bytes, stream, tag, block);
                }
            }
            Err(error) => core.failed(stream, tag, error),
        }
        result
    }

    fn deallocate_batch(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let core = &self.statistics.0;
        let mut known = Vec::with_capacity(blocks.len());
        let mut outcome = Ok(());
        let mut blocks = blocks;
        blocks.retain(|block| match core.live.take(block.generation) {
            Ok(live) => {
                known.push((BlockId::from_block(block), live));
                true
            }
            // Another free has the block.
            Err(error) => {
                outcome = Err(error);
                false
            }
        });
        let result = self.inner.deallocate_batch(blocks);
        for (id, live) in known {
            // After an error only the resource knows which blocks it consumed. Refused blocks are live, or were never known here.
            if result.is_ok() || (live.is_some() && self.inner.block_state(id) != BlockState::Live)
            {
                core.freed(id.generation, live);
            }
        }
        result.and(outcome)
    }

    fn allocate_reserved(
        &self,
        reservation: &mut BudgetReservation,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let block = self.inner.allocate_reserved(reservation, bytes, align, stream, tag);
        self.count(bytes, stream, tag, block)
    }
}

impl<R> fmt::Debug for StatisticsResource<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StatisticsResource")
            .field("statistics", &self.statistics)
            .finish_non_exhaustive()
    }
}
