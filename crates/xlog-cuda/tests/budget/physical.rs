//! What a budget lets its resource take from the card: segments, driver pools and raw allocations, cached or not.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, AsyncCudaResource, DeviceBlock, DeviceMemoryResource, DirectCudaResource,
    GlobalDeviceBudget, GuardConfig, LoggingResource, NullSink, OomCause, OomPolicy, PoolConfig,
    PoolResource, PoolSegments, ResourceError, StreamLease, StreamPool,
};
use xlog_cuda::sim::Call;
use xlog_testing::{WatchedGate, for_each_device, for_each_sim};

const MIB: usize = 1 << 20;
const TAG: AllocTag = AllocTag("rows");

type Boxed = Box<dyn DeviceMemoryResource + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Mapped,
    Plain,
    OverAsync,
    Async,
    Direct,
}

const ALL: [Kind; 5] = [Kind::Mapped, Kind::Plain, Kind::OverAsync, Kind::Async, Kind::Direct];

fn resource(kind: Kind, device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Boxed {
    let ordinal = device.ordinal();
    let pool = |segments| {
        let config = PoolConfig::default().with_segments(segments);
        PoolResource::new(device.clone(), ordinal, streams.clone(), config).unwrap()
    };
    let stream_ordered = || AsyncCudaResource::new(device.clone(), ordinal, streams.clone());
    match kind {
        Kind::Mapped => Box::new(pool(PoolSegments::Mapped)),
        Kind::Plain => Box::new(pool(PoolSegments::Plain)),
        Kind::OverAsync => {
            let inner = Box::new(stream_ordered());
            Box::new(PoolResource::over(inner, streams.clone(), PoolConfig::default()).unwrap())
        }
        Kind::Async => Box::new(stream_ordered()),
        Kind::Direct => Box::new(DirectCudaResource::new(device.clone(), ordinal)),
    }
}

/// A budget over one kind of resource, and its streams.
struct Rig {
    device: Arc<CudaDevice>,
    streams: Arc<StreamPool>,
    budget: GlobalDeviceBudget,
}

/// However busy the machine is: what is tested is not how long a request waits.
fn patient() -> OomPolicy {
    OomPolicy::default().with_deadline(Duration::from_secs(60))
}

impl Rig {
    fn new(kind: Kind, device: &Arc<CudaDevice>, limit: usize) -> Self {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let budget = GlobalDeviceBudget::new(resource(kind, device, &streams), limit);
        let budget = budget.with_policy(patient());
        Self { device: device.clone(), streams, budget }
    }

    fn leases<const N: usize>(&self) -> [StreamLease; N] {
        std::array::from_fn(|_| self.streams.lease().unwrap())
    }

    fn allocate(&self, bytes: usize, stream: &StreamLease) -> Result<DeviceBlock, ResourceError> {
        self.budget.allocate(bytes, stream.id(), TAG)
    }

    /// What is taken of the card, where nobody else uses it.
    fn held(&self) -> usize {
        let memory = self.device.memory_info().unwrap();
        (memory.total - memory.free) as usize
    }
}

fn fill(stream: &StreamLease, block: &DeviceBlock) {
    // SAFETY: the block is live, its stream is this one, and the free comes after it in stream order.
    unsafe { stream.memset(block.ptr, 7, block.bytes).unwrap() };
}

#[test]
fn eight_streams_in_turn_take_no_more_of_the_card_than_the_budget() {
    for_each_sim(|device, _| {
        for kind in ALL {
            let rig = Rig::new(kind, device, 64 * MIB);
            let streams: [StreamLease; 8] = rig.leases();
            for stream in &streams {
                let block = rig.allocate(60 * MIB, stream).unwrap();
                fill(stream, &block);
                assert!(rig.held() <= 64 * MIB, "{kind:?}: {}", rig.held());
                rig.budget.deallocate(block).unwrap();
            }
            drop((rig, streams));
            device.synchronize().unwrap();
            assert!(device.races().is_empty());
        }
    });
}

#[test]
fn a_stream_waits_for_a_held_one_rather_than_take_more_of_the_card() {
    for_each_sim(|device, _| {
        for kind in [Kind::Mapped, Kind::Plain, Kind::Async] {
            let rig = Rig::new(kind, device, 64 * MIB);
            let [first, second] = rig.leases();
            let block = rig.allocate(60 * MIB, &first).unwrap();
            let gate = WatchedGate::new(first.hold().unwrap());
            fill(&first, &block);
            // Freed below the budget, whose books would wait for the held stream.
            let below = rig.budget.inner();
            below.deallocate(DeviceBlock { ..block }).unwrap();
            let again = below.allocate(60 * MIB, second.id(), TAG).unwrap();
            assert!(rig.held() <= 64 * MIB, "{kind:?}: {}", rig.held());
            fill(&second, &again);
            gate.release();
            below.deallocate(again).unwrap();
            drop(rig);
            device.synchronize().unwrap();
            assert!(device.races().is_empty());
        }
    });
}

#[test]
fn decorators_between_a_budget_and_a_pool_hand_the_cap_down() {
    for_each_sim(|device, _| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let pool = resource(Kind::Mapped, device, &streams);
        let guard =
            xlog_cuda::device_runtime::DebugGuardResource::new(pool, GuardConfig::default());
        let logged = LoggingResource::new(Box::new(guard), Arc::new(NullSink::new()));
        // The inner budget is the larger one: both hold.
        let inner = GlobalDeviceBudget::new(Box::new(logged), 96 * MIB).with_policy(patient());
        let budget = GlobalDeviceBudget::new(Box::new(inner), 64 * MIB).with_policy(patient());
        let rig = Rig { device: device.clone(), streams, budget };
        let streams: [StreamLease; 4] = rig.leases();
        for stream in &streams {
            let block = rig.allocate(50 * MIB, stream).unwrap();
            assert!(rig.held() <= 64 * MIB, "{}", rig.held());
            rig.budget.deallocate(block).unwrap();
            rig.budget.trim().unwrap();
        }
    });
}

#[test]
fn a_request_that_only_pieces_are_free_for_is_out_of_memory_by_fragmentation() {
    for_each_device(|device| {
        let rig = Rig::new(Kind::Mapped, device, 8 * MIB);
        let [stream] = rig.leases();
        let mut blocks: Vec<_> =
            (0..8).map(|_| Some(rig.allocate(MIB, &stream).unwrap())).collect();
        for block in blocks.iter_mut().step_by(2) {
            rig.budget.deallocate(block.take().unwrap()).unwrap();
        }
        let refused = rig.allocate(2 * MIB, &stream).unwrap_err();
        let ResourceError::OutOfMemory { requested, detail } = &refused else {
            panic!("not by fragmentation: {refused}");
        };
        assert_eq!(*requested, 2 * MIB);
        assert!(detail.contains("fragmentation"), "{detail}");
        assert_eq!(rig.budget.last_oom().unwrap().cause, OomCause::Fragmentation);
        assert_eq!(rig.budget.remaining(), 4 * MIB, "nothing is charged for it");
        // What fits a piece is served.
        let last = rig.allocate(MIB, &stream).unwrap();
        for block in blocks.into_iter().flatten().chain([last]) {
            rig.budget.deallocate(block).unwrap();
        }
    });
}

#[test]
fn a_request_that_whole_granules_leave_no_room_for_is_out_of_memory_by_granules() {
    for_each_device(|device| {
        // The last unit of a plain segment is never handed out, so 4 MiB take 6 of the card.
        let rig = Rig::new(Kind::Plain, device, 4 * MIB);
        let [stream] = rig.leases();
        let refused = rig.allocate(4 * MIB, &stream).unwrap_err();
        assert!(matches!(&refused, ResourceError::OutOfMemory { .. }), "{refused}");
        assert!(refused.to_string().contains("granules of 2097152"), "{refused}");
        // Raw allocations of more than 1 MiB take whole granules: 3 MiB are two, and the third has no room.
        let rig = Rig::new(Kind::Direct, device, 4 * MIB);
        let [stream] = rig.leases();
        let [first, second] = [0, 1].map(|_| rig.allocate(MIB + 1, &stream).unwrap());
        let refused = rig.allocate(MIB + 1, &stream).unwrap_err();
        assert!(matches!(&refused, ResourceError::OutOfMemory { .. }), "{refused}");
        assert!(refused.to_string().contains("granules of 2097152"), "{refused}");
        rig.budget.deallocate(first).unwrap();
        let third = rig.allocate(MIB + 1, &stream).unwrap();
        for block in [second, third] {
            rig.budget.deallocate(block).unwrap();
        }
    });
}

#[test]
fn a_small_budget_has_a_whole_granule() {
    for_each_device(|device| {
        for kind in ALL {
            let rig = Rig::new(kind, device, 4096);
            let [stream] = rig.leases();
            let all = rig.allocate(4096, &stream).unwrap();
            let refused = rig.allocate(1, &stream).unwrap_err();
            assert!(matches!(refused, ResourceError::OutOfBudget { .. }), "{kind:?}: {refused}");
            rig.budget.deallocate(all).unwrap();
        }
    });
}

#[test]
fn the_cap_follows_the_limit_up_and_down() {
    for_each_sim(|device, _| {
        for kind in ALL {
            let rig = Rig::new(kind, device, 32 * MIB);
            let streams: [StreamLease; 4] = rig.leases();
            let turn = |limit: usize, bytes: usize| {
                rig.budget.set_limit(limit);
                for stream in &streams {
                    let block = rig.allocate(bytes, stream).unwrap();
                    fill(stream, &block);
                    assert!(rig.held() <= limit, "{kind:?} of {limit}: {}", rig.held());
                    rig.budget.deallocate(block).unwrap();
                }
            };
            turn(32 * MIB, 28 * MIB);
            turn(96 * MIB, 90 * MIB);
            // What is cached above a lower limit goes with a trim.
            rig.budget.reap_pending().unwrap();
            rig.budget.trim().unwrap();
            turn(64 * MIB, 60 * MIB);
            drop((rig, streams));
            device.synchronize().unwrap();
        }
    });
}

#[test]
fn driver_pools_of_an_earlier_limit_count_until_their_blocks_are_freed() {
    for_each_sim(|device, _| {
        let rig = Rig::new(Kind::Async, device, 64 * MIB);
        let [one, two] = rig.leases();
        let early = rig.allocate(30 * MIB, &one).unwrap();
        rig.budget.set_limit(128 * MIB);
        let late = rig.allocate(90 * MIB, &two).unwrap();
        assert!(rig.held() <= 128 * MIB, "{}", rig.held());
        rig.budget.deallocate(early).unwrap();
        rig.budget.deallocate(late).unwrap();
        // All of the limit is there again, in one pool.
        let all = rig.allocate(120 * MIB, &two).unwrap();
        assert!(rig.held() <= 128 * MIB, "{}", rig.held());
        rig.budget.deallocate(all).unwrap();
        rig.budget.reap_pending().unwrap();
        rig.budget.trim().unwrap();
        assert_eq!(rig.held(), 0);
    });
}

#[test]
fn driver_pools_that_hold_nothing_of_an_earlier_limit_are_destroyed() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(Kind::Async, device, 64 * MIB);
        let [stream] = rig.leases();
        let pools = || {
            let calls = |call| sim.faults().calls(call);
            calls(Call::PoolCreate) - calls(Call::PoolDestroy)
        };
        let before = pools();
        for granules in 3..20 {
            rig.budget.set_limit(granules * 32 * MIB);
            let block = rig.allocate(40 * MIB, &stream).unwrap();
            fill(&stream, &block);
            rig.budget.deallocate(block).unwrap();
            rig.budget.reap_pending().unwrap();
        }
        assert!(pools() - before <= 2, "{} driver pools", pools() - before);
        rig.budget.trim().unwrap();
        assert_eq!(pools() - before, 1, "the one that serves");
        // One that holds a block stays, and goes after it.
        let early = rig.allocate(MIB, &stream).unwrap();
        rig.budget.set_limit(64 * MIB);
        let late = rig.allocate(MIB, &stream).unwrap();
        rig.budget.trim().unwrap();
        assert_eq!(pools() - before, 2);
        for block in [early, late] {
            rig.budget.deallocate(block).unwrap();
        }
        rig.budget.reap_pending().unwrap();
        rig.budget.trim().unwrap();
        assert_eq!((pools() - before, rig.held()), (1, 0));
        drop(rig);
        assert_eq!(pools(), before);
    });
}

/// A budget for each query over one resource that all of them share.
#[test]
fn a_dropped_budget_caps_its_resource_no_longer() {
    for_each_sim(|device, _| {
        for kind in ALL {
            let streams = Arc::new(StreamPool::with_defaults(device.clone()));
            let stream = streams.lease().unwrap();
            let shared: Arc<Boxed> = Arc::new(resource(kind, device, &streams));
            for limit in [32 * MIB, 64 * MIB] {
                let query = GlobalDeviceBudget::over(shared.clone(), limit);
                let block = query.allocate(8 * MIB, stream.id(), TAG).unwrap();
                query.deallocate(block).unwrap();
                stream.synchronize().unwrap();
                query.reap_pending().unwrap();
                query.trim().unwrap();
                // A handle that stays has the books, and says nothing to the resource.
                let handle = query.handle();
                drop(query);
                handle.set_limit(MIB);
            }
            let large = GlobalDeviceBudget::over(shared.clone(), 512 * MIB);
            let block = large.allocate(200 * MIB, stream.id(), TAG);
            let block = block.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            large.deallocate(block).unwrap();
            stream.synchronize().unwrap();
            large.reap_pending().unwrap();
            // Without a budget, too.
            drop(large);
            let block = shared.allocate(600 * MIB, stream.id(), TAG).unwrap();
            shared.deallocate(block).unwrap();
        }
    });
}
