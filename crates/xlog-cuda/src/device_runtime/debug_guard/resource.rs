//! The guard as a resource.

use std::sync::Arc;

use super::DebugGuardResource;
use super::config::GuardMode;
use super::core::GuardCore;
use super::redzones::{Redzones, layout};
use super::registry::Stage;
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    MIN_ALIGN, PhysicalMeter, ResourceError, ResourceHome, ResourceResult, ResourceStatistics,
    Seal, StreamId,
};

/// The size of the block below that stands in for memory between guard pages.
const STAND_IN: usize = 1;

impl<R: DeviceMemoryResource> GuardCore<R> {
    /// Allocates a guarded block.
    #[inline(never)]
    fn allocate_guarded(
        &self,
        request: &AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        let AllocRequest { bytes, align, .. } = *request;
        let parts = self.parts()?;
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let given = match (self.config.mode, &self.pages) {
            (GuardMode::Pages, Some(pages)) => {
                parts.checker.make_ready()?;
                let below = AllocRequest { bytes: STAND_IN, align: MIN_ALIGN, ..*request };
                let block = self.inner.allocate_request(below, reservation)?;
                self.hand_out_mapped(pages, block, request)
            }
            _ => {
                parts.checker.make_ready()?;
                let Some((front, total)) = layout(bytes, align, self.config.canary_bytes) else {
                    let detail = "no device has so many addresses".to_owned();
                    return Err(ResourceError::OutOfMemory { requested: bytes, detail });
                };
                let below = AllocRequest { bytes: total, ..*request };
                let block = self.inner.allocate_request(below, reservation)?;
                let back = block.bytes.saturating_sub(front + bytes);
                let redzones = Redzones { base: block.ptr, front, bytes, back };
                self.hand_out(block, redzones, None, request)
            }
        };
        given.map_err(|(block, error)| {
            // The user does not have the block. The resource below retries a failed free.
            let _ = self.inner.deallocate(block);
            error
        })
    }

    /// Guards a sampled block. If that fails, the block stays unguarded.
    #[cold]
    #[inline(never)]
    fn guard_chosen(&self, block: DeviceBlock, request: &AllocRequest) -> DeviceBlock {
        let (Some(pages), Ok(parts)) = (&self.pages, &self.parts) else { return block };
        if parts.checker.make_ready().is_err() {
            return block;
        }
        self.hand_out_mapped(pages, block, request).unwrap_or_else(|(block, _)| block)
    }

    /// Returns the result of the resource below; guards the block if it is sampled.
    #[inline]
    fn with_chosen(
        &self,
        given: ResourceResult<DeviceBlock>,
        request: &AllocRequest,
    ) -> ResourceResult<DeviceBlock> {
        match given {
            Ok(block) if self.sampling.chooses(block.generation) => {
                Ok(self.guard_chosen(block, request))
            }
            Ok(block) => Ok(block),
            Err(error) => Err(self.post_mortem_on(error)),
        }
    }

    /// Closes a use, and takes the next step if it was the last one of a freed block.
    fn close(&self, block: BlockId) -> ResourceResult<()> {
        let due = self.registry.lock().close(block.generation);
        self.perform(block.generation, due)
    }

    fn check_device(&self, block: BlockId) -> ResourceResult<()> {
        if block.device_ordinal == self.ordinal {
            return Ok(());
        }
        let (other, own) = (block.device_ordinal, self.ordinal);
        let text = format!("a block of device {other} was given to a guard of device {own}");
        Err(ResourceError::Driver(text))
    }
}

impl<R: DeviceMemoryResource> GuardCore<R> {
    #[inline(never)]
    fn deallocate_guarded(&self, id: BlockId) -> ResourceResult<BlockState> {
        self.check_device(id)?;
        self.with_post_mortem(self.return_block(id))?;
        Ok(self.state_of_guarded(id))
    }

    /// Handles a free that the resource below refused: the block is guarded, or the free is invalid.
    #[cold]
    #[inline(never)]
    fn deallocate_refused(&self, id: BlockId, error: ResourceError) -> ResourceResult<BlockState> {
        if self.sampling.passes(id.ptr) {
            return Err(self.post_mortem_on(error));
        }
        self.deallocate_guarded(id)
    }

    #[inline(never)]
    fn state_of_guarded(&self, block: BlockId) -> BlockState {
        if block.device_ordinal != self.ordinal {
            return BlockState::Freed;
        }
        let (below, stage, is_mapped) = match self.registry.lock().find(block) {
            Ok(entry) => (entry.below, entry.stage, entry.mapped.is_some()),
            Err(_) => return BlockState::Freed,
        };
        match stage {
            Stage::Live => BlockState::Live,
            Stage::Returned | Stage::Evicted => BlockState::Retired,
            Stage::Quarantined(point) if self.is_complete(point) => BlockState::Quarantined,
            Stage::Quarantined(_) => BlockState::Retired,
            Stage::Released(_) if is_mapped => BlockState::Retired,
            Stage::Released(point) => match self.inner.block_state(below) {
                BlockState::Freed if self.is_complete(point) => BlockState::Freed,
                _ => BlockState::Retired,
            },
        }
    }

    #[cold]
    #[inline(never)]
    fn charge_for_guarded(&self, bytes: usize, align: usize) -> usize {
        match (self.config.mode, &self.pages) {
            (GuardMode::Sampled(_), _) => self.inner.charge_for(bytes, align),
            (GuardMode::Pages, Some(pages)) => {
                pages.charge_for(bytes).saturating_add(self.inner.charge_for(STAND_IN, MIN_ALIGN))
            }
            _ => {
                let total = layout(bytes, align, self.config.canary_bytes);
                let total = total.map_or(usize::MAX, |(_, total)| total);
                self.inner.charge_for(total, align)
            }
        }
    }
}

/// Closes a use if the work in it panics.
struct CloseOnPanic<'a, R: DeviceMemoryResource> {
    core: &'a GuardCore<R>,
    block: Option<BlockId>,
}

impl<R: DeviceMemoryResource> Drop for CloseOnPanic<'_, R> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            // A reap returns a failed free.
            let _ = self.core.close(block);
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for DebugGuardResource<R> {
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.core.inner)
    }

    fn is_trusted(&self, seal: Seal) -> bool {
        self.core.inner.is_trusted(seal)
    }

    fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        let core = &*self.core;
        if core.sampling.passes(block.ptr) {
            return core.inner.while_live(block, work);
        }
        core.check_device(block)?;
        // An open use keeps a block that is freed meanwhile.
        core.registry.lock().open(block)?;
        let mut open = CloseOnPanic { core, block: Some(block) };
        work();
        open.block = None;
        core.with_post_mortem(core.close(block))
    }

    // Unguarded blocks bypass the registry.
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let core = &*self.core;
        let request = AllocRequest::new(bytes, stream, tag);
        match core.sampling.is_on() {
            true => core.with_chosen(core.inner.allocate(bytes, stream, tag), &request),
            false => core.with_post_mortem(core.allocate_guarded(&request, None)),
        }
    }

    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        let core = &*self.core;
        request.check_align()?;
        // The guard works on the memory at once.
        let request = AllocRequest { is_tracked: false, ..request };
        if core.sampling.is_on() {
            return core.with_chosen(core.inner.allocate_request(request, reservation), &request);
        }
        core.with_post_mortem(core.allocate_guarded(&request, reservation))
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.deallocate_with_state(&block).map(drop)
    }

    #[inline]
    fn deallocate_with_state(&self, block: &DeviceBlock) -> ResourceResult<BlockState> {
        let core = &*self.core;
        if !core.sampling.is_on() {
            return core.deallocate_guarded(BlockId::from_block(block));
        }
        // Few blocks are guarded. The resource below refuses those: its block of that generation has another address.
        match core.inner.deallocate_with_state(block) {
            Ok(state) => Ok(state),
            Err(error) => core.deallocate_refused(BlockId::from_block(block), error),
        }
    }

    fn device_ordinal(&self) -> u32 {
        self.core.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        let core = &*self.core;
        let own = match (core.config.mode, &core.pages) {
            (GuardMode::Pages, Some(pages)) => pages.physical(),
            _ => 0,
        };
        core.inner.bytes_outstanding() + core.registry.lock().lingering + own
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let core = &*self.core;
        let mut outcome = core.retry();
        let collected = core.collect(true);
        outcome = outcome.and(collected);
        let reaped = core.inner.reap_pending();
        core.prune();
        core.with_post_mortem(core.or_unreported(outcome.and(reaped)))
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let core = &*self.core;
        let mut outcome = core.retry();
        let collected = core.collect(false);
        outcome = outcome.and(collected);
        let reaped = core.inner.reap_completed();
        core.prune();
        core.with_post_mortem(outcome.and(reaped))
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        let core = &*self.core;
        if core.sampling.passes(block.ptr) || !core.inner.supports_block_use_tracking() {
            return core.with_post_mortem(core.inner.record_block_use(block, use_stream));
        }
        let id = BlockId::from_block(block);
        core.check_device(id)?;
        let below = core.registry.lock().open(id)?;
        let (ptr, generation) = (below.ptr, below.generation);
        let claim = DeviceBlock {
            ptr,
            device_ordinal: below.device_ordinal,
            alloc_stream: below.alloc_stream,
            generation,
            state: BlockState::Live,
            ..*block
        };
        let recorded = core.inner.record_block_use(&claim, use_stream);
        core.with_post_mortem(recorded.and(core.close(id)))
    }

    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let core = &*self.core;
        if core.sampling.passes(block.ptr) || !core.inner.supports_block_use_tracking() {
            return core.with_post_mortem(core.inner.prepare_block_use(block, use_stream, access));
        }
        core.check_device(block)?;
        let below = core.registry.lock().open(block)?;
        let prepared = core.announce_own(block, below).and_then(|is_first| {
            core.inner.prepare_block_use(below, use_stream, access).map(|()| is_first)
        });
        match prepared {
            // Only after success: a failed prepare changes nothing.
            Ok(true) => core.set_announced(block),
            Ok(false) => {}
            Err(_) => {
                // The block may have been freed meanwhile; a reap returns a failed free.
                let _ = core.close(block);
            }
        }
        core.with_post_mortem(prepared.map(|_| ()))
    }

    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let core = &*self.core;
        if core.sampling.passes(block.ptr) || !core.inner.supports_block_use_tracking() {
            return core.with_post_mortem(core.inner.finish_block_use(block, use_stream, access));
        }
        core.check_device(block)?;
        let below = core.registry.lock().opened(block)?;
        let finished = core.inner.finish_block_use(below, use_stream, access);
        core.with_post_mortem(match finished {
            Ok(()) => core.close(block),
            // There was no such use.
            Err(ResourceError::UseAfterFree { .. } | ResourceError::StreamMisuse(_)) => finished,
            // The use is closed; only the event behind its work is missing.
            Err(error) => {
                // A reap returns a failed free.
                let _ = core.close(block);
                Err(error)
            }
        })
    }

    #[inline]
    fn block_state(&self, block: BlockId) -> BlockState {
        let core = &*self.core;
        if core.sampling.passes(block.ptr) {
            core.inner.block_state(block)
        } else {
            core.state_of_guarded(block)
        }
    }

    #[inline]
    fn charge_for(&self, bytes: usize, align: usize) -> usize {
        match self.core.sampling.is_on() {
            // A sampled block is charged as an unguarded one; its pages are bounded and metered.
            true => self.core.inner.charge_for(bytes, align),
            false => self.core.charge_for_guarded(bytes, align),
        }
    }

    fn home(&self) -> Option<ResourceHome> {
        let parts = self.core.parts().ok()?;
        let home = ResourceHome::new(parts.device.clone());
        // If the resource below tracks no uses, a stream is only a label, and the guard's own streams are private.
        Some(if parts.tracked { home.with_streams(parts.streams.clone()) } else { home })
    }

    fn statistics(&self) -> ResourceStatistics {
        let held = self.core.registry.lock().held_back;
        let mut counted = self.core.inner.statistics();
        counted.bytes_outstanding = self.bytes_outstanding();
        if counted.allocations > 0 {
            counted.live_blocks = counted.live_blocks.saturating_sub(held);
            counted.retired_blocks += held;
            counted.deallocations += held as u64;
        }
        counted
    }

    /// Empties the quarantine first.
    fn trim(&self) -> ResourceResult<usize> {
        let flushed = self.core.flush();
        let trimmed = self.core.inner.trim();
        flushed.and(trimmed)
    }

    /// Empties the quarantine first, unless its checks would wait: over a resource that tracks no uses they do.
    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        let is_tracked = self.core.parts().is_ok_and(|parts| parts.tracked);
        let flushed = if is_tracked { self.core.flush() } else { Ok(()) };
        let trimmed = self.core.inner.trim_under_pressure();
        flushed.and(trimmed)
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.core.inner.meter_physical(meter.clone())?;
        if let Some(pages) = &self.core.pages {
            pages.start_meter(meter.clone())?;
        }
        self.core.parts.as_ref().map_or(Ok(()), |parts| parts.checker.start_meter(meter))
    }
}
