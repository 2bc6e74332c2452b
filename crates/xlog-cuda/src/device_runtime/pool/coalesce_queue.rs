//! Coalesce queue: delays freed blocks of one stream before they enter its TLSF.
//!
//! Coalescing reads the node of a block and then its physical neighbours. With many live blocks each of these reads is
//! a cache miss that depends on the one before. The queue holds a block that the magazine refuses for a few more frees,
//! while its nodes are prefetched.
//!
//! Invariants: a queued block is free, but the TLSF still counts it as allocated; the queue holds at most 1/[`PART`]
//! of the magazine's capacity.

use super::arena::UNIT;
use super::tlsf::Tlsf;

/// The queue may hold 1/PART of the magazine's capacity.
pub(super) const PART: u64 = 8;
/// The number of blocks in a full queue.
const CAPACITY: usize = 8;
/// Frees between the first and the second prefetch for a block.
const STEP: usize = CAPACITY / 2;
/// An empty entry: node 0 is never a range.
const NO_NODE: u32 = 0;

/// A ring of the nodes of freed blocks.
#[derive(Debug)]
pub(super) struct CoalesceQueue {
    nodes: [u32; CAPACITY],
    oldest: usize,
    bytes: u64,
}

impl Default for CoalesceQueue {
    fn default() -> Self {
        Self { nodes: [NO_NODE; CAPACITY], oldest: 0, bytes: 0 }
    }
}

impl CoalesceQueue {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the queue accepts a block of `units`: it must not exceed its share of `capacity`. An unknown size is 0.
    #[inline(always)]
    pub(super) fn accepts(units: u32, capacity: u64) -> bool {
        u64::from(units.wrapping_sub(1)) < capacity / (PART * CAPACITY as u64 * UNIT)
    }

    /// Pushes a block that the queue accepts, and frees the oldest one into the TLSF.
    #[inline(always)]
    pub(super) fn push(&mut self, node: u32, bytes: u64, tlsf: &mut Tlsf, stamp: u64) {
        let at = self.oldest % CAPACITY;
        let oldest = std::mem::replace(&mut self.nodes[at], node);
        tlsf.prefetch(node, self.nodes[(at + STEP) % CAPACITY]);
        self.oldest = at + 1;
        self.bytes += bytes;
        self.bytes -= tlsf.free(oldest, stamp);
    }

    /// Frees all blocks into the TLSF.
    pub(super) fn drain(&mut self, tlsf: &mut Tlsf, stamp: u64) {
        for node in &mut self.nodes {
            tlsf.free(std::mem::replace(node, NO_NODE), stamp);
        }
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::tlsf::Range;
    use super::*;
    use crate::CudaDevice;
    use crate::device_runtime::{
        AllocTag, DeviceMemoryResource, PoolConfig, PoolResource, StreamPool,
    };

    #[test]
    fn blocks_that_pass_through_are_counted_and_merged() {
        let (mut tlsf, mut coalesce_queue) = (Tlsf::default(), CoalesceQueue::default());
        let all = Range { ptr: 1 << 40, bytes: 64 * UNIT, stamp: 0 };
        assert!(tlsf.insert_span(all, true));
        let taken: Vec<_> = (0..20).filter_map(|_| tlsf.allocate(3 * UNIT, UNIT)).collect();
        for (at, block) in taken.iter().enumerate() {
            coalesce_queue.push(block.node, block.bytes, &mut tlsf, 7);
            let here = (at + 1).min(CAPACITY) as u64;
            assert_eq!(coalesce_queue.bytes(), here * 3 * UNIT, "after {at}");
            assert_eq!(
                tlsf.allocated_bytes(),
                coalesce_queue.bytes() + (19 - at as u64) * 3 * UNIT
            );
        }
        coalesce_queue.drain(&mut tlsf, 9);
        coalesce_queue.drain(&mut tlsf, 11);
        assert_eq!(coalesce_queue.bytes(), 0);
        assert_eq!(tlsf.ranges().collect::<Vec<_>>(), [Range { stamp: 9, ..all }]);
    }

    #[test]
    fn a_full_queue_stays_within_its_share_of_the_capacity() {
        for capacity in [0, UNIT, 16 << 20, (16 << 20) - 1, 1 << 40] {
            let maximum = (0..40).map(|shift| 1_u64 << shift).filter(|units| {
                u32::try_from(*units).is_ok_and(|units| CoalesceQueue::accepts(units, capacity))
            });
            let maximum = maximum.max().unwrap_or(0) * UNIT * CAPACITY as u64;
            assert!(maximum <= capacity / PART, "{maximum} of {capacity}");
            assert!(!CoalesceQueue::accepts(0, capacity), "a size that is not known");
        }
    }

    #[test]
    fn queued_blocks_stay_within_the_limit_and_a_trim_returns_them() {
        // Without the race detector's hooks, so that blocks take the fast path.
        let sim = xlog_sim::SimDevice::open(Default::default()).unwrap();
        let device = Arc::new(CudaDevice::from_driver(sim));
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let lease = streams.lease().unwrap();
        let pool = PoolResource::new(device, 0, streams, PoolConfig::default()).unwrap();
        let sizes = (0..3000).map(|n: usize| 1 + n * 7919 % (300 << 10));
        let mut blocks: Vec<_> =
            sizes.map(|size| pool.allocate(size, lease.id(), AllocTag("t")).unwrap()).collect();
        let mut live: usize = blocks.iter().map(|block| block.bytes).sum();
        while !blocks.is_empty() {
            let block = blocks.swap_remove(blocks.len() * 7 / 13);
            live -= block.bytes;
            pool.deallocate(block).unwrap();
            let now = pool.snapshot();
            assert_eq!(now.live_bytes, live);
            assert!(now.magazine_bytes <= (now.reserved_bytes / 50).max(16 << 20), "{now:?}");
        }
        pool.reap_pending().unwrap();
        pool.trim().unwrap();
        assert_eq!(pool.snapshot().reserved_bytes, 0);
    }
}
