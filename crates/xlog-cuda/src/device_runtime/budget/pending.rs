//! Pending blocks: freed by their users, but not by the resource below at the last query.

use std::collections::HashSet;

use super::quota::Charge;
use crate::device_runtime::resource::{BlockId, Generation};

/// Pending blocks that a shard collects before its thread queries their states.
const QUERY_AT: usize = 64;

/// A pending block, and its charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) block: BlockId,
    pub(crate) charge: Charge,
}

/// Pending blocks that the resource below has freed.
pub(crate) type Freed = HashSet<Generation>;

/// The pending blocks of one shard.
#[derive(Debug, Default)]
pub(crate) struct PendingList {
    pub(crate) blocks: Vec<Pending>,
    /// The number of blocks at which this shard's thread queries their states next.
    query_at: usize,
}

impl PendingList {
    /// Adds a block. Returns all blocks if their states should be queried.
    pub(crate) fn push(&mut self, pending: Pending) -> Option<Vec<Pending>> {
        self.blocks.push(pending);
        (self.blocks.len() >= self.query_at.max(QUERY_AT)).then(|| self.blocks.clone())
    }

    /// Removes the blocks that are in `freed` and returns their charges. If two threads pass one block, only the first gets its charge.
    pub(crate) fn remove(&mut self, freed: &Freed) -> Vec<Charge> {
        let mut charges = Vec::new();
        if freed.is_empty() {
            self.query_at = 2 * self.blocks.len();
            return charges;
        }
        self.blocks.retain(|pending| {
            let is_freed = freed.contains(&pending.block.generation);
            if is_freed {
                charges.push(pending.charge);
            }
            !is_freed
        });
        self.query_at = 2 * self.blocks.len();
        charges
    }
}
