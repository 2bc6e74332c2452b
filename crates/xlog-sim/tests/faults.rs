//! Injected faults: each is an error of its own kind, and leaves everything as it was.

#![allow(clippy::unwrap_used)]

mod support;

use support::{devices, memset, read};
use xlog_driver::{AsyncPools, Driver, DriverError, PoolOptions, VirtualMemory};
use xlog_sim::{Call, Fault};

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
