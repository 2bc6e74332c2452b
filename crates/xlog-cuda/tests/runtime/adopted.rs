//! Streams and memory of another library: its work is ordered with ours, and its handles are not touched once they are given back.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::support::manager;
use xlog_cuda::device_runtime::{AdoptedStream, ResourceError, StreamPool};
use xlog_cuda::driver::{Driver, StreamHandle};
use xlog_cuda::prelude::*;
use xlog_testing::{WatchedGate, for_each_device, for_each_sim};

const BYTES: usize = 4096;

/// Another library: a stream and memory of its own.
struct Other {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
    ptr: u64,
}

impl Other {
    fn new(device: &CudaDevice) -> Self {
        let driver = device.driver().clone();
        let (stream, ptr) = (driver.stream_create(0).unwrap(), driver.alloc(BYTES).unwrap());
        Self { driver, stream, ptr }
    }

    fn raw(&self) -> *mut c_void {
        let number = self.stream.number() as *mut c_void;
        self.driver.raw_stream(self.stream).unwrap_or(number)
    }

    fn fill(&self, ptr: u64, value: u8) -> xlog_cuda::Result<()> {
        // SAFETY: every range of these tests is live until its work has completed.
        Ok(unsafe { self.driver.memset(ptr, value, BYTES, self.stream) }?)
    }

    fn adopted(&self, pool: &StreamPool) -> AdoptedStream {
        // SAFETY: the tests drop it before `end`.
        unsafe { pool.adopt(self.raw()) }.unwrap()
    }

    /// Destroys the stream and frees the memory in the order of the stream.
    fn end(self) {
        self.driver.stream_synchronize(self.stream).unwrap();
        // SAFETY: its own, its work is done, and nothing names them any more.
        unsafe {
            self.driver.stream_destroy(self.stream).unwrap();
            self.driver.free(self.ptr).unwrap();
        }
    }
}

#[test]
fn foreign_work_and_ours_wait_for_each_other_and_the_handle_may_go_afterwards() {
    for_each_device(|device| {
        let memory = manager(device);
        let (runtime, streams) = (memory.runtime().clone(), memory.runtime().stream_pool().clone());
        let (other, reader) = (Other::new(device), streams.lease().unwrap());
        let ours = memory.on_stream(reader.id()).alloc_zeroed::<u8>(BYTES).unwrap();

        // Its pending work happens before ours.
        let held = WatchedGate::new(other.driver.hold(other.stream).unwrap());
        other.fill(other.ptr, 7).unwrap();
        let adopted = other.adopted(&streams);
        // SAFETY: the memory stays until `end`, and is given back before.
        let theirs = unsafe { adopted.adopt::<u8>(&memory, other.ptr, BYTES) }.unwrap();
        let mut copy = memory.alloc::<u8>(BYTES).unwrap();
        copy.copy_from_on(&theirs, reader.id()).unwrap();

        // Its work on our buffer happens after our fill and before our read.
        let mut launch = LaunchRecorder::new_strict(adopted.id());
        launch.write(&ours);
        launch.run(&runtime, |_| adopted.run(|| other.fill(ours.ptr(), 9))).unwrap();
        held.release();
        assert_eq!(copy.to_vec().unwrap(), [7; BYTES]);
        assert_eq!(ours.to_vec_on(StreamId::DEFAULT).unwrap(), [9; BYTES]);

        // After it is given back, its next write waits for our pending read.
        let held = WatchedGate::new(reader.hold().unwrap());
        copy.copy_from_on(theirs.slice(..).unwrap(), reader.id()).unwrap();
        adopted.give_back(theirs).unwrap();
        other.fill(other.ptr, 8).unwrap();
        held.release();
        assert_eq!(copy.to_vec().unwrap(), [7; BYTES]);

        drop(adopted);
        other.end();
        drop((ours, copy));
        let bytes = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        assert_eq!(bytes.to_vec_on(reader.id()).unwrap(), [0; BYTES]);
        drop(bytes);
        runtime.reap_pending().unwrap();
        assert_eq!((runtime.bytes_outstanding(), streams.non_default_len()), (0, 1));
        assert_eq!((memory.live_allocations(), memory.allocated_bytes()), (0, 0));
        assert!(device.races().is_empty(), "{:?}", device.races());
    });
}

#[test]
fn foreign_work_outside_of_run_is_a_race() {
    for_each_sim(|device, _| {
        let memory = manager(device);
        let other = Other::new(device);
        let buffer = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        let adopted = other.adopted(memory.runtime().stream_pool());
        other.fill(buffer.ptr(), 9).unwrap();
        let _ = buffer.to_vec();
        let _ = other.driver.stream_synchronize(other.stream);
        assert!(!device.races().is_empty());
        drop(adopted);
    });
}

#[test]
fn a_panic_in_foreign_work_loses_no_order() {
    for_each_device(|device| {
        let memory = manager(device);
        let other = Other::new(device);
        let buffer = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        let adopted = other.adopted(memory.runtime().stream_pool());
        let held = WatchedGate::new(other.driver.hold(other.stream).unwrap());
        let mut launch = LaunchRecorder::new_strict(adopted.id());
        launch.write(&buffer);
        let work = || -> xlog_cuda::Result<()> {
            other.fill(buffer.ptr(), 9)?;
            panic!("after the work was queued")
        };
        let run = || launch.run(memory.runtime(), |_| adopted.run(work));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        held.release();
        assert_eq!(buffer.to_vec().unwrap(), [9; BYTES]);
        assert!(device.races().is_empty(), "{:?}", device.races());
        drop(adopted);
        other.end();
    });
}

#[test]
fn a_captured_stream_is_refused_and_nothing_is_recorded_on_it() {
    for_each_sim(|device, sim| {
        let memory = manager(device);
        let pool = memory.runtime().stream_pool();
        let other = Other::new(device);
        sim.set_capturing(other.stream, true).unwrap();
        // SAFETY: the stream lives until `end`.
        let refused = unsafe { pool.adopt(other.raw()) }.unwrap_err().to_string();
        assert!(refused.contains("capture is Active"), "{refused}");
        assert_eq!(pool.non_default_len(), 0);
        sim.set_capturing(other.stream, false).unwrap();
        let adopted = other.adopted(pool);
        sim.set_capturing(other.stream, true).unwrap();
        assert!(adopted.run::<()>(|| panic!("not reached")).is_err());
        let buffer = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        assert!(adopted.give_back(buffer).is_err());
        // SAFETY: refused.
        assert!(unsafe { adopted.adopt::<u8>(&memory, other.ptr, BYTES) }.is_err());
        sim.set_capturing(other.stream, false).unwrap();
        adopted.run(|| other.fill(other.ptr, 1)).unwrap();
        drop(adopted);
        other.end();
    });
}

#[test]
fn memory_that_is_not_the_devices_and_streams_that_are_not_are_refused() {
    for_each_sim(|device, _| {
        let memory = manager(device).with_limit(BYTES);
        let pool = memory.runtime().stream_pool().clone();
        let other = Other::new(device);
        let adopted = other.adopted(&pool);
        for (ptr, len) in [(16, 4), (other.ptr + 1, 4), (other.ptr, BYTES), (other.ptr, usize::MAX)]
        {
            // SAFETY: refused.
            let refused = unsafe { adopted.adopt::<u32>(&memory, ptr, len) }.unwrap_err();
            assert!(matches!(refused, XlogError::Resource(_)), "{refused:?}");
        }
        assert_eq!((memory.allocated_bytes(), memory.remaining_bytes()), (0, BYTES));
        // SAFETY: the memory stays, and no work uses it.
        let theirs = unsafe { adopted.adopt::<u32>(&memory, other.ptr, BYTES / 4) }.unwrap();
        assert_eq!((memory.allocated_bytes(), memory.total_allocations()), (BYTES, 1));
        assert_eq!(theirs.ptr(), other.ptr);
        let over = memory.alloc::<u8>(1).unwrap_err();
        assert!(matches!(over, XlogError::Resource(ResourceError::OutOfBudget { .. })));
        adopted.give_back(theirs).unwrap();
        let raw = other.raw();
        drop(adopted);
        other.end();
        // SAFETY: a simulated device refuses what is no stream.
        assert!(unsafe { pool.adopt(raw) }.is_err());
        assert_eq!(pool.non_default_len(), 0);
    });
}
