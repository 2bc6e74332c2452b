//! A free while one of the runtime's streams is captured into a graph: what was queued on it before still runs.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::{ROWS, poke, quiet};
use xlog_cuda::device_runtime::{
    BlockId, BlockState, DebugGuardResource, DeviceMemoryResource, DirectCudaResource, GuardMode,
    PoolConfig, PoolResource, StreamPool,
};
use xlog_cuda::sim::Call;
use xlog_testing::{WatchedGate, for_each_sim};

#[test]
fn a_block_that_a_captured_stream_may_use_is_neither_poisoned_nor_unmapped_before_a_later_reap() {
    for mode in [GuardMode::Canaries, GuardMode::Pages] {
        for_each_sim(|device, sim| {
            let pool = Arc::new(StreamPool::with_defaults(device.clone()));
            let inner = DirectCudaResource::new(device.clone(), device.ordinal());
            let config = quiet().with_mode(mode).with_quarantine(0, 0);
            let guard = DebugGuardResource::over(inner, device.clone(), pool.clone(), config);
            let stream = pool.lease().unwrap();
            let block = guard.allocate(1024, stream.id(), ROWS).unwrap();
            let id = BlockId::from_block(&block);
            let gate = WatchedGate::new(stream.hold().unwrap());
            poke(&stream, block.ptr, 0, 1, 1024);
            sim.set_capturing(stream.handle(), true).unwrap();
            guard.deallocate(block).unwrap();
            guard.reap_completed().unwrap();
            assert_ne!(guard.block_state(id), BlockState::Freed, "{mode:?}");
            assert!(device.races().is_empty(), "{mode:?}: {:#?}", device.races());

            sim.set_capturing(stream.handle(), false).unwrap();
            gate.release();
            guard.reap_pending().unwrap();
            assert_eq!(guard.bytes_outstanding(), 0, "{mode:?}");
            assert!(device.races().is_empty(), "{mode:?}: {:#?}", device.races());
        });
    }
}

/// What the guard queues on a captured stream would run at every launch of the graph, on memory that has another owner by then.
#[test]
fn the_checks_of_freed_blocks_are_no_part_of_a_capture() {
    for_each_sim(|device, sim| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = PoolConfig::default();
        let inner = PoolResource::new(device.clone(), device.ordinal(), pool.clone(), config);
        let guard = DebugGuardResource::over(inner.unwrap(), device.clone(), pool.clone(), quiet());
        let stream = pool.lease().unwrap();
        let blocks: Vec<_> =
            (0..3).map(|_| guard.allocate(1024, stream.id(), ROWS).unwrap()).collect();
        let ids: Vec<_> = blocks.iter().map(BlockId::from_block).collect();
        let mut blocks = blocks.into_iter();
        // One is in the quarantine before the capture begins, one is freed inside, and one is live.
        guard.deallocate(blocks.next().unwrap()).unwrap();
        stream.synchronize().unwrap();
        // Reads what the check has found.
        guard.reap_completed().unwrap();
        assert_eq!(guard.block_state(ids[0]), BlockState::Quarantined);
        sim.set_capturing(stream.handle(), true).unwrap();
        let queued = || {
            let calls =
                [Call::Memset, Call::Launch, Call::CopyDtoh, Call::CopyHtod, Call::CopyDtod];
            calls.map(|call| sim.faults().calls(call))
        };
        let before = queued();
        guard.deallocate(blocks.next().unwrap()).unwrap();
        guard.trim_under_pressure().unwrap();
        guard.reap_completed().unwrap();
        assert_eq!(queued(), before, "the guard queued work on a captured stream");
        assert_ne!(guard.block_state(ids[1]), BlockState::Freed);

        sim.set_capturing(stream.handle(), false).unwrap();
        guard.deallocate(blocks.next().unwrap()).unwrap();
        guard.reap_pending().unwrap();
        guard.trim().unwrap();
        guard.reap_pending().unwrap();
        assert!(ids.iter().all(|id| guard.block_state(*id) == BlockState::Freed));
        assert_eq!(guard.bytes_outstanding(), 0);
        assert!(device.races().is_empty(), "{:#?}", device.races());
    });
}
