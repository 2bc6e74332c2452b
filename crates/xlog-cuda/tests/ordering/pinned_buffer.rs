//! Typed buffers in page-locked memory: the host waits for exactly the copies that conflict, and no safe call breaks that.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::rig::{TAG, fill, twin};
use xlog_cuda::device_runtime::{
    AllocRequest, AllocTag, AsyncCudaResource, BlockState, BudgetReservation, CaptureError,
    DeviceBlock, DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, InMemorySink,
    LoggingResource, PinnedHostResource, ResourceError, ResourceResult, StatisticsResource,
    StreamId, StreamLease, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceRepr, GpuMemoryManager, XlogError};
use xlog_testing::{Buffer, WatchedGate, for_each_device, for_each_sim, promptly, threads};

const LEN: usize = 4096;

struct Rig {
    streams: Arc<StreamPool>,
    pinned: Arc<PinnedHostResource>,
    manager: GpuMemoryManager,
}

impl Rig {
    fn new(device: &Arc<CudaDevice>) -> Self {
        let (ordinal, streams) = (device.ordinal(), Arc::new(StreamPool::new(device.clone(), 16)));
        let resource = Box::new(AsyncCudaResource::new(device.clone(), ordinal, streams.clone()));
        let pinned = PinnedHostResource::new(device.clone(), ordinal, streams.clone());
        let runtime =
            XlogDeviceRuntime::with_resource(device.clone(), ordinal, streams.clone(), resource);
        let manager = GpuMemoryManager::with_runtime(Arc::new(runtime));
        Self { streams, pinned: Arc::new(pinned.with_chunk(1 << 20)), manager }
    }

    fn leases<const N: usize>(&self) -> [StreamLease; N] {
        std::array::from_fn(|_| self.streams.lease().unwrap())
    }
}

fn numbers(from: u32) -> Vec<u32> {
    (from..from + LEN as u32).collect()
}

#[test]
fn what_the_host_writes_goes_to_the_device_and_comes_back() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [there, back] = rig.leases();
        let mut column = rig.manager.alloc::<u32>(LEN).unwrap();
        let mut staging = rig.pinned.alloc::<u32>(LEN, there.id(), TAG).unwrap();
        let mut result = rig.pinned.alloc::<u32>(LEN, back.id(), TAG).unwrap();
        assert_eq!((staging.len(), staging.is_empty()), (LEN, false));
        for round in 0..5 {
            staging.as_mut_slice().unwrap().copy_from_slice(&numbers(round));
            staging.copy_to(&mut column, there.id()).unwrap();
            result.copy_from(&column, back.id()).unwrap();
            assert_eq!(result.as_slice().unwrap(), numbers(round));
        }
        drop((staging, result));
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.pinned.bytes_outstanding(), 0);
    });
}

#[test]
fn copies_reach_a_buffer_that_hides_its_address() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut column = rig.manager.tracked_only().alloc::<u32>(LEN).unwrap();
        let mut staging = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        staging.as_mut_slice().unwrap().copy_from_slice(&numbers(5));
        staging.copy_to(&mut column, stream.id()).unwrap();
        assert_eq!(column.ptr(), 0, "only a recorder's preflight shows it");
        staging.as_mut_slice().unwrap().fill(0);
        let mut last = rig.pinned.alloc::<u32>(8, stream.id(), TAG).unwrap();
        last.copy_from(column.slice(LEN - 8..).unwrap(), stream.id()).unwrap();
        assert_eq!(last.as_slice().unwrap(), &numbers(5)[LEN - 8..]);
        staging.copy_from(&column, stream.id()).unwrap();
        assert_eq!(staging.as_slice().unwrap(), numbers(5));
        assert!(device.races().is_empty(), "{:?}", device.races());
    });
}

#[test]
fn copies_do_not_wait_and_the_host_waits_for_what_conflicts_only() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut column = rig.manager.alloc::<u32>(LEN).unwrap();
        let [mut first, mut second] =
            [(); 2].map(|()| rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap());
        first.as_mut_slice().unwrap().copy_from_slice(&numbers(7));
        first.copy_to(&mut column, stream.id()).unwrap();
        // Later work of the same stream is held; the copy before it is not.
        let gate = WatchedGate::new(stream.hold().unwrap());
        promptly("copy_from", || second.copy_from(&column, stream.id())).unwrap();
        promptly("copy_to", || second.copy_to(&mut column, stream.id())).unwrap();
        assert!(!second.is_idle());
        promptly("as_mut_slice", || first.as_mut_slice().map(|all| all.fill(0))).unwrap();
        assert!(first.is_idle());
        first.copy_to(&mut column, stream.id()).unwrap();
        assert_eq!(promptly("as_slice", || first.as_slice().unwrap()[LEN - 1]), 0);
        drop(first);
        gate.release();
        assert_eq!(second.as_slice().unwrap(), numbers(7));
        assert_eq!(column.to_vec().unwrap(), [0; LEN]);
    });
}

#[test]
fn a_buffer_that_is_dropped_under_a_copy_is_reused_after_it() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut column = rig.manager.alloc::<u32>(LEN).unwrap();
        column.copy_from_slice(&numbers(3)).unwrap();
        let gate = WatchedGate::new(stream.hold().unwrap());
        let mut dropped = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        dropped.copy_from(&column, stream.id()).unwrap();
        let ptr = dropped.block().unwrap().ptr;
        drop(dropped);
        let mut next = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        assert_ne!(next.block().unwrap().ptr, ptr);
        next.as_mut_slice().unwrap().fill(9);
        gate.release();
        stream.synchronize().unwrap();
        rig.pinned.reap_completed().unwrap();
        assert_eq!(next.as_slice().unwrap(), [9; LEN]);
        let all: Vec<_> =
            (0..2).map(|_| rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap()).collect();
        assert!(all.iter().any(|buffer| buffer.block().unwrap().ptr == ptr));
    });
}

#[test]
fn a_forged_free_takes_no_memory_from_under_a_buffer() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut column = rig.manager.alloc::<u32>(LEN).unwrap();
        let mut buffer = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        buffer.as_mut_slice().unwrap().copy_from_slice(&numbers(1));
        let (id, forged) = (buffer.block().unwrap().into(), twin(buffer.block().unwrap()));
        rig.pinned.deallocate(forged).unwrap();
        assert!(rig.pinned.deallocate(twin(buffer.block().unwrap())).is_err(), "freed twice");
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.pinned.trim(), Ok(0));
        let mut others: Vec<_> =
            (0..8).map(|_| rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap()).collect();
        others.iter_mut().for_each(|other| other.as_mut_slice().unwrap().fill(0));
        assert_eq!(buffer.as_slice().unwrap(), numbers(1));
        assert_eq!(rig.pinned.block_state(id), BlockState::Retired);
        let refused = buffer.copy_to(&mut column, stream.id()).unwrap_err();
        let stale = ResourceError::UseAfterFree { generation: id.generation };
        assert_eq!(refused, XlogError::from(stale));
        drop((buffer, others));
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.pinned.bytes_outstanding(), 0);
        assert_eq!(rig.pinned.trim(), Ok(1 << 20));
    });
}

/// Hands out the same block again and again.
struct HandsOutTwice {
    inner: Arc<PinnedHostResource>,
    block: DeviceBlock,
}

impl DeviceMemoryResource for HandsOutTwice {
    xlog_testing::decorates!(inner);
    fn allocate(&self, _: usize, _: StreamId, _: AllocTag) -> ResourceResult<DeviceBlock> {
        Ok(twin(&self.block))
    }
    fn allocate_request(
        &self,
        request: AllocRequest,
        _: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        self.allocate(request.bytes, request.stream, request.tag)
    }
    fn deallocate(&self, _: DeviceBlock) -> ResourceResult<()> {
        Ok(())
    }
}

#[test]
fn decorators_of_this_library_are_taken_and_others_are_not() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let block = rig.pinned.allocate(4 * LEN, stream.id(), TAG).unwrap();
        let strange: Arc<dyn DeviceMemoryResource + Send + Sync> =
            Arc::new(HandsOutTwice { inner: rig.pinned.clone(), block: twin(&block) });
        let refused = rig.pinned.alloc_through::<u32>(&strange, LEN, stream.id(), TAG).unwrap_err();
        assert!(refused.to_string().contains("this library's decorators"), "{refused}");
        rig.pinned.deallocate(block).unwrap();
        rig.pinned.reap_pending().unwrap();

        let sink = Arc::new(InMemorySink::new());
        let budget = GlobalDeviceBudget::new(Box::new(rig.pinned.clone()), 8 * LEN);
        let logged = LoggingResource::new(Box::new(budget), sink.clone());
        let counted = StatisticsResource::new(Box::new(logged));
        let statistics = counted.handle();
        let stack: Arc<dyn DeviceMemoryResource + Send + Sync> = Arc::new(counted);
        let alloc = || rig.pinned.alloc_through::<u32>(&stack, LEN, stream.id(), AllocTag("in"));
        let (one, two) = (alloc().unwrap(), alloc().unwrap());
        let refused = alloc().unwrap_err();
        let over = ResourceError::OutOfBudget { requested: 4 * LEN, remaining: 0 };
        assert_eq!(refused, XlogError::from(over));
        assert_eq!(statistics.snapshot().tag(AllocTag("in")).current_bytes, 8 * LEN);
        drop((one, two));
        stack.reap_pending().unwrap();
        assert_eq!(statistics.snapshot().tag(AllocTag("in")).current_bytes, 0);
        assert!(sink.len() >= 5, "{:?}", sink.snapshot());

        // A resource that is not over this one hands out memory that the host cannot reach.
        let (ordinal, streams) = (device.ordinal(), rig.streams.clone());
        let elsewhere: Arc<dyn DeviceMemoryResource + Send + Sync> =
            Arc::new(AsyncCudaResource::new(device.clone(), ordinal, streams));
        rig.pinned.alloc_through::<u32>(&elsewhere, LEN, stream.id(), TAG).unwrap_err();
        elsewhere.reap_pending().unwrap();
        assert_eq!(elsewhere.bytes_outstanding(), 0);
    });
}

#[test]
fn what_cannot_be_copied_in_order_is_refused() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut buffer = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        let refusal = |error: XlogError| error.to_string();
        let mut short = rig.manager.alloc::<u32>(LEN - 1).unwrap();
        let said = refusal(buffer.copy_to(&mut short, stream.id()).unwrap_err());
        assert!(said.contains("4095") && said.contains("4096"), "{said}");
        let column = rig.manager.alloc::<u32>(LEN).unwrap();
        let said = refusal(buffer.copy_from(&column, StreamId(u32::MAX)).unwrap_err());
        assert!(said.contains("stream"), "{said}");
        let other = Rig::new(device);
        let elsewhere = other.manager.alloc::<u32>(LEN).unwrap();
        let said = refusal(buffer.copy_from(&elsewhere, StreamId::DEFAULT).unwrap_err());
        assert!(said.contains("stream pool"), "{said}");
        let memory = Buffer::new(device, 4 * LEN);
        // SAFETY: the memory lives longer than the slice, and no work is queued on it.
        let foreign =
            unsafe { xlog_cuda::TrackedCudaSlice::<u32>::from_foreign(memory.ptr(), LEN) };
        let said = refusal(buffer.copy_from(&foreign, stream.id()).unwrap_err());
        assert!(said.contains("no runtime"), "{said}");
        let direct = Box::new(DirectCudaResource::new(device.clone(), device.ordinal()));
        let runtime = XlogDeviceRuntime::with_resource(
            device.clone(),
            device.ordinal(),
            rig.streams.clone(),
            direct,
        );
        let manager = GpuMemoryManager::with_runtime(Arc::new(runtime));
        let untracked = manager.alloc::<u32>(LEN).unwrap();
        let said = refusal(buffer.copy_from(&untracked, stream.id()).unwrap_err());
        assert!(said.contains("unsupported"), "{said}");
        assert!(buffer.is_idle(), "nothing was queued");
        buffer.as_mut_slice().unwrap().fill(1);
    });
}

/// As large as a page, and aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

// SAFETY: bytes without padding.
unsafe impl DeviceRepr for Page {}

#[test]
fn empty_buffers_cost_nothing_and_large_alignments_hold() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let mut empty = rig.pinned.alloc::<u64>(0, stream.id(), TAG).unwrap();
        let mut nothing = rig.manager.alloc::<u64>(0).unwrap();
        empty.copy_to(&mut nothing, stream.id()).unwrap();
        assert!(empty.is_empty() && empty.block().is_none());
        assert!(empty.as_mut_slice().unwrap().is_empty());
        assert_eq!(rig.pinned.bytes_held(), 0);
        rig.pinned.alloc::<u64>(usize::MAX, stream.id(), TAG).unwrap_err();
        let _odd = rig.pinned.alloc::<u8>(3, stream.id(), TAG).unwrap();
        let mut pages = rig.pinned.alloc::<Page>(3, stream.id(), TAG).unwrap();
        let slice = pages.as_mut_slice().unwrap();
        assert_eq!(slice.as_ptr().addr() % 4096, 0);
        slice[2].0.fill(8);
        assert_eq!(pages.block().unwrap().ptr % 4096, 0);
    });
}

#[test]
fn threads_that_stage_side_by_side_spoil_nothing() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let work = |thread: u32| {
            let rig = &rig;
            move || {
                let stream = rig.streams.lease().unwrap();
                let manager = rig.manager.clone().on_stream(stream.id());
                for round in 0..20 {
                    let mut column = manager.alloc::<u32>(LEN).unwrap();
                    let mut staging = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
                    let expected = numbers(thread * 1000 + round);
                    staging.as_mut_slice().unwrap().copy_from_slice(&expected);
                    staging.copy_to(&mut column, stream.id()).unwrap();
                    drop(staging);
                    let mut result = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
                    result.as_mut_slice().unwrap().fill(0);
                    result.copy_from(&column, stream.id()).unwrap();
                    assert_eq!(result.as_slice().unwrap(), expected);
                }
            }
        };
        threads(device, (0..4).map(|thread| Box::new(work(thread)) as Box<_>).collect());
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.pinned.bytes_outstanding(), 0);
        assert!(rig.pinned.bytes_held() <= 4 << 20, "{:?}", rig.pinned);
    });
}

#[test]
fn a_race_on_the_bytes_is_reported_by_their_tag() {
    for_each_sim(|device, _| {
        let rig = Rig::new(device);
        let [own, other] = rig.leases();
        let block = rig.pinned.allocate(256, own.id(), AllocTag("staging")).unwrap();
        fill(&own, block.ptr, 1, 256);
        // No hook orders this one.
        fill(&other, block.ptr, 2, 256);
        let _ = (own.synchronize(), other.synchronize());
        let races = device.races();
        assert!(races.iter().any(|race| race.to_string().contains("staging")), "{races:?}");
        rig.pinned.deallocate(block).unwrap();
    });
}

#[test]
fn a_copy_on_a_captured_stream_is_refused() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        // On the same stream, so that no use of another one is asked about.
        let mut column = rig.manager.on_stream(stream.id()).alloc::<u32>(LEN).unwrap();
        let mut staging = rig.pinned.alloc::<u32>(LEN, stream.id(), TAG).unwrap();
        sim.set_capturing(stream.handle(), true).unwrap();
        for error in [
            staging.copy_to(&mut column, stream.id()).unwrap_err(),
            staging.copy_from(&column, stream.id()).unwrap_err(),
        ] {
            let XlogError::Resource(ResourceError::Capture(error)) = error else {
                panic!("{error:?}")
            };
            assert!(matches!(*error, CaptureError::HostAccess { .. }), "{error}");
        }
        sim.set_capturing(stream.handle(), false).unwrap();
        staging.copy_to(&mut column, stream.id()).unwrap();
    });
}
