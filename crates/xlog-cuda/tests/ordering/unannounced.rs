//! Work on a block's own stream without hooks: until the first use that is announced it is ordered all the same, and from then on
//! announcements decide.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::rig::{Rig, assert_all, fill, read};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AsyncCudaResource, BlockId, DebugGuardResource, DeviceBlock, DeviceStream, EventPolicy,
    GuardConfig, PoolConfig, ResourceError, StreamId, StreamPool,
};
use xlog_testing::{WatchedGate, for_each_device};

const SIZE: usize = 4096;

fn held(stream: &DeviceStream) -> WatchedGate {
    WatchedGate::new(stream.hold().unwrap())
}

/// The resources that track uses, also under a guard and with other policies.
fn rigs(device: &Arc<CudaDevice>) -> Vec<(&'static str, Rig)> {
    let with_event_policy = |policy| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let resource = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        Rig::over(pool, Arc::new(resource.with_event_policy(policy)))
    };
    let guarded = |rig: Rig| {
        let guard = DebugGuardResource::on_home(rig.resource, GuardConfig::default());
        Rig::over(rig.pool, Arc::new(guard))
    };
    vec![
        ("async", Rig::new(device)),
        ("async, exact", with_event_policy(EventPolicy::Exact)),
        ("pool", Rig::pooled(device, PoolConfig::default())),
        ("guard over async", guarded(Rig::new(device))),
        ("guard over pool", guarded(Rig::pooled(device, PoolConfig::default()))),
    ]
}

fn for_each_rig(body: impl Fn(&Rig)) {
    for_each_device(|device| {
        for (name, rig) in rigs(device) {
            eprintln!("{name}");
            body(&rig);
            rig.resource.reap_pending().unwrap();
        }
    });
}

/// Makes `consumer` follow everything `producer` has done, through another block that is handed over.
fn follow(rig: &Rig, producer: &DeviceStream, consumer: &DeviceStream) {
    let other = rig.allocate(SIZE, producer);
    let id = BlockId::from_block(&other);
    rig.write(id, producer, 1, SIZE);
    rig.write(id, consumer, 2, SIZE);
    rig.free(other);
}

/// A hooked read of a stream that another one holds: it must not run before that.
fn read_behind(rig: &Rig, block: &DeviceBlock, stream: &DeviceStream, gate: WatchedGate) {
    let id = BlockId::from_block(block);
    rig.prepare(id, stream, Access::Read);
    assert!(!stream.query().unwrap(), "the read does not wait for the own stream");
    gate.release();
    let back = read(stream, block.ptr, SIZE).unwrap();
    rig.finish(id, stream, Access::Read);
    assert_all(&back, 7);
}

#[test]
fn a_write_without_a_hook_is_followed_by_a_consumer_that_already_follows_the_allocation() {
    for_each_rig(|rig| {
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        follow(rig, &producer, &consumer);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        read_behind(rig, &block, &consumer, gate);
        rig.free(block);
    });
}

#[test]
fn what_was_written_before_the_first_prepare_is_followed_by_every_later_stream() {
    for_each_rig(|rig| {
        let [producer, first, second] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        follow(rig, &producer, &first);
        follow(rig, &producer, &second);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        let id = BlockId::from_block(&block);
        rig.prepare(id, &first, Access::Read);
        rig.finish(id, &first, Access::Read);
        read_behind(rig, &block, &second, gate);
        rig.free(block);
    });
}

#[test]
fn the_first_announced_read_of_the_own_stream_stands_for_what_was_written_before_it() {
    for_each_rig(|rig| {
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        follow(rig, &producer, &consumer);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        let id = BlockId::from_block(&block);
        rig.prepare(id, &producer, Access::Read);
        rig.finish(id, &producer, Access::Read);
        read_behind(rig, &block, &consumer, gate);
        rig.free(block);
    });
}

#[test]
fn a_use_recorded_by_another_stream_announces_nothing_for_the_own_one() {
    for_each_rig(|rig| {
        let [producer, other, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        follow(rig, &producer, &consumer);
        rig.resource.record_block_use(&block, other.id()).unwrap();
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        read_behind(rig, &block, &consumer, gate);
        rig.free(block);
    });
}

#[test]
fn a_prepare_that_fails_announces_nothing_for_the_own_stream() {
    for_each_rig(|rig| {
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        let (id, unknown) = (BlockId::from_block(&block), StreamId(u32::MAX - 1));
        let refused = rig.resource.prepare_block_use(id, unknown, Access::Read);
        assert!(matches!(refused, Err(ResourceError::StreamMisuse(_))), "{refused:?}");
        follow(rig, &producer, &consumer);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        read_behind(rig, &block, &consumer, gate);
        rig.free(block);
    });
}

#[test]
fn a_check_of_the_guard_announces_nothing_for_the_own_stream() {
    for_each_device(|device| {
        let Rig { pool, resource, .. } = Rig::new(device);
        let guard = Arc::new(DebugGuardResource::on_home(resource, GuardConfig::default()));
        let rig = Rig::over(pool, guard.clone());
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        guard.check_now().unwrap();
        follow(&rig, &producer, &consumer);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        read_behind(&rig, &block, &consumer, gate);
        rig.free(block);
        rig.resource.reap_pending().unwrap();
    });
}

#[test]
fn a_block_written_without_a_hook_is_freed_after_that() {
    for_each_rig(|rig| {
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        follow(rig, &producer, &consumer);
        let gate = held(&producer);
        fill(&producer, block.ptr, 7, SIZE);
        rig.free(block);
        let next = rig.allocate(SIZE, &consumer);
        fill(&consumer, next.ptr, 9, SIZE);
        gate.release();
        assert_all(&read(&consumer, next.ptr, SIZE).unwrap(), 9);
        rig.free(next);
    });
}

#[test]
fn a_write_without_a_hook_after_an_announced_use_is_reported() {
    for build in [Rig::new, |device: &_| Rig::pooled(device, PoolConfig::default())] {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let rig = build(&device);
        let [producer, consumer] = rig.leases();
        let block = rig.allocate(SIZE, &producer);
        let id = BlockId::from_block(&block);
        rig.write(id, &producer, 1, SIZE);
        follow(&rig, &producer, &consumer);
        assert!(device.races().is_empty());
        fill(&producer, block.ptr, 7, SIZE);
        rig.write(id, &consumer, 8, SIZE);
        let _ = device.synchronize();
        assert_eq!(device.races().len(), 1, "{:?}", device.races());
    }
}
