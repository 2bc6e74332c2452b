//! The live blocks at a point of a log. Memory grows with the live blocks, not with the log, up to a limit.

use std::collections::HashMap;
use std::hash::Hash;

use crate::action::Action;
use crate::error::TraceError;
use crate::names::NameId;
use crate::record::Record;
use crate::stacks::StackId;

/// The maximum number of live blocks tracked at once: a table of 4,194,304 slots, 0.6 GB, and half of that again while it grows.
pub const MAX_LIVE_BLOCKS: usize = (1 << 22) / 8 * 7;

/// Reserves space for one more block in a table of live blocks.
///
/// Returns [`TraceError::TooManyLive`] beyond [`MAX_LIVE_BLOCKS`] or if the system is out of memory.
pub fn reserve_live<K: Eq + Hash, V>(blocks: &mut HashMap<K, V>) -> Result<(), TraceError> {
    if blocks.len() < blocks.capacity() {
        return Ok(());
    }
    reserve_within(blocks, MAX_LIVE_BLOCKS)
}

#[cold]
fn reserve_within<K: Eq + Hash, V>(
    blocks: &mut HashMap<K, V>,
    limit: usize,
) -> Result<(), TraceError> {
    let live = blocks.len();
    // A table doubles its slots, uses at most seven of eight, and has a control byte for each.
    let slots = live.div_ceil(7).max(1) * 8 * 2;
    let bytes = slots.saturating_mul(size_of::<(K, V)>() + 1);
    let refuse = |why| TraceError::TooManyLive { live, bytes, why };
    if live >= limit {
        return Err(refuse("more than a reader of logs may take"));
    }
    blocks.try_reserve(1).map_err(|_| refuse("which the system does not give"))
}

/// A block between its allocation and its free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBlock {
    /// Number of the block in the order of allocation, from one.
    pub number: u64,
    /// The process that allocated it.
    pub process: u32,
    /// The device it is on.
    pub device: u32,
    /// Its address.
    pub ptr: u64,
    /// The requested bytes.
    pub bytes: u64,
    /// The charged bytes.
    pub charged: u64,
    /// Its tag.
    pub tag: Option<NameId>,
    /// The stream of the allocation.
    pub stream: Option<u32>,
    /// The query of the allocation.
    pub query_id: Option<u64>,
    /// Its generation.
    pub generation: Option<u64>,
    /// The thread that allocated it.
    pub thread: u64,
    /// Position of the allocation in the history.
    pub order: u64,
    /// Time of the allocation.
    pub time_nanos: u64,
    /// Source file and line of the allocation.
    pub site: Option<NameId>,
    /// The sampled stack of the allocation.
    pub stack: Option<StackId>,
}

/// The change that a record made to the set of live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// None: the call failed, or the action concerns no live block.
    None,
    Born(LiveBlock),
    /// An allocation at the address of a live block, whose free the log lacks.
    Replaced {
        born: LiveBlock,
        lost: LiveBlock,
    },
    Died(LiveBlock),
    /// A free of a block whose allocation the log lacks.
    UnknownFree,
}

#[derive(Debug, Default)]
pub(crate) struct LiveBlocks {
    blocks: HashMap<(u32, u32, u64), LiveBlock>,
    born: u64,
}

impl LiveBlocks {
    pub(crate) fn apply(&mut self, record: &Record) -> Result<Change, TraceError> {
        let Some(ptr) = record.ptr().filter(|&ptr| ptr != 0 && !record.is_failure()) else {
            return Ok(Change::None);
        };
        let key = (record.process, record.device, ptr);
        Ok(match record.action() {
            Action::Allocate => {
                reserve_live(&mut self.blocks)?;
                self.born += 1;
                let born = LiveBlock {
                    number: self.born,
                    process: record.process,
                    device: record.device,
                    ptr,
                    bytes: record.bytes().unwrap_or(record.granted),
                    charged: record.charged_bytes(),
                    tag: record.tag(),
                    stream: record.stream(),
                    query_id: record.query_id(),
                    generation: record.generation(),
                    thread: record.thread,
                    order: record.order,
                    time_nanos: record.time,
                    site: record.site(),
                    stack: record.stack(),
                };
                match self.blocks.insert(key, born) {
                    Some(lost) => Change::Replaced { born, lost },
                    None => Change::Born(born),
                }
            }
            Action::Deallocate => {
                let stale = |block: &LiveBlock| matches!((block.generation, record.generation()), (Some(a), Some(b)) if a != b);
                if self.blocks.get(&key).is_none_or(stale) {
                    return Ok(Change::UnknownFree);
                }
                self.blocks.remove(&key).map_or(Change::UnknownFree, Change::Died)
            }
            _ => Change::None,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the blocks by address.
    pub(crate) fn into_sorted(self) -> Result<Vec<LiveBlock>, TraceError> {
        let (mut blocks, live) = (Vec::new(), self.blocks.len());
        blocks.try_reserve_exact(live).map_err(|_| {
            let bytes = live.saturating_mul(size_of::<LiveBlock>());
            TraceError::TooManyLive { live, bytes, why: "which the system does not give" }
        })?;
        blocks.extend(self.into_blocks());
        blocks.sort_unstable_by_key(|block: &LiveBlock| (block.ptr, block.number));
        Ok(blocks)
    }

    pub(crate) fn into_blocks(self) -> impl Iterator<Item = LiveBlock> {
        self.blocks.into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_live_blocks_grows_to_its_limit_and_says_what_more_would_take() {
        let mut blocks: HashMap<u64, [u64; 16]> = HashMap::new();
        let limit = (1 << 10) / 8 * 7;
        for key in 0..limit as u64 {
            if blocks.len() == blocks.capacity() {
                reserve_within(&mut blocks, limit).unwrap();
            }
            blocks.insert(key, [0; 16]);
        }
        assert_eq!(blocks.len(), blocks.capacity(), "the limit is where a table would grow");
        let error = reserve_within(&mut blocks, limit).unwrap_err();
        let TraceError::TooManyLive { live, bytes, .. } = error else { panic!("{error:?}") };
        assert_eq!((live, bytes / (1 << 10)), (limit, 2 * 137), "twice the slots of 137 bytes");
        // Slots that a free vacated are reused without a check of the limit.
        blocks.remove(&0);
        reserve_live(&mut blocks).unwrap();
    }
}
