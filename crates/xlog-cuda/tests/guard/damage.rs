//! Each kind of damage by name: who is told what, and when.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use xlog_cuda::DeviceSpec;
use xlog_cuda::device_runtime::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DamageKind, DebugGuardResource,
    DeviceMemoryResource, FoundBy, GlobalDeviceBudget, MIN_ALIGN, PoolConfig, PoolResource,
    QueryScope, ResourceError, StatisticsConfig, StatisticsResource, StreamPool,
};
use xlog_testing::{WatchedGate, for_each_device};

use crate::support::{ROWS, Rig, looks_on_the_device, poke, quiet, twin};

#[test]
fn one_byte_behind_a_block_is_told_by_the_next_reap() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let stream = rig.pool.lease().unwrap();
        let _query = QueryScope::enter(42);
        let block = rig.allocate(1000, &stream);
        let (id, generation) = (BlockId::from_block(&block), block.generation);
        poke(&stream, block.ptr, 1000, 0x5a, 1);
        rig.guard.deallocate(block).unwrap();
        assert_eq!(rig.guard.reap_pending(), Err(ResourceError::OutOfBounds { generation }));
        assert_eq!(rig.guard.reap_pending(), Ok(()), "it is told once");
        let report = &rig.guard.reports()[0];
        assert_eq!(
            (report.kind, report.offset, report.damaged),
            (DamageKind::OutOfBounds, 1000, 1)
        );
        assert_eq!((report.generation, report.ptr, report.bytes), (generation, id.ptr, 1000));
        assert_eq!((report.tag, report.found_by, report.found[0]), (ROWS, FoundBy::Free, 0x5a));
        assert_eq!((report.allocated.stream, report.allocated.query_id), (stream.id(), Some(42)));
        let freed = report.freed.as_ref().unwrap();
        assert_eq!((freed.stream, freed.query_id), (stream.id(), Some(42)));
        assert!(report.allocated.at <= freed.at && freed.at <= report.found_at);
    });
}

#[test]
fn bytes_before_a_block_have_a_negative_offset() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let stream = rig.pool.lease().unwrap();
        let block = rig.allocate(10, &stream);
        poke(&stream, block.ptr, -3, 0, 5);
        rig.guard.deallocate(block).unwrap();
        assert!(matches!(rig.guard.reap_pending(), Err(ResourceError::OutOfBounds { .. })));
        let report = &rig.guard.reports()[0];
        assert_eq!((report.offset, report.damaged), (-3, 3));
        assert_eq!(report.found, [0; 3], "the block's own bytes are no damage");
    });
}

#[test]
fn a_write_after_the_free_is_found_when_the_block_leaves_the_quarantine() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let stream = rig.pool.lease().unwrap();
        let block = rig.allocate(1000, &stream);
        let (ptr, generation) = (block.ptr, block.generation);
        rig.guard.deallocate(block).unwrap();
        poke(&stream, ptr, 123, 0x11, 7);
        assert_eq!(rig.guard.reap_pending(), Ok(()), "the quarantine was not looked at");
        rig.guard.flush_quarantine().unwrap();
        assert_eq!(rig.guard.reap_pending(), Err(ResourceError::UseAfterFree { generation }));
        let report = &rig.guard.reports()[0];
        assert_eq!((report.kind, report.found_by), (DamageKind::UseAfterFree, FoundBy::Release));
        assert_eq!((report.offset, report.damaged, report.found[6]), (123, 7, 0x11));
        assert_eq!(rig.guard.bytes_outstanding(), 0);
    });
}

#[test]
fn check_now_looks_at_live_blocks_and_at_the_quarantine() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let stream = rig.pool.lease().unwrap();
        let (live, freed) = (rig.allocate(100, &stream), rig.allocate(100, &stream));
        let late = (freed.ptr, freed.generation);
        rig.guard.deallocate(freed).unwrap();
        assert_eq!(rig.guard.check_now(), Ok(()));
        poke(&stream, live.ptr, 100, 1, 1);
        poke(&stream, late.0, 0, 1, 1);
        let errors = [rig.guard.check_now(), rig.guard.check_now()];
        let generation = live.generation;
        assert!(errors.contains(&Err(ResourceError::OutOfBounds { generation })), "{errors:?}");
        assert!(errors.contains(&Err(ResourceError::UseAfterFree { generation: late.1 })));
        assert_eq!(rig.guard.check_now(), Ok(()));
        assert!(rig.guard.reports().iter().all(|report| report.found_by == FoundBy::CheckNow));
        // It is not told again when the blocks go.
        rig.guard.deallocate(live).unwrap();
        rig.guard.flush_quarantine().unwrap();
        assert_eq!(rig.guard.reap_pending(), Ok(()));
        assert_eq!(rig.guard.reports().len(), 2);
    });
}

#[test]
fn a_synchronous_free_returns_its_own_damage() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet().with_synchronous(true));
        let stream = rig.pool.lease().unwrap();
        let block = rig.allocate(64, &stream);
        let generation = block.generation;
        poke(&stream, block.ptr, 64, 1, 2);
        let freed = rig.guard.deallocate(block);
        assert_eq!(freed, Err(ResourceError::OutOfBounds { generation }));
        rig.guard.flush_quarantine().unwrap();
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.bytes_outstanding(), 0, "the block is freed all the same");
    });
}

#[test]
fn damage_found_at_the_end_is_in_the_handle() {
    for_each_device(|device| {
        // A drop waits two seconds for its checks. The threads of this device may not run for as long on a busy machine.
        if device.spec() == DeviceSpec::Sim.to_string() {
            return;
        }
        let rig = Rig::new(device, quiet());
        let stream = rig.pool.lease().unwrap();
        let handle = rig.guard.handle();
        let (leaked, freed) = (rig.allocate(100, &stream), rig.allocate(100, &stream));
        poke(&stream, leaked.ptr, -1, 1, 1);
        let ptr = freed.ptr;
        rig.guard.deallocate(freed).unwrap();
        poke(&stream, ptr, 99, 1, 1);
        drop(rig);
        let mut found: Vec<_> = handle.reports().iter().map(|r| (r.offset, r.found_by)).collect();
        found.sort_unstable_by_key(|(offset, _)| *offset);
        assert_eq!(found, [(-1, FoundBy::Drop), (99, FoundBy::Drop)]);
        assert_eq!((handle.check_now(), handle.quarantine()), (Ok(()), (0, 0)));
    });
}

#[test]
fn a_free_on_a_held_stream_returns_and_its_state_is_true() {
    for_each_device(|device| {
        if !looks_on_the_device(device) {
            return; // what is read back there is waited for
        }
        let rig = Rig::new(device, quiet());
        let (own, other) = (rig.pool.lease().unwrap(), rig.pool.lease().unwrap());
        let block = rig.allocate(1000, &own);
        let id = BlockId::from_block(&block);
        let bytes = rig.guard.bytes_outstanding();
        let gate = WatchedGate::new(other.hold().unwrap());
        rig.write(id, &other, 0, 3, 1000);
        rig.guard.deallocate(block).unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Retired, "its use has not completed");
        rig.guard.reap_completed().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Retired);
        gate.release();
        own.synchronize().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Quarantined);
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Quarantined, "a reap is no flush");
        assert_eq!(rig.guard.bytes_outstanding(), bytes, "held back, and outstanding");
        rig.guard.flush_quarantine().unwrap();
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Freed);
        assert_eq!(rig.guard.bytes_outstanding(), 0);
    });
}

#[test]
fn an_open_use_keeps_a_returned_block_from_being_poisoned() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let (own, other) = (rig.pool.lease().unwrap(), rig.pool.lease().unwrap());
        let block = rig.allocate(256, &own);
        let id = BlockId::from_block(&block);
        rig.guard.prepare_block_use(id, other.id(), Access::ReadWrite).unwrap();
        let again = twin(&block);
        rig.guard.deallocate(block).unwrap();
        assert_eq!(rig.guard.quarantine(), (0, 0), "it is not held back yet");
        assert_eq!(rig.guard.block_state(id), BlockState::Retired);
        let second = rig.guard.deallocate(again);
        assert_eq!(second, Err(ResourceError::UseAfterFree { generation: id.generation }));
        poke(&other, id.ptr, 0, 9, 256);
        let mut back = [0; 256];
        // SAFETY: the use is open, so the block is there.
        unsafe { other.copy_dtoh(&mut back, id.ptr) }.unwrap();
        assert_eq!(back, [9; 256]);
        rig.guard.finish_block_use(id, other.id(), Access::ReadWrite).unwrap();
        assert_eq!(rig.guard.quarantine().1, 1);
        rig.guard.flush_quarantine().unwrap();
        assert_eq!(rig.guard.reap_pending(), Ok(()), "the open use was no use after free");
        assert_eq!(rig.guard.bytes_outstanding(), 0);
    });
}

#[test]
fn a_budget_charges_the_canaries_and_a_full_one_empties_the_quarantine() {
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let stream = pool.lease().unwrap();
        let config = PoolConfig::default();
        let inner = PoolResource::new(device.clone(), device.ordinal(), pool, config).unwrap();
        let guard = DebugGuardResource::on_home(inner, quiet());
        let budget = GlobalDeviceBudget::over(guard, 10_240);
        assert_eq!(
            budget.charge_for(1000, MIN_ALIGN),
            1536,
            "whole units of 1000 and two canaries of 256"
        );
        let block = budget.allocate(1000, stream.id(), ROWS).unwrap();
        assert_eq!((block.bytes, budget.reserved_bytes()), (1000, 1536));
        let wide = budget
            .allocate_request(AllocRequest::new(1000, stream.id(), ROWS).aligned(4096), None)
            .unwrap();
        assert!(wide.ptr.is_multiple_of(4096));
        assert_eq!(budget.reserved_bytes(), 1536 + 5376, "alignment is charged, too");
        budget.deallocate(wide).unwrap();
        budget.deallocate(block).unwrap();
        assert_eq!(budget.reserved_bytes(), 6912, "held back is not free");
        let all = budget.allocate(10_240 - 512, stream.id(), ROWS).unwrap();
        assert_eq!(budget.reserved_bytes(), 10_240);
        budget.deallocate(all).unwrap();
    });
}

#[test]
fn damage_of_another_block_does_not_hide_a_free_from_the_counts() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet().with_synchronous(true).with_quarantine(1 << 20, 1));
        let stream = rig.pool.lease().unwrap();
        let counted = StatisticsResource::over(rig.guard, StatisticsConfig::default());
        let first = counted.allocate(100, stream.id(), AllocTag("first")).unwrap();
        let second = counted.allocate(100, stream.id(), AllocTag("second")).unwrap();
        let (ptr, generation) = (first.ptr, first.generation);
        counted.deallocate(first).unwrap();
        poke(&stream, ptr, 0, 1, 1);
        let freed = counted.deallocate(second);
        assert_eq!(freed, Err(ResourceError::UseAfterFree { generation }), "the first left for it");
        assert_eq!(counted.handle().snapshot().total.current_bytes, 0);
    });
}

#[test]
fn a_late_write_whose_stream_was_given_back_is_found() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let lease = rig.pool.lease().unwrap();
        let block = rig.allocate(1000, &lease);
        let (ptr, generation) = (block.ptr, block.generation);
        poke(&lease, ptr, 0, 4, 1000);
        drop(lease);
        rig.guard.deallocate(block).unwrap();
        let default = rig.pool.default_stream().unwrap();
        poke(&default, ptr, 999, 4, 1);
        rig.guard.flush_quarantine().unwrap();
        assert_eq!(rig.guard.reap_pending(), Err(ResourceError::UseAfterFree { generation }));
        assert_eq!(rig.guard.reports()[0].offset, 999);
    });
}

#[test]
fn a_free_after_its_stream_was_given_back_follows_work_that_was_not_announced() {
    for_each_device(|device| {
        let rig = Rig::new(device, quiet());
        let lease = rig.pool.lease().unwrap();
        let default = rig.pool.default_stream().unwrap();
        let block = rig.allocate(1000, &lease);
        // The default stream, on which such a block is checked, already follows the allocation.
        let other = rig.allocate(1000, &lease);
        rig.write(BlockId::from_block(&other), &lease, 0, 1, 1000);
        rig.write(BlockId::from_block(&other), &default, 0, 2, 1000);
        let gate = WatchedGate::new(lease.hold().unwrap());
        poke(&lease, block.ptr, 0, 4, 1000);
        drop(lease);
        rig.guard.deallocate(block).unwrap();
        assert!(!default.query().unwrap(), "the check does not wait for the write");
        gate.release();
        rig.guard.deallocate(other).unwrap();
        rig.guard.flush_quarantine().unwrap();
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.reports().len(), 0);
        assert!(device.races().is_empty());
    });
}

#[test]
fn the_quarantine_goes_back_to_the_device_when_another_process_asks() {
    for_each_device(|device| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = PoolConfig::default().without_decay();
        let pool = PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config);
        let guard = DebugGuardResource::on_home(pool.unwrap(), quiet());
        let stream = streams.lease().unwrap();
        let block = guard.allocate(8 << 20, stream.id(), ROWS).unwrap();
        guard.deallocate(block).unwrap();
        stream.stream().synchronize().unwrap();
        guard.reap_pending().unwrap();
        assert_eq!(guard.quarantine().1, 1);
        // The first call queues the last check of the block; the second one finds it complete.
        guard.trim_under_pressure().unwrap();
        assert_eq!(guard.quarantine(), (0, 0));
        stream.stream().synchronize().unwrap();
        guard.reap_pending().unwrap();
        guard.trim_under_pressure().unwrap();
        assert_eq!((guard.bytes_outstanding(), guard.physical_bytes()), (0, Some(0)));
    });
}
