//! Injected faults: each is an error of its own kind, and leaves everything as it was.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::support::{devices, memset, read};
use xlog_driver::{AsyncPools, Driver, DriverError, PoolOptions, StreamHandle, VirtualMemory};
use xlog_sim::{Call, Fault, SimConfig, SimDevice};

#[test]
fn the_nth_call_of_a_kind_fails_and_changes_nothing() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let block = device.alloc(64).unwrap();
        memset(&device, block, 1, 64, stream);
        device.faults().fail_nth(Call::Memset, 2, Fault::Code(42));
        memset(&device, block, 2, 64, stream);
        // SAFETY: the block is live.
        let failed = unsafe { device.memset(block, 3, 64, stream) }.unwrap_err();
        assert!(matches!(failed, DriverError::Code { code: 42, call: "memset", .. }), "{failed}");
        assert_eq!(read(&device, block, 64, stream), [2; 64]);
        assert_eq!(device.faults().calls(Call::Memset), 3);

        let free = device.memory_info().unwrap().free;
        device.faults().fail_nth(Call::Alloc, 1, Fault::OutOfMemory);
        assert!(device.alloc(64).unwrap_err().is_out_of_memory());
        device.faults().fail_nth(Call::Create, 1, Fault::Unsupported);
        let refused = device.create(device.granularity()).unwrap_err();
        assert!(matches!(refused, DriverError::Unsupported { .. }));
        assert_eq!(device.memory_info().unwrap().free, free);
        device.faults().fail_nth(Call::EventCreate, 1, Fault::Code(1));
        device.faults().clear();
        device.event_create().unwrap();
    }
}

#[test]
fn memory_runs_out_where_the_test_says() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let pool = device.pool_create(&PoolOptions::default()).unwrap();
        device.faults().limit_memory(Some(4096));
        let block = device.alloc(4096).unwrap();
        assert!(device.alloc(1).unwrap_err().is_out_of_memory());
        assert!(device.alloc_async(1, pool, stream).unwrap_err().is_out_of_memory());
        assert_eq!(device.memory_info().unwrap().free, 0);
        device.faults().limit_memory(None);
        device.alloc_async(1, pool, stream).unwrap();
        // SAFETY: nothing was queued on it.
        unsafe { device.free(block) }.unwrap();
    }
}

#[test]
fn a_stream_held_back_runs_nothing_until_it_is_let_go() {
    for device in devices() {
        let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let (x, y) = (device.alloc(64).unwrap(), device.alloc(64).unwrap());
        let held = device.faults().hold_back(a).unwrap();
        memset(&device, x, 1, 64, a);
        memset(&device, y, 2, 64, b);
        assert_eq!(read(&device, y, 64, b), [2; 64]);
        assert!(!device.stream_query(a).unwrap());
        held.release();
        assert_eq!(read(&device, x, 64, a), [1; 64]);
        assert!(device.races().is_empty());
    }
}

#[test]
fn a_lost_device_fails_every_call_and_every_waiter() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let gate = device.hold(stream).unwrap();
        device.host_fn(stream, Box::new(|| {})).unwrap();
        let bodies: Vec<Box<dyn FnOnce() + Send>> = vec![
            Box::new(|| {
                let lost = device.stream_synchronize(stream).unwrap_err();
                assert!(lost.is_device_lost(), "{lost}");
            }),
            Box::new(|| device.faults().lose_device()),
        ];
        device.run_threads(bodies);
        gate.release();
        assert!(device.alloc(1).unwrap_err().is_device_lost());
        assert!(device.memory_info().unwrap_err().is_device_lost());
        // SAFETY: nothing is copied.
        let copy = unsafe { device.copy_dtoh(&mut [0; 1], 0x1, stream) };
        assert!(copy.unwrap_err().is_device_lost());
    }
    for device in devices() {
        device.faults().fail_nth(Call::Alloc, 2, Fault::DeviceLost);
        device.alloc(1).unwrap();
        assert!(device.alloc(1).unwrap_err().is_device_lost());
        assert!(device.stream_create(0).unwrap_err().is_device_lost());
    }
}

#[test]
fn a_lost_device_outranks_what_is_planned() {
    for device in devices() {
        for fault in [Fault::OutOfMemory, Fault::Unsupported, Fault::Code(3)] {
            device.faults().fail_nth(Call::Alloc, 1, fault);
        }
        device.faults().lose_device();
        assert!(device.alloc(8).unwrap_err().is_device_lost());
        assert_eq!(device.faults().calls(Call::Alloc), 1, "it was called all the same");
    }
}

/// A row of host functions, the first of which blocks until it is told to go on; returns how many of the others ran.
fn interrupted(between: impl FnOnce(&SimDevice, StreamHandle)) -> (Arc<SimDevice>, u32) {
    let device = SimDevice::open(SimConfig::default()).unwrap();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    let ran = Arc::new(AtomicU32::new(0));
    let ((begun, has_begun), (go, wait)) = (mpsc::channel(), mpsc::channel());
    let first = move || {
        begun.send(()).unwrap();
        wait.recv().unwrap();
    };
    device.host_fn(stream, Box::new(first)).unwrap();
    for _ in 0..20 {
        let ran = Arc::clone(&ran);
        let count = move || {
            ran.fetch_add(1, Ordering::SeqCst);
        };
        device.host_fn(stream, Box::new(count)).unwrap();
    }
    gate.release();
    has_begun.recv().unwrap();
    between(&device, stream);
    go.send(()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let ran = ran.load(Ordering::SeqCst);
    (device, ran)
}

#[test]
fn a_stream_held_back_in_a_row_of_host_functions_stops_after_the_one_that_runs() {
    let held = Mutex::new(None);
    let (device, ran) = interrupted(|device, stream| {
        *held.lock().unwrap() = Some((device.faults().hold_back(stream).unwrap(), stream));
    });
    assert_eq!(ran, 0);
    let (gate, stream) = held.into_inner().unwrap().unwrap();
    assert!(!device.stream_query(stream).unwrap(), "the rest is still queued");
    let order = Arc::new(Mutex::new(Vec::new()));
    for i in 0..3 {
        let order = Arc::clone(&order);
        device.host_fn(stream, Box::new(move || order.lock().unwrap().push(i))).unwrap();
    }
    gate.release();
    device.stream_synchronize(stream).unwrap();
    assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
}

#[test]
fn a_device_lost_in_a_row_of_host_functions_runs_no_more_of_them() {
    let (device, ran) = interrupted(|device, _| device.faults().lose_device());
    assert_eq!(ran, 0);
    assert!(device.synchronize().unwrap_err().is_device_lost());
}
