//! Two threads free one block: the books of a budget and of statistics stay right, whichever is first below.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use xlog_cuda::device_runtime::{DeviceBlock, ResourceResult, StreamPool};
use xlog_cuda::prelude::*;

/// Delays the first free until step 2.
struct Delayed {
    inner: PoolResource,
    frees: AtomicUsize,
    step: Arc<Step>,
}

#[derive(Default)]
struct Step(Mutex<u32>, Condvar);

impl Step {
    fn reach(&self, step: u32) {
        *self.0.lock().unwrap() = step;
        self.1.notify_all();
    }

    fn wait_for(&self, step: u32) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |at| *at < step).unwrap());
    }
}

impl DeviceMemoryResource for Delayed {
    xlog_testing::decorates!(inner);

    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.inner.allocate(bytes, stream, tag)
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        if self.frees.fetch_add(1, Ordering::SeqCst) == 0 {
            self.step.reach(1);
            self.step.wait_for(2);
        }
        self.inner.deallocate(block)
    }
}

fn delayed() -> (Box<Delayed>, Arc<Step>) {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let inner = PoolResource::new(device, 0, streams, PoolConfig::default()).unwrap();
    let step = Arc::new(Step::default());
    (Box::new(Delayed { inner, frees: AtomicUsize::new(0), step: step.clone() }), step)
}

/// Frees one block twice: the second free begins and ends while the first is below. One of them is refused.
fn free_twice(resource: &impl DeviceMemoryResource, step: &Step) {
    let block = resource.allocate(4096, StreamId::DEFAULT, AllocTag("twice")).unwrap();
    let forged = DeviceBlock { ..block };
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| resource.deallocate(block));
        step.wait_for(1);
        let second = resource.deallocate(forged);
        step.reach(2);
        (first.join().unwrap(), second)
    });
    assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
    resource.reap_pending().unwrap();
}

#[test]
fn a_double_free_by_two_threads_loses_no_budget() {
    let (inner, step) = delayed();
    let budget = GlobalDeviceBudget::new(inner, 1 << 20);
    free_twice(&budget, &step);
    assert_eq!((budget.reserved_bytes(), budget.bytes_outstanding()), (0, 0));
}

#[test]
fn a_double_free_by_two_threads_leaves_no_live_block_in_the_statistics() {
    let (inner, step) = delayed();
    let counted = StatisticsResource::new(inner);
    free_twice(&counted, &step);
    let live = counted.handle().live_blocks();
    assert!(live.is_empty(), "{live:?}");
}
