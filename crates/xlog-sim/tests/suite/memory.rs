//! Plain memory, stream-ordered pools and virtual memory: the rules of the driver, and the accounting.

#![allow(clippy::unwrap_used)]

use crate::support::{devices, edge, memset, read, seeded};
use xlog_driver::{
    AsyncPools, Driver, DriverError, MapAccess, PoolOptions, ReusePolicy, StreamHandle,
    VirtualMemory,
};
use xlog_sim::{SimConfig, SimDevice};

const ONLY_OWN: ReusePolicy = ReusePolicy {
    follow_event_dependencies: false,
    opportunistic: false,
    internal_dependencies: false,
};

fn free(device: &SimDevice, ptr: u64, stream: StreamHandle) {
    // SAFETY: the simulated device checks the block itself.
    unsafe { device.free_async(ptr, stream) }.unwrap();
}

fn taken(device: &SimDevice) -> u64 {
    let info = device.memory_info().unwrap();
    info.total - info.free
}

#[test]
fn exactly_the_capacity_fits_and_one_byte_more_does_not() {
    let device = SimDevice::open(SimConfig::default().with_capacity(8192)).unwrap();
    let whole = device.alloc(8192).unwrap();
    assert_eq!(device.memory_info().unwrap().free, 0);
    let refused = device.alloc(1).unwrap_err();
    assert!(matches!(refused, DriverError::OutOfMemory { requested: 512, .. }), "{refused:?}");
    // SAFETY: nothing was queued on it.
    unsafe { device.free(whole) }.unwrap();
    assert!(device.alloc(8193).unwrap_err().is_out_of_memory());
    device.alloc(8192).unwrap();
    for huge in [1 << 50, usize::MAX, usize::MAX - 511] {
        assert!(device.alloc(huge).unwrap_err().is_out_of_memory(), "{huge}");
    }
}

#[test]
fn a_large_capacity_costs_the_host_nothing_until_it_is_written() {
    let device = SimDevice::open(SimConfig::default().with_capacity(1 << 40)).unwrap();
    let stream = device.stream_create(0).unwrap();
    let block = device.alloc(8 << 30).unwrap();
    memset(&device, block + (4 << 30), 3, 16, stream);
    assert_eq!(read(&device, block + (4 << 30) - 1, 3, stream), [0, 3, 3]);
}

#[test]
fn addresses_are_aligned_and_never_overlap_and_no_host_maps_them() {
    let device = seeded(0);
    let mut blocks: Vec<(u64, u64)> = Vec::new();
    for i in 1..200_u64 {
        let bytes = i * 37 % 5000 + 1;
        let ptr = device.alloc(bytes as usize).unwrap();
        assert_eq!(ptr % device.properties().allocation_alignment as u64, 0);
        assert!(ptr >= 1 << 52);
        assert!(blocks.iter().all(|&(at, len)| ptr + bytes <= at || at + len <= ptr));
        blocks.push((ptr, bytes));
    }
}

#[test]
fn a_pool_reuses_a_streams_own_memory_at_once_and_anothers_by_its_switches() {
    let alternatives = [
        (ONLY_OWN, false, false, false),
        (ReusePolicy { follow_event_dependencies: true, ..ONLY_OWN }, false, true, false),
        (ReusePolicy { opportunistic: true, ..ONLY_OWN }, false, false, true),
        (ReusePolicy::ALL, false, true, true),
    ];
    for (reuse, unordered, ordered, completed) in alternatives {
        for case in 0..3 {
            let device = seeded(0);
            let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
            let pool =
                device.pool_create(&PoolOptions { reuse, ..PoolOptions::default() }).unwrap();
            let block = device.alloc_async(1000, pool, a).unwrap();
            assert_eq!(block, {
                free(&device, block, a);
                device.alloc_async(1000, pool, a).unwrap()
            });
            let gate = device.hold(a).unwrap();
            free(&device, block, a);
            let expected = match case {
                // The free is held: it can neither have completed nor be known.
                0 => unordered,
                1 => {
                    gate.release();
                    edge(&device, a, b);
                    // Whether it also completed is the scheduler's choice, so forbid that.
                    let held = device.faults().hold_back(a).unwrap();
                    let got = device.alloc_async(1000, pool, b).unwrap() == block;
                    drop(held);
                    assert!(got || !ordered, "{reuse:?}");
                    continue;
                }
                _ => {
                    gate.release();
                    // Completed on the device, unknown to the host: only the driver itself can see it.
                    let other = device.stream_create(0).unwrap();
                    edge(&device, a, other);
                    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
                    let flag = std::sync::Arc::clone(&done);
                    let set = move || flag.store(true, std::sync::atomic::Ordering::SeqCst);
                    device.host_fn(other, Box::new(set)).unwrap();
                    while !done.load(std::sync::atomic::Ordering::SeqCst) {
                        device.memory_info().unwrap();
                    }
                    completed
                }
            };
            let got = device.alloc_async(1000, pool, b).unwrap() == block;
            assert_eq!(got, expected, "{reuse:?}, case {case}");
        }
    }
}

#[test]
fn a_full_pool_waits_for_another_streams_free_only_where_that_is_allowed() {
    for internal_dependencies in [false, true] {
        let device = seeded(5);
        let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let reuse = ReusePolicy { internal_dependencies, ..ONLY_OWN };
        let options = PoolOptions { reuse, max_bytes: Some(2 << 20), ..PoolOptions::default() };
        let pool = device.pool_create(&options).unwrap();
        let block = device.alloc_async(2 << 20, pool, a).unwrap();
        let gate = device.hold(a).unwrap();
        memset(&device, block, 1, 2 << 20, a);
        free(&device, block, a);
        let next = device.alloc_async(1 << 20, pool, b);
        if !internal_dependencies {
            assert!(next.unwrap_err().is_out_of_memory());
            drop(gate);
            continue;
        }
        let next = next.unwrap();
        memset(&device, next, 2, 1 << 20, b);
        assert!(!device.stream_query(b).unwrap(), "b must wait for the held free");
        gate.release();
        assert_eq!(read(&device, next, 1 << 20, b), vec![2; 1 << 20]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn a_pool_holds_to_its_maximum_its_threshold_and_its_trim() {
    let device = seeded(2);
    let stream = device.stream_create(0).unwrap();
    let options =
        PoolOptions { max_bytes: Some(100 << 20), release_threshold: 0, ..PoolOptions::default() };
    let pool = device.pool_create(&options).unwrap();
    let blocks: Vec<u64> =
        (0..3).map(|_| device.alloc_async(32 << 20, pool, stream).unwrap()).collect();
    assert!(device.alloc_async(8 << 20, pool, stream).unwrap_err().is_out_of_memory());
    let usage = device.pool_usage(pool).unwrap();
    assert_eq!((usage.used, usage.reserved), (96 << 20, 96 << 20));
    assert_eq!(taken(&device), 96 << 20);
    for block in blocks {
        free(&device, block, stream);
    }
    device.stream_synchronize(stream).unwrap();
    let usage = device.pool_usage(pool).unwrap();
    assert_eq!((usage.used, usage.reserved, usage.reserved_peak), (0, 0, 96 << 20));
    assert_eq!(taken(&device), 0);

    let pool = device.pool_create(&PoolOptions::default()).unwrap();
    let block = device.alloc_async(64 << 20, pool, stream).unwrap();
    free(&device, block, stream);
    device.stream_synchronize(stream).unwrap();
    assert_eq!(device.pool_usage(pool).unwrap().reserved, 64 << 20, "kept across a sync");
    device.pool_trim(pool, 64 << 20).unwrap();
    assert_eq!(device.pool_usage(pool).unwrap().reserved, 64 << 20);
    device.pool_trim(pool, 0).unwrap();
    assert_eq!(device.pool_usage(pool).unwrap().reserved, 0);
    // SAFETY: made here, and not used any more.
    unsafe { device.pool_destroy(pool) }.unwrap();
    assert!(device.pool_usage(pool).is_err());
}

#[test]
fn a_destroyed_pool_gives_its_memory_back_with_its_last_block() {
    let device = seeded(2);
    let stream = device.stream_create(0).unwrap();
    let pool = device.pool_create(&PoolOptions::default()).unwrap();
    let block = device.alloc_async(1000, pool, stream).unwrap();
    // SAFETY: made here, and not used any more.
    unsafe { device.pool_destroy(pool) }.unwrap();
    memset(&device, block, 1, 1000, stream);
    assert!(device.alloc_async(1, pool, stream).is_err());
    free(&device, block, stream);
    device.stream_synchronize(stream).unwrap();
    assert_eq!(taken(&device), 0);
}

#[test]
fn pieces_of_a_pool_merge_again_whatever_stream_freed_them() {
    let device = seeded(8);
    let streams: Vec<_> = (0..3).map(|_| device.stream_create(0).unwrap()).collect();
    let options = PoolOptions { max_bytes: Some(32 << 20), ..PoolOptions::default() };
    let pool = device.pool_create(&options).unwrap();
    let blocks: Vec<(u64, StreamHandle)> = (0..96)
        .map(|i| {
            let stream = streams[i % 3];
            (device.alloc_async(100_000, pool, stream).unwrap(), stream)
        })
        .collect();
    for (block, stream) in blocks {
        free(&device, block, stream);
    }
    device.synchronize().unwrap();
    let whole = device.alloc_async(32 << 20, pool, streams[0]).unwrap();
    memset(&device, whole, 1, 32 << 20, streams[0]);
    device.synchronize().unwrap();
}

#[test]
fn mapped_memory_moves_between_addresses_and_keeps_its_bytes() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let unit = device.granularity();
        let range = device.reserve(4 * unit, 0).unwrap();
        let (x, y) = (device.create(unit).unwrap(), device.create(unit).unwrap());
        assert_eq!(taken(&device), 2 * unit as u64);
        // SAFETY: a fresh reservation; mapped before access is set.
        unsafe {
            device.map(range, unit, x).unwrap();
            device.map(range + unit as u64, unit, y).unwrap();
            device.set_access(range, 2 * unit, MapAccess::ReadWrite).unwrap();
        }
        // One range over both pieces.
        memset(&device, range + unit as u64 - 8, 5, 16, stream);
        assert_eq!(read(&device, range + unit as u64 - 9, 18, stream)[..2], [0, 5]);
        device.stream_synchronize(stream).unwrap();
        let high = range + 2 * unit as u64;
        // SAFETY: the host has seen everything complete.
        unsafe {
            device.unmap(range, 2 * unit).unwrap();
            device.map(high, unit, y).unwrap();
            device.set_access(high, unit, MapAccess::Read).unwrap();
        }
        assert_eq!(read(&device, high, 9, stream), [5, 5, 5, 5, 5, 5, 5, 5, 0]);
        // SAFETY: made here, and not used any more.
        unsafe { device.destroy(x) }.unwrap();
        // SAFETY: as above.
        unsafe { device.destroy(y) }.unwrap();
        assert_eq!(taken(&device), unit as u64, "y is still mapped");
        // SAFETY: the host has seen everything complete.
        unsafe {
            device.unmap(high, unit).unwrap();
            device.release(range, 4 * unit).unwrap();
        }
        assert_eq!(taken(&device), 0);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn access_to_unmapped_memory_is_a_sticky_fault() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let unit = device.granularity();
        let range = device.reserve(2 * unit, 0).unwrap();
        let memory = device.create(unit).unwrap();
        // SAFETY: a fresh reservation.
        unsafe {
            device.map(range, unit, memory).unwrap();
            device.set_access(range, unit, MapAccess::Read).unwrap();
        }
        assert_eq!(read(&device, range, 4, stream), [0; 4]);
        memset(&device, range, 1, 4, stream); // queued; the device finds out that it may not
        let lost = device.stream_synchronize(stream).unwrap_err();
        assert!(matches!(lost, DriverError::DeviceLost { code: 700, .. }), "{lost}");
        assert!(lost.to_string().contains(&format!("{range:#x}")), "{lost}");
        for later in [
            device.alloc(1).unwrap_err(),
            device.stream_create(0).unwrap_err(),
            device.synchronize().unwrap_err(),
        ] {
            assert!(later.is_device_lost(), "{later}");
        }
    }
}

#[test]
fn memory_mapped_while_its_work_waits_behind_a_gate_is_there_in_time() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let unit = device.granularity();
        let range = device.reserve(unit, 0).unwrap();
        let gate = device.hold(stream).unwrap();
        memset(&device, range, 8, unit, stream);
        let memory = device.create(unit).unwrap();
        // SAFETY: a fresh reservation.
        unsafe {
            device.map(range, unit, memory).unwrap();
            device.set_access(range, unit, MapAccess::ReadWrite).unwrap();
        }
        gate.release();
        assert_eq!(read(&device, range, 4, stream), [8; 4]);
    }
}

#[test]
fn capabilities_can_be_missing() {
    let config = SimConfig::default().with_async_pools(false).with_virtual_memory(false);
    let device = SimDevice::open(config).unwrap();
    let device: &dyn Driver = &*device;
    assert!(device.async_pools().is_none() && device.virtual_memory().is_none());
    assert_eq!(device.properties().granularity, 0);
}
