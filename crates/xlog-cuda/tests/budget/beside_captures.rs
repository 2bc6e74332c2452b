//! Requests that run short while somebody captures a stream whose freed memory they would need, or on a device that is lost.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::support::{TAG, patient};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, DeviceMemoryResource, GlobalDeviceBudget, PoolConfig, PoolResource,
    PoolSegments, ResourceError, ResourceResult, StreamId, StreamLease, StreamPool,
};
use xlog_cuda::sim::{Call, Fault};
use xlog_testing::{for_each_sim, threads};

const MIB: usize = 1 << 20;

fn pool(
    device: &Arc<CudaDevice>,
    config: PoolConfig,
) -> (Arc<StreamPool>, ResourceResult<PoolResource>) {
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool = PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config);
    (streams, pool)
}

fn leases<const N: usize>(streams: &Arc<StreamPool>) -> [StreamLease; N] {
    std::array::from_fn(|_| streams.lease().unwrap())
}

fn fill(stream: &StreamLease, block: &DeviceBlock) {
    // SAFETY: the block is live, its stream is this one, and the free comes after it in stream order.
    unsafe { stream.memset(block.ptr, 7, block.bytes).unwrap() };
}

fn names_the_capture(refused: ResourceResult<DeviceBlock>) {
    let Err(ResourceError::OutOfMemory { detail, .. }) = &refused else { panic!("{refused:?}") };
    assert!(detail.contains("capture is Active"), "{detail}");
    assert!(!detail.contains("fragmentation"), "{detail}");
}

fn each_budget(
    device: &Arc<CudaDevice>,
    body: impl Fn(&GlobalDeviceBudget<PoolResource>, [StreamLease; 2]),
) {
    for segments in [PoolSegments::Mapped, PoolSegments::Plain] {
        for insert_waits in [true, false] {
            let mut config = PoolConfig::default().with_segments(segments);
            config.reuse.insert_waits = insert_waits;
            let (streams, pool) = pool(device, config);
            // Long enough for the work of a busy machine; what can only be refused is refused at once.
            let budget = GlobalDeviceBudget::over(pool.unwrap(), 64 * MIB).with_policy(patient());
            body(&budget, leases(&streams));
        }
    }
}

/// The first stream has freed 40 MiB; then it is captured.
fn freed_by_captured(
    device: &Arc<CudaDevice>,
    budget: &GlobalDeviceBudget<PoolResource>,
    stream: &StreamLease,
    event: Event,
) {
    let block = budget.allocate(40 * MIB, stream.id(), TAG).unwrap();
    fill(stream, &block);
    let handle = stream.handle();
    free_with(device, event, || budget.deallocate(block));
    device.sim().unwrap().set_capturing(handle, true).unwrap();
}

/// Whether the event that a free records on a stream whose handle is known comes about. Without it no call can tell what has completed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Recorded,
    Failed,
}

fn free_with(device: &Arc<CudaDevice>, event: Event, free: impl FnOnce() -> ResourceResult<()>) {
    let sim = device.sim().unwrap();
    let before = sim.faults().calls(Call::EventRecord);
    if event == Event::Failed {
        sim.faults().fail_nth(Call::EventRecord, 1, Fault::Code(999));
    }
    free().unwrap();
    assert_eq!(sim.faults().calls(Call::EventRecord), before + 1);
}

#[test]
fn memory_that_a_captured_stream_freed_before_serves_beside_the_capture() {
    for_each_sim(|device, sim| {
        each_budget(device, |budget, [first, second]| {
            freed_by_captured(device, budget, &first, Event::Recorded);
            let block = budget.allocate(40 * MIB, second.id(), TAG).unwrap();
            fill(&second, &block);
            sim.set_capturing(first.handle(), false).unwrap();
            budget.deallocate(block).unwrap();
            budget.reap_pending().unwrap();
        });
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_request_that_only_a_captured_stream_has_memory_for_is_out_of_memory() {
    for_each_sim(|device, sim| {
        each_budget(device, |budget, [first, second]| {
            freed_by_captured(device, budget, &first, Event::Failed);
            names_the_capture(budget.allocate(40 * MIB, second.id(), TAG));
            assert_eq!(budget.remaining(), 64 * MIB, "nothing is charged for it");
            sim.set_capturing(first.handle(), false).unwrap();
            let block = budget.allocate(40 * MIB, second.id(), TAG).unwrap();
            budget.deallocate(block).unwrap();
            budget.reap_pending().unwrap();
        });
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_pressure_function_that_ends_a_capture_serves_the_request() {
    for_each_sim(|device, sim| {
        each_budget(device, |budget, [first, second]| {
            freed_by_captured(device, budget, &first, Event::Failed);
            let (handle, calls) = (first.handle(), Arc::new(AtomicU32::new(0)));
            let _registered = budget.on_pressure({
                let (sim, calls) = (sim.clone(), calls.clone());
                move |_| {
                    calls.fetch_add(1, Ordering::Relaxed);
                    sim.set_capturing(handle, false).unwrap();
                }
            });
            let block = budget.allocate(40 * MIB, second.id(), TAG).unwrap();
            assert_eq!(calls.load(Ordering::Relaxed), 1);
            budget.deallocate(block).unwrap();
            budget.reap_pending().unwrap();
        });
    });
}

#[test]
fn memory_of_another_stream_serves_a_pool_that_waits_beside_a_capture() {
    for_each_sim(|device, sim| {
        let mut config = PoolConfig::default().with_maximum(16 * MIB).with_growth(2 * MIB);
        (config.reuse.insert_waits, config.reuse.opportunistic) = (false, false);
        let (streams, pool) = pool(device, config);
        let pool = pool.unwrap();
        let [captured, other, asking] = leases(&streams);
        let handle = captured.handle();
        let blocks = [(6, &captured), (8, &other)].map(|(size, stream)| {
            let block = pool.allocate(size * MIB, stream.id(), TAG).unwrap();
            fill(stream, &block);
            block
        });
        blocks.into_iter().for_each(|block| pool.deallocate(block).unwrap());
        sim.set_capturing(handle, true).unwrap();
        let block = pool.allocate(8 * MIB, asking.id(), TAG).unwrap();
        sim.set_capturing(handle, false).unwrap();
        pool.deallocate(block).unwrap();
    });
}

/// In one piece: 3 MiB of the captured stream, 3 of another, a live one, 3 of the other and 3 of a third.
#[test]
fn ranges_are_joined_without_those_of_a_captured_stream() {
    for_each_sim(|device, sim| {
        let config = PoolConfig::default().with_maximum(14 * MIB).with_growth(14 * MIB);
        let (streams, pool) = pool(device, config.with_initial(14 * MIB));
        let pool = pool.unwrap();
        let [captured, other, third, asking] = leases(&streams);
        let handle = captured.handle();
        let at = |size: usize, stream: &StreamLease| {
            let block = pool.allocate(size * MIB, stream.id(), TAG).unwrap();
            fill(stream, &block);
            block
        };
        let first = [at(3, &captured), at(3, &other)];
        let live = at(1, &asking);
        let last = [at(3, &other), at(3, &third)];
        let [of_captured, of_other] = first;
        free_with(device, Event::Failed, || pool.deallocate(of_captured));
        [of_other].into_iter().chain(last).for_each(|block| pool.deallocate(block).unwrap());
        sim.set_capturing(handle, true).unwrap();
        let block = pool.allocate(5 * MIB, asking.id(), TAG).unwrap();
        assert!(block.ptr > live.ptr);
        fill(&asking, &block);
        names_the_capture(pool.allocate(6 * MIB, asking.id(), TAG));
        sim.set_capturing(handle, false).unwrap();
        [live, block].into_iter().for_each(|block| pool.deallocate(block).unwrap());
        drop(pool);
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_device_that_is_lost_while_a_pool_grows_again_is_named() {
    for_each_sim(|device, _| {
        let device = &Arc::new(CudaDevice::open(device.spec()).unwrap());
        let config = PoolConfig::default().with_segments(PoolSegments::Plain);
        let (streams, pool) = pool(device, config.with_maximum(8 * MIB).with_growth(2 * MIB));
        let pool = pool.unwrap();
        let [stream] = leases(&streams);
        let block = pool.allocate(3 * MIB, stream.id(), TAG).unwrap();
        pool.deallocate(block).unwrap();
        device.sim().unwrap().faults().fail_nth(Call::Alloc, 1, Fault::DeviceLost);
        let refused = pool.allocate(7 * MIB, stream.id(), TAG);
        let Err(ResourceError::Driver(text)) = &refused else { panic!("{refused:?}") };
        assert!(text.contains("lost"), "{text}");
    });
}

/// Reaps before it allocates.
struct Reaping {
    pool: Arc<PoolResource>,
    has_reaped: Arc<AtomicBool>,
}

impl DeviceMemoryResource for Reaping {
    fn allocate(
        &self,
        size: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.pool.reap_pending()?;
        self.has_reaped.store(true, Ordering::Release);
        self.pool.allocate(size, stream, tag)
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.pool.deallocate(block)
    }
    fn device_ordinal(&self) -> u32 {
        self.pool.device_ordinal()
    }
    fn bytes_outstanding(&self) -> usize {
        self.pool.bytes_outstanding()
    }
}

/// The stream is let go when the reap waits for it, or has returned without.
#[test]
fn a_reap_inside_a_request_of_a_budget_waits_for_every_queued_free() {
    for_each_sim(|device, sim| {
        let (streams, pool) = pool(device, PoolConfig::default());
        let (pool, has_reaped) = (Arc::new(pool.unwrap()), Arc::new(AtomicBool::new(false)));
        let below = Reaping { pool: pool.clone(), has_reaped: has_reaped.clone() };
        let budget = GlobalDeviceBudget::over(below, 64 * MIB);
        let [busy, other, looking] = leases(&streams);
        let rows = pool.allocate(6 * MIB, busy.id(), TAG).unwrap();
        let gate = busy.hold().unwrap();
        fill(&busy, &rows);
        pool.deallocate(rows).unwrap();
        let waits = || sim.faults().calls(Call::EventSynchronize);
        let (before, has_waited) = (waits(), AtomicBool::new(false));
        let ask = || {
            let block = budget.allocate(MIB, other.id(), TAG).unwrap();
            budget.deallocate(block).unwrap();
        };
        let release = || {
            while waits() == before && !has_reaped.load(Ordering::Acquire) {
                // Where threads are scheduled by a seed, the other one may go on here.
                looking.query().unwrap();
                std::thread::yield_now();
            }
            has_waited.store(!has_reaped.load(Ordering::Acquire), Ordering::Release);
            gate.release();
        };
        threads(device, vec![Box::new(ask), Box::new(release)]);
        assert!(has_waited.load(Ordering::Acquire), "returned before the free had completed");
    });
}
