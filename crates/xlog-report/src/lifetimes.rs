//! Lifetimes and sizes of blocks, and how long they were idle after their last use.
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use xlog_base::PowerHistogram;

use crate::lives::Life;

/// The maximum number of blocks listed.
const LISTED: usize = 20;

/// Number and bytes of blocks by the magnitude of a value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    blocks: PowerHistogram,
    bytes: PowerHistogram,
}

impl Histogram {
    pub(crate) fn add(&mut self, value: u64, bytes: u64) {
        self.blocks.add(value);
        self.bytes.add_many(value, bytes);
    }

    /// Returns the classes that are not empty: minimum value, blocks and bytes.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let rows = self.blocks.rows().zip(self.blocks.classes());
        rows.map(|((from, blocks), (class, _))| (from, blocks, self.bytes[class]))
    }
}

/// A block and how long it was held after its last use.
///
/// Ordered by its bytes times nanoseconds; of equal ones the earlier block is greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct IdleBlock {
    weight: u128,
    order: Reverse<u64>,
    pub(crate) life: Life,
    pub(crate) idle_nanos: u64,
    pub(crate) freed: bool,
}

/// Memory that the blocks of one tag held, and held idle, in bytes times nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdleTag {
    pub(crate) blocks: u64,
    /// Blocks without any use.
    pub(crate) unused: u64,
    pub(crate) held: f64,
    pub(crate) idle: f64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Lifetimes {
    pub(crate) sizes: Histogram,
    pub(crate) lifetimes: Histogram,
    pub(crate) idle: Histogram,
    pub(crate) by_tag: Vec<IdleTag>,
    /// The largest byte-seconds first.
    pub(crate) worst: Vec<IdleBlock>,
    heap: BinaryHeap<Reverse<IdleBlock>>,
}

impl Lifetimes {
    pub(crate) fn new(tags: usize) -> Self {
        Self { by_tag: vec![IdleTag::default(); tags], ..Self::default() }
    }

    pub(crate) fn born(&mut self, life: &Life) {
        self.sizes.add(life.bytes, life.bytes);
    }

    /// Adds a block that was freed at `time`, or was live at the end.
    pub(crate) fn died(&mut self, life: &Life, time: u64, freed: bool) {
        let held = time.saturating_sub(life.born);
        if freed {
            self.lifetimes.add(held, life.bytes);
        }
        let Some(tag) = self.by_tag.get_mut(life.tag as usize) else { return };
        tag.blocks += 1;
        tag.held += held as f64 * life.bytes as f64;
        let Some(used) = life.last_use else {
            tag.unused += 1;
            return;
        };
        let idle_nanos = time.saturating_sub(used);
        tag.idle += idle_nanos as f64 * life.bytes as f64;
        self.idle.add(idle_nanos, life.bytes);
        let weight = u128::from(idle_nanos) * u128::from(life.bytes);
        let order = Reverse(life.order);
        let block = IdleBlock { weight, order, life: *life, idle_nanos, freed };
        if self.heap.len() < LISTED {
            self.heap.push(Reverse(block));
        } else if self.heap.peek().is_some_and(|Reverse(least)| *least < block) {
            self.heap.pop();
            self.heap.push(Reverse(block));
        }
    }

    pub(crate) fn finish(mut self) -> Self {
        self.worst = std::mem::take(&mut self.heap)
            .into_sorted_vec()
            .into_iter()
            .map(|Reverse(block)| block)
            .collect();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_runs_from_the_last_use_and_the_heaviest_come_first() {
        let mut all = Lifetimes::new(1);
        for order in 0..100 {
            let life = Life {
                process: 0,
                device: 0,
                ptr: 1,
                bytes: 10,
                extent: 10,
                tag: 0,
                name: None,
                stream: None,
                generation: None,
                order,
                born: 0,
                last_use: (order > 0).then_some(1000 - order),
                last_stream: None,
            };
            all.born(&life);
            all.died(&life, 1000, true);
        }
        let all = all.finish();
        let tag = all.by_tag[0];
        assert_eq!((tag.blocks, tag.unused), (100, 1));
        assert_eq!((tag.held, tag.idle), (1e6, 10.0 * (99.0 * 100.0 / 2.0)));
        let worst: Vec<u64> = all.worst.iter().map(|block| block.idle_nanos).collect();
        assert_eq!(worst, (80..100).rev().collect::<Vec<u64>>());
        assert_eq!(all.sizes.rows().collect::<Vec<_>>(), [(8, 100, 1000)]);
    }
}
