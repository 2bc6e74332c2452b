//! What a memory resource is, and the words everything ordered on a stream shares.
//!
//! A [`DeviceMemoryResource`] hands out [`DeviceBlock`]s in stream order. Resources stack: a budget, a log or a guard is a
//! decorator, which wraps an inner resource ([`DeviceMemoryResource::inner_resource`]). A resource's own record is the truth about
//! a block; what a caller passes is a claim that is checked by (device, address, generation) and nothing else.

mod block;
mod cap;
mod error;
mod forward;
mod home;
mod meter;
mod segments;
mod trust;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::budget::BudgetReservation;

pub use block::{AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, Generation, StreamId};
pub use cap::PhysicalCap;
pub use error::{ResourceError, ResourceResult};
pub use home::ResourceHome;
pub use meter::{FreeSpace, MemoryUse, PhysicalMeter, ResourceStatistics};
pub use segments::{SegmentRange, SegmentWatcher};
pub use xlog_driver::Access;

/// What a resource calls when it has taken memory from the device; see [`DeviceMemoryResource::on_growth`].
pub type GrowthHook = Arc<dyn Fn(Duration) + Send + Sync>;

pub(crate) use block::SLOT_BITS;
pub(crate) use cap::{CapSlot, refused_by_cap};
pub(crate) use forward::forward_plain;
pub(crate) use trust::{Seal, check_memory};

/// The alignment every block has at least.
pub const MIN_ALIGN: usize = 256;

/// Hands out device memory in stream order.
///
/// `allocate` and `deallocate` name a stream and are ordered on it; a use on another stream is announced by the hooks
/// ([`prepare_block_use`](Self::prepare_block_use), [`finish_block_use`](Self::finish_block_use)), where the resource tracks
/// them. The hooks' defaults refuse: silent success on a backend that tracks nothing would be believed.
///
/// Refusals change nothing: an unknown stream is [`ResourceError::StreamMisuse`], another device's block
/// [`ResourceError::Driver`], anything but the live block at that address [`ResourceError::UseAfterFree`].
///
/// # Decorators
///
/// A decorator implements the four required methods and [`inner_resource`](Self::inner_resource). Every other method then forwards to
/// the inner resource, so a method that is added to this trait is forwarded too. A decorator overrides what it changes. Two
/// methods hand out blocks, and a decorator that acts on allocations overrides both: [`allocate`](Self::allocate) and
/// [`allocate_request`](Self::allocate_request). The batch forms and [`deallocate_with_state`](Self::deallocate_with_state) are
/// composed of the decorator's own single forms.
/// docs/decorators.md has an example. The conformance suite (`xlog_conformance::Suite::of_decorator`) names what a decorator does not
/// forward.
pub trait DeviceMemoryResource: Send + Sync {
    /// A live block of at least `bytes`, usable on `stream` at once. Zero bytes are refused.
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock>;

    /// Frees a block on its allocation stream, after every recorded use.
    ///
    /// The block is consumed either way. If the driver fails half way the error is returned, the block stays
    /// [`BlockState::Retired`], and a later reap finishes the free.
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()>;

    /// The device whose memory this is.
    fn device_ordinal(&self) -> u32;

    /// Bytes of live blocks, and of retired ones that are not yet freed.
    fn bytes_outstanding(&self) -> usize;

    /// The resource that this one decorates; `None` for a resource that takes memory itself.
    ///
    /// The default methods forward to it.
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        None
    }

    /// Waits until every free already queued has completed and counts it. Blocks held by an open use are skipped.
    ///
    /// One stream's failure loses no byte and can be tried again.
    fn reap_pending(&self) -> ResourceResult<()> {
        self.inner_resource().map_or(Ok(()), |inner| inner.reap_pending())
    }

    /// [`reap_pending`](Self::reap_pending) that never waits: counts what has completed.
    fn reap_completed(&self) -> ResourceResult<()> {
        self.inner_resource().map_or(Ok(()), |inner| inner.reap_completed())
    }

    /// Work of unknown access on `use_stream` touches the block: the free and every later use wait for it.
    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.record_block_use(block, use_stream),
            None => Err(ResourceError::untracked("record_block_use")),
        }
    }

    /// True exactly where the three hooks are real.
    fn supports_block_use_tracking(&self) -> bool {
        self.inner_resource().is_some_and(|inner| inner.supports_block_use_tracking())
    }

    /// Before work is queued on `use_stream`: makes that stream wait for what the work must follow, and opens the use.
    ///
    /// Until the block's own stream has announced a use, it may work on the block without hooks: the first prepare of another stream
    /// follows everything that the own stream has queued by then.
    #[inline]
    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.prepare_block_use(block, use_stream, access),
            None => Err(ResourceError::untracked("prepare_block_use")),
        }
    }

    /// After it is queued, or failed to be: remembers the work and closes the use.
    ///
    /// A finish of an open use closes it, also where it returns an error: [`ResourceError::UseAfterFree`] and
    /// [`ResourceError::StreamMisuse`] say that there was no such use.
    #[inline]
    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.finish_block_use(block, use_stream, access),
            None => Err(ResourceError::untracked("finish_block_use")),
        }
    }

    /// The truth about a block, by identity.
    #[inline]
    fn block_state(&self, block: BlockId) -> BlockState {
        self.inner_resource().map_or(BlockState::Freed, |inner| inner.block_state(block))
    }

    // The methods below are additions to the contract; every default is right for a resource that knows nothing of them.

    /// [`deallocate`](Self::deallocate), and what has become of the block: [`block_state`](Self::block_state) right after it.
    ///
    /// For decorators, which pass a block on: by reference it is not copied at every step. It is freed all the same, and names nothing
    /// from then on.
    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let id = BlockId::from_block(block);
        self.deallocate(DeviceBlock { ..*block }).map(|()| self.block_state(id))
    }

    /// Runs `work` once while the block cannot be freed. Anything but the live block at its address is refused, and nothing runs.
    ///
    /// A free meanwhile retires the block and completes afterwards. Unlike an open use, no other thread can end this: copies of buffers
    /// run in it. The default asks [`block_state`](Self::block_state) first; another thread may free the block between the answer and
    /// the work.
    fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        if let Some(inner) = self.inner_resource() {
            return inner.while_live(block, work);
        }
        if self.block_state(block) != BlockState::Live {
            return Err(ResourceError::UseAfterFree { generation: block.generation });
        }
        work();
        Ok(())
    }

    /// Whether every block lies in memory of the device: known of this library's resources only.
    ///
    /// Sealed: the argument cannot be named outside of this crate, so no other resource can override the answer, or forward it.
    #[doc(hidden)]
    fn is_trusted(&self, _seal: Seal) -> bool {
        false
    }

    /// [`finish_block_use`](Self::finish_block_use) for all blocks of one launch. One failure does not stop the others; the
    /// first is returned.
    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        finish_one_by_one(self, uses, use_stream)
    }

    /// Allocates what `request` describes. With a reservation, its bytes pay, and the budget that gave it checks nothing.
    ///
    /// The default asks [`allocate`](Self::allocate) for a plain request, and the inner resource for an alignment above [`MIN_ALIGN`] and
    /// out of a reservation. Its blocks are ordered at once: a decorator that does not work on the memory forwards the whole request,
    /// so that the resource below sees [`is_tracked`](AllocRequest::is_tracked).
    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        let AllocRequest { bytes, align, stream, tag, .. } = request;
        request.check_align()?;
        let is_plain = reservation.is_none() && align <= MIN_ALIGN;
        if let Some(inner) = self.inner_resource().filter(|_| !is_plain) {
            let ordered = AllocRequest { is_tracked: false, ..request };
            return inner.allocate_request(ordered, reservation);
        }
        if reservation.is_some() {
            return Err(ResourceError::no_budget());
        }
        let block = self.allocate(bytes, stream, tag)?;
        if block.align >= align {
            return Ok(block);
        }
        let given = block.align;
        self.deallocate(block)?;
        Err(ResourceError::invalid(
            format!("alignment {align}"),
            format!("at most {given}, which this resource gives"),
        ))
    }

    /// Several blocks at once, all or none.
    fn allocate_batch(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        let mut blocks = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            match self.allocate(bytes, stream, tag) {
                Ok(block) => blocks.push(block),
                Err(error) => {
                    let _ = self.deallocate_batch(blocks);
                    return Err(error);
                }
            }
        }
        Ok(blocks)
    }

    /// Frees several blocks. All are consumed; the first error is returned.
    fn deallocate_batch(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for block in blocks {
            let this = self.deallocate(block);
            outcome = outcome.and(this);
        }
        outcome
    }

    /// What a request of `bytes` with this alignment will be charged.
    #[inline]
    fn charge_for(&self, bytes: usize, align: usize) -> usize {
        self.inner_resource().map_or(bytes, |inner| inner.charge_for(bytes, align))
    }

    /// The device and the streams this resource works on, for what is stacked on it and queues work of its own.
    ///
    /// `None` where a resource does not say.
    fn home(&self) -> Option<ResourceHome> {
        self.inner_resource()?.home()
    }

    /// Counters, cheap to read.
    fn statistics(&self) -> ResourceStatistics {
        let inner = self.inner_resource().map(|inner| inner.statistics());
        ResourceStatistics {
            bytes_outstanding: self.bytes_outstanding(),
            ..inner.unwrap_or_default()
        }
    }

    /// Gives cached memory back to the device; returns how many bytes.
    fn trim(&self) -> ResourceResult<usize> {
        self.inner_resource().map_or(Ok(0), |inner| inner.trim())
    }

    /// From now on, tells `meter` of the physical memory this resource takes from the device and returns to it.
    ///
    /// What is held already is announced at once. A resource that takes none itself refuses.
    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.meter_physical(meter),
            None => Err(ResourceError::invalid(
                "a physical meter",
                "none: this resource does not announce physical memory (unsupported)",
            )),
        }
    }

    /// From now on, holds no more physical memory of the device than `cap`, rounded up to the granules in which it takes memory.
    ///
    /// What is held already stays. Several caps all hold, each until its last `Arc` is dropped. A resource that takes none itself
    /// refuses.
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.cap_physical(cap),
            None => Err(ResourceError::invalid(
                "a cap on physical memory",
                "none: this resource takes no memory of the device itself (unsupported)",
            )),
        }
    }

    /// From now on, tells `watcher` of the segments that this resource takes from the device and returns to it, beginning with those it
    /// holds. False where it has none, or does not know their addresses.
    fn watch_segments(&self, watcher: &Weak<dyn SegmentWatcher>) -> bool {
        self.inner_resource().is_some_and(|inner| inner.watch_segments(watcher))
    }

    /// The physical memory that this resource holds of its device, cached or not, where it knows: what a
    /// [cap](Self::cap_physical) is about.
    fn physical_bytes(&self) -> Option<usize> {
        self.inner_resource()?.physical_bytes()
    }

    /// [`trim`](Self::trim) because another process needs the memory. It never waits. On busy streams it marks the work queued so far, so
    /// that a later call finds what has completed by then.
    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        match self.inner_resource() {
            Some(inner) => inner.trim_under_pressure(),
            None => self.trim(),
        }
    }

    /// Returns memory to the device that has been idle for a while at `now`, if the resource does so by itself. Returns the
    /// number of bytes.
    fn return_idle(&self, now: Instant) -> ResourceResult<usize> {
        self.inner_resource().map_or(Ok(0), |inner| inner.return_idle(now))
    }

    /// Has `hook` called whenever the resource has taken memory from the device, with the interval in which
    /// [`return_idle`](Self::return_idle) is to be called from then on. False if the resource keeps idle memory.
    fn on_growth(&self, hook: GrowthHook) -> bool {
        self.inner_resource().is_some_and(|inner| inner.on_growth(hook))
    }

    /// How the physical memory of this resource divides into live, cached and pending, where it knows.
    fn memory_use(&self) -> Option<MemoryUse> {
        if let Some(inner) = self.inner_resource() {
            return inner.memory_use();
        }
        let physical = self.physical_bytes()?;
        let cached = physical.saturating_sub(self.bytes_outstanding());
        Some(MemoryUse::of_physical(physical, cached, 0))
    }

    /// What this resource could hand out without taking more from the device, where it knows.
    fn free_space(&self) -> Option<FreeSpace> {
        self.inner_resource()?.free_space()
    }

    /// True where no two blocks that are live or retired share the low bits of their generation: a place of their own.
    fn places_blocks(&self) -> bool {
        self.inner_resource().is_some_and(|inner| inner.places_blocks())
    }

    /// Sets bytes of a budget aside, all or none; `None` where there is no budget.
    ///
    /// The default refuses with [`ResourceError::Unsupported`] where there is no inner resource: a resource that takes memory itself
    /// answers `Ok(None)`, and a decorator names its inner resource, which may be a budget.
    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        match self.inner_resource() {
            Some(inner) => inner.reserve_budget(bytes),
            None => Err(ResourceError::Unsupported {
                call: "reserve_budget",
                detail: "this resource does not say whether a budget lies below it; a decorator implements inner_resource, a \
                         resource without a budget answers Ok(None)",
            }),
        }
    }
}

/// Finishes several uses by the single form: all of them, and the first error.
pub(crate) fn finish_one_by_one<R: DeviceMemoryResource + ?Sized>(
    resource: &R,
    uses: &[(BlockId, Access)],
    use_stream: StreamId,
) -> ResourceResult<()> {
    let mut outcome = Ok(());
    for &(block, access) in uses {
        let this = resource.finish_block_use(block, use_stream, access);
        outcome = outcome.and(this);
    }
    outcome
}
