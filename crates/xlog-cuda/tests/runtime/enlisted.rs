//! Streams of another library that have an id of the pool: its unannounced work is ordered as that of any block's own stream.

#![allow(clippy::unwrap_used)]

use std::ffi::c_void;
use std::sync::Arc;

use crate::support::manager;
use xlog_cuda::device_runtime::{BlockState, PoolConfig, PoolResource, StreamPool};
use xlog_cuda::driver::{Driver, StreamHandle};
use xlog_cuda::prelude::*;
use xlog_testing::{WatchedGate, for_each_device, for_each_sim};

const BYTES: usize = 4096;
const TAG: AllocTag = AllocTag("enlisted");

/// Another library's stream. It is destroyed after everything that names it.
struct Other {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
}

impl Other {
    fn new(device: &CudaDevice) -> Self {
        let driver = device.driver().clone();
        Self { stream: driver.stream_create(0).unwrap(), driver }
    }

    fn raw(&self) -> *mut c_void {
        let number = self.stream.number() as *mut c_void;
        self.driver.raw_stream(self.stream).unwrap_or(number)
    }

    fn fill(&self, ptr: u64, value: u8) {
        // SAFETY: every range of these tests is live until its work has completed.
        unsafe { self.driver.memset(ptr, value, BYTES, self.stream) }.unwrap();
    }

    /// Destroys the stream, which the pool must not have done.
    fn end(self) {
        self.driver.stream_synchronize(self.stream).unwrap();
        // SAFETY: its own, and nothing names it any more.
        unsafe { self.driver.stream_destroy(self.stream) }.unwrap();
    }
}

fn pooled(device: &Arc<CudaDevice>) -> XlogDeviceRuntime {
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let config = PoolConfig::default();
    let pool =
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config).unwrap();
    XlogDeviceRuntime::with_resource(device.clone(), device.ordinal(), streams, Box::new(pool))
}

#[test]
fn unannounced_work_of_the_other_library_happens_before_ours_and_before_reuse() {
    for_each_device(|device| {
        let memory = manager(device);
        let runtime = memory.runtime().clone();
        let other = Other::new(device);
        // SAFETY: the stream is destroyed after the pool.
        let id = unsafe { runtime.stream_pool().enlist(other.raw()) }.unwrap();
        let held = WatchedGate::new(other.driver.hold(other.stream).unwrap());
        let rows = memory.on_stream(id).alloc::<u8>(BYTES).unwrap();
        other.fill(rows.ptr(), 7);
        let mut copy = memory.alloc::<u8>(BYTES).unwrap();
        copy.copy_from_on(&rows, StreamId::DEFAULT).unwrap();
        drop(rows);
        let next = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        held.release();
        assert_eq!(copy.to_vec().unwrap(), [7; BYTES]);
        assert_eq!(next.to_vec().unwrap(), [0; BYTES]);
        assert!(device.races().is_empty(), "{:?}", device.races());
        drop((copy, next, memory));
        runtime.reap_pending().unwrap();
        drop(runtime);
        other.end();
    });
}

#[test]
fn freed_memory_serves_its_enlisted_stream_at_once_and_others_only_in_order() {
    for_each_sim(|device, _| {
        let runtime = pooled(device);
        let other = Other::new(device);
        // SAFETY: the stream is destroyed after the pool.
        let id = unsafe { runtime.stream_pool().enlist(other.raw()) }.unwrap();
        let held = WatchedGate::new(other.driver.hold(other.stream).unwrap());
        let block = runtime.allocate(BYTES, id, TAG).unwrap();
        let (ptr, first) = (block.ptr, (&block).into());
        other.fill(ptr, 1);
        runtime.deallocate(block).unwrap();
        assert_eq!(runtime.block_state(first), BlockState::Freed);
        let again = runtime.allocate(BYTES, id, TAG).unwrap();
        assert_eq!(again.ptr, ptr, "the next request of the stream got other memory");
        other.fill(ptr, 2);
        runtime.deallocate(again).unwrap();
        let elsewhere = runtime.allocate(BYTES, StreamId::DEFAULT, TAG).unwrap();
        let own = runtime.stream_pool().default_stream().unwrap();
        // SAFETY: the block is live, and this is its own stream.
        unsafe { own.memset(elsewhere.ptr, 3, BYTES) }.unwrap();
        held.release();
        own.synchronize().unwrap();
        runtime.deallocate(elsewhere).unwrap();
        runtime.reap_pending().unwrap();
        assert!(device.races().is_empty(), "{:?}", device.races());
        drop(runtime);
        other.end();
    });
}

#[test]
fn an_enlisted_stream_takes_no_lease_and_cannot_be_released() {
    for_each_sim(|device, _| {
        let pool = StreamPool::new(device.clone(), 1);
        let other = Other::new(device);
        // SAFETY: the stream is destroyed after the pool.
        let id = unsafe { pool.enlist(other.raw()) }.unwrap();
        assert_eq!(pool.non_default_len(), 0);
        assert!(!pool.release(id));
        assert!(pool.resolve(id).is_some());
        let lease = pool.lease().unwrap();
        assert_ne!(lease.handle(), other.stream, "a lease got the other library's stream");
        drop((lease, pool));
        other.end();
    });
}

#[test]
fn what_is_no_stream_is_not_enlisted_and_a_captured_one_serves_afterwards() {
    for_each_sim(|device, sim| {
        let runtime = pooled(device);
        let streams = runtime.stream_pool().clone();
        // SAFETY: a simulated device refuses what is no stream.
        assert!(unsafe { streams.enlist(123_456 as *mut c_void) }.is_err());
        let other = Other::new(device);
        sim.set_capturing(other.stream, true).unwrap();
        // SAFETY: the stream is destroyed after the pool.
        let id = unsafe { streams.enlist(other.raw()) }.unwrap();
        let refused = runtime.allocate(BYTES, id, TAG).unwrap_err().to_string();
        assert!(refused.contains("capture is Active"), "{refused}");
        sim.set_capturing(other.stream, false).unwrap();
        let block = runtime.allocate(BYTES, id, TAG).unwrap();
        runtime.deallocate(block).unwrap();
        drop((runtime, streams));
        other.end();
    });
}
