//! Batches: several blocks of one stream with one visit of its arena. What that cannot serve is allocated or freed one by one.

use super::PoolResource;
use super::arena::FreedBlock;
use super::fast_path::RequestStream;
use super::resource::MAX_BYTES;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, ResourceResult, StreamId, allocate_one_by_one,
};

impl PoolResource {
    pub(super) fn batch_allocate(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(blocks) = self.batch_allocate_fast(sizes, stream, tag) {
            return Ok(blocks);
        }
        allocate_one_by_one(self, sizes, stream, tag)
    }

    /// Allocates all blocks from the arena of the stream; `None` with nothing changed if it has too little.
    fn batch_allocate_fast(
        &self,
        sizes: &[usize],
        id: StreamId,
        tag: AllocTag,
    ) -> Option<Vec<DeviceBlock>> {
        if sizes.iter().any(|bytes| bytes.wrapping_sub(1) >= MAX_BYTES) {
            return None;
        }
        let (slot, header) = self.tracker.stream_table.inline_header(id)?;
        let stream = RequestStream { id, slot, header };
        let arena = self.fast_arena(slot, header)?;
        let (table, capacity) = (&self.tracker.table, self.arenas.magazine_capacity());
        let mut blocks = Vec::with_capacity(sizes.len());
        arena.with(|arena| {
            for bytes in sizes {
                let Some(block) = arena.begin_block(*bytes, stream, table) else { break };
                blocks.push(block.live(self.ordinal, id, tag));
            }
            if blocks.len() == sizes.len() {
                return Some(());
            }
            for block in &blocks {
                if let Some(meta) = table.at(block.generation) {
                    let freed = FreedBlock::of(block.generation, meta);
                    arena.end_block(freed, header.now(), capacity, table);
                    arena.counts.deallocations -= 1;
                    arena.counts.undone += 1;
                }
            }
            None
        })?;
        Some(blocks)
    }

    pub(super) fn batch_free(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for block in self.free_unshared(blocks) {
            let freed = self.free_slow(&block);
            outcome = outcome.and(freed);
        }
        outcome
    }

    /// Frees the unshared blocks, and returns the others.
    fn free_unshared(&self, blocks: Vec<DeviceBlock>) -> Vec<DeviceBlock> {
        let (table, capacity) = (&self.tracker.table, self.arenas.magazine_capacity());
        let owner_of = |block: &DeviceBlock| table.lookup(block.into()).map(BlockMeta::owner);
        let mut rest = Vec::new();
        let mut blocks = blocks.into_iter().peekable();
        while let Some(first) = blocks.next() {
            let owner = owner_of(&first);
            let header = owner.and_then(|owner| self.tracker.headers.inline(owner));
            let arena =
                owner.zip(header).and_then(|(owner, header)| self.fast_arena(owner, header));
            let (Some(header), Some(arena)) = (header, arena) else {
                rest.push(first);
                continue;
            };
            arena.with(|arena| {
                let mut next = Some(first);
                while let Some(block) = next {
                    match table.lookup((&block).into()) {
                        Some(meta)
                            if meta
                                .state
                                .is_live_and_unshared(generation_bits(block.generation)) =>
                        {
                            let freed = FreedBlock::of(block.generation, meta);
                            arena.end_block(freed, header.now(), capacity, table);
                        }
                        _ => rest.push(block),
                    }
                    next = blocks.next_if(|block| owner_of(block) == owner);
                }
            });
        }
        rest
    }
}
