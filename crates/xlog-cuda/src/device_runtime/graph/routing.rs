//! Dispatches the runtime's calls while captures are open or graphs have memory.
//!
//! A call on a captured stream goes to the arena of its capture. A use of a block in an arena becomes a use of its chunk. Every
//! other call is forwarded to the resource. Without captures and graphs the runtime calls the resource directly.

use std::time::Instant;

use super::CaptureError;
use super::arena::BlockOrigin;
use super::captured::CapturedUse;
use super::registry::GraphRegistry;
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    ResourceError, ResourceResult, StreamId,
};

impl GraphRegistry {
    /// Logs a request that failed in a capture. If its arena could not grow, the log also has the failed request for a chunk.
    fn log_captured_refusal(&self, request: AllocRequest, error: &ResourceError) {
        self.inner.log_refusal(request, error);
    }
}

impl DeviceMemoryResource for GraphRegistry {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.allocate_request(AllocRequest::new(bytes, stream, tag), None)
    }

    // The arena is charged to the budget, so a block inside it needs no reservation.
    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        self.sweep();
        let capture = self.capture_of(request.stream);
        let capture = capture.inspect_err(|error| self.log_captured_refusal(request, error))?;
        match capture.filter(|_| request.align.is_power_of_two()) {
            Some(capture) => self
                .allocate_captured(&capture, request)
                .inspect_err(|error| self.log_captured_refusal(request, error)),
            None => self.inner.allocate_request(request, reservation),
        }
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.sweep();
        let id = BlockId::from_block(&block);
        if let Some(found) = self.find(block.ptr) {
            if found.arena.free(id)? {
                self.release_idle(&found.arena);
            }
            return Ok(());
        }
        let mut block = block;
        while let Some(capture) = self.capture_of_member(block.alloc_stream)
            && self.inner.block_state(id) == BlockState::Live
        {
            match capture.arena.defer_free(block)? {
                // The stream may be in another capture by now.
                Some(returned) => block = returned,
                None => return Ok(()),
            }
        }
        self.inner.deallocate(block)
    }

    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }

    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&*self.inner)
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        self.sweep();
        self.inner.reap_pending()
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        self.sweep();
        self.inner.reap_completed()
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        let id = BlockId::from_block(block);
        if self.capture_of(use_stream)?.is_some() {
            self.prepare_block_use(id, use_stream, Access::ReadWrite)?;
            return self.finish_block_use(id, use_stream, Access::ReadWrite);
        }
        match self.find(block.ptr).map(|found| found.arena.origin(id, found.index)).transpose()? {
            Some(BlockOrigin::Outside(chunk)) => {
                let chunk = DeviceBlock {
                    ptr: chunk.ptr,
                    generation: chunk.generation,
                    alloc_stream: chunk.alloc_stream,
                    ..*block
                };
                self.inner.record_block_use(&chunk, use_stream)
            }
            Some(BlockOrigin::Captured) => {
                let generation = block.generation;
                Err(CaptureError::NotCaptured { stream: use_stream, generation }.into())
            }
            Some(BlockOrigin::Chunk) | None => self.inner.record_block_use(block, use_stream),
        }
    }

    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if let Some(capture) = self.capture_of(use_stream)? {
            let used = self.captured_use(&capture, block, use_stream, access)?;
            return capture.arena.prepare(used, self.on_stream(use_stream)?);
        }
        let Some(found) = self.find(block.ptr) else {
            return self.inner.prepare_block_use(block, use_stream, access);
        };
        match found.arena.origin(block, found.index)? {
            BlockOrigin::Chunk => self.inner.prepare_block_use(block, use_stream, access),
            BlockOrigin::Captured => {
                let generation = block.generation;
                Err(CaptureError::NotCaptured { stream: use_stream, generation }.into())
            }
            BlockOrigin::Outside(chunk) => {
                self.inner.prepare_block_use(chunk, use_stream, access)?;
                found.arena.open_outside(block).inspect_err(|_| {
                    let _ = self.inner.finish_block_use(chunk, use_stream, access);
                })
            }
        }
    }

    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.finish_block_uses(&[(block, access)], use_stream)
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let mut outside: Vec<(BlockId, Access)> = Vec::with_capacity(uses.len());
        for &(block, access) in uses {
            // The stream may have left a broken capture that has the use open, so the search is by use.
            match self.capture_with_use(block, use_stream) {
                Some(capture) => {
                    let used = CapturedUse { block, access, outside: None };
                    outcome = outcome.and(capture.arena.finish(used, use_stream));
                }
                None => outside.push((block, access)),
            }
        }
        match outside.is_empty() {
            true => outcome,
            false => outcome.and(self.finish_outside(&outside, use_stream)),
        }
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        let found = self.find(block.ptr);
        match found.and_then(|found| found.arena.block_state(block)) {
            Some(state) => state,
            None => self.inner.block_state(block),
        }
    }

    fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        let Some(found) = self.find(block.ptr) else { return self.inner.while_live(block, work) };
        match found.arena.origin(block, found.index)? {
            BlockOrigin::Chunk => self.inner.while_live(block, work),
            BlockOrigin::Outside(chunk) => self.inner.while_live(chunk, work),
            BlockOrigin::Captured => match found.arena.chunk_of(block) {
                Some(chunk) => self.inner.while_live(chunk, work),
                None => Err(ResourceError::UseAfterFree { generation: block.generation }),
            },
        }
    }

    fn trim(&self) -> ResourceResult<usize> {
        self.sweep();
        self.inner.trim()
    }

    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        self.sweep();
        self.inner.trim_under_pressure()
    }

    fn return_idle(&self, now: Instant) -> ResourceResult<usize> {
        self.sweep();
        self.inner.return_idle(now)
    }
}
