//! Page-locked host memory: two addresses of the same bytes, outside the capacity of the device.

#![allow(clippy::unwrap_used)]

use crate::support::{devices, memset, read};
use xlog_driver::{Driver, DriverError, HostAllocation, HostMemory};
use xlog_sim::{Call, Fault, SimConfig, SimDevice};

fn free(device: &SimDevice, memory: HostAllocation) {
    // SAFETY: the simulated device checks the address itself; no reference into the memory is left.
    unsafe { device.free_host(memory) }.unwrap();
}

/// The first bytes, by the address of the host.
fn seen_by_host(memory: HostAllocation, bytes: usize) -> Vec<u8> {
    // SAFETY: callers have waited for all work, and ask for no more than was allocated.
    unsafe { std::slice::from_raw_parts(memory.host.as_ptr(), bytes) }.to_vec()
}

#[test]
fn host_and_device_reach_the_same_bytes() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let memory = device.alloc_host(5000).unwrap();
        let block = device.alloc(5000).unwrap();
        assert_ne!(memory.device, memory.host.addr().get() as u64);
        assert_eq!((memory.device % 4096, memory.host.addr().get() % 4096), (0, 0));
        memset(&device, memory.device, 7, 5000, stream);
        device.stream_synchronize(stream).unwrap();
        assert_eq!(seen_by_host(memory, 5000), [7; 5000]);
        // SAFETY: no work is pending on the memory, which has this many bytes.
        unsafe { memory.host.write_bytes(9, 5000) };
        // SAFETY: both ranges are live.
        unsafe { device.copy_dtod(block, memory.device, 5000, stream) }.unwrap();
        assert_eq!(read(&device, block, 5000, stream), [9; 5000]);
        free(&device, memory);
    }
}

#[test]
fn it_takes_nothing_of_the_device_and_is_no_memory_of_it() {
    let device = SimDevice::open(SimConfig::default().with_capacity(8192)).unwrap();
    let memory = device.alloc_host(1 << 20).unwrap();
    assert_eq!(device.memory_info().unwrap().free, 8192);
    assert_eq!(device.memory_at(memory.device), Ok(None));
    let block = device.alloc(8192).unwrap();
    assert!(device.memory_at(block).unwrap().is_some());
    free(&device, memory);
    assert_eq!(device.memory_info().unwrap().free, 0);
}

#[test]
fn only_its_own_live_memory_is_freed() {
    for device in devices() {
        let (memory, block) = (device.alloc_host(4096).unwrap(), device.alloc(4096).unwrap());
        let inside = HostAllocation { device: memory.device + 4096, ..memory };
        let plain = HostAllocation { device: block, ..memory };
        for wrong in [inside, plain] {
            // SAFETY: the simulated device checks the address itself.
            let refused = unsafe { device.free_host(wrong) }.unwrap_err();
            assert!(matches!(refused, DriverError::Invalid { call: "free_host", .. }), "{refused}");
        }
        // SAFETY: as above.
        let refused = unsafe { device.free(memory.device) }.unwrap_err();
        assert!(matches!(refused, DriverError::Invalid { .. }), "{refused}");
        free(&device, memory);
        // SAFETY: as above.
        assert!(unsafe { device.free_host(memory) }.is_err(), "freed twice");
        assert!(matches!(device.alloc_host(0), Err(DriverError::Invalid { .. })));
        for huge in [1 << 50, usize::MAX] {
            let error = device.alloc_host(huge).unwrap_err();
            assert!(matches!(error, DriverError::OutOfHostMemory { .. }), "{error}");
        }
    }
}

#[test]
fn a_free_under_work_that_was_not_waited_for_is_a_race() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let memory = device.alloc_host(4096).unwrap();
        memset(&device, memory.device, 1, 4096, stream);
        free(&device, memory);
        assert_eq!(device.races().len(), 1, "{:?}", device.races());
    }
}

#[test]
fn calls_fail_on_request() {
    for device in devices() {
        device.faults().fail_nth(Call::AllocHost, 1, Fault::OutOfMemory);
        device.alloc_host(64).unwrap_err();
        let memory = device.alloc_host(64).unwrap();
        device.faults().fail_nth(Call::FreeHost, 1, Fault::Code(999));
        // SAFETY: nothing uses it.
        unsafe { device.free_host(memory) }.unwrap_err();
        free(&device, memory);
    }
}
