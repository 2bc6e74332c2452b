//! Guard pages: a stray access faults, and what lay around it is told.
#![allow(clippy::unwrap_used)]

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, DamageKind, DeviceMemoryResource, DeviceStream, GuardConfig,
    GuardMode, GuardOutput, MIN_ALIGN, PagePlacement, PhysicalMeter, ResourceError, ResourceResult,
};
use xlog_cuda::sim::{RaceKind, SimConfig, SimDevice};
use xlog_testing::{WatchedGate, for_each_device, for_each_sim, promptly};

use crate::support::{ROWS, Random, Replay, Rig, gpu, looks_on_the_device, poke, quiet, seeds};

const UNIT: usize = 4096;

fn pages() -> GuardConfig {
    quiet().with_mode(GuardMode::Pages)
}

fn sampled(every: u64) -> GuardConfig {
    quiet().with_mode(GuardMode::Sampled(NonZeroU64::new(every).unwrap()))
}

/// A seeded device with small pages, so that a program is quick.
fn small_pages(seed: u64) -> Arc<CudaDevice> {
    let config = SimConfig::default().with_seed(seed).with_granularity(UNIT);
    Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()))
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let file = format!("xlog-guard-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(file))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Random blocks, and one stray byte near one of them: in what alignment leaves it is reported, beyond that it faults.
#[test]
fn every_stray_byte_faults_or_is_reported() {
    if gpu().is_some() {
        return; // A fault ends the process's context.
    }
    let (mut faults, mut reports) = (0, 0);
    for seed in seeds(1000, 0) {
        let _replay = Replay(seed);
        let device = small_pages(seed);
        let mut random = Random::new(seed);
        let at_end = random.below(2) == 0;
        let placement = if at_end { PagePlacement::End } else { PagePlacement::Start };
        let rig = Rig::new(&device, pages().with_placement(placement));
        let stream = rig.pool.lease().unwrap();
        let blocks: Vec<_> =
            (0..3).map(|_| rig.allocate(1 + random.below(2 * UNIT), &stream)).collect();
        let victim = &blocks[random.below(3)];
        let mapped = victim.bytes.next_multiple_of(UNIT);
        // Behind a block that ends its pages, before one that begins them.
        let (offset, faulting) = if at_end {
            let left = victim.bytes.next_multiple_of(256) - victim.bytes;
            let beyond = random.below(left + 50);
            ((victim.bytes + beyond) as i64, beyond >= left)
        } else {
            (-1 - random.below(UNIT) as i64, true)
        };
        assert!(victim.bytes <= mapped);
        poke(&stream, victim.ptr, offset, 0x21, 1);
        let (ptr, generation) = (victim.ptr, victim.generation);
        if faulting {
            faults += 1;
            let said = rig.guard.check_now().unwrap_err().to_string();
            assert!(said.contains("the device is lost"), "{said}");
            let found = rig.guard.describe_address(ptr.wrapping_add_signed(offset));
            let nearest = &found.blocks[0];
            assert_eq!((nearest.generation, nearest.offset), (generation, Some(offset)));
            assert_eq!((nearest.state, nearest.tag), (BlockState::Live, ROWS));
        } else {
            reports += 1;
            let damage = Err(ResourceError::OutOfBounds { generation });
            assert_eq!(rig.guard.check_now(), damage);
            let report = &rig.guard.reports()[0];
            assert_eq!((report.kind, report.offset), (DamageKind::OutOfBounds, offset));
        }
    }
    // One program alone tells nothing of the mixture.
    let enough = std::env::var_os("XLOG_GUARD_SEED").is_some() || (faults > 100 && reports > 100);
    assert!(enough, "{faults} faults, {reports} reports");
}

#[test]
fn a_write_after_the_free_faults_and_the_post_mortem_names_the_block() {
    for_each_sim(|device, _| {
        let file = Scratch::new("late-write");
        let _ = std::fs::remove_file(&file.0);
        let rig = Rig::new(device, pages().with_output(GuardOutput::File(file.0.clone())));
        let stream = rig.pool.lease().unwrap();
        let block = rig.guard.allocate(5000, stream.id(), AllocTag("index")).unwrap();
        let id = BlockId::from_block(&block);
        rig.guard.deallocate(block).unwrap();
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Freed);
        poke(&stream, id.ptr, 10, 1, 4);
        let lost = rig.guard.check_now().and_then(|()| {
            let _ = stream.synchronize();
            rig.guard.allocate(1, stream.id(), ROWS).map(|_| ())
        });
        assert!(matches!(lost, Err(ResourceError::Driver(_))), "{lost:?}");
        let _ = rig.guard.reap_pending();
        let written = std::fs::read_to_string(&file.0).unwrap();
        assert!(written.contains("5000 bytes (index), freed"), "{written}");
        assert!(written.contains("the address is its byte 10"), "{written}");
        assert_eq!(
            written.matches("is lost").count(),
            2,
            "the post-mortem is written once: {written}"
        );
    });
}

/// A seeded device of every seed up to 12, and one that runs by itself.
fn small_devices() -> impl Iterator<Item = Arc<CudaDevice>> {
    let unseeded = SimDevice::open(SimConfig::default().with_granularity(UNIT)).unwrap();
    (0..12).map(small_pages).chain([Arc::new(CudaDevice::from_sim(unseeded))])
}

/// Writes into a freed block and expects a fault: its pages are unmapped.
fn faults(stream: &DeviceStream, ptr: u64, what: &str) {
    poke(stream, ptr, 0, 7, 4);
    let told = stream.synchronize().unwrap_err().to_string();
    assert!(told.contains("the device is lost"), "{what}: {told}");
}

#[test]
fn a_write_after_the_free_of_an_idle_block_faults_without_a_reap() {
    for config in [pages(), sampled(1)] {
        for device in small_devices() {
            let rig = Rig::new(&device, config.clone());
            let stream = rig.pool.lease().unwrap();
            let block = rig.allocate(5000, &stream);
            let ptr = block.ptr;
            poke(&stream, ptr, 0, 1, 5000);
            stream.synchronize().unwrap();
            rig.guard.deallocate(block).unwrap();
            faults(&stream, ptr, device.spec());
            assert!(device.races().is_empty(), "it was in order: {:#?}", device.races());
        }
    }
}

#[test]
fn a_write_after_the_free_races_while_older_work_keeps_the_pages() {
    for device in small_devices() {
        let rig = Rig::new(&device, pages());
        let stream = rig.pool.lease().unwrap();
        let block = rig.allocate(5000, &stream);
        let ptr = block.ptr;
        let gate = stream.hold().unwrap();
        poke(&stream, ptr, 0, 1, 5000);
        rig.guard.deallocate(block).unwrap();
        poke(&stream, ptr, 10, 7, 4);
        gate.release();
        let told = stream.synchronize().unwrap_err().to_string();
        assert!(told.contains("use after free"), "{}: {told}", device.spec());
        let races = device.races();
        assert_eq!((races.len(), races[0].kind), (1, RaceKind::UseAfterFree), "{races:#?}");
    }
}

#[test]
fn the_next_request_or_free_unmaps_a_freed_block_whose_work_has_completed() {
    for by_request in [true, false] {
        for device in small_devices() {
            let rig = Rig::new(&device, pages());
            let stream = rig.pool.lease().unwrap();
            let (block, other) = (rig.allocate(5000, &stream), rig.allocate(5000, &stream));
            let id = BlockId::from_block(&block);
            let gate = stream.hold().unwrap();
            poke(&stream, id.ptr, 0, 1, 5000);
            rig.guard.deallocate(block).unwrap();
            assert_eq!(rig.guard.block_state(id), BlockState::Retired, "its work is held");
            gate.release();
            stream.synchronize().unwrap();
            match by_request {
                true => drop(rig.allocate(1, &stream)),
                false => rig.guard.deallocate(other).unwrap(),
            }
            faults(&stream, id.ptr, device.spec());
        }
    }
}

#[test]
fn clean_programs_between_guard_pages_are_not_reported() {
    for_each_device(|device| {
        for config in [pages(), pages().with_placement(PagePlacement::Start), sampled(2)] {
            let rig = Rig::new(device, config);
            let streams = [rig.pool.lease().unwrap(), rig.pool.lease().unwrap()];
            let mut random = Random::new(7);
            let mut blocks = Vec::new();
            for _ in 0..60 {
                let stream = &streams[random.below(2)];
                if blocks.len() < 6 {
                    let block = rig.allocate(1 + random.below(10_000), stream);
                    rig.write((&block).into(), stream, 0, 0xff, block.bytes);
                    blocks.push(block);
                } else {
                    let block = blocks.swap_remove(random.below(blocks.len()));
                    rig.write((&block).into(), stream, 0, 0, block.bytes);
                    rig.guard.deallocate(block).unwrap();
                }
            }
            blocks.into_iter().for_each(|block| rig.guard.deallocate(block).unwrap());
            rig.guard.reap_pending().unwrap();
            rig.guard.reap_pending().unwrap();
            assert_eq!(rig.guard.bytes_outstanding(), 0);
            assert!(rig.guard.reports().is_empty(), "{:#?}", rig.guard.reports());
        }
    });
}

#[test]
fn a_block_in_use_elsewhere_is_not_unmapped() {
    for_each_device(|device| {
        if !looks_on_the_device(device) {
            return; // what is read back there is waited for
        }
        let rig = Rig::new(device, pages());
        let (own, other) = (rig.pool.lease().unwrap(), rig.pool.lease().unwrap());
        let block = rig.allocate(1000, &own);
        let id = BlockId::from_block(&block);
        let gate = WatchedGate::new(other.hold().unwrap());
        promptly("write", || rig.write(id, &other, 0, 1, 1000));
        promptly("deallocate", || rig.guard.deallocate(block).unwrap());
        promptly("reap_completed", || rig.guard.reap_completed().unwrap());
        assert_eq!(rig.guard.block_state(id), BlockState::Retired);
        assert!(rig.guard.bytes_outstanding() >= 1000);
        gate.release();
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.block_state(id), BlockState::Freed);
        assert_eq!(rig.guard.bytes_outstanding(), 0);
    });
}

#[derive(Default)]
struct Meter {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl PhysicalMeter for Meter {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most.fetch_max(now, Ordering::Relaxed);
        Ok(())
    }
    fn release(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[test]
fn sampled_blocks_keep_to_their_physical_memory_and_announce_it() {
    for_each_device(|device| {
        let unit = device.properties().granularity;
        let most = 3 * unit;
        let config = sampled(1).with_page_bytes(most);
        let plain = Rig::new(device, quiet().with_mode(GuardMode::Canaries));
        let rig = Rig::new(device, config);
        let meter = Arc::new(Meter::default());
        rig.guard.meter_physical(meter.clone()).unwrap();
        let before = meter.now.load(Ordering::Relaxed);
        let stream = rig.pool.lease().unwrap();
        let blocks: Vec<_> = (0..10).map(|_| rig.allocate(1000, &stream)).collect();
        let is_sampled = |ptr: u64| !rig.guard.describe_address(ptr).blocks.is_empty();
        assert!(is_sampled(blocks[0].ptr));
        let guarded = blocks.iter().filter(|block| {
            let near = rig.guard.describe_address(block.ptr);
            near.blocks.first().is_some_and(|near| near.generation == block.generation)
        });
        assert_eq!(guarded.count(), 3, "the others are handed out as they are");
        assert_eq!(
            rig.guard.charge_for(1000, MIN_ALIGN),
            plain.guard.inner().charge_for(1000, MIN_ALIGN)
        );
        assert!(meter.now.load(Ordering::Relaxed) >= before + most);
        blocks.into_iter().for_each(|block| rig.guard.deallocate(block).unwrap());
        rig.guard.reap_pending().unwrap();
        assert_eq!(rig.guard.bytes_outstanding(), 0);
        let next = rig.allocate(1000, &stream);
        let near = rig.guard.describe_address(next.ptr);
        assert_eq!(near.blocks[0].generation, next.generation, "there is room again");
        rig.guard.deallocate(next).unwrap();
    });
}

#[test]
fn one_in_so_many_blocks_is_sampled() {
    for_each_device(|device| {
        let config = sampled(10).with_page_bytes(1 << 30).with_quarantine(0, 0);
        let rig = Rig::new(device, config);
        let stream = rig.pool.lease().unwrap();
        let mut guarded = [0, 0];
        for turn in 0..200 {
            let block = rig.allocate(100, &stream);
            let near = rig.guard.describe_address(block.ptr);
            guarded[turn % 2] += usize::from(
                near.blocks.first().is_some_and(|near| near.generation == block.generation),
            );
            rig.guard.deallocate(block).unwrap();
            // The record of this block serves the next one, whatever the machine is busy with: the choice depends on it.
            rig.guard.reap_pending().unwrap();
        }
        // Of those that come first in every pair as of those that come second. How far a row of this length can be off is what
        // `sampling.rs` tests.
        assert!(guarded.iter().all(|count| (6..=14).contains(count)), "{guarded:?}");
    });
}

#[test]
fn a_freed_range_is_not_the_next_blocks() {
    for_each_device(|device| {
        let rig = Rig::new(device, pages());
        let stream = rig.pool.lease().unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..20 {
            let block = rig.allocate(100, &stream);
            assert!(seen.insert(block.ptr), "the range of a freed block was mapped again");
            rig.guard.deallocate(block).unwrap();
            rig.guard.reap_pending().unwrap();
        }
    });
}

#[test]
fn a_device_without_virtual_memory_is_refused_by_name() {
    let config = SimConfig::default().with_virtual_memory(false);
    let device = Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()));
    for config in [pages(), sampled(100)] {
        let rig = Rig::new(&device, config);
        let said = rig.guard.allocate(100, rig.pool.lease().unwrap().id(), ROWS).unwrap_err();
        assert!(said.to_string().contains("guard pages on device \"sim\""), "{said}");
    }
}
