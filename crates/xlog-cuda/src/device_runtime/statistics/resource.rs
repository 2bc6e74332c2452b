//! The decorator that counts the blocks of the resource below.

use std::fmt;

use super::core::{Statistics, StatisticsConfig};
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    ResourceResult, StreamId, forward_plain,
};

/// Counts every block of the resource below: current, peak and total, by tag, stream and query.
///
/// A block counts from the return of its allocation to the return of its free.
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
    /// Counts the blocks that `inner` allocates from now on.
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

    /// Returns a handle on the counts. It may outlive the resource.
    pub fn handle(&self) -> Statistics {
        self.statistics.clone()
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for StatisticsResource<R> {
    forward_plain!(self, self.inner);

    #[inline(always)]
    fn charge_for(&self, bytes: usize, align: usize) -> usize {
        self.inner.charge_for(bytes, align)
    }

    #[inline(always)]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let result = self.inner.allocate(bytes, stream, tag);
        self.statistics.0.allocated(bytes, stream, tag, result.as_ref());
        result
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.deallocate_with_state(&block).map(drop)
    }

    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let (core, id) = (&self.statistics.0, BlockId::from_block(block));
        let live = core.live.take(id.generation)?;
        let result = self.inner.deallocate_with_state(block);
        let is_freed = match &result {
            Ok(_) => true,
            Err(error) => live.is_some() && !error.is_refused_free(id, &self.inner),
        };
        if is_freed {
            core.freed(id.generation, live);
        }
        result
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.inner.finish_block_uses(uses, use_stream)
    }

    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        let AllocRequest { bytes, stream, tag, .. } = request;
        let result = self.inner.allocate_request(request, reservation);
        self.statistics.0.allocated(bytes, stream, tag, result.as_ref());
        result
    }
}

impl<R> fmt::Debug for StatisticsResource<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StatisticsResource")
            .field("statistics", &self.statistics)
            .finish_non_exhaustive()
    }
}
