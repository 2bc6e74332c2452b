//! Blocks of one stream that are on their way to its free memory.
//!
//! Merging a block looks at its node and then at the nodes beside it, and after many blocks none of these is in a cache: each look
//! waits for the one before. So a block that the magazine has no room for stays here while a few more come, and what its merge
//! will look at is loaded meanwhile. Like a block in the magazine it is free, and taken in the books of the index.

use super::arena::UNIT;
use super::index::Index;

/// What blocks may have here, beside what those in the magazine have: one part of so many.
pub(super) const PART: u64 = 8;
/// Blocks that are here, once so many have come.
const MOST: usize = 8;
/// How many come between the first and the second load for a block.
const STEP: usize = MOST / 2;
/// In the place of a node: the index has none of this number.
const NONE: u32 = 0;

/// A ring of blocks, each by its node.
#[derive(Debug)]
pub(super) struct Leaving {
    nodes: [u32; MOST],
    oldest: usize,
    bytes: u64,
}

impl Default for Leaving {
    fn default() -> Self {
        Self { nodes: [NONE; MOST], oldest: 0, bytes: 0 }
    }
}

impl Leaving {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a block of so many units, or of 0 if that is not known, comes here: not where it is more than its part of `room`.
    #[inline(always)]
    pub(super) fn takes(units: u32, room: u64) -> bool {
        u64::from(units.wrapping_sub(1)) < room / (PART * MOST as u64 * UNIT)
    }

    /// Takes a block in that comes here, and gives the one that came first to the index.
    #[inline(always)]
    pub(super) fn push(&mut self, (node, bytes): (u32, u64), index: &mut Index, stamp: u64) {
        let at = self.oldest % MOST;
        let oldest = std::mem::replace(&mut self.nodes[at], node);
        index.prefetch(node, self.nodes[(at + STEP) % MOST]);
        self.oldest = at + 1;
        self.bytes += bytes;
        self.bytes -= index.give(oldest, stamp);
    }

    /// Gives all blocks to the index.
    pub(super) fn drain(&mut self, index: &mut Index, stamp: u64) {
        for node in &mut self.nodes {
            index.give(std::mem::replace(node, NONE), stamp);
        }
        self.bytes = 0;
    }
}
