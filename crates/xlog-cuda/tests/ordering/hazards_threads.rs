//! Hazards of several host threads, and of streams and resources that come and go.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::rig::{Rig, assert_all, copy, fill, read};
use xlog_cuda::DeviceStream;
use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    GlobalDeviceBudget,
};
use xlog_cuda::driver::sync::Mutex;
use xlog_testing::{WatchedGate, for_each_device, threads};

const SIZE: usize = 4096;

/// The threads take turns on a block, and nothing else orders them.
struct Turns {
    blocks: Vec<Mutex<(DeviceBlock, u8)>>,
}

impl Turns {
    fn new(rig: &Rig, owner: &DeviceStream, blocks: usize) -> Self {
        let block = |_| {
            let block = rig.allocate(SIZE, owner);
            rig.write((&block).into(), owner, 0, SIZE);
            Mutex::new((block, 0))
        };
        Self { blocks: (0..blocks).map(block).collect() }
    }

    fn write(&self, rig: &Rig, n: usize, stream: &DeviceStream) {
        let mut turn = self.blocks[n % self.blocks.len()].lock();
        turn.1 = turn.1.wrapping_add(1);
        rig.write((&turn.0).into(), stream, turn.1, SIZE);
    }

    fn check(&self, rig: &Rig, n: usize, stream: &DeviceStream, to: &DeviceBlock) {
        let turn = self.blocks[n % self.blocks.len()].lock();
        let id = BlockId::from_block(&turn.0);
        rig.prepare(id, stream, Access::Read);
        copy(stream, to.ptr, id.ptr, SIZE);
        rig.finish(id, stream, Access::Read);
        let back = read(stream, to.ptr, SIZE).unwrap();
        assert_all(&back, turn.1);
    }

    fn free(self, rig: &Rig) {
        self.blocks.into_iter().for_each(|turn| rig.free(turn.into_inner().0));
        rig.settle();
    }
}

#[test]
fn a_tail_recorded_while_another_thread_queues_on_that_stream_covers_no_more_than_it_saw() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [a, b] = rig.leases();
        let turns = Turns::new(&rig, &a, 3);
        // One thread queues on A all the time; the others make B wait for A's tail, at any moment of it.
        let writer = || (0..60).for_each(|n| turns.write(&rig, n, &a));
        let reader = |offset: usize| {
            let (rig, b, turns) = (&rig, &b, &turns);
            move || {
                for n in 0..30 {
                    // B is shared, so each copy needs a target of its own.
                    let to = rig.allocate(SIZE, b);
                    turns.check(rig, n * 2 + offset, b, &to);
                    rig.free(to);
                }
            }
        };
        threads(device, vec![Box::new(writer), Box::new(reader(0)), Box::new(reader(1))]);
        turns.free(&rig);
    });
}

#[test]
fn a_thread_does_not_skip_a_wait_that_another_has_not_queued_yet() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [a, b, c] = rig.leases();
        for _ in 0..20 {
            // Both blocks were written on A; two threads prepare them on B at once. Whoever comes second may rely on the
            // first one's wait only once it stands in the stream.
            let blocks = [rig.allocate(SIZE, &a), rig.allocate(SIZE, &a)];
            blocks.iter().for_each(|block| rig.write(block.into(), &a, 7, SIZE));
            let user = |block: &DeviceBlock| {
                let (rig, b, id) = (&rig, &b, BlockId::from_block(block));
                move || rig.write(id, b, 9, SIZE)
            };
            let bodies =
                blocks.iter().map(|block| Box::new(user(block)) as Box<dyn FnOnce() + Send + '_>);
            threads(device, bodies.collect());
            for block in blocks {
                rig.expect((&block).into(), &c, 9, SIZE);
                rig.free(block);
            }
        }
        rig.settle();
    });
}

#[test]
fn of_two_threads_that_finish_writes_on_one_stream_neither_is_lost() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [owner, shared, reader] = rig.leases();
        for round in 0..60_u8 {
            let block = rig.allocate(2 * SIZE, &owner);
            let id = BlockId::from_block(&block);
            // The stamps of the two are taken in one order and may be remembered in the other.
            let writer = |half: u64| {
                let (rig, shared) = (&rig, &shared);
                let body = move || {
                    rig.prepare(id, shared, Access::Write);
                    fill(shared, id.ptr + half * SIZE as u64, round, SIZE);
                    rig.finish(id, shared, Access::Write);
                };
                Box::new(body) as Box<dyn FnOnce() + Send + '_>
            };
            threads(device, vec![writer(0), writer(1)]);
            rig.expect(id, &reader, round, 2 * SIZE);
            rig.free(block);
        }
        rig.settle();
    });
}

#[test]
fn threads_hand_blocks_round_over_streams_and_every_byte_is_the_last_writers() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let streams = rig.leases::<4>();
        let turns = Turns::new(&rig, &streams[0], 5);
        let body = |thread: usize| {
            let (rig, streams, turns) = (&rig, &streams, &turns);
            move || {
                for n in 0..40 {
                    let stream = &streams[(thread + n) % 4];
                    if (thread + n).is_multiple_of(3) {
                        let to = rig.allocate(SIZE, stream);
                        turns.check(rig, n, stream, &to);
                        rig.free(to);
                    } else {
                        turns.write(rig, n + thread, stream);
                    }
                    if n % 10 == 9 {
                        rig.resource.reap_completed().unwrap();
                    }
                }
            }
        };
        let bodies = (0..4).map(|thread| Box::new(body(thread)) as Box<dyn FnOnce() + Send + '_>);
        threads(device, bodies.collect());
        turns.free(&rig);
    });
}

#[test]
fn a_block_is_used_and_freed_after_its_allocation_stream_was_given_back() {
    for_each_device(|device| {
        let rig = Rig::with_streams(device, 4);
        let [user] = rig.leases();
        for round in 0..10 {
            let owner = rig.pool.acquire().unwrap();
            let stream = rig.pool.resolve(owner).unwrap();
            let gate = WatchedGate::new(stream.hold().unwrap());
            let block = rig.allocate(SIZE, &stream);
            let id = BlockId::from_block(&block);
            rig.write(id, &stream, round, SIZE);
            drop(stream);
            assert!(rig.pool.release(owner));
            // Other users of the pool may get the driver stream below.
            let other = rig.pool.lease().unwrap();
            let beside = rig.allocate(SIZE, &other);
            rig.write((&beside).into(), &other, 0xee, SIZE);
            rig.prepare(id, &user, Access::Read);
            user.host_fn(|| {}).unwrap();
            gate.release();
            assert_all(&read(&user, id.ptr, SIZE).unwrap(), round);
            rig.finish(id, &user, Access::Read);
            rig.free(block);
            rig.free(beside);
            rig.settle();
            assert_eq!(rig.state(id), BlockState::Freed);
        }
    });
}

#[test]
fn a_driver_stream_that_serves_again_under_a_new_id_inherits_no_order() {
    for_each_device(|device| {
        // A pool of one: every lease runs on one of two driver streams.
        let rig = Rig::with_streams(device, 1);
        let mut kept: Option<(DeviceBlock, u8)> = None;
        for value in 0..100 {
            let lease = rig.pool.lease().unwrap();
            if let Some((block, due)) = kept.take() {
                rig.prepare((&block).into(), &lease, Access::Read);
                if value % 3 == 0 {
                    assert_all(&read(&lease, block.ptr, SIZE).unwrap(), due);
                } else {
                    let to = rig.allocate(SIZE, &lease);
                    copy(&lease, to.ptr, block.ptr, SIZE);
                    rig.free(to);
                }
                rig.finish((&block).into(), &lease, Access::Read);
                rig.free(block);
            }
            let block = rig.allocate(SIZE, &lease);
            rig.write((&block).into(), &lease, value, SIZE);
            kept = Some((block, value));
        }
        rig.free(kept.unwrap().0);
        rig.settle();
    });
}

/// Acquires and releases streams, each with a block that outlives it, and uses the blocks of streams long gone.
fn come_and_go(rig: &Rig, streams: usize) {
    const KEPT: usize = 20;
    let default = rig.pool.default_stream().unwrap();
    let mut blocks: std::collections::VecDeque<(DeviceBlock, u8)> = Default::default();
    for n in 0..streams {
        let id = rig.pool.acquire().unwrap();
        let stream = rig.pool.resolve(id).unwrap();
        let block = rig.allocate(64, &stream);
        rig.write((&block).into(), &stream, n as u8, 64);
        blocks.push_back((block, n as u8));
        if blocks.len() > KEPT {
            let (block, due) = blocks.pop_front().unwrap();
            let user = if n % 2 == 0 { &stream } else { &default };
            if n % 50 == 0 {
                rig.expect((&block).into(), user, due, 64);
            } else {
                rig.prepare((&block).into(), user, Access::Write);
                fill(user, block.ptr, 0, 64);
                rig.finish((&block).into(), user, Access::Write);
            }
            rig.free(block);
        }
        drop(stream);
        assert!(rig.pool.release(id));
        if n % 100 == 0 {
            rig.resource.reap_completed().unwrap();
        }
    }
    blocks.into_iter().for_each(|(block, _)| rig.free(block));
    rig.settle();
}

#[test]
fn more_streams_than_the_pool_has_come_and_go_with_a_block_each() {
    for_each_device(|device| come_and_go(&Rig::new(device), 17 * 3));
}

#[test]
fn ten_thousand_streams_come_and_go_with_a_block_each() {
    for_each_device(|device| {
        // One seed is as good as another here.
        if device.sim().is_some_and(|sim| sim.seed().is_some_and(|seed| seed != 1)) {
            return;
        }
        come_and_go(&Rig::new(device), 10_000);
    });
}

/// The other thread removes completed frees from lists before it counts them.
#[test]
fn a_reap_beside_one_that_never_waits_returns_once_all_frees_are_counted() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let inner = Box::new(Arc::clone(&rig.resource));
        let budget = GlobalDeviceBudget::new(inner, 64 << 20);
        let [stream] = rig.leases();
        let is_done = AtomicBool::new(false);
        let reaps = || {
            while !is_done.load(Ordering::Acquire) {
                budget.reap_completed().unwrap();
            }
        };
        let frees = || {
            let mut left = 0;
            for _ in 0..60 {
                let allocate = |()| budget.allocate(SIZE, stream.id(), AllocTag("rows")).unwrap();
                let blocks = [(); 100].map(allocate);
                blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap());
                budget.reap_pending().unwrap();
                left += budget.bytes_outstanding() + budget.reserved_bytes();
            }
            is_done.store(true, Ordering::Release);
            assert_eq!(left, 0);
        };
        threads(device, vec![Box::new(reaps), Box::new(frees)]);
    });
}

#[test]
fn a_resource_dropped_with_frees_pending_frees_nothing_under_running_work() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [owner, user] = rig.leases();
        let block = rig.allocate(SIZE, &owner);
        let open = rig.allocate(SIZE, &owner);
        let (id, open_id) = (BlockId::from_block(&block), BlockId::from_block(&open));
        rig.prepare(open_id, &user, Access::Write);
        rig.free(open);
        let gate = WatchedGate::new(user.hold().unwrap());
        rig.write(id, &user, 1, SIZE);
        fill(&user, open_id.ptr, 1, SIZE);
        rig.free(block);
        let Rig { resource, pool, .. } = rig;
        let handles = [owner.stream().clone(), user.stream().clone()];
        drop((owner, user));
        drop(resource);
        drop(pool);
        gate.release();
        handles.iter().for_each(|stream| stream.synchronize().unwrap());
        assert_eq!(Arc::strong_count(&handles[0]), 1, "the dropped resource keeps a stream");
    });
}

#[test]
fn a_use_closed_beside_the_owner_of_a_block_leaves_nothing_for_the_next_block_in_its_place() {
    for_each_device(|device| {
        let rig = Rig::new(device);
        let [a, b, c] = rig.leases();
        // The clock of A is far ahead of C's.
        let first = rig.allocate(SIZE, &a);
        for n in 0..50 {
            rig.write((&first).into(), &a, n, SIZE);
            rig.write((&first).into(), &b, n, SIZE);
        }
        rig.free(first);
        rig.settle();
        let block = rig.allocate(SIZE, &a);
        let id = BlockId::from_block(&block);
        let generation = block.generation;
        let (owned, other) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rig.prepare(id, &a, Access::Write);
                other.wait();
                owned.wait();
                rig.finish(id, &a, Access::Write);
            });
            other.wait();
            // Often enough in a row to own the block.
            for _ in 0..40 {
                rig.prepare(id, &a, Access::Write);
                rig.finish(id, &a, Access::Write);
            }
            owned.wait();
        });
        rig.free(block);
        rig.settle();
        let next = rig.allocate(SIZE, &c);
        let id = BlockId::from_block(&next);
        let place = |generation: Generation| generation.0 & 0xff_ffff;
        assert_eq!(place(id.generation), place(generation), "otherwise nothing is tested");
        let before = rig.resource.statistics().waits_inserted;
        for _ in 0..2 {
            rig.prepare(id, &b, Access::Read);
            rig.finish(id, &b, Access::Read);
        }
        let after = rig.resource.statistics().waits_inserted;
        assert_eq!(after - before, 1, "B followed the allocation on C once");
        rig.free(next);
        rig.settle();
    });
}
