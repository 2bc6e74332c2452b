//! Stream-ordered driver memory, with uses tracked across streams.
//!
//! An allocation and a free are one driver call each, on the block's own stream. The hooks announce work on other
//! streams, and make streams wait by the clocks of `ordering`. On the allocation stream a free follows every
//! outstanding use; while a use is open it is deferred until the last one closes.
//!
//! A freed block counts as outstanding until its free is known to have completed: at a reap, or when the frees of its
//! stream fill a batch for one event. Uses and frees hold no lock over a driver call.

mod driver_pools;
mod frees;
mod physical;

use std::sync::Arc;

use xlog_base::debug_fields;
use xlog_driver::{AsyncPools, DriverResult, PoolUsage};

use self::driver_pools::DriverPools;
use self::frees::Frees;
use self::physical::PhysicalBytes;
use super::budget::BudgetReservation;
use super::direct::too_many_blocks;
use super::ordering::{
    BlockMeta, DeferredFrees, EventPolicy, Retired, Tracker, UseTracking, tracked_hooks,
};
use super::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    PhysicalCap, PhysicalMeter, ResourceError, ResourceHome, ResourceResult, ResourceStatistics,
    Seal, StreamId, first_error,
};
use super::stream_pool::StreamPool;
use crate::CudaDevice;
use crate::stream::{CallGuard, RawStream};

/// Pending deferred frees after which an allocation stops looking for completed ones.
const DEFERRED_PER_REQUEST: usize = 2;

/// The driver's own pool: `cuMemAllocAsync` and `cuMemFreeAsync` on the caller's stream.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     Access, AllocTag, AsyncCudaResource, BlockId, DeviceMemoryResource, StreamPool,
/// };
///
/// let device = Arc::new(CudaDevice::open("sim:3")?);
/// let pool = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
/// let resource = AsyncCudaResource::new(Arc::clone(&device), 0, Arc::clone(&pool));
/// let (producer, consumer) = (pool.lease()?, pool.lease()?);
///
/// let block = resource.allocate(64, producer.id(), AllocTag("rows"))?;
/// let id = BlockId::from_block(&block);
/// // SAFETY: the block is live. Its own stream has announced no use of it, so the consumer's prepare follows this fill.
/// unsafe { producer.memset(block.ptr, 7, 64)? };
/// let mut bytes = [0; 64];
/// resource.prepare_block_use(id, consumer.id(), Access::Read)?;
/// // SAFETY: the block is live, and its prepare ordered the read after the fill.
/// unsafe { consumer.copy_dtoh(&mut bytes, block.ptr)? };
/// resource.finish_block_use(id, consumer.id(), Access::Read)?;
/// resource.deallocate(block)?; // follows the read
///
/// resource.reap_pending()?;
/// assert_eq!((bytes, resource.bytes_outstanding()), ([7; 64], 0));
/// assert!(device.races().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AsyncCudaResource {
    tracker: Tracker,
    device: Arc<CudaDevice>,
    ordinal: u32,
    driver_pools: DriverPools,
    frees: Frees,
    deferred_frees: DeferredFrees,
    physical: PhysicalBytes,
}

impl AsyncCudaResource {
    /// Creates a resource of `device`, which has the number `ordinal`, on the streams of `streams`.
    ///
    /// If the parts belong to different devices, the first call returns a driver error.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>, ordinal: u32, streams: Arc<StreamPool>) -> Self {
        Self {
            tracker: Tracker::new(&device, ordinal, streams),
            driver_pools: DriverPools::new(device.clone()),
            frees: Frees::default(),
            deferred_frees: DeferredFrees::default(),
            physical: PhysicalBytes::default(),
            device,
            ordinal,
        }
    }

    /// Sets when an event is recorded for a closed use.
    #[must_use]
    pub fn with_event_policy(mut self, policy: EventPolicy) -> Self {
        self.tracker.policy = policy;
        self
    }

    /// Returns the usage of the driver pools of this resource: the device's pool or, under a budget, pools of its own.
    pub fn driver_pool_usage(&self) -> ResourceResult<PoolUsage> {
        self.driver_pools.usage()
    }

    /// Allocates from the driver's pool; charges the meter if there is one. The result keeps captures of the runtime from
    /// beginning on the stream, so the memory can be freed there.
    #[inline]
    fn request<'a>(
        &self,
        pools: &dyn AsyncPools,
        bytes: usize,
        owner: &'a RawStream,
    ) -> ResourceResult<Requested<'a>> {
        let pool = self.driver_pools.current()?;
        let request = || {
            let entered = owner.enter("alloc_async")?;
            let ptr = pools.alloc_async(bytes, pool.handle(), owner.handle())?;
            Ok(Requested { ptr, _entered: entered })
        };
        if !self.physical.is_metered() {
            return request();
        }
        self.physical.around(&self.driver_pools, bytes, request, |requested| {
            #[allow(unsafe_code)]
            // SAFETY: just allocated on this stream, and published to no other thread.
            let freed = unsafe { pools.free_async(requested.ptr, owner.handle()) };
            // If the driver refuses, it keeps the memory; the request fails either way.
            let _ = freed;
            self.frees.undone(owner);
        })
    }

    /// Requests again after freeing deferred blocks or creating a larger driver pool.
    #[cold]
    #[inline(never)]
    fn request_again<'a>(
        &self,
        pools: &dyn AsyncPools,
        bytes: usize,
        owner: &'a RawStream,
        error: ResourceError,
    ) -> ResourceResult<Requested<'a>> {
        let is_short =
            matches!(error, ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. });
        if !is_short {
            return Err(error);
        }
        let has_deferred = self.deferred_frees.has_deferred();
        let mut freed = Ok(());
        if has_deferred {
            let _reaper = self.deferred_frees.reaper_lock();
            // A failed free, as on a captured stream, stays deferred. The refusal of the request names the failure.
            freed = self.free_deferred();
        }
        let reclaimed = self.driver_pools.reclaim();
        if !*reclaimed.as_ref().unwrap_or(&false) && !has_deferred {
            return Err(self.driver_pools.explain(bytes, error));
        }
        let failed = freed.err().or(reclaimed.err());
        self.request(pools, bytes, owner)
            .map_err(|error| because_of(self.driver_pools.explain(bytes, error), failed))
    }

    /// Frees all deferred blocks, with the necessary waits.
    fn free_deferred(&self) -> ResourceResult<()> {
        self.deferred_frees
            .free_all(&self.tracker, |generation, meta| self.free_in_order(generation, meta))
    }

    /// Frees deferred blocks whose uses have completed, and stops after `pending` others.
    fn free_completed(&self, pending: usize) -> ResourceResult<()> {
        self.deferred_frees.free_completed(pending, &self.tracker, |generation, meta| {
            self.free_in_order(generation, meta)
        })
    }

    /// Queues the free of a retired block on its stream, after all outstanding uses. A reap retries after a failure.
    fn free_in_order(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        let owner = self.tracker.owner_stream(meta)?;
        let outstanding = meta.with_uses(|uses| uses.take_outstanding(&self.tracker.streams));
        let free = || {
            // No capture of the runtime begins between the waits and the free.
            let _entered = owner.enter("free_async")?;
            self.tracker.wait_on_all(owner, &outstanding)?;
            self.free_on(owner, meta)
        };
        if let Err(error) = free() {
            meta.with_uses(|uses| uses.restore(outstanding));
            self.deferred_frees.keep_failed(generation);
            return Err(error);
        }
        self.note_queued(owner, generation);
        Ok(())
    }

    /// Queues the free of a retired block whose stream is ordered after all uses.
    #[inline]
    fn queue_own_stream_only(
        &self,
        owner: &RawStream,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        let entered = owner.enter("free_async");
        let freed = entered.map_err(Into::into).and_then(|_entered| self.free_on(owner, meta));
        match freed {
            Ok(()) => {
                self.note_queued(owner, generation);
                Ok(())
            }
            Err(error) => {
                self.deferred_frees.keep_failed(generation);
                Err(error)
            }
        }
    }

    /// Returns the memory of a retired block to the driver, on its stream, which follows every use.
    #[inline]
    fn free_on(&self, owner: &RawStream, meta: &BlockMeta) -> ResourceResult<()> {
        let pools = self.driver_pools.driver()?;
        #[allow(unsafe_code)]
        // SAFETY: the metadata says that the block belongs to this resource and is retired, which happens once; its stream
        // is ordered after every use.
        unsafe {
            pools.free_async(meta.ptr(), owner.handle())?;
        }
        Ok(())
    }

    /// Adds a queued free, and polls when a batch is full.
    #[inline]
    fn note_queued(&self, owner: &RawStream, generation: Generation) {
        if self.frees.queued(owner, generation) {
            self.poll_frees(owner);
        }
    }

    #[cold]
    #[inline(never)]
    fn poll_frees(&self, owner: &RawStream) {
        // After a failure a reap polls again.
        let _ = self.frees.poll(owner, &self.tracker.counters, |done| self.freed(done));
    }

    fn freed(&self, generations: &[Generation]) {
        if generations.is_empty() {
            return;
        }
        let bytes = self.tracker.table.end(generations);
        self.tracker.counters.count(|counts| {
            counts.freed = counts.freed.wrapping_add(generations.len() as u64);
            counts.outstanding = counts.outstanding.wrapping_sub(bytes);
        });
    }

    /// Calls `note` for each stream with frees that are not counted. Continues after a failure.
    fn note_completed(&self, note: impl Fn(&RawStream) -> DriverResult<()>) -> ResourceResult<()> {
        let slots = self.frees.slots().into_iter();
        first_error(slots.filter_map(|slot| self.tracker.streams.at(slot)), |stream| {
            stream.arm_free_events();
            Ok(note(stream)?)
        })
    }

    fn retry(&self) -> ResourceResult<()> {
        self.deferred_frees
            .retry_failed(&self.tracker, |generation, meta| self.free_late(generation, meta))
    }

    /// Queues a free that was deferred or has failed. A block whose stream is being captured is kept for a later reap, without
    /// an error.
    fn free_late(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        let owner = self.tracker.owner_stream(meta)?;
        let free = || self.free_in_order(generation, meta);
        self.deferred_frees.free_unless_captured(owner, generation, free)
    }
}

/// Driver memory that is not a block yet.
struct Requested<'a> {
    ptr: u64,
    _entered: CallGuard<'a>,
}

/// Adds a failed free to a refusal for lack of memory.
#[cold]
fn because_of(refusal: ResourceError, failed: Option<ResourceError>) -> ResourceError {
    match (refusal, failed) {
        (ResourceError::OutOfMemory { requested, detail }, Some(failed)) => {
            ResourceError::OutOfMemory { requested, detail: format!("{detail}; {failed}") }
        }
        (refusal, _) => refusal,
    }
}

impl UseTracking for AsyncCudaResource {
    #[inline]
    fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Frees at once if the block's stream is already ordered after all uses; otherwise defers the free.
    ///
    /// A wait queued here would make the stream's next work wait for another stream. The free is therefore deferred until that
    /// use completes, memory runs out, or too many frees are deferred.
    fn free(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        let owner = self.tracker.owner_stream(meta)?;
        let streams = &self.tracker.streams;
        let at_once = meta.with_uses(|uses| uses.is_ordered_before(streams, owner));
        if at_once || !self.deferred_frees.defer(generation) {
            return self.free_in_order(generation, meta);
        }
        Ok(())
    }
}

impl Drop for AsyncCudaResource {
    fn drop(&mut self) {
        // In stream order: no wait of the host, and no memory is freed under running work.
        let _ = self.free_deferred();
    }
}

impl DeviceMemoryResource for AsyncCudaResource {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let owner = self.tracker.stream(stream)?;
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        owner.check_not_capturing("alloc_async")?;
        let pools = self.driver_pools.driver()?;
        if self.deferred_frees.has_deferred()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            // A failed free keeps its block; a reap retries and reports it.
            let _ = self.free_completed(DEFERRED_PER_REQUEST);
        }
        let requested = match self.request(pools, bytes, owner) {
            Ok(requested) => requested,
            Err(error) => self.request_again(pools, bytes, owner, error)?,
        };
        let ptr = requested.ptr;
        let id = self.tracker.fast_path_id(stream);
        let Some(generation) = self.tracker.table.begin(ptr, bytes, Some((id, owner))) else {
            #[allow(unsafe_code)]
            // SAFETY: just allocated on this stream, and published to no other thread.
            let freed = unsafe { pools.free_async(ptr, owner.handle()) };
            self.frees.undone(owner);
            freed?;
            return Err(too_many_blocks());
        };
        drop(requested);
        self.tracker.counters.count(|counts| {
            counts.allocations += 1;
            counts.outstanding = counts.outstanding.wrapping_add(bytes);
        });
        Ok(DeviceBlock::live(ptr, bytes, self.ordinal, stream, tag, generation))
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.tracker.check_parts()?;
        let generation = block.generation;
        let meta = self.tracker.table.find_block(&block)?;
        // Read first: the metadata may end with the free.
        let (owner, bytes) = (self.tracker.owner_stream(meta)?, meta.bytes());
        let retired = self.tracker.retire(meta, generation)?;
        self.tracker.counters.count(|counts| counts.deallocations += 1);
        let freed = match retired {
            Retired::OwnStreamOnly => self.queue_own_stream_only(owner, generation, meta),
            Retired::Used => self.free(generation, meta),
            Retired::Open => Ok(()),
        };
        // This call names the stream, so it may record the event that other calls poll.
        if owner.count_free_and_check(bytes) {
            self.poll_frees(owner);
        }
        freed
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        self.tracker.counters.sum().outstanding
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let reaper = self.deferred_frees.reaper_lock();
        let retried = self.retry();
        let deferred = self
            .deferred_frees
            .free_all(&self.tracker, |generation, meta| self.free_late(generation, meta));
        drop(reaper);
        let outcome = retried.and(deferred);
        let noted = self.note_completed(|stream| {
            self.frees.synchronize(stream, &self.tracker.counters, |done| self.freed(done))
        });
        self.frees.wait_until_counted();
        outcome.and(noted)
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let reaper = self.deferred_frees.reaper_lock();
        let retried = self.retry();
        let completed = self.free_completed(usize::MAX);
        drop(reaper);
        let outcome = retried.and(completed);
        let noted = self.note_completed(|stream| {
            self.frees.poll(stream, &self.tracker.counters, |done| self.freed(done))
        });
        outcome.and(noted)
    }

    tracked_hooks!();

    fn is_trusted(&self, _seal: Seal) -> bool {
        true
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    fn statistics(&self) -> ResourceStatistics {
        self.tracker.statistics()
    }

    fn trim(&self) -> ResourceResult<usize> {
        let before = self.driver_pools.usage()?.reserved;
        self.driver_pools.trim(0)?;
        let after = self.driver_pools.usage()?.reserved;
        self.physical.reconcile(&self.driver_pools);
        Ok(before.saturating_sub(after) as usize)
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.tracker.check_parts()?;
        self.physical.start(&self.driver_pools, meter)
    }

    fn physical_bytes(&self) -> Option<usize> {
        self.driver_pools.usage().ok().map(|usage| usage.reserved as usize)
    }

    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.driver_pools.cap(cap);
        Ok(())
    }
}

debug_fields!(self: AsyncCudaResource {
    device: self.device.spec(), policy: self.tracker.policy, statistics: self.statistics(), ..
});
