//! What a memory resource is, and the words everything ordered on a stream shares.
//!
//! A [`DeviceMemoryResource`] hands out [`DeviceBlock`]s in stream order. Resources stack: a budget, a log or a guard owns the
//! one below it. A resource's own record is the truth about a block; what a caller passes is a claim that is checked by
//! (device, address, generation) and nothing else.

mod block;
mod error;
mod home;
mod meter;

use std::sync::Arc;

use super::budget::BudgetReservation;

pub use block::{AllocTag, BlockId, BlockState, DeviceBlock, Generation, StreamId};
pub use error::{ResourceError, ResourceResult};
pub use home::ResourceHome;
pub use meter::{FreeSpace, PhysicalMeter, ResourceStatistics};
pub use xlog_driver::Access;

pub(crate) use block::SLOT_BITS;

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

    /// Waits until every free already queued has completed and counts it. Blocks held by an open use are skipped.
    ///
    /// One stream's failure loses no byte and can be tried again.
    fn reap_pending(&self) -> ResourceResult<()> {
        Ok(())
    }

    /// [`reap_pending`](Self::reap_pending) that never waits: counts what has completed.
    fn reap_completed(&self) -> ResourceResult<()> {
        Ok(())
    }

    /// Work of unknown access on `use_stream` touches the block: the free and every later use wait for it.
    fn record_block_use(&self, _block: &DeviceBlock, _use_stream: StreamId) -> ResourceResult<()> {
        Err(ResourceError::untracked("record_block_use"))
    }

    /// True exactly where the three hooks are real.
    fn supports_block_use_tracking(&self) -> bool {
        false
    }

    /// Before work is queued on `use_stream`: makes that stream wait for what the work must follow, and opens the use.
    fn prepare_block_use(
        &self,
        _block: BlockId,
        _use_stream: StreamId,
        _access: Access,
    ) -> ResourceResult<()> {
        Err(ResourceError::untracked("prepare_block_use"))
    }

    /// After it is queued, or failed to be: remembers the work and closes the use.
    fn finish_block_use(
        &self,
        _block: BlockId,
        _use_stream: StreamId,
        _access: Access,
    ) -> ResourceResult<()> {
        Err(ResourceError::untracked("finish_block_use"))
    }

    /// The truth about a block, by identity.
    fn block_state(&self, _block: BlockId) -> BlockState {
        BlockState::Freed
    }

    // What follows is ours; every default is right for a resource that knows nothing of it.

    /// [`deallocate`](Self::deallocate), and what has become of the block: [`block_state`](Self::block_state) right after it.
    ///
    /// For decorators, which pass a block on: by reference it is not copied at every step. It is freed all the same, and names nothing
    /// from then on.
    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let id = BlockId::from_block(block);
        self.deallocate(DeviceBlock { ..*block }).map(|()| self.block_state(id))
    }

    /// [`finish_block_use`](Self::finish_block_use) for all blocks of one launch. One failure does not stop the others; the
    /// first is returned.
    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for &(block, access) in uses {
            let this = self.finish_block_use(block, use_stream, access);
            outcome = outcome.and(this);
        }
        outcome
    }

    /// [`allocate`](Self::allocate) with an alignment, a power of two.
    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if !align.is_power_of_two() {
            return Err(ResourceError::InvalidRequest {
                value: format!("alignment {align}"),
                accepted: "a power of two".to_owned(),
            });
        }
        let block = self.allocate(bytes, stream, tag)?;
        if block.align >= align {
            return Ok(block);
        }
        let given = block.align;
        self.deallocate(block)?;
        Err(ResourceError::InvalidRequest {
            value: format!("alignment {align}"),
            accepted: format!("at most {given}, which this resource gives"),
        })
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

    /// What a request of `bytes` will be charged.
    fn charge_for(&self, bytes: usize) -> usize {
        bytes
    }

    /// [`charge_for`](Self::charge_for) of a request with an alignment.
    fn charge_for_aligned(&self, bytes: usize, _align: usize) -> usize {
        self.charge_for(bytes)
    }

    /// The device and the streams this resource works on, for what is stacked on it and queues work of its own.
    ///
    /// Decorators forward; `None` where a resource does not say.
    fn home(&self) -> Option<ResourceHome> {
        None
    }

    /// Counters, cheap to read.
    fn statistics(&self) -> ResourceStatistics {
        ResourceStatistics { bytes_outstanding: self.bytes_outstanding(), ..Default::default() }
    }

    /// Gives cached memory back to the device; returns how many bytes.
    fn trim(&self) -> ResourceResult<usize> {
        Ok(0)
    }

    /// From now on, tells `meter` of the physical memory this resource takes from the device and returns to it.
    ///
    /// What is held already is announced at once. Decorators forward; a resource that takes none itself refuses.
    fn meter_physical(&self, _meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        Err(ResourceError::InvalidRequest {
            value: "a physical meter".to_owned(),
            accepted: "none: this resource does not announce physical memory (unsupported)"
                .to_owned(),
        })
    }

    /// What this resource could hand out without taking more from the device, where it knows.
    fn free_space(&self) -> Option<FreeSpace> {
        None
    }

    /// True where no two blocks that are live or retired share the low bits of their generation: a place of their own.
    fn places_blocks(&self) -> bool {
        false
    }

    /// Sets bytes of a budget aside, all or none; `None` where there is no budget.
    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    /// [`allocate_aligned`](Self::allocate_aligned) out of a reservation, without another check of the budget that gave it.
    fn allocate_reserved(
        &self,
        _reservation: &mut BudgetReservation,
        _bytes: usize,
        _align: usize,
        _stream: StreamId,
        _tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        Err(ResourceError::InvalidRequest {
            value: "a reservation".to_owned(),
            accepted: "none: there is no budget here (unsupported)".to_owned(),
        })
    }
}

/// What a decorator over a resource in the field `$inner` answers as that resource does.
macro_rules! forward_questions {
    ($inner:ident) => {
        fn device_ordinal(&self) -> u32 {
            self.$inner.device_ordinal()
        }

        fn bytes_outstanding(&self) -> usize {
            self.$inner.bytes_outstanding()
        }

        fn supports_block_use_tracking(&self) -> bool {
            self.$inner.supports_block_use_tracking()
        }

        #[inline]
        fn block_state(&self, block: BlockId) -> BlockState {
            self.$inner.block_state(block)
        }

        #[inline]
        fn charge_for(&self, bytes: usize) -> usize {
            self.$inner.charge_for(bytes)
        }

        #[inline]
        fn charge_for_aligned(&self, bytes: usize, align: usize) -> usize {
            self.$inner.charge_for_aligned(bytes, align)
        }

        fn home(&self) -> Option<crate::device_runtime::resource::ResourceHome> {
            self.$inner.home()
        }

        fn statistics(&self) -> ResourceStatistics {
            self.$inner.statistics()
        }

        fn free_space(&self) -> Option<FreeSpace> {
            self.$inner.free_space()
        }

        fn places_blocks(&self) -> bool {
            self.$inner.places_blocks()
        }
    };
}
pub(crate) use forward_questions;

macro_rules! forward {
    () => {
        fn allocate(
            &self,
            bytes: usize,
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<DeviceBlock> {
            (**self).allocate(bytes, stream, tag)
        }
        fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
            (**self).deallocate(block)
        }
        fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
            (**self).deallocate_with_state(block)
        }
        fn device_ordinal(&self) -> u32 {
            (**self).device_ordinal()
        }
        fn bytes_outstanding(&self) -> usize {
            (**self).bytes_outstanding()
        }
        fn reap_pending(&self) -> ResourceResult<()> {
            (**self).reap_pending()
        }
        fn reap_completed(&self) -> ResourceResult<()> {
            (**self).reap_completed()
        }
        fn record_block_use(&self, block: &DeviceBlock, stream: StreamId) -> ResourceResult<()> {
            (**self).record_block_use(block, stream)
        }
        fn supports_block_use_tracking(&self) -> bool {
            (**self).supports_block_use_tracking()
        }
        fn prepare_block_use(
            &self,
            block: BlockId,
            stream: StreamId,
            access: Access,
        ) -> ResourceResult<()> {
            (**self).prepare_block_use(block, stream, access)
        }
        fn finish_block_use(
            &self,
            block: BlockId,
            stream: StreamId,
            access: Access,
        ) -> ResourceResult<()> {
            (**self).finish_block_use(block, stream, access)
        }
        fn block_state(&self, block: BlockId) -> BlockState {
            (**self).block_state(block)
        }
        fn finish_block_uses(
            &self,
            uses: &[(BlockId, Access)],
            stream: StreamId,
        ) -> ResourceResult<()> {
            (**self).finish_block_uses(uses, stream)
        }
        fn allocate_aligned(
            &self,
            bytes: usize,
            align: usize,
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<DeviceBlock> {
            (**self).allocate_aligned(bytes, align, stream, tag)
        }
        fn allocate_batch(
            &self,
            sizes: &[usize],
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<Vec<DeviceBlock>> {
            (**self).allocate_batch(sizes, stream, tag)
        }
        fn deallocate_batch(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
            (**self).deallocate_batch(blocks)
        }
        fn charge_for(&self, bytes: usize) -> usize {
            (**self).charge_for(bytes)
        }
        fn charge_for_aligned(&self, bytes: usize, align: usize) -> usize {
            (**self).charge_for_aligned(bytes, align)
        }
        fn home(&self) -> Option<ResourceHome> {
            (**self).home()
        }
        fn statistics(&self) -> ResourceStatistics {
            (**self).statistics()
        }
        fn trim(&self) -> ResourceResult<usize> {
            (**self).trim()
        }
        fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
            (**self).meter_physical(meter)
        }
        fn free_space(&self) -> Option<FreeSpace> {
            (**self).free_space()
        }
        fn places_blocks(&self) -> bool {
            (**self).places_blocks()
        }
        fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
            (**self).reserve_budget(bytes)
        }
        fn allocate_reserved(
            &self,
            reservation: &mut BudgetReservation,
            bytes: usize,
            align: usize,
            stream: StreamId,
            tag: AllocTag,
        ) -> ResourceResult<DeviceBlock> {
            (**self).allocate_reserved(reservation, bytes, align, stream, tag)
        }
    };
}

impl DeviceMemoryResource for Box<dyn DeviceMemoryResource + Send + Sync> {
    forward!();
}

impl<R: DeviceMemoryResource + ?Sized> DeviceMemoryResource for Arc<R> {
    forward!();
}
