//! Individual blocks for the page, with all that the log records about them.
//!
//! The page keeps the [`KEPT`] blocks with the most bytes times nanoseconds, which cover most of a chart. Memory is bounded: a
//! live block beyond [`FOLLOWED`] has no thread, query or uses, and only the first [`USES`] uses of a block are kept, though
//! all are counted.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use xlog_trace::{Action, NameId, Record, StackId, UseAccess};

use crate::lives::{Key, Life};

/// The maximum number of blocks kept for a page.
pub(crate) const KEPT: usize = 1 << 15;
/// The maximum number of live blocks whose calls are tracked.
const FOLLOWED: usize = 1 << 20;
/// The maximum number of uses kept per block.
const USES: usize = 6;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockUse {
    pub(crate) time: u64,
    pub(crate) by: Caller,
    /// Bit 0: reads; bit 1: writes; zero if the log lacks it.
    pub(crate) access: u8,
}

/// The tracked calls on a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Calls {
    pub(crate) allocated: Option<Caller>,
    /// Code of the path that served the allocation.
    pub(crate) served_by: u8,
    pub(crate) latency_nanos: u32,
    pub(crate) uses: u32,
    pub(crate) first_uses: Vec<BlockUse>,
    pub(crate) freed: Option<Caller>,
    /// Source location of the allocation.
    pub(crate) site: Option<NameId>,
    pub(crate) stack: Option<StackId>,
}

/// A block with its lifetime, ordered by bytes times nanoseconds; of equal ones the earlier block is greater.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Block {
    weight: u128,
    order: Reverse<u64>,
    pub(crate) life: Life,
    /// Nanoseconds since the first record; `None` for a block live at the end.
    pub(crate) died: Option<u64>,
    pub(crate) calls: Calls,
}

#[derive(Debug, Default)]
pub(crate) struct BlocksBuilder {
    live: HashMap<Key, Calls>,
    heap: BinaryHeap<Reverse<Block>>,
    kept: usize,
    all: u64,
}

/// The kept blocks, by time of allocation.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub(crate) kept: Vec<Block>,
    /// The number of blocks in the log.
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
        // A use has a prepare and a finish record; only the first counts.
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

    /// Adds a block whose life ended at `time`: freed, replaced, or live at the end of the log.
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
