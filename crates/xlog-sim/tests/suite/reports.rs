//! What a race report says, and whom it reaches.

#![allow(clippy::unwrap_used)]

use crate::support::{devices, memset, seeded, two_streams};
use xlog_driver::{Access, Driver, DriverError, DriverResult};
use xlog_sim::{Call, RaceKind, SimKernel};

fn is_race<T: std::fmt::Debug>(outcome: DriverResult<T>) {
    assert!(matches!(outcome, Err(DriverError::Race { .. })), "{outcome:?}");
}

#[test]
fn a_report_names_both_operations_their_streams_the_bytes_and_the_tags() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        device.name_stream(a, "build").unwrap();
        device.name_stream(b, "probe").unwrap();
        let block = device.alloc(100).unwrap();
        device.tag_memory(block, 100, "hash table").unwrap();
        memset(&device, block, 1, 60, a);
        let kernel = SimKernel::new("probe_rows", |_| {}).arg(block + 40, 60, Access::Read);
        device.launch(b, kernel).unwrap();
        let races = device.races();
        assert_eq!(races.len(), 1, "{races:?}");
        let race = &races[0];
        assert_eq!((race.ptr, race.bytes), (block + 40, 20), "the shared bytes");
        assert_eq!((race.first.stream, race.second.stream), (Some(a), Some(b)));
        let text = race.to_string();
        for part in
            ["read/write", "memset", "probe_rows", "build", "probe", "hash table", "20 bytes"]
        {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }
}

#[test]
fn a_race_fails_the_next_synchronisation_of_either_stream_once() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, a);
        memset(&device, block, 2, 64, b);
        for stream in [a, b] {
            let first = device.stream_synchronize(stream);
            assert!(matches!(first, Err(DriverError::Race { .. })), "{first:?}");
            device.stream_synchronize(stream).unwrap();
        }
        assert_eq!(device.races().len(), 1);
        device.synchronize().unwrap();
    }
}

#[test]
fn a_report_covers_all_bytes_two_operations_share_however_they_were_touched_between() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let (x, y) = (device.alloc(64).unwrap(), device.alloc(64).unwrap());
        memset(&device, x, 1, 64, a);
        // SAFETY: both blocks are live. The read splits what is known of the block in three.
        unsafe { device.copy_dtod(y, x + 16, 8, a) }.unwrap();
        memset(&device, x, 2, 64, b);
        let races = device.races();
        let write = races.iter().find(|race| race.kind == RaceKind::WriteWrite).unwrap();
        assert_eq!((write.ptr, write.bytes), (x, 64), "{write}");
        let read = races.iter().find(|race| race.kind == RaceKind::ReadWrite).unwrap();
        assert_eq!((read.ptr, read.bytes), (x + 16, 8), "{read}");
        assert_eq!(races.len(), 2);
    }
}

#[test]
fn races_beyond_the_reports_that_are_kept_still_fail_synchronisations_and_count() {
    let device = seeded(3);
    let block = device.alloc(64).unwrap();
    let (a, b) = two_streams(&device);
    for _ in 0..1200 {
        memset(&device, block, 1, 64, a);
        memset(&device, block, 1, 64, b);
        is_race(device.stream_synchronize(b));
        let _ = device.stream_synchronize(a);
    }
    assert_eq!(device.races().len(), 1000);
    let counted = device.race_count();
    assert!(counted >= 1200, "{counted}");
    let (c, d) = two_streams(&device);
    let fresh = device.alloc(64).unwrap();
    memset(&device, fresh, 1, 64, c);
    memset(&device, fresh, 2, 64, d);
    let late = device.stream_synchronize(d).unwrap_err().to_string();
    assert!(late.contains(&format!("{fresh:#x}")), "{late}");
    is_race(device.stream_synchronize(c));
    assert_eq!(device.race_count(), counted + 1);
}

#[test]
fn a_race_of_destroyed_streams_fails_the_next_synchronisation_of_the_device() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, a);
        memset(&device, block, 2, 64, b);
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(a) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(b) }.unwrap();
        is_race(device.synchronize());
        device.synchronize().unwrap();
        assert_eq!(device.races().len(), 1);
    }
}

#[test]
fn a_block_freed_under_the_work_of_a_stream_that_is_gone() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, stream);
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
        // Only the seeded engines leave work undone until somebody asks, so give the concurrent one time to finish.
        while device.seed().is_none() && device.faults().calls(Call::StreamQuery) < 50 {
            let _ = device.stream_query(stream);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // SAFETY: what this test is about: nobody waited.
        unsafe { device.free(block) }.unwrap();
        is_race(device.synchronize());
        assert_eq!(device.races()[0].kind, RaceKind::UseAfterFree);
    }
}

#[test]
fn a_synchronisation_of_the_device_reports_the_first_race_and_keeps_all_of_them() {
    for device in devices() {
        let blocks = [device.alloc(64).unwrap(), device.alloc(64).unwrap()];
        for block in blocks {
            let (a, b) = two_streams(&device);
            memset(&device, block, 1, 64, a);
            memset(&device, block, 2, 64, b);
        }
        let first = device.synchronize().unwrap_err().to_string();
        assert!(first.contains(&format!("{:#x}", blocks[0])), "{first}");
        device.synchronize().unwrap();
        assert_eq!((device.races().len(), device.race_count()), (2, 2));
    }
}

#[test]
fn an_owner_that_looks_whether_its_stream_is_idle_learns_no_order() {
    let (mut idle, mut busy) = (0, 0);
    for device in devices().into_iter().chain((100..300).map(seeded)) {
        let (a, b) = two_streams(&device);
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, a);
        if device.stream_is_idle(a).unwrap() {
            idle += 1;
        } else {
            busy += 1;
        }
        memset(&device, block, 2, 64, b);
        assert_eq!(device.races().len(), 1, "the race must not depend on the answer");
        assert_eq!(device.faults().calls(Call::StreamIsIdle), 1);
        assert_eq!(device.faults().calls(Call::StreamQuery), 0);
    }
    assert!(idle > 0 && busy > 0, "{idle} idle, {busy} busy");
}
