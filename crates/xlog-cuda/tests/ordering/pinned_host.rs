//! Page-locked host memory: reuse waits for completion, the maximum names its numbers, chunks come and go, faults leave nothing.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::rig::{TAG, copy, fill};
use xlog_conformance::Suite;
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    GlobalDeviceBudget, InMemorySink, LogAction, LoggingResource, PinnedHostResource,
    ResourceError, ServedBy, StatisticsResource, StreamId, StreamLease, StreamPool,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::sim::{Call, Fault};
use xlog_testing::{Buffer, WatchedGate, for_each_device, for_each_seam, for_each_sim, threads};

const MIB: usize = 1 << 20;
const KIB: usize = 1 << 10;

struct Rig {
    device: Arc<CudaDevice>,
    streams: Arc<StreamPool>,
    pinned: PinnedHostResource,
}

impl Rig {
    fn new(
        device: &Arc<CudaDevice>,
        configure: impl FnOnce(PinnedHostResource) -> PinnedHostResource,
    ) -> Self {
        let streams = Arc::new(StreamPool::new(device.clone(), 16));
        let pinned = PinnedHostResource::new(device.clone(), device.ordinal(), streams.clone());
        Self { device: device.clone(), streams, pinned: configure(pinned) }
    }

    fn leases<const N: usize>(&self) -> [StreamLease; N] {
        std::array::from_fn(|_| self.streams.lease().unwrap())
    }

    fn allocate(&self, bytes: usize, stream: &StreamLease) -> DeviceBlock {
        self.pinned.allocate(bytes, stream.id(), TAG).unwrap()
    }

    fn free(&self, block: DeviceBlock) {
        self.pinned.deallocate(block).unwrap();
    }

    /// Fills a block from the host.
    fn write_by_host(&self, block: &DeviceBlock, value: u8) {
        let host = self.pinned.host_ptr(block).unwrap();
        // SAFETY: the block is live and new, and no work on the device uses it: the resource promises that.
        unsafe { host.write_bytes(value, block.bytes) };
    }

    fn state(&self, block: BlockId) -> BlockState {
        self.pinned.block_state(block)
    }
}

/// Whether chunks are freed without a wait: `cuMemFreeHost` waits for all work.
fn frees_chunks_without_a_wait(device: &CudaDevice) -> bool {
    device.properties().kind != DeviceKind::Cuda
}

#[test]
fn the_pinned_host_resource_conforms() {
    for_each_seam(|device| {
        let suite = Suite::new(|device, streams| {
            Box::new(PinnedHostResource::new(device.clone(), device.ordinal(), streams.clone()))
        });
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
        let may_skip = [
            "hooks::refuse_where_nothing_is_tracked",
            "allocation::one_gibibyte",
            "faults::a_finish_that_fails_closes_the_use",
            // An address is reused once its stream got there, which it need not within this check.
            "identity::an_address_reused_does_not_revive_its_old_name",
        ];
        assert!(report.skipped().all(|check| may_skip.contains(&check.name)), "{report}");
    });
}

#[test]
fn a_stack_over_page_locked_memory_conforms() {
    for_each_seam(|device| {
        let suite = Suite::new(|device, streams| {
            let pinned = PinnedHostResource::new(device.clone(), device.ordinal(), streams.clone());
            let pinned = pinned.with_chunk(64 * KIB).with_maximum(2048 * MIB);
            let budget = GlobalDeviceBudget::new(Box::new(pinned), 2048 * MIB);
            let logged = LoggingResource::new(Box::new(budget), Arc::new(InMemorySink::new()));
            Box::new(StatisticsResource::new(Box::new(logged)))
        });
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
    });
}

/// A copy to the host is held; its block is freed. The next owner would write the same bytes from the host at once.
#[test]
fn host_memory_is_reused_only_after_the_copy_that_uses_it_has_completed() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(64 * KIB));
        let [stream] = rig.leases();
        let source = Buffer::new(device, 64 * KIB);
        source.fill(&stream, 0x11).unwrap();
        let block = rig.allocate(64 * KIB, &stream);
        let (id, host) = (BlockId::from_block(&block), rig.pinned.host_ptr(&block).unwrap());
        let gate = WatchedGate::new(stream.hold().unwrap());
        // The own stream needs no hook.
        copy(&stream, block.ptr, source.ptr(), 64 * KIB);
        rig.free(block);
        rig.pinned.reap_completed().unwrap();
        assert_eq!(rig.state(id), BlockState::Retired);
        let next = rig.allocate(64 * KIB, &stream);
        assert_ne!(next.ptr, id.ptr, "on the same stream, too: the host is in no stream's order");
        rig.write_by_host(&next, 0x22);
        gate.release();
        stream.synchronize().unwrap();
        // SAFETY: the copy has completed, and the chunk is held.
        let copied = unsafe { std::slice::from_raw_parts(host.as_ptr(), 64 * KIB) };
        assert!(copied.iter().all(|byte| *byte == 0x11));
        let again = rig.allocate(64 * KIB, &stream);
        assert_eq!(again.ptr, id.ptr, "it is free once the host has seen the copy complete");
        assert_eq!(rig.state(id), BlockState::Freed);
        rig.free(next);
        rig.free(again);
    });
}

#[test]
fn host_memory_waits_for_uses_on_other_streams_and_not_for_others_work() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(4 * KIB));
        let [own, reader, other] = rig.leases();
        let target = Buffer::new(device, 4 * KIB);
        let block = rig.allocate(4 * KIB, &own);
        let id = BlockId::from_block(&block);
        rig.write_by_host(&block, 0x33);
        let gate = WatchedGate::new(reader.hold().unwrap());
        rig.pinned.prepare_block_use(id, reader.id(), Access::Read).unwrap();
        copy(&reader, target.ptr(), block.ptr, 4 * KIB);
        rig.pinned.finish_block_use(id, reader.id(), Access::Read).unwrap();
        rig.free(block);
        own.synchronize().unwrap();
        let next = rig.allocate(4 * KIB, &own);
        assert_ne!(next.ptr, id.ptr, "another stream still reads it");
        rig.write_by_host(&next, 0x44);
        gate.release();
        reader.synchronize().unwrap();
        let gate = WatchedGate::new(other.hold().unwrap());
        fill(&other, target.ptr(), 0, 1);
        let again = rig.allocate(4 * KIB, &other);
        assert_eq!(again.ptr, id.ptr, "whatever runs on the stream that gets it");
        gate.release();
        rig.free(next);
        rig.free(again);
    });
}

#[test]
fn work_that_uses_are_open_for_keeps_a_returned_block() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(4 * KIB));
        let [own, user] = rig.leases();
        let block = rig.allocate(4 * KIB, &own);
        let id = BlockId::from_block(&block);
        rig.pinned.prepare_block_use(id, user.id(), Access::Write).unwrap();
        rig.free(block);
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.state(id), BlockState::Retired);
        fill(&user, id.ptr, 1, 4 * KIB);
        rig.pinned.finish_block_use(id, user.id(), Access::Write).unwrap();
        rig.pinned.reap_pending().unwrap();
        assert_eq!((rig.state(id), rig.pinned.bytes_outstanding()), (BlockState::Freed, 0));
    });
}

#[test]
fn at_the_maximum_a_request_waits_for_returned_blocks() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_maximum(MIB));
        let [stream, other] = rig.leases();
        for value in 0..20 {
            let block = rig.allocate(MIB, &stream);
            rig.write_by_host(&block, value);
            let id = BlockId::from_block(&block);
            rig.pinned.prepare_block_use(id, other.id(), Access::Write).unwrap();
            fill(&other, block.ptr, value, MIB);
            rig.pinned.finish_block_use(id, other.id(), Access::Write).unwrap();
            rig.free(block);
        }
        assert_eq!(rig.pinned.bytes_held(), MIB);
    });
}

/// The thread that holds the gate reaps and allocates before it opens it.
#[test]
fn a_request_that_waits_at_the_maximum_keeps_no_other_thread() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_maximum(MIB).with_chunk(MIB));
        let [held, free] = rig.leases();
        let small = rig.allocate(4 * KIB, &free);
        let large = rig.allocate(MIB - 4 * KIB, &held);
        let gate = WatchedGate::new(held.hold().unwrap());
        fill(&held, large.ptr, 1, 4 * KIB);
        rig.free(large);
        let rig = &rig;
        let (held, free) = (&held, &free);
        let waits = move || rig.free(rig.allocate(MIB / 2, held));
        let opens = move || {
            rig.free(small);
            for _ in 0..20 {
                rig.pinned.reap_completed().unwrap();
                std::thread::yield_now();
            }
            free.synchronize().unwrap();
            rig.pinned.reap_completed().unwrap();
            rig.free(rig.allocate(4 * KIB, free));
            gate.release();
        };
        threads(device, vec![Box::new(waits), Box::new(opens)]);
        rig.pinned.reap_pending().unwrap();
        assert_eq!(rig.pinned.bytes_outstanding(), 0);
    });
}

#[test]
fn a_refusal_at_the_maximum_names_its_numbers_and_takes_nothing() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_maximum(3 * MIB).with_chunk(MIB));
        let [stream] = rig.leases();
        let refused = |bytes: usize| rig.pinned.allocate(bytes, stream.id(), TAG).unwrap_err();
        let whole = rig.allocate(3 * MIB, &stream);
        let expected = ResourceError::OutOfBudget { requested: 256, remaining: 0 };
        assert_eq!(refused(1), expected, "exactly the maximum fits, and one byte more does not");
        rig.free(whole);
        let one = rig.allocate(MIB, &stream);
        let expected = ResourceError::OutOfBudget { requested: 3 * MIB, remaining: 2 * MIB };
        assert_eq!(refused(3 * MIB), expected);
        assert!(matches!(refused(1 << 50), ResourceError::OutOfMemory { .. }));
        assert_eq!(rig.pinned.bytes_held(), 3 * MIB, "what a refusal cannot use stays cached");
        assert_eq!(rig.pinned.bytes_outstanding(), MIB);
        rig.free(one);
        let three = [(); 3].map(|()| rig.allocate(MIB, &stream));
        assert_eq!(rig.pinned.bytes_held(), 3 * MIB);
        rig.free(three.into_iter().nth(1).unwrap());
    });
}

#[test]
fn memory_in_pieces_is_out_of_memory_and_says_so() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_maximum(12 * KIB));
        let [stream] = rig.leases();
        let [first, middle, last] = [(); 3].map(|()| rig.allocate(4 * KIB, &stream));
        rig.free(first);
        rig.free(last);
        let refused = rig.pinned.allocate(8 * KIB, stream.id(), TAG).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, ResourceError::OutOfMemory { requested: 8192, .. }), "{text}");
        for part in
            ["12288 of at most 12288", "page-locked host memory", "largest free one has 4096"]
        {
            assert!(text.contains(part), "'{part}' is missing in: {text}");
        }
        rig.free(middle);
        rig.free(rig.allocate(12 * KIB, &stream));
    });
}

#[test]
fn chunks_that_are_too_small_make_room_for_one_that_is_large_enough() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_maximum(16 * KIB).with_chunk(4 * KIB));
        let [stream] = rig.leases();
        let blocks = [(); 4].map(|()| rig.allocate(4 * KIB, &stream));
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.free(rig.allocate(16 * KIB, &stream));
        assert_eq!(rig.pinned.bytes_held(), 16 * KIB);
    });
}

#[test]
fn trim_returns_the_chunks_that_are_free_and_no_others() {
    for_each_device(|device| {
        if !frees_chunks_without_a_wait(device) {
            return;
        }
        let rig = Rig::new(device, |pinned| pinned.with_chunk(64 * KIB));
        let [stream, held] = rig.leases();
        let kept = rig.allocate(64 * KIB, &stream);
        let returned = [(); 3].map(|()| rig.allocate(64 * KIB, &stream));
        let busy = rig.allocate(64 * KIB, &held);
        assert_eq!(rig.pinned.bytes_held(), 5 * 64 * KIB);
        let gate = WatchedGate::new(held.hold().unwrap());
        fill(&held, busy.ptr, 1, 64 * KIB);
        rig.free(busy);
        returned.into_iter().for_each(|block| rig.free(block));
        stream.synchronize().unwrap();
        assert_eq!(rig.pinned.trim(), Ok(3 * 64 * KIB));
        assert_eq!(rig.pinned.bytes_held(), 2 * 64 * KIB, "one is in use, work is pending on one");
        gate.release();
        held.synchronize().unwrap();
        assert_eq!(rig.pinned.trim(), Ok(64 * KIB));
        rig.write_by_host(&kept, 5);
        rig.free(kept);
        rig.pinned.reap_pending().unwrap();
        assert_eq!((rig.pinned.trim(), rig.pinned.bytes_held()), (Ok(64 * KIB), 0));
    });
}

#[test]
fn a_reserve_takes_the_memory_before_it_is_asked_for() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(MIB).with_maximum(4 * MIB));
        rig.pinned.reserve(3 * MIB).unwrap();
        rig.pinned.reserve(2 * MIB).unwrap();
        assert_eq!(rig.pinned.bytes_held(), 3 * MIB);
        let taken = sim.faults().calls(Call::AllocHost);
        let [stream] = rig.leases();
        let blocks = [(); 3].map(|()| rig.allocate(MIB, &stream));
        assert_eq!(sim.faults().calls(Call::AllocHost), taken);
        let refused = ResourceError::OutOfBudget { requested: 5 * MIB, remaining: MIB };
        assert_eq!(rig.pinned.reserve(5 * MIB), Err(refused));
        blocks.into_iter().for_each(|block| rig.free(block));
    });
}

#[test]
fn everything_is_freed_on_drop_but_the_chunks_of_live_blocks() {
    for_each_sim(|device, sim| {
        for keeps_one in [false, true] {
            let calls = |call| sim.faults().calls(call);
            let before = (calls(Call::AllocHost), calls(Call::FreeHost));
            let rig = Rig::new(device, |pinned| pinned.with_chunk(4 * KIB));
            let [stream, other] = rig.leases();
            let [first, second, third] = [(); 3].map(|()| rig.allocate(4 * KIB, &stream));
            // Pending when the resource is dropped.
            fill(&stream, first.ptr, 1, 4 * KIB);
            rig.pinned.prepare_block_use((&second).into(), other.id(), Access::Write).unwrap();
            fill(&other, second.ptr, 1, 4 * KIB);
            rig.pinned.finish_block_use((&second).into(), other.id(), Access::Write).unwrap();
            rig.free(first);
            rig.free(second);
            if keeps_one {
                let _ = third;
            } else {
                rig.free(third);
            }
            drop(rig);
            let taken = calls(Call::AllocHost) - before.0;
            let given = calls(Call::FreeHost) - before.1;
            assert_eq!((taken, given), (3, if keeps_one { 2 } else { 3 }));
            assert!(device.races().is_empty(), "{:?}", device.races());
        }
    });
}

#[test]
fn a_driver_that_is_out_of_memory_leaves_nothing_behind() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(64 * KIB));
        let [stream] = rig.leases();
        let faults = sim.faults();
        for (fault, kind) in [
            (Fault::OutOfMemory, "out_of_memory"),
            (Fault::Code(999), "driver"),
            (Fault::Unsupported, "driver"),
        ] {
            // A chunk, the request alone, and the request again after a trim.
            (1..=3).for_each(|nth| faults.fail_nth(Call::AllocHost, nth, fault));
            let error = rig.pinned.allocate(4 * KIB, stream.id(), TAG).unwrap_err();
            faults.clear();
            assert_eq!(error.kind(), kind, "{fault:?} became {error:?}");
            assert_eq!((rig.pinned.bytes_held(), rig.pinned.bytes_outstanding()), (0, 0));
            assert_eq!(rig.pinned.statistics().allocations, 0);
        }
        faults.fail_nth(Call::AllocHost, 1, Fault::OutOfMemory);
        let block = rig.allocate(4 * KIB, &stream);
        assert_eq!(
            rig.pinned.bytes_held(),
            4 * KIB,
            "where a chunk is too much, the request is not"
        );
        rig.free(block);
    });
}

#[test]
fn a_free_that_fails_half_way_is_finished_by_a_reap() {
    for_each_sim(|device, sim| {
        let rig = Rig::new(device, |pinned| pinned);
        for call in [Call::EventCreate, Call::EventRecord] {
            // A stream that has recorded nothing: its event has to be made.
            let [stream] = rig.leases();
            let block = rig.allocate(4 * KIB, &stream);
            let id = BlockId::from_block(&block);
            sim.faults().fail_nth(call, 1, Fault::Code(999));
            rig.pinned.deallocate(block).unwrap_err();
            sim.faults().clear();
            assert_eq!(
                (rig.state(id), rig.pinned.bytes_outstanding()),
                (BlockState::Retired, 4 * KIB)
            );
            rig.pinned.reap_pending().unwrap();
            assert_eq!((rig.state(id), rig.pinned.bytes_outstanding()), (BlockState::Freed, 0));
        }
        sim.faults().fail_nth(Call::FreeHost, 1, Fault::Code(999));
        let held = rig.pinned.bytes_held();
        rig.pinned.trim().unwrap_err();
        assert_eq!(rig.pinned.bytes_held(), held, "a chunk that the driver keeps is not lost");
        assert_eq!(rig.pinned.trim(), Ok(held));
    });
}

#[test]
fn statistics_by_tag_and_log_lines_come_from_the_decorators() {
    for_each_device(|device| {
        let rig = Rig::new(device, |pinned| pinned.with_chunk(MIB));
        let [stream] = rig.leases();
        let Rig { device: _, streams: _, pinned } = rig;
        let sink = Arc::new(InMemorySink::new());
        let logged = LoggingResource::new(Box::new(pinned), sink.clone());
        let counted = StatisticsResource::new(Box::new(logged));
        let statistics = counted.handle();
        let input = counted.allocate(5000, stream.id(), AllocTag("input")).unwrap();
        let output = counted.allocate(100, stream.id(), AllocTag("output")).unwrap();
        let usage = |tag| statistics.snapshot().tag(AllocTag(tag)).current_bytes;
        assert_eq!((usage("input"), usage("output")), (5120, 256));
        counted.deallocate(input).unwrap();
        counted.reap_pending().unwrap();
        assert_eq!((usage("input"), usage("output")), (0, 256));
        counted.deallocate(output).unwrap();
        let records = sink.snapshot();
        let served: Vec<_> = records
            .iter()
            .filter(|record| record.action == LogAction::Allocate)
            .map(|record| (record.tag.unwrap().0, record.bytes.unwrap(), record.served_by))
            .collect();
        assert_eq!(
            served,
            [("input", 5000, ServedBy::Grown), ("output", 100, ServedBy::Completed)]
        );
        let frees = records.iter().filter(|record| record.action == LogAction::Deallocate);
        assert_eq!(frees.count(), 2);
    });
}

#[test]
fn it_takes_no_memory_of_the_device_and_announces_none() {
    for_each_sim(|device, _| {
        let free = device.memory_info().unwrap().free;
        let rig = Rig::new(device, |pinned| pinned);
        let [stream] = rig.leases();
        let block = rig.allocate(MIB, &stream);
        assert_eq!(device.memory_info().unwrap().free, free);
        assert_eq!(rig.pinned.physical_bytes(), None);
        rig.free(block);
    });
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    for_each_sim(|device, _| {
        let other = Arc::new(CudaDevice::open("sim").unwrap());
        let streams = Arc::new(StreamPool::with_defaults(other));
        let pinned = PinnedHostResource::new(device.clone(), device.ordinal(), streams);
        let refused = pinned.allocate(1, StreamId::DEFAULT, TAG).unwrap_err();
        assert!(matches!(refused, ResourceError::Driver(_)), "{refused}");
        assert!(matches!(pinned.reserve(1), Err(ResourceError::Driver(_))));
        let rig = Rig::new(device, |pinned| pinned);
        let asynchronous =
            AsyncCudaResource::new(device.clone(), device.ordinal(), rig.streams.clone());
        let foreign = asynchronous.allocate(64, StreamId::DEFAULT, TAG).unwrap();
        let refused = rig.pinned.host_ptr(&foreign).unwrap_err();
        assert!(matches!(refused, ResourceError::UseAfterFree { .. }), "{refused}");
        asynchronous.deallocate(foreign).unwrap();
        assert!(Arc::ptr_eq(&rig.device, device));
    });
}
