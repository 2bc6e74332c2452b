//! Bad input: a typed error that names the value and what is accepted, and nothing changed.

#![allow(clippy::unwrap_used)]

use crate::support::{devices, memset, read};
use xlog_driver::{
    Access, AsyncPools, Driver, DriverError, DriverResult, EventHandle, MapAccess, MemoryHandle,
    PoolHandle, PoolOptions, StreamHandle, VirtualMemory,
};
use xlog_sim::{SimConfig, SimDevice, SimKernel, SimMachine};

/// The call must refuse, and say so with these words.
fn refuses<T: std::fmt::Debug>(outcome: DriverResult<T>, words: &[&str]) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, DriverError::Invalid { .. }), "{error:?}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{word}' is missing in: {text}");
    }
}

#[test]
fn configurations() {
    let open = |config: SimConfig| SimMachine::new(config);
    refuses(open(SimConfig::default().with_capacity(0)), &["capacity = 0", "1 byte"]);
    refuses(open(SimConfig::default().with_capacity(u64::MAX)), &["18446744073709551615"]);
    refuses(open(SimConfig::default().with_ordinals(0)), &["ordinals = 0", "1 to 16"]);
    refuses(open(SimConfig::default().with_ordinals(17)), &["ordinals = 17"]);
    refuses(
        open(SimConfig::default().with_granularity(3000)),
        &["granularity = 3000", "power of two"],
    );
    let machine = open(SimConfig::default().with_ordinals(2)).unwrap();
    refuses(machine.device(2), &["ordinal 2", "below 2"]);
}

#[test]
fn streams_and_events_that_are_unknown_or_destroyed() {
    for device in devices() {
        let live = device.stream_create(0).unwrap();
        let gone = device.stream_create(0).unwrap();
        // SAFETY: the simulated device looks the handle up, and refuses one that is not there.
        unsafe { device.stream_destroy(gone) }.unwrap();
        let block = device.alloc(64).unwrap();
        let event = device.event_create().unwrap();
        for (stream, name) in
            [(gone, format!("{gone}")), (StreamHandle::numbered(0xdead), "0xdead".into())]
        {
            let words = [name.as_str(), "live stream"];
            refuses(device.stream_synchronize(stream), &words);
            refuses(device.stream_query(stream), &words);
            // SAFETY: the simulated device looks the handle up, and refuses one that is not there.
            refuses(unsafe { device.stream_destroy(stream) }, &words);
            refuses(device.stream_id(stream), &words);
            refuses(device.stream_capture(stream), &words);
            refuses(device.stream_wait_event(stream, event), &words);
            refuses(device.event_record(event, stream), &words);
            refuses(device.host_fn(stream, Box::new(|| {})), &words);
            refuses(device.hold(stream), &words);
            refuses(device.launch(stream, SimKernel::new("k", |_| {})), &words);
            refuses(device.name_stream(stream, "x"), &words);
            refuses(device.faults().hold_back(stream), &["live stream"]);
            // SAFETY: the block is live.
            refuses(unsafe { device.memset(block, 1, 64, stream) }, &words);
        }
        let dead = EventHandle::numbered(0xbeef);
        refuses(device.event_query(dead), &["0xbeef", "live event"]);
        refuses(device.event_synchronize(dead), &["0xbeef"]);
        // SAFETY: the simulated device looks the handle up, and refuses one that is not there.
        refuses(unsafe { device.event_destroy(dead) }, &["0xbeef"]);
        refuses(device.event_record(dead, live), &["0xbeef"]);
        refuses(device.stream_wait_event(live, dead), &["0xbeef"]);
        assert_eq!(read(&device, block, 64, live), [0; 64]);
        device.synchronize().unwrap();
    }
}

/// Everything that takes a range refuses this one.
fn all_refuse(device: &SimDevice, stream: StreamHandle, ptr: u64, bytes: usize, words: &[&str]) {
    // Of a size that does not take a freed block's place.
    let other = device.alloc(bytes + 4096).unwrap();
    // SAFETY: the simulated device checks ranges itself.
    unsafe {
        refuses(device.memset(ptr, 9, bytes, stream), words);
        refuses(device.copy_htod(ptr, &vec![9; bytes], stream), words);
        refuses(device.copy_dtoh(&mut vec![0; bytes], ptr, stream), words);
        refuses(device.copy_dtod(ptr, other, bytes, stream), words);
        refuses(device.copy_dtod(other, ptr, bytes, stream), words);
    }
    let kernel = SimKernel::new("k", |_| {}).arg(ptr, bytes, Access::Write);
    refuses(device.launch(stream, kernel), words);
    refuses(device.tag_memory(ptr, bytes, "x"), words);
    device.stream_synchronize(stream).unwrap();
    // SAFETY: nothing was queued on it.
    unsafe { device.free(other) }.unwrap();
}

#[test]
fn ranges_that_are_freed_unknown_or_past_their_block() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let block = device.alloc(100).unwrap();
        memset(&device, block, 1, 100, stream);
        let at = format!("{block:#x}");
        all_refuse(&device, stream, block, 101, &["101 bytes", &at, "its block of 100 bytes"]);
        all_refuse(&device, stream, block + 60, 41, &["41 bytes", &at, "its block of 100 bytes"]);
        all_refuse(&device, stream, 0x1000, 4, &["0x1000", "live memory"]);
        assert_eq!(read(&device, block, 100, stream), [1; 100]);

        // SAFETY: the host saw everything complete.
        unsafe { device.free(block) }.unwrap();
        all_refuse(&device, stream, block, 50, &["50 bytes", &at, "was freed"]);
        // SAFETY: refused.
        refuses(unsafe { device.free(block) }, &[&at, "was freed"]);

        let pool = device.pool_create(&PoolOptions::default()).unwrap();
        let block = device.alloc_async(100, pool, stream).unwrap();
        let at = format!("{block:#x}");
        // SAFETY: refused.
        refuses(unsafe { device.free(block) }, &[&at, "block of alloc"]);
        // SAFETY: refused.
        refuses(unsafe { device.free_async(block + 8, stream) }, &["live memory"]);
        // SAFETY: the block is live.
        unsafe { device.free_async(block, stream) }.unwrap();
        // SAFETY: refused.
        refuses(unsafe { device.free_async(block, stream) }, &[&at, "was freed"]);
        all_refuse(&device, stream, block, 10, &["10 bytes", &at, "was freed"]);
    }
}

#[test]
fn another_devices_memory() {
    for device in devices() {
        let other = SimDevice::open(SimConfig::default()).unwrap();
        let stream = device.stream_create(0).unwrap();
        let foreign = other.alloc(64).unwrap();
        all_refuse(&device, stream, foreign, 64, &[&format!("{foreign:#x}"), "this device"]);
        // SAFETY: refused.
        refuses(unsafe { device.free(foreign) }, &[&format!("{foreign:#x}")]);
        assert_eq!(other.memory_info().unwrap().free, other.memory_info().unwrap().total - 512);
    }
}

#[test]
fn sizes_of_zero_and_ranges_that_overlap() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let pool = device.pool_create(&PoolOptions::default()).unwrap();
        refuses(device.alloc(0), &["0 bytes", "at least one"]);
        refuses(device.alloc_async(0, pool, stream), &["0 bytes", "at least one"]);
        let block = device.alloc(64).unwrap();
        // SAFETY: nothing is touched, or the ranges are checked.
        unsafe {
            device.memset(0x1, 1, 0, stream).unwrap();
            device.copy_htod(0x1, &[], stream).unwrap();
            device.copy_dtoh(&mut [], 0x1, stream).unwrap();
            device.copy_dtod(0x1, 0x2, 0, stream).unwrap();
            refuses(device.copy_dtod(block, block + 8, 16, stream), &["overlapping", "16 bytes"]);
        }
        let empty = SimKernel::new("k", |_| {}).arg(block, 0, Access::Read);
        refuses(device.launch(stream, empty), &["0 bytes"]);
    }
}

#[test]
fn pools_and_physical_memory_that_are_unknown() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let pool = PoolHandle::numbered(0xfeed);
        refuses(device.alloc_async(1, pool, stream), &["0xfeed", "live pool"]);
        refuses(device.pool_trim(pool, 0), &["0xfeed"]);
        refuses(device.pool_usage(pool), &["0xfeed"]);
        // SAFETY: the simulated device looks the handle up, and refuses one that is not there.
        refuses(unsafe { device.pool_destroy(pool) }, &["0xfeed"]);
        let unit = device.granularity();
        let range = device.reserve(unit, 0).unwrap();
        // SAFETY: refused.
        refuses(
            unsafe { device.map(range, unit, MemoryHandle::numbered(0xfeed)) },
            &["0xfeed", "physical"],
        );
        // SAFETY: as above.
        refuses(unsafe { device.destroy(MemoryHandle::numbered(0xfeed)) }, &["0xfeed"]);
    }
}

#[test]
fn mappings_that_do_not_fit() {
    for device in devices() {
        let unit = device.granularity();
        refuses(device.reserve(unit + 1, 0), &["size", "granularity"]);
        refuses(device.reserve(unit, 3), &["alignment 3", "power of two"]);
        refuses(device.create(unit / 2), &["size", "granularity"]);
        let range = device.reserve(2 * unit, 0).unwrap();
        let memory = device.create(unit).unwrap();
        let block = device.alloc(unit).unwrap();
        // SAFETY: whatever does not fit is refused.
        unsafe {
            refuses(device.map(range + 1, unit, memory), &["address", "granularity"]);
            refuses(device.map(range, 2 * unit, memory), &["whole physical memory"]);
            refuses(device.map(range + 2 * unit as u64, unit, memory), &["inside a reservation"]);
            refuses(device.unmap(range, unit), &["whole mappings"]);
            refuses(device.set_access(range, unit, MapAccess::Read), &["whole mappings"]);
            device.map(range, unit, memory).unwrap();
            refuses(device.map(range, unit, memory), &["nothing is mapped"]);
            refuses(device.unmap(range, 2 * unit), &["whole mappings"]);
            refuses(device.release(range, 2 * unit), &["without mappings"]);
            refuses(device.release(range, unit), &["whole reservation"]);
            refuses(device.release(block, unit), &["not a block"]);
            refuses(device.unmap(block, unit), &["reservation"]);
            device.unmap(range, unit).unwrap();
            device.release(range, 2 * unit).unwrap();
            refuses(device.release(range, 2 * unit), &["start of a reservation"]);
        }
    }
}
