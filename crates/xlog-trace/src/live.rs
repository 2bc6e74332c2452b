//! Which blocks are alive at a point of a log. Memory grows with the live blocks, not with the log.

use std::collections::HashMap;

use crate::action::Action;
use crate::names::NameId;
use crate::record::Record;

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
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes it is charged.
    pub charged: u64,
    /// Its label.
    pub tag: Option<NameId>,
    /// The stream it was allocated on.
    pub stream: Option<u32>,
    /// The query it was allocated for.
    pub query_id: Option<u64>,
    /// Its generation.
    pub generation: Option<u64>,
    /// The thread that allocated it.
    pub thread: u64,
    /// Place of the allocation in the history.
    pub order: u64,
    /// Time of the allocation.
    pub time_nanos: u64,
}

/// What a record did to the set of live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing: it failed, or it is about something else.
    None,
    Born(LiveBlock),
    /// Born at the address of a block whose free the log does not have.
    Replaced {
        born: LiveBlock,
        lost: LiveBlock,
    },
    Died(LiveBlock),
    /// A free of a block whose allocation the log does not have.
    UnknownFree,
}

#[derive(Debug, Default)]
pub(crate) struct LiveBlocks {
    blocks: HashMap<(u32, u32, u64), LiveBlock>,
    born: u64,
}

impl LiveBlocks {
    pub(crate) fn apply(&mut self, record: &Record) -> Change {
        let Some(ptr) = record.ptr().filter(|&ptr| ptr != 0 && !record.is_failure()) else {
            return Change::None;
        };
        let key = (record.process, record.device, ptr);
        match record.action() {
            Action::Allocate => {
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
                };
                match self.blocks.insert(key, born) {
                    Some(lost) => Change::Replaced { born, lost },
                    None => Change::Born(born),
                }
            }
            Action::Deallocate => {
                let stale = |block: &LiveBlock| matches!((block.generation, record.generation()), (Some(a), Some(b)) if a != b);
                if self.blocks.get(&key).is_none_or(stale) {
                    return Change::UnknownFree;
                }
                self.blocks.remove(&key).map_or(Change::UnknownFree, Change::Died)
            }
            _ => Change::None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn into_blocks(self) -> impl Iterator<Item = LiveBlock> {
        self.blocks.into_values()
    }
}
