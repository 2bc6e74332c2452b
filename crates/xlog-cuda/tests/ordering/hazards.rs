//! What goes wrong in allocators that let memory move between streams, each as a schedule that would show it.
//!
//! Gates hold streams where they hurt most. On the simulated devices the race detector judges as well as the bytes; on a
//! GPU the bytes do.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::rig::{Rig, TAG, assert_all, copy, fill, read, twin};
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation, ResourceError,
};
use xlog_testing::{WatchedGate, for_each_seam, threads};

const SIZE: usize = 256 << 10;

fn held(stream: &xlog_cuda::DeviceStream) -> WatchedGate {
    WatchedGate::new(stream.hold().unwrap())
}

#[test]
fn an_owner_frees_while_another_stream_still_reads() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, reader, next] = rig.leases();
        let copied = rig.allocate(SIZE, &reader);
        let block = rig.allocate(SIZE, &owner);
        let id = BlockId::from_block(&block);
        rig.write(id, &owner, 0x11, SIZE);

        let gate = held(&reader);
        rig.copy_to((&copied).into(), id, &reader, SIZE);
        rig.free(block);
        assert_eq!(rig.state(id), BlockState::Retired);
        // Whoever gets the memory now overwrites it at once.
        for stream in [&owner, &next, &owner, &next] {
            let other = rig.allocate(SIZE, stream);
            fill(stream, other.ptr, 0xee, SIZE);
            rig.free(other);
        }
        gate.release();

        assert_all(&read(&reader, copied.ptr, SIZE).unwrap(), 0x11);
        rig.free(copied);
        rig.settle();
        assert_eq!(rig.state(id), BlockState::Freed);
    });
}

#[test]
fn two_readers_then_a_writer_then_a_free() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, first, second, writer] = rig.leases();
        let copies = [rig.allocate(SIZE, &first), rig.allocate(SIZE, &second)];
        let block = rig.allocate(SIZE, &owner);
        let id = BlockId::from_block(&block);
        rig.write(id, &owner, 0x22, SIZE);

        let gates = [held(&first), held(&second)];
        rig.copy_to((&copies[0]).into(), id, &first, SIZE);
        rig.copy_to((&copies[1]).into(), id, &second, SIZE);
        rig.write(id, &writer, 0x33, SIZE);
        rig.free(block);
        let next = rig.allocate(SIZE, &owner);
        fill(&owner, next.ptr, 0xee, SIZE);
        for (n, gate) in gates.into_iter().enumerate() {
            assert!(!writer.query().unwrap(), "the writer ran with {} readers held", 2 - n);
            gate.release();
        }

        assert_all(&read(&first, copies[0].ptr, SIZE).unwrap(), 0x22);
        assert_all(&read(&second, copies[1].ptr, SIZE).unwrap(), 0x22);
        copies.into_iter().chain([next]).for_each(|block| rig.free(block));
        rig.settle();
    });
}

#[test]
fn a_read_that_finishes_inside_another_streams_write_is_not_lost() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, writer, reader, last] = rig.leases();
        for free_at_once in [false, true] {
            let copied = rig.allocate(SIZE, &reader);
            let block = rig.allocate(SIZE, &owner);
            let id = BlockId::from_block(&block);
            rig.prepare(id, &writer, Access::Write);
            fill(&writer, id.ptr, 0x44, SIZE);
            reader.wait_for(&writer).unwrap();
            let gate = held(&reader);
            rig.copy_to((&copied).into(), id, &reader, SIZE);
            rig.finish(id, &writer, Access::Write);
            if !free_at_once {
                rig.write(id, &last, 0x55, SIZE);
                assert!(!last.query().unwrap(), "a later write overtook the read");
            }
            rig.free(block);
            let next = rig.allocate(SIZE, &owner);
            fill(&owner, next.ptr, 0xee, SIZE);
            gate.release();
            assert_all(&read(&reader, copied.ptr, SIZE).unwrap(), 0x44);
            rig.free(next);
            rig.free(copied);
            rig.settle();
        }
    });
}

#[test]
fn a_write_that_finishes_inside_another_streams_write_is_not_lost() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, outer, inner, reader] = rig.leases();
        let block = rig.allocate(2 * SIZE, &owner);
        let id = BlockId::from_block(&block);
        for round in 0..4 {
            rig.prepare(id, &outer, Access::Write);
            rig.prepare(id, &inner, Access::Write);
            let gates = [held(&outer), held(&inner)];
            fill(&outer, id.ptr, round, SIZE);
            fill(&inner, id.ptr + SIZE as u64, round + 100, SIZE);
            let order = if round % 2 == 0 { [&outer, &inner] } else { [&inner, &outer] };
            order.into_iter().for_each(|stream| rig.finish(id, stream, Access::Write));
            rig.prepare(id, &reader, Access::Read);
            reader.host_fn(|| {}).unwrap();
            for gate in gates {
                assert!(!reader.query().unwrap(), "a reader overtook one of two writers");
                gate.release();
            }
            let back = read(&reader, id.ptr, 2 * SIZE).unwrap();
            rig.finish(id, &reader, Access::Read);
            assert_all(&back[..SIZE], round);
            assert_all(&back[SIZE..], round + 100);
        }
        rig.free(block);
        rig.settle();
    });
}

#[test]
fn an_allocation_is_used_at_once_on_another_stream() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, user] = rig.leases();
        // The memory was somebody else's a moment ago.
        let earlier = rig.allocate(SIZE, &owner);
        let gate = held(&owner);
        fill(&owner, earlier.ptr, 0xee, SIZE);
        rig.free(earlier);
        let block = rig.allocate(SIZE, &owner);
        let id = BlockId::from_block(&block);
        rig.write(id, &user, 0x66, SIZE);
        assert!(!user.query().unwrap(), "a use overtook the allocation of its block");
        gate.release();
        rig.expect(id, &user, 0x66, SIZE);
        rig.free(block);
        rig.settle();
    });
}

#[test]
fn a_stale_name_of_a_reused_address_is_refused_and_changes_nothing() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, other] = rig.leases();
        let mut reused = 0;
        for _ in 0..50 {
            let old = rig.allocate(SIZE, &owner);
            let (claim, stale) = (twin(&old), BlockId::from_block(&old));
            rig.free(old);
            let new = rig.allocate(SIZE, &owner);
            reused += usize::from(new.ptr == stale.ptr);
            let before = rig.resource.statistics();
            let refusal = ResourceError::UseAfterFree { generation: stale.generation };
            let prepared = rig.resource.prepare_block_use(stale, other.id(), Access::Write);
            assert_eq!(prepared, Err(refusal.clone()));
            let finished = rig.resource.finish_block_use(stale, other.id(), Access::Write);
            assert!(finished.is_err());
            let recorded = rig.resource.record_block_use(&claim, other.id());
            assert_eq!(recorded, Err(refusal.clone()));
            assert_eq!(rig.resource.deallocate(claim), Err(refusal));
            assert_eq!(rig.resource.statistics(), before);
            assert_eq!(rig.state((&new).into()), BlockState::Live);
            rig.free(new);
        }
        assert!(reused > 0, "no address was reused");
        rig.settle();
    });
}

#[test]
fn a_double_free_is_refused_whatever_became_of_the_first() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, reader] = rig.leases();
        let block = rig.allocate(SIZE, &owner);
        let id = BlockId::from_block(&block);
        let claims = [twin(&block), twin(&block), twin(&block)];
        let gate = held(&reader);
        rig.prepare(id, &reader, Access::Read);
        rig.free(block);
        let mut gate = Some(gate);
        for (step, claim) in claims.into_iter().enumerate() {
            let refusal = ResourceError::UseAfterFree { generation: id.generation };
            assert_eq!(rig.resource.deallocate(claim), Err(refusal), "at step {step}");
            match step {
                0 => rig.finish(id, &reader, Access::Read),
                1 => gate.take().unwrap().release(),
                _ => rig.settle(),
            }
        }
        rig.assert_empty();
    });
}

#[test]
fn forged_fields_are_refused_or_ignored_but_never_believed() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, other] = rig.leases();
        let block = rig.allocate(SIZE, &owner);
        let before = rig.resource.statistics();
        let foreign = DeviceBlock { device_ordinal: block.device_ordinal + 1, ..twin(&block) };
        assert!(matches!(rig.resource.deallocate(foreign), Err(ResourceError::Driver(_))));
        for ptr in [0, block.ptr + 256, block.ptr + SIZE as u64, u64::MAX] {
            let forged = DeviceBlock { ptr, ..twin(&block) };
            let refused = rig.resource.deallocate(forged);
            assert!(matches!(refused, Err(ResourceError::UseAfterFree { .. })), "{refused:?}");
        }
        for generation in [Generation(0), Generation(u64::MAX), Generation::next()] {
            let forged = DeviceBlock { generation, ..twin(&block) };
            let refused = rig.resource.deallocate(forged);
            assert_eq!(refused, Err(ResourceError::UseAfterFree { generation }));
        }
        assert_eq!(rig.resource.statistics(), before);

        // The free goes to the stream of the record: what the owner queued before is done by then.
        let gate = held(&owner);
        fill(&owner, block.ptr, 0x77, SIZE);
        let forged = DeviceBlock { bytes: 1, alloc_stream: other.id(), align: 1, ..block };
        rig.free(forged);
        let next = rig.allocate(SIZE, &other);
        fill(&other, next.ptr, 0xee, SIZE);
        gate.release();
        rig.free(next);
        rig.settle();
    });
}

#[test]
fn a_free_with_a_use_open_happens_after_the_use_is_finished() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, user, next] = rig.leases();
        for stream in [&user, &owner] {
            let block = rig.allocate(SIZE, &owner);
            let id = BlockId::from_block(&block);
            rig.prepare(id, stream, Access::ReadWrite);
            let counted = rig.resource.bytes_outstanding();
            rig.free(block);
            rig.resource.reap_completed().unwrap();
            rig.resource.reap_pending().unwrap();
            assert_eq!(rig.resource.bytes_outstanding(), counted);
            assert_eq!(rig.state(id), BlockState::Retired);
            let refused = rig.resource.prepare_block_use(id, next.id(), Access::Read);
            assert!(matches!(refused, Err(ResourceError::UseAfterFree { .. })), "{refused:?}");
            // Others come and go meanwhile; none may get this memory.
            for other in [&owner, &next] {
                let other_block = rig.allocate(SIZE, other);
                fill(other, other_block.ptr, 0xee, SIZE);
                rig.free(other_block);
            }
            fill(stream, id.ptr, 0x88, SIZE);
            assert_all(&read(stream, id.ptr, SIZE).unwrap(), 0x88);
            rig.finish(id, stream, Access::ReadWrite);
            rig.settle();
            assert_eq!(rig.state(id), BlockState::Freed);
        }
    });
}

#[test]
fn of_two_threads_that_free_twins_one_wins() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, user] = rig.leases();
        for round in 0..100 {
            let block = rig.allocate(4096, &owner);
            let id = BlockId::from_block(&block);
            if round % 2 == 0 {
                rig.write(id, &user, 1, 4096);
            }
            let won = AtomicUsize::new(0);
            let claims = [twin(&block), twin(&block), block];
            let bodies = claims.into_iter().map(|claim| {
                let (rig, won) = (&rig, &won);
                Box::new(move || match rig.resource.deallocate(claim) {
                    Ok(()) => _ = won.fetch_add(1, Ordering::Relaxed),
                    Err(error) => assert!(matches!(error, ResourceError::UseAfterFree { .. })),
                }) as Box<dyn FnOnce() + Send + '_>
            });
            threads(device, bodies.collect());
            assert_eq!(won.load(Ordering::Relaxed), 1, "round {round}");
            rig.settle();
        }
    });
}

#[test]
fn later_work_of_a_foreign_stream_that_waits_for_the_host_holds_nobody_up() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, user, reader] = rig.leases();
        let block = rig.allocate(SIZE, &owner);
        let id = BlockId::from_block(&block);
        rig.write(id, &user, 0x99, SIZE);
        // The use was closed on a foreign stream, so its edge is exact: what comes later there is not part of it.
        let gate = held(&user);
        fill(&user, rig.allocate(16, &user).ptr, 0, 16);
        rig.expect(id, &reader, 0x99, SIZE);
        rig.expect(id, &owner, 0x99, SIZE);
        rig.free(block);
        // The free may have waited for the uses to complete before it was queued itself.
        for _ in 0..2 {
            reader.synchronize().unwrap();
            owner.synchronize().unwrap();
            rig.resource.reap_completed().unwrap();
        }
        assert_eq!(rig.state(id), BlockState::Freed);
        assert!(!user.query().unwrap());
        gate.release();
        user.synchronize().unwrap();
    });
}

#[test]
fn an_operator_that_fails_between_its_hooks_leaves_nothing_open() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [owner, user] = rig.leases();
        let blocks = [rig.allocate(SIZE, &owner), rig.allocate(SIZE, &owner)];
        let uses: Vec<_> = blocks.iter().map(|b| (BlockId::from_block(b), Access::Write)).collect();
        uses.iter().for_each(|&(id, access)| rig.prepare(id, &user, access));
        // Half of the work was queued, the other half could not be.
        fill(&user, uses[0].0.ptr, 1, SIZE);
        rig.resource.finish_block_uses(&uses, user.id()).unwrap();
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.settle();
        let refused = rig.resource.allocate(0, user.id(), TAG);
        assert!(refused.is_err());
        rig.assert_empty();
    });
}

#[test]
fn memory_passed_on_over_three_streams_keeps_every_edge() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let streams = rig.leases::<3>();
        let kept = rig.allocate(SIZE, &streams[2]);
        for round in 0..6 {
            let gate = held(&streams[round % 3]);
            for stream in &streams {
                let block = rig.allocate(SIZE, stream);
                rig.write((&block).into(), stream, round as u8, SIZE);
                rig.copy_to((&kept).into(), (&block).into(), &streams[2], SIZE);
                rig.free(block);
            }
            gate.release();
            assert_all(&read(&streams[2], kept.ptr, SIZE).unwrap(), round as u8);
        }
        rig.free(kept);
        rig.settle();
    });
}

#[test]
fn more_uses_than_can_be_counted_without_a_lock_lose_no_order() {
    for_each_seam(|device| {
        let rig = Rig::new(device);
        let [a, b] = rig.leases();
        let (block, copied) = (rig.allocate(SIZE, &a), rig.allocate(SIZE, &b));
        let id = BlockId::from_block(&block);
        for (access, value) in [(Access::Read, 0x5a), (Access::Write, 0x5b)] {
            let gate = WatchedGate::new(a.hold().unwrap());
            rig.write(id, &a, value, SIZE);
            for _ in 0..1100 {
                rig.prepare(id, &a, access);
            }
            rig.prepare(id, &b, Access::Read);
            copy(&b, copied.ptr, id.ptr, SIZE);
            rig.finish(id, &b, Access::Read);
            gate.release();
            assert_all(&read(&b, copied.ptr, SIZE).unwrap(), value);
            for _ in 0..1100 {
                rig.finish(id, &a, access);
            }
        }
        rig.free(block);
        rig.free(copied);
        rig.settle();
        assert!(device.races().is_empty());
    });
}
