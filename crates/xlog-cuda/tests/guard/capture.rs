//! A free while one of the runtime's streams is captured into a graph: what was queued on it before still runs.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::{ROWS, poke, quiet};
use xlog_cuda::device_runtime::{
    BlockId, BlockState, DebugGuardResource, DeviceMemoryResource, DirectCudaResource, GuardMode,
    StreamPool,
};
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
