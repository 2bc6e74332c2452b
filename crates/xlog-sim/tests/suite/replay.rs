//! One seed, one run: addresses and order come back, whatever the process did before.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;

use crate::support::{self, seeded};
use xlog_driver::{AsyncPools, Driver, PoolHandle, PoolOptions, StreamHandle};
use xlog_sim::{SimConfig, SimDevice};

fn pools(device: &SimDevice, count: usize) -> Vec<PoolHandle> {
    let options = PoolOptions { release_threshold: 0, ..PoolOptions::default() };
    (0..count).map(|_| device.pool_create(&options).unwrap()).collect()
}

fn free(device: &SimDevice, block: u64, stream: StreamHandle) {
    // SAFETY: the block is live.
    unsafe { device.free_async(block, stream) }.unwrap();
}

#[test]
fn segments_that_several_pools_release_at_once_come_back_at_the_same_addresses() {
    let mut seen = HashSet::new();
    for _ in 0..60 {
        let device = seeded(5);
        let stream = device.stream_create(0).unwrap();
        let pools = pools(&device, 4);
        let blocks: Vec<u64> =
            pools.iter().map(|&pool| device.alloc_async(1024, pool, stream).unwrap()).collect();
        for &block in &blocks {
            free(&device, block, stream);
        }
        device.stream_synchronize(stream).unwrap();
        let again: Vec<u64> = pools
            .iter()
            .map(|&pool| device.alloc_async(1024, pool, stream).unwrap().wrapping_sub(blocks[0]))
            .collect();
        seen.insert(again);
    }
    assert_eq!(seen.len(), 1, "{seen:x?}");
}

#[test]
fn a_seed_repeats_its_order_after_pools_gave_memory_back() {
    let mut seen = HashSet::new();
    for _ in 0..40 {
        let config = SimConfig::default().with_seed(9).with_capacity(96 << 20);
        let device = SimDevice::open(config).unwrap();
        let streams: Vec<_> = (0..4).map(|_| device.stream_create(0).unwrap()).collect();
        let pools = pools(&device, 3);
        for (&pool, &stream) in pools.iter().zip(&streams) {
            let block = device.alloc_async(1024, pool, stream).unwrap();
            free(&device, block, stream);
        }
        device.synchronize().unwrap();
        // One pool takes all the memory; which part a stream gets again depends on the addresses.
        let whole = 32 << 20;
        let blocks: Vec<u64> =
            (0..3).map(|i| device.alloc_async(whole, pools[0], streams[i]).unwrap()).collect();
        for (block, &stream) in blocks.into_iter().zip(&streams) {
            support::memset(&device, block, 1, 64, stream);
            free(&device, block, stream);
        }
        for _ in 0..3 {
            let block = device.alloc_async(whole, pools[0], streams[3]).unwrap();
            support::memset(&device, block, 2, 64, streams[3]);
        }
        device.synchronize().unwrap();
        assert!(device.races().is_empty(), "{}", device.races()[0]);
        seen.insert(device.order_hash());
    }
    assert_eq!(seen.len(), 1);
}
