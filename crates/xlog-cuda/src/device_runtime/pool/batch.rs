//! Batches: several blocks of one stream with one visit of its arena and one stamp.

use super::PoolResource;
use super::arena::{FreedBlock, Suballocation, UNIT};
use super::fast_path::RequestStream;
use super::resource::{MAX_BYTES, size_of};
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::tracking::tracker::Retired;
use crate::device_runtime::ordering::tracking::use_tracking::UseTracking;
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, Generation, ResourceResult, StreamId,
};
use crate::stream::RawStream;

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
        let owner = self.tracker.stream(stream)?;
        let requested = sizes;
        let sizes =
            sizes.iter().map(|bytes| size_of(*bytes)).collect::<ResourceResult<Vec<_>>>()?;
        owner.check_not_capturing("pool allocate")?;
        let arena = self.arena(owner.clock().slot())?;
        let mut suballocations: Vec<Option<Suballocation>> = Vec::with_capacity(sizes.len());
        arena.with(|arena| {
            suballocations
                .extend(sizes.iter().map(|size| arena.allocate(*size, UNIT, &self.tracker.table)));
        });
        for (at, size) in sizes.iter().enumerate() {
            if suballocations[at].is_some() {
                continue;
            }
            match self.allocate_slow(stream, owner, arena, *size, UNIT) {
                Ok(suballocation) => suballocations[at] = Some(suballocation),
                Err(error) => {
                    self.undo_allocations(suballocations.into_iter().flatten(), owner);
                    return Err(error);
                }
            }
        }
        let mut suballocations = suballocations.into_iter().flatten().zip(requested);
        let mut blocks = Vec::with_capacity(sizes.len());
        while let Some((suballocation, bytes)) = suballocations.next() {
            match self.begin_block(suballocation, *bytes, owner, stream, tag) {
                Ok(block) => blocks.push(block),
                Err(error) => {
                    self.undo_allocations(
                        suballocations.map(|(suballocation, _)| suballocation),
                        owner,
                    );
                    let _ = self.deallocate_batch(blocks);
                    return Err(error);
                }
            }
        }
        Ok(blocks)
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

    fn undo_allocations(
        &self,
        suballocations: impl Iterator<Item = Suballocation>,
        owner: &RawStream,
    ) {
        if let Ok(arena) = self.arena(owner.clock().slot()) {
            let stamp = owner.clock().now();
            arena.with(|arena| {
                suballocations.for_each(|suballocation| arena.undo(suballocation, stamp))
            });
        }
    }

    pub(super) fn batch_free(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        let rest = self.free_unshared(blocks);
        let mut quiet: Vec<(Generation, &BlockMeta)> = Vec::with_capacity(rest.len());
        for block in rest {
            let generation = block.generation;
            let this = self.tracker.table.find_block(&block).and_then(|meta| {
                self.publish_block(meta);
                let owner = meta.owner();
                match self.tracker.retire(meta, generation)? {
                    Retired::Quiet if self.sanitizer.is_none() => {
                        quiet.push((generation, meta));
                        Ok(())
                    }
                    Retired::Quiet | Retired::Used => self.free_used(generation, meta),
                    Retired::Open => self.count_free(owner),
                }
            });
            outcome = outcome.and(this);
        }
        for run in quiet.chunk_by(|one, other| one.1.owner() == other.1.owner()) {
            let this = self.free_run(run);
            outcome = outcome.and(this);
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

    /// Frees retired blocks of one stream that no other stream has used.
    fn free_run(&self, run: &[(Generation, &BlockMeta)]) -> ResourceResult<()> {
        let Some((_, first)) = run.first() else { return Ok(()) };
        let owner = self.tracker.owner_stream(first)?;
        if owner.check_not_capturing("pool free").is_err() {
            // Each is refused by itself, and kept for a reap.
            let free = |(generation, meta): &(Generation, &BlockMeta)| {
                self.free_to_arena(*generation, meta, true)
            };
            return run.iter().map(free).fold(Ok(()), Result::and);
        }
        for (_, meta) in run {
            if let Some(observer) = &self.observer {
                let _ = observer.end_range(meta.ptr(), meta.bytes(), owner.handle());
            }
            meta.end();
        }
        let table = &self.tracker.table;
        self.arena(owner.clock().slot())?.with(|arena| {
            let (stamp, capacity) = (owner.clock().now(), self.arenas.magazine_capacity());
            for (generation, meta) in run {
                arena.counts.deallocations += 1;
                arena.free(FreedBlock::of(*generation, meta), stamp, capacity, table);
            }
        });
        Ok(())
    }
}
