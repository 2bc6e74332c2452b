//! A pool at its maximum: free ranges that change their stream, what is left of them, and trims beside pending work.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use crate::support::Random;
use crate::support::pool_rig::{MIB, Rig, rig, scarce};
use crate::support::rig::{TAG, assert_all, fill, read};
use xlog_cuda::device_runtime::{
    Access, BlockId, DeviceBlock, DeviceMemoryResource, PoolConfig, PoolResource, PoolSegments,
    PoolSnapshot, ResourceError, StreamLease, StreamPool,
};
use xlog_cuda::{CudaDevice, Gate};
use xlog_testing::{WatchedGate, for_each_seam};

const KIB: usize = 1 << 10;

/// A pool of 4 MiB that one stream has used up: 2 MiB of it are free behind a copy that a held stream has yet to make.
struct Full {
    rig: Rig,
    /// Where the copy goes, and a block that only takes room.
    witness: DeviceBlock,
    filler: DeviceBlock,
    gate: WatchedGate,
}

fn full(rig: Rig, first: &StreamLease) -> Full {
    let [witness, filler, block] =
        [MIB, MIB, 2 * MIB].map(|bytes| rig.pool.allocate(bytes, first.id(), TAG).unwrap());
    assert_eq!(rig.pool.snapshot().reserved_bytes, 4 * MIB);
    fill(first, block.ptr, 0x11, 2 * MIB);
    let gate = WatchedGate::new(first.hold().unwrap());
    // SAFETY: both blocks are live when this runs; the free below comes after it.
    unsafe { first.copy_dtod(witness.ptr, block.ptr, MIB).unwrap() };
    rig.pool.deallocate(block).unwrap();
    Full { rig, witness, filler, gate }
}

impl Full {
    /// The second stream steals a range, of which it needs a part; the third overwrites the rest before the first has read it.
    fn pass_on(self, device: &CudaDevice, streams: [&StreamLease; 3]) {
        let [first, second, third] = streams;
        let Self { rig, witness, filler, gate } = self;
        let part = rig.allocate(32 * KIB, second);
        let before = rig.pool.snapshot();
        let rest = rig.allocate(64 * KIB, third);
        fill(third, rest.ptr, 0xee, 64 * KIB);
        fill(second, part.ptr, 0xdd, 32 * KIB);
        let after = rig.pool.snapshot();
        gate.release();
        assert_all(&read(first, witness.ptr, MIB).unwrap(), 0x11);
        assert_all(&read(third, rest.ptr, 64 * KIB).unwrap(), 0xee);
        assert_eq!(before.paths.completed, after.paths.completed, "nothing was complete");
        for block in [part, rest, witness, filler] {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    }
}

#[test]
fn what_is_left_of_a_range_stolen_with_a_wait_is_not_handed_to_a_third_stream_under_the_first() {
    for_each_seam(|device| {
        let rig = rig(device, scarce(4 * MIB));
        let [first, second, third] = rig.leases();
        let full = full(rig, &first);
        full.pass_on(device, [&first, &second, &third]);
    });
}

#[test]
fn what_is_left_of_a_range_stolen_in_followed_order_is_not_handed_to_a_third_stream_under_the_first()
 {
    for_each_seam(|device| {
        let rig = rig(device, scarce(4 * MIB));
        let [first, second, third] = rig.leases();
        let full = full(rig, &first);
        // A hand-over of another block makes the second stream follow the first, behind the free.
        let id = BlockId::from_block(&full.filler);
        for (stream, access) in [(&first, Access::Write), (&second, Access::Read)] {
            full.rig.pool.prepare_block_use(id, stream.id(), access).unwrap();
            if access.writes() {
                fill(stream, id.ptr, 1, KIB);
            }
            full.rig.pool.finish_block_use(id, stream.id(), access).unwrap();
        }
        full.pass_on(device, [&first, &second, &third]);
    });
}

#[test]
fn a_range_that_went_round_five_streams_stays_behind_the_first() {
    for_each_seam(|device| {
        let rig = rig(device, scarce(4 * MIB));
        let streams: [StreamLease; 5] = rig.leases();
        let Full { rig, witness, filler, gate } = full(rig, &streams[0]);
        // Each takes more than the one before has used, so that ranges and remainders of all of them are mixed.
        let mut taken = Vec::new();
        for (at, stream) in streams.iter().enumerate().skip(1) {
            let bytes = (16 << at) * KIB;
            let block = rig.allocate(bytes, stream);
            fill(stream, block.ptr, 0xe0 + at as u8, bytes);
            if at % 2 == 0 {
                taken.push((block, at, bytes));
            } else {
                rig.pool.deallocate(block).unwrap();
            }
        }
        assert!(rig.pool.snapshot().paths.waited >= 1);
        gate.release();
        assert_all(&read(&streams[0], witness.ptr, MIB).unwrap(), 0x11);
        for (block, at, bytes) in taken {
            assert_all(&read(&streams[at], block.ptr, bytes).unwrap(), 0xe0 + at as u8);
            rig.pool.deallocate(block).unwrap();
        }
        for block in [witness, filler] {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    });
}

/// Three streams have freed 4 MiB each; the second is held, and the third follows it. What `give_back` leaves of the 12.
fn beside_pending_work(
    device: &Arc<CudaDevice>,
    config: PoolConfig,
    give_back: impl Fn(&PoolResource),
) {
    let rig = rig(device, config.with_growth(4 * MIB));
    let streams: [StreamLease; 3] = rig.leases();
    let blocks = streams.each_ref().map(|stream| rig.allocate(4 * MIB, stream));
    let passed = rig.allocate(KIB, &streams[1]);
    let gate = WatchedGate::new(streams[1].hold().unwrap());
    let id = BlockId::from_block(&passed);
    for (stream, access) in [(&streams[1], Access::Write), (&streams[2], Access::Read)] {
        rig.pool.prepare_block_use(id, stream.id(), access).unwrap();
        if access.writes() {
            fill(stream, id.ptr, 1, KIB);
        }
        rig.pool.finish_block_use(id, stream.id(), access).unwrap();
    }
    for (stream, block) in streams.iter().zip(blocks) {
        fill(stream, block.ptr, 7, 4 * MIB);
        rig.pool.deallocate(block).unwrap();
    }
    streams[0].synchronize().unwrap();
    let held = rig.pool.snapshot().reserved_bytes;
    give_back(&rig.pool);
    let left = rig.pool.snapshot().reserved_bytes;
    assert_eq!(held - left, 4 * MIB, "exactly what is complete goes");
    gate.release();
    for stream in &streams {
        stream.synchronize().unwrap();
    }
    rig.pool.deallocate(passed).unwrap();
    rig.pool.reap_pending().unwrap();
    give_back(&rig.pool);
    assert_eq!(rig.pool.snapshot().reserved_bytes, 0);
    assert!(device.races().is_empty());
}

#[test]
fn a_trim_beside_a_held_stream_leaves_what_that_stream_and_its_followers_work_on() {
    for_each_seam(|device| {
        beside_pending_work(device, PoolConfig::default(), |pool| {
            pool.trim().unwrap();
        });
    });
}

#[test]
fn decay_beside_a_held_stream_leaves_what_that_stream_and_its_followers_work_on() {
    for_each_seam(|device| {
        let config = PoolConfig::default().with_decay(Duration::ZERO, 0);
        beside_pending_work(device, config, |pool| pool.reap_completed().unwrap());
    });
}

#[test]
fn a_trim_leaves_the_rest_of_a_stolen_range_behind_the_stream_it_was_stolen_from() {
    for_each_seam(|device| {
        let rig = rig(device, scarce(4 * MIB));
        let [first, second] = rig.leases();
        let Full { rig, witness, filler, gate } = full(rig, &first);
        let part = rig.allocate(32 * KIB, &second);
        rig.pool.deallocate(part).unwrap();
        assert_eq!(rig.pool.trim().unwrap(), 0, "the copy has yet to be made");
        gate.release();
        assert_all(&read(&first, witness.ptr, MIB).unwrap(), 0x11);
        for block in [witness, filler] {
            rig.pool.deallocate(block).unwrap();
        }
        rig.empty();
        assert!(device.races().is_empty());
    });
}

/// What a random program over a pool has.
struct Running {
    rig: Rig,
    streams: [StreamLease; 4],
    live: Vec<(DeviceBlock, usize, u8)>,
    gates: Vec<Gate>,
}

impl Running {
    fn allocate(&mut self, bytes: usize, at: usize, value: u8) {
        match self.rig.pool.allocate(bytes, self.streams[at].id(), TAG) {
            Ok(block) => {
                fill(&self.streams[at], block.ptr, value, bytes);
                self.live.push((block, at, value));
            }
            // The free memory is in pieces.
            Err(ResourceError::OutOfMemory { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Writes all of a block on its own stream or, announced, on another, and frees it at once.
    fn free(&mut self, random: &mut Random) {
        if self.live.is_empty() {
            return;
        }
        let (block, own, value) = self.live.swap_remove(random.below(self.live.len()));
        let user = if random.chance(30) { random.below(4) } else { own };
        let id = BlockId::from_block(&block);
        self.rig.pool.prepare_block_use(id, self.streams[user].id(), Access::Write).unwrap();
        fill(&self.streams[user], block.ptr, !value, block.bytes);
        self.rig.pool.finish_block_use(id, self.streams[user].id(), Access::Write).unwrap();
        self.rig.pool.deallocate(block).unwrap();
    }
}

#[test]
fn random_blocks_of_four_streams_in_a_full_pool_keep_their_bytes_beside_held_streams_and_trims() {
    let seeds = crate::support::number("XLOG_POOL_SEEDS").unwrap_or(300);
    let (mut waited, mut covered) = (0, 0);
    for seed in 0..seeds {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = scarce(4 * MIB).with_decay(Duration::ZERO, 2 * MIB);
        let pool = PoolResource::new(device.clone(), 0, streams.clone(), config).unwrap();
        let rig = Rig { streams, pool };
        let leases = rig.leases();
        let mut running = Running { rig, streams: leases, live: Vec::new(), gates: Vec::new() };
        let mut random = Random::new(seed);
        for step in 0..160_u8 {
            let live: usize = running.live.iter().map(|(block, ..)| block.bytes).sum();
            match random.below(20) {
                0..10 if live < 3 * MIB => {
                    // With so much free, a request is served with waits; with less, it may have to wait on the host.
                    if live > 3 * MIB / 2 {
                        running.gates.clear();
                    }
                    let bytes = 1024 << random.below(8);
                    let bytes = bytes + random.below(bytes);
                    running.allocate(bytes, random.below(4), step);
                }
                10..14 => running.free(&mut random),
                14..16 if running.gates.len() < 2 => {
                    running.gates.push(running.streams[random.below(4)].hold().unwrap());
                }
                16 => running.gates.clear(),
                17 => drop(running.rig.pool.trim().unwrap()),
                18 => running.rig.pool.reap_completed().unwrap(),
                _ => running.free(&mut random),
            }
        }
        let Running { rig, streams, live, gates } = running;
        drop(gates);
        for (block, at, value) in live {
            let back = read(&streams[at], block.ptr, 256).unwrap_or_else(|e| panic!("{seed}: {e}"));
            assert_all(&back, value);
            rig.pool.deallocate(block).unwrap();
        }
        let paths = rig.pool.snapshot().paths;
        (waited, covered) = (waited + paths.waited, covered + paths.covered);
        rig.empty();
        assert!(device.races().is_empty(), "sim:{seed}: {:?}", device.races());
    }
    assert!(waited >= 5 && covered >= 5, "stolen with a wait: {waited}, in order: {covered}");
}

/// One thread, blocks on 64 streams in turn, a few of them live: once each stream has memory of its own, requests are not served from
/// that of others.
#[test]
fn requests_of_many_streams_settle_on_memory_of_their_own() {
    const LIVE: usize = 64;
    for_each_seam(|device| {
        let streams = Arc::new(StreamPool::new(device.clone(), 64));
        let pool =
            PoolResource::new(device.clone(), 0, streams.clone(), PoolConfig::default()).unwrap();
        let leases: Vec<_> = (0..64).map(|_| streams.lease().unwrap()).collect();
        let mut random = Random::new(7);
        let mut live: Vec<_> = (0..LIVE).map(|_| None).collect();
        let mut turn = 0;
        let mut step = || {
            let slot = &mut live[random.below(LIVE)];
            match slot.take() {
                Some(block) => pool.deallocate(block).unwrap(),
                None => {
                    let bytes = 1 + random.below(256 << 10);
                    *slot = Some(pool.allocate(bytes, leases[turn % 64].id(), TAG).unwrap());
                    turn += 1;
                }
            }
        };
        (0..20_000).for_each(|_| step());
        let before = pool.snapshot();
        (0..20_000).for_each(|_| step());
        let after = pool.snapshot();
        let slow = |snapshot: &PoolSnapshot| {
            let paths = snapshot.paths;
            paths.covered + paths.completed + paths.grown + paths.waited
        };
        let share = (slow(&after) - slow(&before)) as f64 / 10_000.0;
        assert!(
            share < 0.05,
            "{:.0} % of the requests took memory of others: {after:?}",
            share * 100.0
        );
        assert!(after.reserved_bytes <= 256 * MIB, "{after:?}");
        for block in live.into_iter().flatten() {
            pool.deallocate(block).unwrap();
        }
    });
}

/// RMM's multi_stream_allocations, cold: small blocks of four busy streams must not cost four growths.
#[test]
fn busy_streams_of_a_cold_pool_share_what_the_first_growth_has_left() {
    for_each_seam(|device| {
        let rig = rig(device, PoolConfig::default());
        let leases: [_; 4] = rig.leases();
        let mut gates = Vec::new();
        for lease in &leases {
            let block = rig.allocate(8, lease);
            gates.push(WatchedGate::new(lease.hold().unwrap()));
            fill(lease, block.ptr, 1, 8);
            rig.pool.deallocate(block).unwrap();
        }
        let snapshot = rig.pool.snapshot();
        assert_eq!(
            (snapshot.paths.waited, snapshot.paths.grown, snapshot.segments),
            (0, 1, 1),
            "{snapshot:?}"
        );
        drop(gates);
        rig.empty();
    });
}

/// A listener's thread must not wait in `cuMemFree` for a stream that the program holds.
#[test]
fn memory_whose_return_would_wait_for_the_device_is_not_returned_under_pressure() {
    for_each_seam(|device| {
        for (segments, returns) in [(PoolSegments::Mapped, true), (PoolSegments::Plain, false)] {
            let rig = rig(device, PoolConfig::default().with_segments(segments));
            let [own] = rig.leases();
            rig.pool.deallocate(rig.allocate(MIB, &own)).unwrap();
            own.synchronize().unwrap();
            assert_eq!(rig.pool.trim_under_pressure().unwrap() > 0, returns, "{segments:?}");
            rig.pool.trim().unwrap();
            assert_eq!(rig.pool.snapshot().reserved_bytes, 0, "{segments:?}");
            rig.empty();
        }
    });
}
