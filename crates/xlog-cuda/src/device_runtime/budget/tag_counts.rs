//! What each tag holds, counted where the thread that allocates already is.
//!
//! A shard counts what was charged there less what was released there, so its count may be below zero; the sum over all shards is
//! right. Tags are told apart by the address of their text, once per shard, then by a small number.

use std::collections::{HashMap, HashSet};

use super::primitive::Mutex;
use super::tree::ScopeIndex;
use crate::device_runtime::resource::{AllocTag, BlockId, Generation};

/// Tags told apart. The rest is counted together.
const MAX_TAGS: u32 = 4096;
/// The tag of what is beyond.
const OTHER: AllocTag = AllocTag("(other tags)");
const CACHED: usize = 8;

/// A tag by number.
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

/// What a shard keeps beside its credit.
#[derive(Debug, Default)]
pub(crate) struct TagCounts {
    cache: [(usize, usize, TagIndex); CACHED],
    counts: Vec<Count>,
    pub(crate) pending: Vec<Pending>,
    /// How many pending blocks there are when this shard's thread asks about them next.
    pub(crate) query_at: usize,
}

/// Wraps below zero.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    bytes: usize,
    blocks: u32,
}

impl TagCounts {
    /// The number of a tag.
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

    /// Bytes and blocks of a tag more.
    #[inline(always)]
    pub(crate) fn add(&mut self, tag: TagIndex, bytes: usize, blocks: u32) {
        let count = self.count(tag);
        count.bytes = count.bytes.wrapping_add(bytes);
        count.blocks = count.blocks.wrapping_add(blocks);
    }

    /// Bytes and blocks of a tag less.
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

    /// Takes out the pending blocks that are freed, and their counts. Of two threads that saw the same block freed, one finds it here.
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

/// The tags of a budget by number.
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
