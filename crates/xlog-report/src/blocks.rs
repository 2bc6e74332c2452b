//! Blocks that the page shows one by one, with everything the log says of their lives.
//!
//! The page keeps the [`KEPT`] blocks that held the most bytes times nanoseconds: those that cover the most of a chart. A log with no more
//! blocks is kept whole. Memory is bounded: a live block beyond [`FOLLOWED`] has no thread, query or uses, and of each block
//! the first [`USES`] uses are kept; all are counted.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use xlog_trace::{Action, NameId, Record, StackId, UseAccess};

use crate::lives::{Key, Life};

/// Blocks that a page has one by one.
pub(crate) const KEPT: usize = 1 << 15;
/// Live blocks whose calls are followed.
const FOLLOWED: usize = 1 << 20;
/// Uses of one block that are kept one by one.
const USES: usize = 6;

/// The caller of an operation on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Caller {
    pub(crate) thread: u64,
    pub(crate) stream: Option<u32>,
    pub(crate) query: Option<u64>,
}

impl Caller {
    fn of(record: &Record) -> Self {
        Self { thread: record.thread(), stream: record.stream(), query: record.query_id() }
    }
}

/// A use of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockUse {
    pub(crate) time: u64,
    pub(crate) by: Caller,
    /// Bit 0: reads; bit 1: writes; none where the log does not say.
    pub(crate) access: u8,
}

/// The calls on a block, as far as they were followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Calls {
    pub(crate) allocated: Option<Caller>,
    /// Code of the path that served the allocation.
    pub(crate) served_by: u8,
    pub(crate) latency_nanos: u32,
    /// Number of uses.
    pub(crate) uses: u32,
    pub(crate) first_uses: Vec<BlockUse>,
    pub(crate) freed: Option<Caller>,
    /// Source file and line of the allocation.
    pub(crate) site: Option<NameId>,
    pub(crate) stack: Option<StackId>,
}

/// A block with its life. Ordered by bytes times nanoseconds; of equal ones the earlier block is the larger.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Block {
    weight: u128,
    order: Reverse<u64>,
    pub(crate) life: Life,
    /// Nanoseconds since the first record; none for a block that was live at the end.
    pub(crate) died: Option<u64>,
    pub(crate) calls: Calls,
}

/// Collects the blocks.
#[derive(Debug, Default)]
pub(crate) struct BlocksBuilder {
    live: HashMap<Key, Calls>,
    heap: BinaryHeap<Reverse<Block>>,
    kept: usize,
    all: u64,
}

/// The kept blocks, by time of birth.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub(crate) kept: Vec<Block>,
    /// Blocks of the log.
    pub(crate) all: u64,
}

fn key(life: &Life) -> Key {
    (life.process, life.device, life.ptr)
}

impl BlocksBuilder {
    pub(crate) fn new(kept: usize) -> Self {
        Self { kept, ..Self::default() }
    }

    pub(crate) fn born(&mut self, life: &Life, record: &Record) {
        if self.live.len() >= FOLLOWED {
            return;
        }
        let calls = Calls {
            allocated: Some(Caller::of(record)),
            served_by: record.served_by().code(),
            latency_nanos: record.latency_nanos(),
            site: record.site(),
            stack: record.stack(),
            ..Calls::default()
        };
        self.live.insert(key(life), calls);
    }

    pub(crate) fn used(&mut self, life: &Life, record: &Record, time: u64) {
        // A use is opened and closed; its opening counts.
        if record.action() != Action::UsePrepare {
            return;
        }
        let Some(calls) = self.live.get_mut(&key(life)) else { return };
        calls.uses = calls.uses.saturating_add(1);
        if calls.first_uses.len() < USES {
            let access = match record.access() {
                None => 0,
                Some(UseAccess::Read) => 1,
                Some(UseAccess::Write) => 2,
                Some(UseAccess::ReadWrite) => 3,
            };
            calls.first_uses.push(BlockUse { time, by: Caller::of(record), access });
        }
    }

    /// A block that ended at `time`: freed by a record, or replaced, or still live at the end of the log.
    pub(crate) fn ended(
        &mut self,
        life: &Life,
        time: u64,
        died: Option<u64>,
        free: Option<&Record>,
    ) {
        self.all += 1;
        let mut calls = self.live.remove(&key(life)).unwrap_or_default();
        calls.freed = free.map(Caller::of);
        let held = u128::from(time.saturating_sub(life.born)) + 1;
        let weight = held * u128::from(life.bytes);
        let block = Block { weight, order: Reverse(life.order), life: *life, died, calls };
        if self.heap.len() < self.kept {
            self.heap.push(Reverse(block));
        } else if self.heap.peek().is_some_and(|Reverse(least)| *least < block) {
            self.heap.pop();
            self.heap.push(Reverse(block));
        }
    }

    pub(crate) fn finish(self) -> Blocks {
        let mut kept: Vec<Block> = self.heap.into_iter().map(|Reverse(block)| block).collect();
        kept.sort_unstable_by_key(|block| (block.life.born, block.life.order));
        Blocks { kept, all: self.all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lives::{Change, Lives};

    #[test]
    fn the_heaviest_blocks_are_kept_with_their_calls_and_all_are_counted() {
        let (mut lives, mut blocks) = (Lives::default(), BlocksBuilder::new(3));
        for order in 0..10 {
            let ptr = 0x1000 * (order + 1);
            let record = Record::new(Action::Allocate, 0, 3 * order, 0)
                .with_ptr(ptr)
                .with_bytes(100 * (order + 1))
                .with_thread(order)
                .with_query_id(7);
            let Ok(Change::Born(life)) = lives.apply(&record, 0, 0) else { panic!() };
            blocks.born(&life, &record);
            for time in 0..8 {
                let action = if time % 2 == 0 { Action::UsePrepare } else { Action::UseFinish };
                let used = Record::new(action, 0, 3 * order + 1, 0).with_ptr(ptr).with_stream(2);
                let used = used.with_access(UseAccess::Write);
                let Ok(Change::Used(life)) = lives.apply(&used, time, 0) else { panic!() };
                blocks.used(&life, &used, time);
            }
            let free = Record::new(Action::Deallocate, 0, 3 * order + 2, 0);
            let free = free.with_ptr(ptr).with_thread(99);
            let Ok(Change::Died(life)) = lives.apply(&free, 50, 0) else { panic!() };
            blocks.ended(&life, 50, Some(50), Some(&free));
        }
        let blocks = blocks.finish();
        let sizes: Vec<u64> = blocks.kept.iter().map(|block| block.life.bytes).collect();
        assert_eq!((sizes, blocks.all), (vec![800, 900, 1000], 10));
        let calls = &blocks.kept[2].calls;
        assert_eq!((calls.uses, calls.first_uses.len()), (4, 4));
        assert_eq!((calls.first_uses[0].by.stream, calls.first_uses[0].access), (Some(2), 2));
        assert_eq!(calls.allocated.map(|by| (by.thread, by.query)), Some((9, Some(7))));
        assert_eq!(calls.freed.map(|by| by.thread), Some(99));
    }
}
