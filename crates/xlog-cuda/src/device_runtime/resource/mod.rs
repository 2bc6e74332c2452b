//! The trait [`DeviceMemoryResource`] and the types that its calls share.
//!
//! A resource allocates [`DeviceBlock`]s in stream order. Resources stack: a budget, a log or a guard is a decorator, which wraps an
//! inner resource ([`DeviceMemoryResource::inner_resource`]). The resource's metadata is authoritative; a block that a caller passes
//! is validated by device, address and generation.

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

/// The function that a resource calls after it took memory from the device, until it returns false; see
/// [`DeviceMemoryResource::on_growth`].
pub type GrowthHook = Arc<dyn Fn(Duration) -> bool + Send + Sync>;

pub(crate) use block::SLOT_BITS;
pub(crate) use cap::{CapSlot, refused_by_cap};
pub(crate) use forward::forward_plain;
pub(crate) use trust::{Seal, check_memory};

/// The minimum alignment of a block.
pub const MIN_ALIGN: usize = 256;

/// Allocates device memory in stream order.
///
/// `allocate` and `deallocate` are ordered on the stream that they name. Three hooks order uses on other streams:
/// [`prepare_block_use`](Self::prepare_block_use), [`finish_block_use`](Self::finish_block_use) and
/// [`record_block_use`](Self::record_block_use). The default hooks return an error: a resource that tracks nothing must not report
/// success.
///
/// A refused call changes nothing. An unknown stream is [`ResourceError::StreamMisuse`], a block of another device
/// [`ResourceError::Driver`], a block that is not the live one at its address [`ResourceError::UseAfterFree`].
///
/// # Decorators
///
/// A decorator implements the four required methods and [`inner_resource`](Self::inner_resource). The default methods forward to the
/// inner resource, so a method that is added to this trait is forwarded too. A decorator that acts on allocations overrides both
/// [`allocate`](Self::allocate) and [`allocate_request`](Self::allocate_request). [`deallocate_with_state`](Self::deallocate_with_state)
/// and [`finish_block_uses`](Self::finish_block_uses) call the decorator's own single forms.
///
/// docs/decorators.md has an example. The conformance suite (`xlog_conformance::Suite::of_decorator`) finds calls that a decorator
/// does not forward.
pub trait DeviceMemoryResource: Send + Sync {
    /// Allocates a live block of at least `bytes`, usable on `stream` at once. Zero bytes are refused.
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock>;

    /// Frees a block on its allocation stream, after every recorded use.
    ///
    /// The block is consumed even if the call fails. If the driver fails, the block stays [`BlockState::Retired`], and a later reap
    /// finishes the free.
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()>;

    /// Returns the ordinal of the device that has the memory.
    fn device_ordinal(&self) -> u32;

    /// Returns the bytes of live blocks, and of retired blocks that are not yet freed.
    fn bytes_outstanding(&self) -> usize;

    /// Returns the resource that this one decorates, to which the default methods forward; `None` for a resource that takes memory itself.
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        None
    }

    /// Waits until every queued free has completed, and counts it. Skips blocks with an open use.
    ///
    /// If a stream fails, its frees stay queued, and a later call retries them.
    fn reap_pending(&self) -> ResourceResult<()> {
        self.inner_resource().map_or(Ok(()), |inner| inner.reap_pending())
    }

    /// [`reap_pending`](Self::reap_pending) that never waits: counts the frees that have completed.
    fn reap_completed(&self) -> ResourceResult<()> {
        self.inner_resource().map_or(Ok(()), |inner| inner.reap_completed())
    }

    /// Records that queued work on `use_stream` uses the block in an unknown way. The free and every later use wait for that work.
    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.record_block_use(block, use_stream),
            None => Err(ResourceError::untracked("record_block_use")),
        }
    }

    /// Returns whether the three hooks track uses.
    fn supports_block_use_tracking(&self) -> bool {
        self.inner_resource().is_some_and(|inner| inner.supports_block_use_tracking())
    }

    /// Opens a use before its work is queued, and makes `use_stream` wait for what the use depends on.
    ///
    /// Until the first announcement (a prepare by another stream, or a finished use of the allocation stream), the allocation stream
    /// may use the block without hooks: the first prepare of another stream waits for everything queued on it by then.
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

    /// Closes a use after its work was queued, or failed to be.
    ///
    /// An open use is closed even if the call returns an error. [`ResourceError::UseAfterFree`] and [`ResourceError::StreamMisuse`] mean
    /// that there was no such use.
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

    /// Returns the state of a block.
    #[inline]
    fn block_state(&self, block: BlockId) -> BlockState {
        self.inner_resource().map_or(BlockState::Freed, |inner| inner.block_state(block))
    }

    // The methods below extend the contract. Each default is correct for a resource that does not override it.

    /// [`deallocate`](Self::deallocate) that returns the [`block_state`](Self::block_state) right after it.
    ///
    /// For decorators: the block is passed by reference, so no layer copies it. It is freed as if it were passed by value.
    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let id = BlockId::from_block(block);
        self.deallocate(DeviceBlock { ..*block }).map(|()| self.block_state(id))
    }

    /// Runs `work` once while the block cannot be freed. If the block is not the live one at its address, returns an error without
    /// running `work`.
    ///
    /// A concurrent free retires the block and completes after `work`. Unlike an open use, no other thread can end this: copies of
    /// buffers rely on it. The default only checks [`block_state`](Self::block_state) first; another thread may free the block after
    /// the check, so a resource that takes memory itself overrides it.
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

    /// Returns whether every block is known to lie in memory of the device: true for this library's resources only.
    ///
    /// Sealed: other crates cannot name the argument, so their resources can neither override this method nor forward it.
    #[doc(hidden)]
    fn is_trusted(&self, _seal: Seal) -> bool {
        false
    }

    /// [`finish_block_use`](Self::finish_block_use) for all blocks of one launch. Closes all of them; returns the first error.
    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        finish_one_by_one(self, uses, use_stream)
    }

    /// Allocates what `request` describes. If a reservation is given, the block is charged to it, and its budget does not check the
    /// limit again.
    ///
    /// The default calls [`allocate`](Self::allocate). If the alignment is above [`MIN_ALIGN`] or a reservation is given, it calls the
    /// inner resource instead, with [`is_tracked`](AllocRequest::is_tracked) cleared. A decorator that does not access the memory itself
    /// should forward the whole request.
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

    /// Returns the bytes that a request of `bytes` with this alignment is charged.
    #[inline]
    fn charge_for(&self, bytes: usize, align: usize) -> usize {
        self.inner_resource().map_or(bytes, |inner| inner.charge_for(bytes, align))
    }

    /// Returns the device and the streams of this resource, for layers above it that queue work of their own; `None` if unknown.
    fn home(&self) -> Option<ResourceHome> {
        self.inner_resource()?.home()
    }

    /// Returns the counters. Reading them is cheap.
    fn statistics(&self) -> ResourceStatistics {
        let inner = self.inner_resource().map(|inner| inner.statistics());
        ResourceStatistics {
            bytes_outstanding: self.bytes_outstanding(),
            ..inner.unwrap_or_default()
        }
    }

    /// Returns cached memory to the device. Returns the number of bytes.
    fn trim(&self) -> ResourceResult<usize> {
        self.inner_resource().map_or(Ok(0), |inner| inner.trim())
    }

    /// Reports the physical memory that this resource takes from the device and returns to it to `meter`, from now on.
    ///
    /// Memory that it already holds is reported at once. A resource that takes no physical memory refuses.
    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.meter_physical(meter),
            None => Err(ResourceError::invalid(
                "a physical meter",
                "none: this resource does not announce physical memory (unsupported)",
            )),
        }
    }

    /// Limits the physical memory that this resource holds to `cap`, rounded up to its granules.
    ///
    /// Memory above the cap that it already holds stays. The smallest of several caps applies; each ends with its last `Arc`. A resource
    /// that takes no physical memory refuses.
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        match self.inner_resource() {
            Some(inner) => inner.cap_physical(cap),
            None => Err(ResourceError::invalid(
                "a cap on physical memory",
                "none: this resource takes no memory of the device itself (unsupported)",
            )),
        }
    }

    /// Reports the segments that this resource holds, takes from the device and returns to it to `watcher`, from now on. Returns false if
    /// it has none, or does not know their addresses.
    fn watch_segments(&self, watcher: &Weak<dyn SegmentWatcher>) -> bool {
        self.inner_resource().is_some_and(|inner| inner.watch_segments(watcher))
    }

    /// Returns the physical memory that this resource holds, cached or not, which a [cap](Self::cap_physical) limits; `None` if unknown.
    fn physical_bytes(&self) -> Option<usize> {
        self.inner_resource()?.physical_bytes()
    }

    /// [`trim`](Self::trim) for another process that needs the memory. It never waits. It marks the queued work of busy streams, so that
    /// a later call can return the memory once that work has completed.
    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        match self.inner_resource() {
            Some(inner) => inner.trim_under_pressure(),
            None => self.trim(),
        }
    }

    /// Returns memory to the device that has been idle for the resource's decay time at `now`. Returns the number of bytes; 0 if the
    /// resource keeps idle memory.
    fn return_idle(&self, now: Instant) -> ResourceResult<usize> {
        self.inner_resource().map_or(Ok(0), |inner| inner.return_idle(now))
    }

    /// Calls `hook` whenever the resource has taken memory from the device, and at once if it holds some, with the interval at which to
    /// call [`return_idle`](Self::return_idle) from then on. Returns false if the resource keeps idle memory.
    fn on_growth(&self, hook: GrowthHook) -> bool {
        self.inner_resource().is_some_and(|inner| inner.on_growth(hook))
    }

    /// Divides the physical memory of this resource into live, cached and pending; `None` if unknown.
    fn memory_use(&self) -> Option<MemoryUse> {
        if let Some(inner) = self.inner_resource() {
            return inner.memory_use();
        }
        let physical = self.physical_bytes()?;
        let cached = physical.saturating_sub(self.bytes_outstanding());
        Some(MemoryUse::of_physical(physical, cached, 0))
    }

    /// Returns the memory that this resource holds and no block occupies; `None` if unknown.
    fn free_space(&self) -> Option<FreeSpace> {
        self.inner_resource()?.free_space()
    }

    /// Returns whether no two live or retired blocks share the slot bits of their generation.
    fn places_blocks(&self) -> bool {
        self.inner_resource().is_some_and(|inner| inner.places_blocks())
    }

    /// Reserves bytes of a budget, all or none; `None` if there is no budget.
    ///
    /// Without an inner resource the default is [`ResourceError::Unsupported`]. A resource that takes memory itself and has no budget
    /// returns `Ok(None)`.
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

    /// Logs a request that a layer above this resource refused, such as the limit of a memory manager.
    fn log_refusal(&self, request: AllocRequest, error: &ResourceError) {
        if let Some(inner) = self.inner_resource() {
            inner.log_refusal(request, error);
        }
    }
}

/// Finishes several uses one by one. Returns the first error.
pub(crate) fn finish_one_by_one<R: DeviceMemoryResource + ?Sized>(
    resource: &R,
    uses: &[(BlockId, Access)],
    use_stream: StreamId,
) -> ResourceResult<()> {
    first_error(uses, |&(block, access)| resource.finish_block_use(block, use_stream, access))
}

/// Calls `work` for all items, whatever fails. Returns the first error.
pub(crate) fn first_error<T, E>(
    items: impl IntoIterator<Item = T>,
    mut work: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let mut outcome = Ok(());
    for item in items {
        let this = work(item);
        outcome = outcome.and(this);
    }
    outcome
}
