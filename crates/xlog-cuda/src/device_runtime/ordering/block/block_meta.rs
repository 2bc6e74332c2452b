//! Metadata of the blocks of a resource.
//!
//! The metadata of a block lies in a slot that never moves. A slot is reused, so a stale identity fails by its
//! generation. The slot is in the low bits of the generation: a lookup needs no map and no lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::primitive::Lock;
use super::slab::Slab;
use super::state_word::{OwnStamps, StateWord};
use super::uses::Uses;
use crate::device_runtime::resource::{
    BlockId, BlockState, DeviceBlock, Generation, MIN_ALIGN, ResourceError, ResourceResult,
    StreamId,
};
use crate::device_runtime::stream_table::MAX_STREAM_SLOTS;
use crate::stream::RawStream;

/// The maximum number of blocks of a resource.
const MAX_BLOCKS: u32 = 1 << 24;

/// Metadata of one block, on one cache line: everything that an allocation or a free changes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct BlockMeta {
    generation: AtomicU64,
    ptr: AtomicU64,
    stream_id: AtomicU32,
    /// The slot of the owning stream, and the bytes beyond whole units.
    owner: AtomicU32,
    /// The node of the block in its sub-allocator.
    node: AtomicU32,
    /// The size in whole units. For a size that does not fit it is 0, and `SharedState` has the size.
    units: AtomicU32,
    pub(crate) stamps: OwnStamps,
    pub(crate) state: StateWord<SharedState>,
}

const _: () = assert!(size_of::<BlockMeta>() == 64 && MIN_ALIGN == 1 << REST_BITS);
const _: () = assert!(MAX_STREAM_SLOTS <= NO_OWNER);
const REST_BITS: u32 = 8;

/// State of a shared or very large block.
#[derive(Debug, Default)]
pub(crate) struct SharedState {
    uses: Lock<Uses>,
    bytes: AtomicU64,
}

/// The owner slot of a block without a stream.
pub(crate) const NO_OWNER: u32 = u32::MAX >> REST_BITS;

/// The memory of a block, and its node in the sub-allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockMemory {
    pub(crate) ptr: u64,
    pub(crate) bytes: usize,
    pub(crate) node: u32,
}

/// The stream that a block begins on, and the current stamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockOwner {
    pub(crate) id: StreamId,
    pub(crate) slot: u32,
    pub(crate) stamp: u64,
}

impl BlockMeta {
    #[inline]
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn ptr(&self) -> u64 {
        self.ptr.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        let rest = self.owner.load(Ordering::Relaxed) as usize % MIN_ALIGN;
        match self.units.load(Ordering::Relaxed) as usize * MIN_ALIGN + rest {
            0 => self
                .state
                .shared()
                .map_or(0, |shared_state| shared_state.bytes.load(Ordering::Relaxed) as usize),
            bytes => bytes,
        }
    }

    /// The size in whole units; 0 if it does not fit.
    #[inline(always)]
    pub(crate) fn units(&self) -> u32 {
        self.units.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn stream_id(&self) -> u32 {
        self.stream_id.load(Ordering::Relaxed)
    }

    /// The slot of the stream that owns the block.
    #[inline]
    pub(crate) fn owner(&self) -> u32 {
        self.owner.load(Ordering::Relaxed) >> REST_BITS
    }

    /// Whether the block is owned by this stream and has exactly this many units.
    #[inline(always)]
    pub(crate) fn has_owner_and_units(&self, owner: u32, units: u32) -> bool {
        self.owner.load(Ordering::Relaxed) == owner << REST_BITS && self.units() == units
    }

    #[inline]
    pub(crate) fn node(&self) -> u32 {
        self.node.load(Ordering::Relaxed)
    }

    /// Begins a live block in a slot that no other thread uses.
    #[inline(always)]
    fn begin(&self, generation: Generation, ptr: u64, bytes: usize, owner: BlockOwner) {
        let BlockOwner { id, slot, stamp } = owner;
        self.set_memory(ptr, bytes, slot);
        self.stream_id.store(id.0, Ordering::Relaxed);
        self.generation.store(generation.0, Ordering::Relaxed);
        self.stamps.begin(stamp);
        self.state.begin(generation_bits(generation));
    }

    /// A live block of a stream, and its generation.
    #[cfg(test)]
    pub(crate) fn begun(id: StreamId, owner: u32, stamp: u64) -> (Self, Generation) {
        let (meta, generation) = (Self::default(), Generation::next().at(0));
        meta.begin(generation, 0x1000, MIN_ALIGN, BlockOwner { id, slot: owner, stamp });
        (meta, generation)
    }

    #[inline(always)]
    fn set_memory(&self, ptr: u64, bytes: usize, owner: u32) {
        self.ptr.store(ptr, Ordering::Relaxed);
        let (units, rest) = (bytes / MIN_ALIGN, (bytes % MIN_ALIGN) as u32);
        if let Ok(units) = u32::try_from(units) {
            self.units.store(units, Ordering::Relaxed);
            self.owner.store(owner << REST_BITS | rest, Ordering::Relaxed);
        } else {
            self.set_huge(bytes, owner);
        }
    }

    #[cold]
    fn set_huge(&self, bytes: usize, owner: u32) {
        self.units.store(0, Ordering::Relaxed);
        self.owner.store(owner << REST_BITS, Ordering::Relaxed);
        self.state.shared_or_make().bytes.store(bytes as u64, Ordering::Relaxed);
    }

    /// Begins another block of the same memory and owner, unshared: see [`StateWord::begin_unshared`].
    #[inline(always)]
    pub(crate) fn begin_reused(&self, generation: Generation, id: StreamId, stamp: u64) {
        self.stream_id.store(id.0, Ordering::Relaxed);
        self.generation.store(generation.0, Ordering::Relaxed);
        self.stamps.begin(stamp);
        self.state.begin_unshared(generation_bits(generation));
    }

    /// Ends a retired block. The caller keeps the slot.
    #[inline]
    pub(crate) fn end(&self) {
        self.state.end();
        self.forget();
    }

    /// Ends the metadata; the state word has ended.
    #[inline(always)]
    pub(crate) fn forget(&self) {
        self.generation.store(0, Ordering::Relaxed);
    }

    /// The next slot in the list of an ended block.
    #[inline(always)]
    pub(crate) fn next(&self) -> u32 {
        self.generation.load(Ordering::Relaxed) as u32
    }

    /// Links an ended block in front of `slot`. No block has a generation this low, so it stays ended.
    #[inline(always)]
    pub(crate) fn set_next(&self, slot: u32) {
        self.generation.store(u64::from(slot), Ordering::Relaxed);
    }

    /// Runs `body` with all uses, under the lock of the block.
    #[inline(always)]
    pub(crate) fn with_uses<R>(&self, body: impl FnOnce(&mut Uses) -> R) -> R {
        self.state.shared_or_make().uses.with(body)
    }
}

/// Returns the part of a generation that the state word carries.
#[inline]
pub(crate) fn generation_bits(generation: Generation) -> u32 {
    (generation.0 >> crate::device_runtime::resource::SLOT_BITS) as u32
}

#[derive(Debug)]
pub(crate) struct BlockTable {
    /// The metadata of all blocks, live and ended, by slot.
    pub(crate) blocks: Slab<BlockMeta>,
    ordinal: u32,
}

impl BlockTable {
    pub(crate) fn new(ordinal: u32) -> Self {
        Self { blocks: Slab::new(MAX_BLOCKS), ordinal }
    }

    /// Begins a live block; `None` if the table is full.
    #[inline]
    pub(crate) fn begin(
        &self,
        ptr: u64,
        bytes: usize,
        owner: Option<(StreamId, &RawStream)>,
    ) -> Option<Generation> {
        let (slot, meta) = self.blocks.allocate()?;
        let generation = Generation::next().at(slot);
        let owner = match owner {
            Some((id, raw)) => {
                BlockOwner { id, slot: raw.clock().slot(), stamp: raw.clock().now() }
            }
            None => BlockOwner { id: StreamId(u32::MAX), slot: NO_OWNER, stamp: 0 },
        };
        meta.begin(generation, ptr, bytes, owner);
        Some(generation)
    }

    /// Allocates a slot for a sub-allocator that keeps slots with its memory; `None` if the table is full.
    pub(crate) fn allocate_slot(&self) -> Option<u32> {
        self.blocks.allocate().map(|(slot, _)| slot)
    }

    /// Allocates up to `maximum` slots from this thread's free list.
    pub(crate) fn allocate_slots(&self, slots: &mut Vec<u32>, maximum: usize) {
        self.blocks.allocate_cached(slots, maximum);
    }

    pub(crate) fn free_slots(&self, slots: impl IntoIterator<Item = u32>) {
        self.blocks.free(slots);
    }

    /// Begins a live block in a slot that the caller allocated.
    #[inline(always)]
    pub(crate) fn begin_at(
        &self,
        slot: u32,
        memory: BlockMemory,
        owner: BlockOwner,
    ) -> Option<Generation> {
        let meta = self.blocks.get(slot)?;
        let generation = Generation::next().at(slot);
        meta.node.store(memory.node, Ordering::Relaxed);
        meta.begin(generation, memory.ptr, memory.bytes, owner);
        Some(generation)
    }

    /// [`BlockTable::begin_at`] for an unshared block of whole units. The caller holds the arena of its stream.
    #[inline]
    pub(crate) fn begin_unshared(
        &self,
        slot: u32,
        memory: BlockMemory,
        owner: BlockOwner,
    ) -> Option<Generation> {
        let meta = self.blocks.get(slot)?;
        let generation = Generation::next().at(slot);
        meta.node.store(memory.node, Ordering::Relaxed);
        meta.set_memory(memory.ptr, memory.bytes, owner.slot);
        meta.begin_reused(generation, owner.id, owner.stamp);
        Some(generation)
    }

    /// Returns the metadata that an identity names, if it is a block of this table.
    #[inline(always)]
    pub(crate) fn lookup(&self, block: BlockId) -> Option<&BlockMeta> {
        let meta = self.blocks.get(block.generation.slot())?;
        let same = block.device_ordinal == self.ordinal
            && meta.generation() == block.generation
            && meta.ptr() == block.ptr;
        same.then_some(meta)
    }

    /// [`BlockTable::lookup`] with errors. Checks device, address and generation, in this order.
    #[inline]
    pub(crate) fn find(
        &self,
        ordinal: u32,
        ptr: u64,
        generation: Generation,
    ) -> ResourceResult<&BlockMeta> {
        if ordinal == self.ordinal
            && let Some(meta) = self.blocks.get(generation.slot())
            && meta.ptr() == ptr
            && meta.generation() == generation
        {
            return Ok(meta);
        }
        Err(self.refusal(ordinal, generation))
    }

    #[inline]
    pub(crate) fn find_by_id(&self, block: BlockId) -> ResourceResult<&BlockMeta> {
        self.find(block.device_ordinal, block.ptr, block.generation)
    }

    pub(crate) fn find_block(&self, block: &DeviceBlock) -> ResourceResult<&BlockMeta> {
        self.find(block.device_ordinal, block.ptr, block.generation)
    }

    #[cold]
    fn refusal(&self, ordinal: u32, generation: Generation) -> ResourceError {
        let own = self.ordinal;
        if ordinal != own {
            let text =
                format!("a block of device {ordinal} was given to a resource of device {own}");
            return ResourceError::Driver(text);
        }
        ResourceError::UseAfterFree { generation }
    }

    /// Ends blocks and frees their slots. Returns the sum of their bytes.
    pub(crate) fn end(&self, generations: &[Generation]) -> usize {
        let mut bytes = 0;
        for generation in generations {
            let Some(meta) = self.blocks.get(generation.slot()) else { continue };
            bytes += meta.bytes();
            meta.end();
        }
        self.blocks.free(generations.iter().map(|generation| generation.slot()));
        bytes
    }

    pub(crate) fn at(&self, generation: Generation) -> Option<&BlockMeta> {
        self.blocks.get(generation.slot()).filter(|meta| meta.generation() == generation)
    }

    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        match self.find_by_id(block) {
            Ok(meta) if meta.state.is_live(generation_bits(block.generation)) => BlockState::Live,
            Ok(_) => BlockState::Retired,
            Err(_) => BlockState::Freed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_runtime::ordering::block::state_word::Attempt;

    #[test]
    fn every_size_is_stored_exactly_beside_every_owner() {
        for owner in [0, 1, 63, 64, (1 << 16) - 1, NO_OWNER] {
            let meta = BlockMeta::default();
            for bytes in [1, 255, 256, 257, 1000, 1 << 20, (1 << 40) - 256, (1 << 40) - 1] {
                meta.set_memory(0x1000, bytes, owner);
                assert_eq!((meta.bytes(), meta.owner()), (bytes, owner));
                assert_eq!(meta.units() as usize, bytes / MIN_ALIGN);
                let is_whole = bytes % MIN_ALIGN == 0;
                assert_eq!(meta.has_owner_and_units(owner, (bytes / MIN_ALIGN) as u32), is_whole);
                assert!(meta.state.shared().is_none(), "nothing is kept elsewhere for it");
            }
            // Too many units for the metadata.
            for bytes in [1 << 40, (1 << 40) + 3, 1 << 47] {
                meta.set_memory(0x1000, bytes, owner);
                assert_eq!((meta.bytes(), meta.owner(), meta.units()), (bytes, owner, 0));
            }
            meta.set_memory(0x1000, 300, owner);
            assert_eq!(meta.bytes(), 300, "what is kept elsewhere is of another block");
        }
    }

    /// Opens and closes uses until the block could be biased to this thread; returns how many that took.
    fn rows(meta: &BlockMeta, generation: Generation, maximum: usize) -> Option<usize> {
        let bits = generation_bits(generation);
        (1..=maximum).find(|_| {
            let attempt = meta.state.open(bits, true);
            assert!(meta.state.close(bits, true, 6, &meta.stamps) == Attempt::Done);
            attempt == Attempt::DoneBiasable
        })
    }

    #[test]
    fn a_stale_claim_closes_no_use_of_the_next_block_in_its_slot() {
        let (meta, first) = BlockMeta::begun(StreamId(1), 3, 5);
        assert!(meta.with_uses(|_| meta.state.retire(generation_bits(first))));
        meta.end();
        let next = Generation::next().at(0);
        meta.begin(next, 0x1000, MIN_ALIGN, BlockOwner { id: StreamId(1), slot: 3, stamp: 5 });
        for writes in [false, true] {
            assert_eq!(meta.state.open(generation_bits(next), writes), Attempt::Done);
            meta.with_uses(|_| {
                assert!(!meta.state.has_counted(generation_bits(first), writes));
                assert!(!meta.state.close_counted(generation_bits(first), writes));
                assert!(
                    meta.state.has_counted(generation_bits(next), writes),
                    "its use was closed"
                );
                assert!(meta.state.close_counted(generation_bits(next), writes));
            });
        }
    }

    #[test]
    fn a_block_that_was_taken_from_its_thread_leaves_nothing_to_the_next_one() {
        let (meta, generation) = BlockMeta::begun(StreamId(1), 3, 5);
        let needed = rows(&meta, generation, 100);
        assert!(needed.is_some(), "a thread that keeps using it is given it");
        meta.with_uses(|_| meta.state.bias_to_current(generation_bits(generation)));
        assert!(meta.state.is_biased());
        std::thread::scope(|scope| {
            scope.spawn(|| meta.with_uses(|_| meta.state.revoke_bias()));
        });
        assert_eq!(rows(&meta, generation, 100), None, "it is not given to one again");
        assert!(meta.with_uses(|_| meta.state.retire(generation_bits(generation))));
        meta.end();
        // An unshared block, and one that never was.
        let next = Generation::next().at(0);
        meta.begin_reused(next, StreamId(1), 7);
        assert!(meta.state.is_live_and_unshared(generation_bits(next)) && !meta.state.is_biased());
        meta.state.publish();
        assert_eq!(rows(&meta, next, 100), needed);
        assert!(meta.with_uses(|_| meta.state.retire(generation_bits(next))));
        meta.end();
        let last = Generation::next().at(0);
        meta.begin(last, 0x1000, MIN_ALIGN, BlockOwner { id: StreamId(1), slot: 3, stamp: 9 });
        assert_eq!(rows(&meta, last, 100), needed);
    }
}
