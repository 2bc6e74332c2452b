//! The driver fails at each call in turn: the error comes back, nothing is lost, and a later reap finishes what was begun.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use crate::support::rig::{Rig, TAG, fill};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, ResourceError, StreamLease,
};
use xlog_cuda::sim::{Call, Fault};
use xlog_testing::for_each_sim;

const SIZE: usize = 1024;
const FAULT: Fault = Fault::Code(999);

/// What a small program with handovers, reuse and frees made of a failing driver.
struct Story<'a> {
    rig: &'a Rig,
    streams: [StreamLease; 3],
    live: Vec<DeviceBlock>,
    errors: usize,
}

impl Story<'_> {
    fn note<T>(&mut self, result: Result<T, ResourceError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(ResourceError::Driver(_) | ResourceError::OutOfMemory { .. }) => {
                self.errors += 1;
                None
            }
            Err(error) => panic!("the driver's failure became {error:?}"),
        }
    }

    fn step(&mut self, n: usize) {
        let (own, user) = (n % 3, (n + 1 + n / 3 % 2) % 3);
        let allocated = self.rig.resource.allocate(SIZE, self.streams[own].id(), TAG);
        let Some(block) = self.note(allocated) else { return };
        let id = BlockId::from_block(&block);
        for (stream, access) in
            [(own, Access::Write), (user, Access::Read), (user, Access::Write), (own, Access::Read)]
        {
            let of = self.streams[stream].id();
            let prepared = self.rig.resource.prepare_block_use(id, of, access);
            if self.note(prepared).is_none() {
                continue; // refused, so no use is open and no work may be queued
            }
            if access.writes() {
                fill(&self.streams[stream], block.ptr, n as u8, SIZE);
            }
            // Whatever it says, the use is closed and its work is remembered.
            let finished = self.rig.resource.finish_block_use(id, of, access);
            self.note(finished);
            assert_eq!(self.rig.state(id), BlockState::Live);
        }
        self.live.push(block);
        if self.live.len() > 3 {
            let block = self.live.remove(0);
            let id = BlockId::from_block(&block);
            let freed = self.rig.resource.deallocate(block);
            if self.note(freed).is_none() {
                assert_eq!(self.rig.state(id), BlockState::Retired, "a failed free loses nothing");
            }
        }
        if n % 7 == 6 {
            let reaped = self.rig.resource.reap_completed();
            self.note(reaped);
        }
    }

    /// Everything can be freed and counted now that the driver works.
    fn end(mut self) -> usize {
        for block in std::mem::take(&mut self.live) {
            let freed = self.rig.resource.deallocate(block);
            self.note(freed);
        }
        self.errors
    }
}

fn story(spec: &str, call: Call, nth: u64) -> bool {
    // A device of its own: events that an earlier story left would hide that one cannot be made.
    let device = &Arc::new(CudaDevice::open(spec).unwrap());
    let sim = device.sim().unwrap();
    let rig = Rig::new(device);
    let streams = rig.leases();
    // The default path is warm: the pool exists, and one block came and went.
    rig.free(rig.allocate(SIZE, &streams[0]));
    let before = sim.faults().calls(call);
    sim.faults().fail_nth(call, nth, FAULT);
    let mut story = Story { rig: &rig, streams, live: Vec::new(), errors: 0 };
    (0..20).for_each(|n| story.step(n));
    let errors = story.end();
    let reached = sim.faults().calls(call) - before >= nth;
    sim.faults().clear();
    // A batch's event may fail in silence, since a reap does it again; all else is told.
    assert!(errors <= 1, "{} failures of one {} call", errors, call.name());
    rig.settle();
    let races = device.races();
    assert!(races.is_empty(), "{} #{nth}: {races:#?}", call.name());
    reached
}

#[test]
fn each_driver_call_fails_once_at_each_place() {
    for_each_sim(|device, _| {
        let calls = [
            Call::AllocAsync,
            Call::FreeAsync,
            Call::EventCreate,
            Call::EventRecord,
            Call::StreamWaitEvent,
        ];
        for call in calls {
            let reached = (1..80).take_while(|&nth| story(device.spec(), call, nth)).count();
            let few = if call == Call::EventCreate { 3 } else { 15 };
            assert!(reached >= few, "{} was reached {reached} times only", call.name());
        }
    });
}

#[test]
fn a_failed_allocation_counts_nothing() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        sim.faults().fail_nth(Call::AllocAsync, 1, Fault::OutOfMemory);
        let refused = rig.resource.allocate(SIZE, own.id(), TAG);
        assert!(matches!(refused, Err(ResourceError::OutOfMemory { .. })), "{refused:?}");
        sim.faults().fail_nth(Call::AllocAsync, 1, FAULT);
        let refused = rig.resource.allocate(SIZE, own.id(), TAG);
        assert!(matches!(refused, Err(ResourceError::Driver(_))), "{refused:?}");
        rig.assert_empty();
        assert_eq!(rig.resource.statistics().allocations, 0);
        rig.free(rig.allocate(SIZE, &own));
        rig.settle();
    });
}

#[test]
fn a_failed_free_is_finished_by_a_reap_of_either_kind() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        for waits in [false, true] {
            let block = rig.allocate(SIZE, &own);
            let id = BlockId::from_block(&block);
            rig.write(id, &own, 1, SIZE);
            sim.faults().fail_nth(Call::FreeAsync, 1, FAULT);
            assert!(matches!(rig.resource.deallocate(block), Err(ResourceError::Driver(_))));
            assert_eq!(rig.state(id), BlockState::Retired);
            assert_eq!(rig.resource.bytes_outstanding(), SIZE);
            // The retry may fail too.
            sim.faults().fail_nth(Call::FreeAsync, 1, FAULT);
            assert!(rig.resource.reap_completed().is_err());
            assert_eq!(rig.state(id), BlockState::Retired);
            match waits {
                true => rig.resource.reap_pending().unwrap(),
                false => {
                    rig.resource.reap_completed().unwrap();
                    own.synchronize().unwrap();
                    rig.resource.reap_completed().unwrap();
                }
            }
            assert_eq!(rig.state(id), BlockState::Freed);
            rig.assert_empty();
        }
    });
}

#[test]
fn a_failed_free_behind_a_foreign_use_is_told_and_finished() {
    for_each_sim(|device, sim| {
        for call in [Call::FreeAsync, Call::StreamWaitEvent, Call::EventRecord, Call::EventQuery] {
            let rig = Rig::new(device);
            let [own, user] = rig.leases();
            let block = rig.allocate(SIZE, &own);
            let id = BlockId::from_block(&block);
            rig.write(id, &user, 1, SIZE);
            sim.faults().fail_nth(call, 1, FAULT);
            // The free may wait for the use to complete, so its failure may come with a reap.
            let _ = rig.resource.deallocate(block);
            assert_eq!(rig.state(id), BlockState::Retired);
            assert_eq!(rig.resource.bytes_outstanding(), SIZE);
            let _ = rig.resource.reap_completed();
            let _ = rig.resource.reap_pending();
            sim.faults().clear();
            rig.settle();
            assert_eq!(rig.state(id), BlockState::Freed, "{}", call.name());
            assert!(device.races().is_empty(), "{:#?}", device.races());
        }
    });
}

#[test]
fn a_free_that_fails_when_the_last_use_closes_is_kept_too() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [own] = rig.leases();
        let block = rig.allocate(SIZE, &own);
        let id = BlockId::from_block(&block);
        rig.prepare(id, &own, Access::Write);
        rig.free(block);
        fill(&own, id.ptr, 1, SIZE);
        sim.faults().fail_nth(Call::FreeAsync, 1, FAULT);
        let finished = rig.resource.finish_block_use(id, own.id(), Access::Write);
        assert!(matches!(finished, Err(ResourceError::Driver(_))), "{finished:?}");
        assert_eq!(rig.state(id), BlockState::Retired);
        let again = rig.resource.finish_block_use(id, own.id(), Access::Write);
        assert!(again.is_err(), "the use was closed although the free failed");
        rig.settle();
        assert_eq!(rig.state(id), BlockState::Freed);
    });
}

#[test]
fn a_prepare_whose_wait_fails_opens_no_use() {
    for_each_sim(|device, sim| {
        for call in [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent] {
            let rig = Rig::new(device);
            let [own, user] = rig.leases();
            let block = rig.allocate(SIZE, &own);
            let id = BlockId::from_block(&block);
            rig.write(id, &own, 1, SIZE);
            sim.faults().fail_nth(call, 1, FAULT);
            let prepared = rig.resource.prepare_block_use(id, user.id(), Access::Write);
            sim.faults().clear();
            if prepared.is_ok() {
                // An event was at hand, so this call was not needed.
                assert_eq!(call, Call::EventCreate);
                rig.finish(id, &user, Access::Write);
            } else {
                let finished = rig.resource.finish_block_use(id, user.id(), Access::Write);
                assert!(finished.is_err(), "a refused prepare left a use open");
            }
            // The order that failed is made now: a wait that was never queued is not believed.
            rig.write(id, &user, 2, SIZE);
            rig.expect(id, &own, 2, SIZE);
            rig.free(block);
            rig.settle();
            assert!(device.races().is_empty(), "{:#?}", device.races());
        }
    });
}

#[test]
fn one_streams_failure_loses_no_byte_of_another() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device);
        let [a, b] = rig.leases();
        for call in [Call::EventRecord, Call::EventSynchronize, Call::EventCreate] {
            let blocks = [rig.allocate(SIZE, &a), rig.allocate(SIZE, &b)];
            blocks.into_iter().for_each(|block| rig.free(block));
            sim.faults().fail_nth(call, 1, FAULT);
            let reaped = rig.resource.reap_pending();
            sim.faults().clear();
            let left = rig.resource.bytes_outstanding();
            match reaped {
                Ok(()) => assert_eq!(left, 0, "{}", call.name()),
                Err(_) => assert_eq!(left, SIZE, "{}: the other stream was reaped", call.name()),
            }
            rig.settle();
        }
    });
}
