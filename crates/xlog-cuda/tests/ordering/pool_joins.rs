//! Memory of several streams, and several blocks, at once.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use crate::support::Random;
use crate::support::pool_rig::{MIB, Rig, rig};
use crate::support::rig::{TAG, assert_all, fill, read, twin};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, PoolConfig, ResourceError,
    StreamLease,
};
use xlog_testing::{WatchedGate, for_each_seam, for_each_sim};

/// 12 MiB in one piece, in which two streams have had 5 MiB each, side by side.
fn shared_out(device: &Arc<CudaDevice>, config: PoolConfig) -> (Rig, [StreamLease; 2]) {
    let rig = rig(device, config.with_initial(12 * MIB).with_growth(16 * MIB));
    let [one, two] = rig.leases();
    let blocks = [rig.allocate(5 * MIB, &one), rig.allocate(5 * MIB, &two)];
    assert_eq!(rig.pool.snapshot().reserved_bytes, 12 * MIB);
    for (block, stream) in blocks.into_iter().zip([&one, &two]) {
        fill(stream, block.ptr, 1, 5 * MIB);
        rig.pool.deallocate(block).unwrap();
    }
    for stream in [&one, &two] {
        stream.synchronize().unwrap();
    }
    (rig, [one, two])
}

#[test]
fn ranges_of_several_streams_are_joined_before_a_request_is_refused() {
    for_each_seam(|device| {
        let (rig, [_, two]) = shared_out(device, PoolConfig::default().with_maximum(12 * MIB));
        let all = rig.allocate(11 * MIB, &two);
        fill(&two, all.ptr, 2, 11 * MIB);
        assert_all(&read(&two, all.ptr, 11 * MIB).unwrap(), 2);
        assert_eq!(rig.pool.snapshot().reserved_bytes, 12 * MIB);
        rig.pool.deallocate(all).unwrap();
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_joined_range_follows_the_pending_work_on_each_of_its_parts() {
    for_each_seam(|device| {
        let (rig, [one, two]) = shared_out(device, PoolConfig::default().with_maximum(12 * MIB));
        let late = rig.allocate(5 * MIB, &one);
        let gate = WatchedGate::new(one.hold().unwrap());
        fill(&one, late.ptr, 3, 5 * MIB);
        rig.pool.deallocate(late).unwrap();
        let all = rig.allocate(11 * MIB, &two);
        fill(&two, all.ptr, 4, 11 * MIB);
        gate.release();
        assert_all(&read(&two, all.ptr, 11 * MIB).unwrap(), 4);
        rig.pool.deallocate(all).unwrap();
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_pool_that_may_grow_takes_complete_ranges_of_several_streams_first() {
    for_each_seam(|device| {
        let (rig, [_, two]) = shared_out(device, PoolConfig::default());
        let all = rig.allocate(11 * MIB, &two);
        fill(&two, all.ptr, 2, 11 * MIB);
        assert_all(&read(&two, all.ptr, 11 * MIB).unwrap(), 2);
        let snapshot = rig.pool.snapshot();
        assert_eq!(snapshot.reserved_bytes, 12 * MIB, "{snapshot:?}");
        assert_eq!((snapshot.paths.grown, snapshot.paths.waited), (0, 0), "{snapshot:?}");
        rig.pool.deallocate(all).unwrap();
        rig.empty();
        assert!(device.races().is_empty());
    });
}

#[test]
fn small_ranges_of_two_streams_are_joined_beside_a_live_block_of_the_same_handle() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default().with_growth(2 * MIB).with_maximum(2 * MIB));
        let [one, two] = rig.leases();
        let kept = rig.allocate(2 * MIB - (96 << 10), &one);
        let [first, second] = [&one, &two].map(|stream| rig.allocate(48 << 10, stream));
        for (block, stream) in [(first, &one), (second, &two)] {
            fill(stream, block.ptr, 1, 48 << 10);
            rig.pool.deallocate(block).unwrap();
        }
        let joined = rig.allocate(96 << 10, &two);
        fill(&two, joined.ptr, 2, 96 << 10);
        assert_all(&read(&two, joined.ptr, 96 << 10).unwrap(), 2);
        for block in [kept, joined] {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    });
}

/// One stream still works on the 11 MiB that it has freed when the other asks for them; what the pool holds then.
fn asked_while_pending(device: &Arc<CudaDevice>, config: PoolConfig) -> (usize, u64) {
    let rig = rig(device, config.with_initial(12 * MIB).with_growth(16 * MIB));
    let [one, two] = rig.leases();
    let late = rig.allocate(11 * MIB, &one);
    let gate = WatchedGate::new(one.hold().unwrap());
    fill(&one, late.ptr, 3, 11 * MIB);
    rig.pool.deallocate(late).unwrap();
    let all = rig.allocate(11 * MIB, &two);
    fill(&two, all.ptr, 4, 11 * MIB);
    let snapshot = rig.pool.snapshot();
    gate.release();
    assert_all(&read(&two, all.ptr, 11 * MIB).unwrap(), 4);
    rig.pool.deallocate(all).unwrap();
    rig.empty();
    assert!(device.races().is_empty());
    (snapshot.reserved_bytes, snapshot.paths.waited)
}

#[test]
fn a_thrifty_pool_rather_lets_a_stream_wait_than_grow_and_an_eager_one_grows() {
    for_each_seam(|device| {
        let thrifty = PoolConfig::default().with_eager_growth(0);
        assert_eq!(asked_while_pending(device, thrifty), (12 * MIB, 1));
        let (held, waited) = asked_while_pending(device, PoolConfig::default());
        assert!(held >= 23 * MIB && waited == 0, "{held} {waited}");
    });
}

#[test]
fn a_thrifty_pool_grows_where_the_other_stream_cannot_be_waited_for() {
    for_each_sim(|device, sim| {
        let (rig, [one, two]) = shared_out(device, PoolConfig::default().with_eager_growth(0));
        let late = rig.allocate(5 * MIB, &one);
        let gate = WatchedGate::new(one.hold().unwrap());
        fill(&one, late.ptr, 3, 5 * MIB);
        rig.pool.deallocate(late).unwrap();
        let _ = one.cu_stream();
        sim.set_capturing(one.handle(), true).unwrap();
        let all = rig.allocate(11 * MIB, &two);
        // What is complete serves a part of the request.
        assert!(rig.pool.snapshot().reserved_bytes > 12 * MIB);
        sim.set_capturing(one.handle(), false).unwrap();
        gate.release();
        rig.pool.deallocate(all).unwrap();
        rig.empty();
    });
}

/// Both ends of a block, where a neighbour would be hit, in what would be its last bytes.
fn mark(stream: &StreamLease, block: &DeviceBlock, value: u8) {
    fill(stream, block.ptr, value, 512);
    fill(stream, block.ptr + block.bytes as u64 - 512, value, 512);
}

#[test]
fn random_large_blocks_on_three_streams_keep_their_bytes_when_memory_is_joined_and_moved() {
    for seed in 0..60 {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let eager = if seed % 3 == 0 { usize::MAX } else { 0 };
        let config = PoolConfig::default().with_growth(2 * MIB).with_eager_growth(eager);
        let rig = rig(&device, config.with_maximum(40 * MIB));
        let streams = rig.leases::<3>();
        let mut random = Random::new(seed);
        let mut live: Vec<(DeviceBlock, usize, u8)> = Vec::new();
        for step in 0..150_u8 {
            let at = random.below(3);
            if random.below(5) < 2 && !live.is_empty() {
                let (block, at, value) = live.swap_remove(random.below(live.len()));
                // Seldom, since a look waits for the stream, and what is pending is what is tested.
                if random.below(6) == 0 {
                    let end = block.ptr + block.bytes as u64 - 512;
                    assert_all(&read(&streams[at], end, 512).unwrap(), value);
                }
                mark(&streams[at], &block, !value);
                rig.pool.deallocate(block).unwrap();
            } else {
                let bytes = (64 << 10) + random.below(6 * MIB);
                match rig.pool.allocate(bytes, streams[at].id(), TAG) {
                    Ok(block) => {
                        mark(&streams[at], &block, step);
                        live.push((block, at, step));
                    }
                    Err(ResourceError::OutOfMemory { .. }) => {}
                    Err(error) => panic!("seed {seed}, step {step}: {error}"),
                }
            }
        }
        for (block, at, value) in live {
            assert_all(&read(&streams[at], block.ptr, 512).unwrap(), value);
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty(), "seed {seed}: {:?}", device.races());
    }
}

#[test]
fn blocks_in_every_state_are_freed_together() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let [first, second] = rig.leases();
        for round in 0..3 {
            let sizes = [1000, 5 * MIB, 70_000, 256, 256];
            let mut blocks: Vec<_> =
                sizes.into_iter().map(|bytes| rig.allocate(bytes, &first)).collect();
            blocks.push(rig.allocate(1000, &second));
            blocks.push(rig.allocate(1000, &first));
            // One is used on its own stream, one on another, and one has a use open.
            let ids: Vec<BlockId> = blocks.iter().map(BlockId::from_block).collect();
            for (id, stream) in [(ids[0], &first), (ids[2], &second)] {
                rig.pool.prepare_block_use(id, stream.id(), Access::Write).unwrap();
                fill(stream, id.ptr, 1, 64);
                rig.pool.finish_block_use(id, stream.id(), Access::Write).unwrap();
            }
            rig.pool.prepare_block_use(ids[3], second.id(), Access::Read).unwrap();
            // And one is there twice.
            let twin = twin(&blocks[6]);
            blocks.insert(round * 3, twin);
            let outcome = blocks
                .into_iter()
                .map(|block| rig.pool.deallocate(block))
                .fold(Ok(()), Result::and);
            assert_eq!(outcome, Err(ResourceError::UseAfterFree { generation: ids[6].generation }));
            assert_eq!(rig.pool.block_state(ids[3]), BlockState::Retired);
            rig.pool.finish_block_use(ids[3], second.id(), Access::Read).unwrap();
            rig.pool.reap_pending().unwrap();
            assert_eq!(rig.pool.bytes_outstanding(), 0);
            let counts = rig.pool.statistics();
            assert_eq!((counts.live_blocks, counts.retired_blocks), (0, 0));
        }
        rig.empty();
    });
}
