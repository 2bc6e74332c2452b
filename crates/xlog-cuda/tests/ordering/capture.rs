//! A stream that others capture into a graph: what is queued on it does not run now, so it is refused, loudly and without loss.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;

use crate::support::rig::{Rig, TAG, fill};
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceMemoryResource, ResourceError, ResourceResult,
};
use xlog_cuda::sim::Call;
use xlog_testing::{WatchedGate, for_each_sim};

const SIZE: usize = 4096;

fn refused<T: Debug>(result: ResourceResult<T>) {
    let error = result.unwrap_err();
    let ResourceError::Driver(text) = &error else { unreachable!("{error:?}") };
    assert!(text.contains("capture is Active"), "{text}");
    assert!(text.contains("a stream that is not being captured"), "{text}");
}

#[test]
fn a_stream_whose_driver_handle_was_handed_out_is_asked_whether_it_is_captured() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let (own, other) = (rig.pool.lease().unwrap(), rig.pool.lease().unwrap());
        let block = rig.resource.allocate(SIZE, own.id(), TAG).unwrap();
        let handle = other.handle();
        sim.set_capturing(handle, true).unwrap();
        refused(rig.resource.allocate(SIZE, other.id(), TAG));
        refused(rig.resource.prepare_block_use((&block).into(), other.id(), Access::Read));
        sim.set_capturing(handle, false).unwrap();
        rig.resource.deallocate(block).unwrap();
        rig.resource.reap_pending().unwrap();
    });
}

#[test]
fn a_captured_stream_is_refused_and_serves_again_afterwards() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let (own, other) = (rig.pool.lease().unwrap(), rig.pool.lease().unwrap());
        let kept = rig.resource.allocate(SIZE, own.id(), TAG).unwrap();
        let id = BlockId::from_block(&kept);
        fill(&own, kept.ptr, 1, SIZE);

        // Only a stream whose raw handle was handed out can be captured.
        let _ = own.cu_stream();
        let _ = other.cu_stream();
        sim.set_capturing(other.handle(), true).unwrap();
        refused(rig.resource.allocate(SIZE, other.id(), TAG));
        refused(rig.resource.prepare_block_use(id, other.id(), Access::Read));
        assert_eq!(rig.resource.bytes_outstanding(), SIZE, "a refused call took memory");

        // The tail of a captured stream cannot be recorded either.
        sim.set_capturing(other.handle(), false).unwrap();
        sim.set_capturing(own.handle(), true).unwrap();
        refused(rig.resource.prepare_block_use(id, other.id(), Access::Read));
        assert_eq!(rig.state(id), BlockState::Live);

        // A free is consumed, kept, and finished by a reap once the capture has ended.
        refused(rig.resource.deallocate(kept));
        assert_eq!(rig.state(id), BlockState::Retired);
        assert_eq!(rig.resource.bytes_outstanding(), SIZE);
        // Reaps of other threads meanwhile leave it alone: the capture is no failure of theirs.
        rig.resource.reap_pending().unwrap();
        rig.resource.reap_completed().unwrap();
        assert_eq!(rig.state(id), BlockState::Retired);
        sim.set_capturing(own.handle(), false).unwrap();
        rig.resource.reap_pending().unwrap();
        assert_eq!((rig.state(id), rig.resource.bytes_outstanding()), (BlockState::Freed, 0));

        let block = rig.resource.allocate(SIZE, other.id(), TAG).unwrap();
        rig.resource.deallocate(block).unwrap();
        rig.resource.reap_pending().unwrap();
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_request_that_a_deferred_free_of_a_captured_stream_would_serve_is_out_of_memory() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own, other] = rig.leases();
        let block = rig.allocate(SIZE, &own);
        let id = BlockId::from_block(&block);
        let gate = WatchedGate::new(other.hold().unwrap());
        rig.write(id, &other, 1, SIZE);
        rig.free(block);
        assert_eq!(rig.state(id), BlockState::Retired, "the free waits for the other stream");
        sim.set_capturing(own.handle(), true).unwrap();
        sim.faults().limit_memory(Some(0));
        let refused = rig.resource.allocate(64 << 20, other.id(), TAG);
        let Err(ResourceError::OutOfMemory { detail, .. }) = &refused else {
            unreachable!("{refused:?}")
        };
        assert!(detail.contains("capture is Active"), "{detail}");
        sim.faults().limit_memory(None);
        sim.set_capturing(own.handle(), false).unwrap();
        gate.release();
        rig.resource.reap_pending().unwrap();
        assert_eq!((rig.state(id), rig.resource.bytes_outstanding()), (BlockState::Freed, 0));
    });
}

#[test]
fn a_stream_whose_handle_was_never_handed_out_is_not_asked() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let own = rig.pool.lease().unwrap();
        let block = rig.resource.allocate(SIZE, own.id(), TAG).unwrap();
        rig.resource.deallocate(block).unwrap();
        rig.resource.reap_pending().unwrap();
        assert_eq!(sim.faults().calls(Call::StreamCapture), 0);
    });
}

#[test]
fn a_stream_that_waits_for_a_captured_one_is_asked_from_then_on() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [captured, joined, third] = [(); 3].map(|()| rig.pool.lease().unwrap());
        let block = rig.resource.allocate(SIZE, joined.id(), TAG).unwrap();
        let gate = WatchedGate::new(joined.hold().unwrap());
        fill(&joined, block.ptr, 1, SIZE);
        sim.set_capturing(captured.handle(), true).unwrap();
        // The fork of a capture over two streams. An event of the joined stream is now a node of the graph: it says nothing of the
        // fill, which still waits for the gate.
        joined.wait_for(&captured).unwrap();
        refused(rig.resource.prepare_block_use((&block).into(), third.id(), Access::Read));
        refused(rig.resource.allocate(SIZE, joined.id(), TAG));

        sim.set_capturing(captured.handle(), false).unwrap();
        rig.resource.prepare_block_use((&block).into(), third.id(), Access::Read).unwrap();
        rig.resource.finish_block_use((&block).into(), third.id(), Access::Read).unwrap();
        gate.release();
        rig.resource.deallocate(block).unwrap();
        rig.resource.reap_pending().unwrap();
    });
}
