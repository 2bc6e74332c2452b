//! Bytes and blocks by tag, counted in the shard of the thread that charges or releases.
//!
//! Invariant: the sum over all shards is exact. The counts of one shard may be negative, since another thread may release what this
//! one charged.
//!
//! A shard finds the index of a tag by the address of its text in a small cache, and in the shared table on a miss.

use std::collections::{HashMap, HashSet};

use super::primitive::Mutex;
use super::tree::ScopeIndex;
use crate::device_runtime::resource::{AllocTag, BlockId, Generation};

/// Tags that are counted separately. Further ones share a count.
const MAX_TAGS: u32 = 4096;
/// The tag of that shared count.
const OTHER: AllocTag = AllocTag("(other tags)");
const CACHED: usize = 8;

/// The index of a tag.
pub(crate) type TagIndex = u32;

/// A returned block that the resource below had not freed when it was last asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) block: BlockId,
    pub(crate) charge: usize,
    pub(crate) tag: TagIndex,
    pub(crate) scope: ScopeIndex,
}

impl Pending {
    fn key(&self) -> (u64, Generation) {
        (self.block.ptr, self.block.generation)
    }
}

/// Pending blocks that the resource below has freed.
#[derive(Debug, Default)]
pub(crate) struct Freed(HashSet<(u64, Generation)>);

impl Freed {
    pub(crate) fn insert(&mut self, pending: &Pending) {
        self.0.insert(pending.key());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The counts of one shard.
#[derive(Debug, Default)]
pub(crate) struct TagCounts {
    cache: [(usize, usize, TagIndex); CACHED],
    counts: Vec<Count>,
    pub(crate) pending: Vec<Pending>,
    /// Number of pending blocks at which this shard's thread queries their states next.
    pub(crate) query_at: usize,
}

/// Wraps below zero.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    bytes: usize,
    blocks: u32,
}

impl TagCounts {
    /// Returns the index of a tag.
    #[inline(always)]
    pub(crate) fn index_of(&mut self, tag: AllocTag, names: &TagNames) -> TagIndex {
        let (address, length) = (tag.0.as_ptr().addr(), tag.0.len());
        let slot = (address >> 3) % CACHED;
        let known = self.cache[slot];
        if known.0 == address && known.1 == length {
            return known.2;
        }
        self.cache_index(tag, slot, names)
    }

    #[cold]
    #[inline(never)]
    fn cache_index(&mut self, tag: AllocTag, slot: usize, names: &TagNames) -> TagIndex {
        let index = names.index_of(tag);
        self.cache[slot] = (tag.0.as_ptr().addr(), tag.0.len(), index);
        index
    }

    /// Adds bytes and blocks to a tag.
    #[inline(always)]
    pub(crate) fn add(&mut self, tag: TagIndex, bytes: usize, blocks: u32) {
        let count = self.count(tag);
        count.bytes = count.bytes.wrapping_add(bytes);
        count.blocks = count.blocks.wrapping_add(blocks);
    }

    /// Subtracts bytes and blocks from a tag.
    #[inline(always)]
    pub(crate) fn remove(&mut self, tag: TagIndex, bytes: usize, blocks: u32) {
        let count = self.count(tag);
        count.bytes = count.bytes.wrapping_sub(bytes);
        count.blocks = count.blocks.wrapping_sub(blocks);
    }

    #[inline(always)]
    fn count(&mut self, tag: TagIndex) -> &mut Count {
        let index = tag as usize;
        if index >= self.counts.len() {
            self.grow(index);
        }
        &mut self.counts[index]
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, index: usize) {
        self.counts.resize(index + 1, Count::default());
    }

    /// Removes the pending blocks that are in `freed`, and their counts. If two threads saw one block freed, only the first finds
    /// it here.
    pub(crate) fn remove_freed(&mut self, freed: &Freed) -> Vec<Pending> {
        let (gone, kept): (Vec<_>, Vec<_>) =
            self.pending.drain(..).partition(|pending| freed.0.contains(&pending.key()));
        self.pending = kept;
        gone.iter().for_each(|pending| self.remove(pending.tag, pending.charge, 1));
        gone
    }

    /// Adds this shard's counts to a sum by tag.
    pub(crate) fn sum_into(&self, sums: &mut Vec<(usize, u32)>) {
        if sums.len() < self.counts.len() {
            sums.resize(self.counts.len(), (0, 0));
        }
        for (sum, count) in sums.iter_mut().zip(&self.counts) {
            sum.0 = sum.0.wrapping_add(count.bytes);
            sum.1 = sum.1.wrapping_add(count.blocks);
        }
    }
}

/// The tags of a budget by index.
#[derive(Debug, Default)]
pub(crate) struct TagNames(Mutex<Names>);

#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<&'static str, TagIndex>,
    tags: Vec<AllocTag>,
}

impl TagNames {
    fn index_of(&self, tag: AllocTag) -> TagIndex {
        let mut names = self.0.lock();
        if let Some(&known) = names.numbers.get(tag.0) {
            return known;
        }
        let next = names.tags.len() as TagIndex;
        if next > MAX_TAGS {
            return MAX_TAGS;
        }
        let tag = if next == MAX_TAGS { OTHER } else { tag };
        names.tags.push(tag);
        names.numbers.insert(tag.0, next);
        next
    }

    pub(crate) fn name(&self, index: usize) -> AllocTag {
        self.0.lock().tags.get(index).copied().unwrap_or(AllocTag::UNTAGGED)
    }
}
