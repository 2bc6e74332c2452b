//! Copies and fills of buffers while others capture their stream, close their uses, free their blocks, or panic.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use xlog_conformance::BoxedResource;
use xlog_cuda::device_runtime::{
    BlockId, BlockState, DeviceBlock, GuardConfig, GuardOutput, ResourceError, ResourceResult,
};
use xlog_cuda::prelude::*;

const LEN: usize = 64;

fn config(kind: ResourceKind) -> RuntimeConfig {
    RuntimeConfig::default().with_device("sim".parse().unwrap()).with_resource(kind)
}

/// The resources that track uses, and one of them under a guard.
fn tracking() -> [(&'static str, RuntimeConfig); 3] {
    let guard = GuardConfig::default().with_output(GuardOutput::Silent).with_quarantine(0, 0);
    [
        ("pool", config(ResourceKind::Pool)),
        ("async", config(ResourceKind::Async)),
        ("guard", config(ResourceKind::Pool).with_guard(guard)),
    ]
}

fn refused<T: std::fmt::Debug>(result: Result<T, XlogError>, what: &str) {
    let error = result.unwrap_err();
    let is_typed = matches!(error, XlogError::Resource(ResourceError::Capture(_)));
    assert!(is_typed && error.to_string().contains("is being captured"), "{what}: {error}");
}

#[test]
fn copies_and_fills_on_a_captured_stream_are_refused() {
    for kind in [ResourceKind::Pool, ResourceKind::Async, ResourceKind::Direct] {
        let runtime = config(kind).open().unwrap();
        let stream = runtime.stream_pool().lease().unwrap();
        let memory = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(stream.id());
        let source = memory.alloc_from(&[7_u32; LEN]).unwrap();
        let mut copy = memory.alloc_zeroed::<u32>(LEN).unwrap();
        let sim = runtime.device().sim().unwrap();
        sim.set_capturing(stream.handle(), true).unwrap();
        refused(copy.copy_from(&source), "a copy");
        refused(copy.fill_bytes(1), "a fill");
        refused(copy.copy_from_slice(&[1; LEN]), "a copy from the host");
        refused(copy.to_vec(), "a copy to the host");
        refused(copy.slice_mut(1..3).unwrap().copy_from(source.slice(1..3).unwrap()), "views");
        refused(copy.slice_mut(1..3).unwrap().fill_bytes(1), "a fill of a view");
        let zeroes = memory.alloc_zeroed::<u32>(8).unwrap_err().to_string();
        assert!(zeroes.contains("captur"), "{zeroes}");
        sim.set_capturing(stream.handle(), false).unwrap();
        assert_eq!(copy.to_vec().unwrap(), [0; LEN], "{kind:?}: a refused call has written");
        copy.copy_from(&source).unwrap();
        assert_eq!(copy.to_vec().unwrap(), [7; LEN]);
    }
}

/// A place where one thread waits for another.
#[derive(Default)]
struct Steps {
    at: Mutex<u32>,
    changed: Condvar,
}

impl Steps {
    fn reach(&self, step: u32) {
        *self.at.lock().unwrap() = step;
        self.changed.notify_all();
    }

    fn wait_for(&self, step: u32) {
        let at = self.at.lock().unwrap();
        drop(self.changed.wait_while(at, |at| *at < step).unwrap());
    }
}

/// What the layer does in the prepare that is due.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Act {
    /// Stops behind the prepare, until step 2.
    Pause,
    /// Panics before the prepare.
    Panic,
}

/// A layer that acts in one prepare, and fixes the moment of what other threads do.
struct Acting {
    inner: BoxedResource,
    moment: Moment,
}

/// The prepare that is due, and what happens then. 0: none is due.
#[derive(Clone)]
struct Moment {
    act: Act,
    left: Arc<AtomicUsize>,
    steps: Arc<Steps>,
}

impl Moment {
    fn new(act: Act) -> Self {
        Self { act, left: Arc::default(), steps: Arc::default() }
    }

    /// The next prepare of this number is due.
    fn arm(&self, number: usize) {
        self.left.store(number, Ordering::SeqCst);
    }

    fn is_due(&self) -> bool {
        let count = |left: usize| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count) == Ok(1)
    }

    fn layer(&self, config: RuntimeConfig) -> Arc<XlogDeviceRuntime> {
        let moment = self.clone();
        let layer = move |inner: BoxedResource| -> BoxedResource {
            Box::new(Acting { inner, moment: moment.clone() })
        };
        config.with_layer(layer).open().unwrap()
    }
}

impl DeviceMemoryResource for Acting {
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
        self.inner.deallocate(block)
    }
    fn prepare_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let is_due = self.moment.is_due();
        assert!(!is_due || self.moment.act != Act::Panic, "the layer panics");
        self.inner.prepare_block_use(block, stream, access)?;
        if is_due {
            self.moment.steps.reach(1);
            self.moment.steps.wait_for(2);
        }
        Ok(())
    }
}

fn copy_of(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { ..*block }
}

#[test]
fn a_fill_whose_use_and_block_another_thread_ends_writes_no_other_block() {
    for (name, config) in tracking() {
        let moment = Moment::new(Act::Pause);
        let runtime = moment.layer(config);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let mut column = memory.alloc_zeroed::<u32>(LEN).unwrap();
        let id = column.id().unwrap();
        let forged = copy_of(column.runtime_block().unwrap());
        moment.arm(1);
        let (victim, filled) = std::thread::scope(|scope| {
            let filling = scope.spawn(|| column.fill_bytes(0xee));
            moment.steps.wait_for(1);
            runtime.finish_block_use(id, StreamId::DEFAULT, Access::Write).unwrap();
            runtime.deallocate(forged).unwrap();
            assert_eq!(runtime.block_state(id), BlockState::Retired, "{name}: the fill has it");
            let victim = memory.alloc_from(&[1_u32; LEN]).unwrap();
            moment.steps.reach(2);
            (victim, filling.join().unwrap())
        });
        assert!(filled.is_err(), "{name}: the caller learns of it");
        assert_eq!(victim.to_vec().unwrap(), [1; LEN], "{name}");
        drop((victim, column));
        assert_eq!(memory.failed_frees(), 1, "{name}: the buffer's own free came second");
        runtime.reap_pending().unwrap();
        assert_eq!((runtime.block_state(id), runtime.bytes_outstanding()), (BlockState::Freed, 0));
        assert!(runtime.device().races().is_empty(), "{name}: {:?}", runtime.device().races());
    }
}

#[test]
fn a_copy_whose_use_another_thread_closed_before_it_was_queued_is_recorded() {
    for (name, config) in tracking() {
        let moment = Moment::new(Act::Pause);
        let runtime = moment.layer(config);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let other = runtime.stream_pool().lease().unwrap();
        let mut column = memory.alloc_zeroed::<u32>(LEN).unwrap();
        let source = memory.alloc_from(&[7_u32; LEN]).unwrap();
        let id = source.id().unwrap();
        let gate = other.hold().unwrap();
        // The source is prepared first.
        moment.arm(1);
        let copied = std::thread::scope(|scope| {
            let copying = scope.spawn(|| column.copy_from_on(&source, other.id()));
            moment.steps.wait_for(1);
            runtime.finish_block_use(id, other.id(), Access::Read).unwrap();
            moment.steps.reach(2);
            copying.join().unwrap()
        });
        assert!(copied.is_err(), "{name}: the caller learns of it");
        drop(source);
        // If the copy was not recorded, this memory is the source's, and the copy reads the ones.
        let next: Vec<_> = (0..4).map(|_| memory.alloc_from(&[1_u32; LEN]).unwrap()).collect();
        gate.release();
        assert_eq!(column.to_vec().unwrap(), [7; LEN], "{name}");
        drop((next, column));
        runtime.reap_pending().unwrap();
        assert_eq!((runtime.block_state(id), runtime.bytes_outstanding()), (BlockState::Freed, 0));
        assert!(runtime.device().races().is_empty(), "{name}: {:?}", runtime.device().races());
    }
}

#[test]
fn a_copy_of_page_locked_memory_keeps_a_device_block_that_another_thread_ends() {
    for (name, config) in tracking() {
        let moment = Moment::new(Act::Pause);
        let runtime = moment.layer(config);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let streams = runtime.stream_pool().clone();
        let pinned = Arc::new(PinnedHostResource::new(runtime.device().clone(), 0, streams));
        let mut staging = pinned.alloc::<u32>(LEN, StreamId::DEFAULT, AllocTag("staging")).unwrap();
        staging.as_mut_slice().unwrap().fill(7);
        let mut column = memory.alloc_zeroed::<u32>(LEN).unwrap();
        let id = column.id().unwrap();
        let forged = copy_of(column.runtime_block().unwrap());
        moment.arm(1);
        let (victim, copied) = std::thread::scope(|scope| {
            let copying = scope.spawn(|| staging.copy_to(&mut column, StreamId::DEFAULT));
            moment.steps.wait_for(1);
            runtime.finish_block_use(id, StreamId::DEFAULT, Access::Write).unwrap();
            runtime.deallocate(forged).unwrap();
            let victim = memory.alloc_from(&[1_u32; LEN]).unwrap();
            moment.steps.reach(2);
            (victim, copying.join().unwrap())
        });
        assert!(copied.is_err(), "{name}: the caller learns of it");
        assert_eq!(victim.to_vec().unwrap(), [1; LEN], "{name}");
        drop((victim, column, staging));
        runtime.reap_pending().unwrap();
        assert_eq!((runtime.block_state(id), runtime.bytes_outstanding()), (BlockState::Freed, 0));
        assert!(runtime.device().races().is_empty(), "{name}: {:?}", runtime.device().races());
    }
}

#[test]
fn a_panic_in_a_layer_leaves_no_use_of_a_copy_open() {
    for (name, config) in tracking() {
        let moment = Moment::new(Act::Panic);
        let runtime = moment.layer(config);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let streams = runtime.stream_pool().clone();
        let pinned = Arc::new(PinnedHostResource::new(runtime.device().clone(), 0, streams));
        let mut staging = pinned.alloc::<u32>(LEN, StreamId::DEFAULT, AllocTag("staging")).unwrap();
        let source = memory.alloc_from(&[7_u32; LEN]).unwrap();
        let mut copy = memory.alloc_zeroed::<u32>(LEN).unwrap();
        let ids = [&source, &copy].map(|buffer| buffer.id().unwrap());
        // The source is prepared first, then the copy.
        for number in [1, 2] {
            moment.arm(number);
            let copied = catch_unwind(AssertUnwindSafe(|| copy.copy_from(&source)));
            assert!(copied.is_err(), "{name}: prepare {number} did not panic");
        }
        moment.arm(1);
        let staged =
            catch_unwind(AssertUnwindSafe(|| staging.copy_from(&source, StreamId::DEFAULT)));
        assert!(staged.is_err(), "{name}: the prepare did not panic");
        drop((source, copy, staging));
        runtime.reap_pending().unwrap();
        assert_eq!(ids.map(|id| runtime.block_state(id)), [BlockState::Freed; 2], "{name}");
        assert_eq!(runtime.bytes_outstanding(), 0, "{name}");
        assert!(runtime.device().races().is_empty(), "{name}: {:?}", runtime.device().races());
    }
}
