//! What a fault on a real GPU does to every later call. It ends the context, so it has a process of its own.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use xlog_driver::cuda::CudaDriver;
use xlog_driver::{Driver, DriverError};

#[test]
fn after_a_fault_every_call_says_that_the_device_is_lost() {
    let spec = std::env::var("XLOG_TEST_DEVICE").unwrap_or_default();
    let Some(ordinal) = spec.strip_prefix("cuda:").and_then(|text| text.parse().ok()) else {
        eprintln!("skipped: XLOG_TEST_DEVICE does not name a CUDA device");
        return;
    };
    let device = CudaDriver::open(ordinal).expect("the device opens");
    let Some(memory) = device.virtual_memory() else {
        return;
    };
    let stream = device.stream_create(0).unwrap();
    let bytes = memory.granularity();
    let address = memory.reserve(bytes, 0).unwrap();
    let handle = memory.create(bytes).unwrap();
    // SAFETY: the range was just reserved and is empty.
    unsafe { memory.map(address, bytes, handle) }.unwrap();
    // SAFETY: not sound on purpose: the mapping has no access rights, so the device faults.
    let queued = unsafe { device.memset(address, 1, bytes, stream) };
    let waited = queued.and_then(|()| device.stream_synchronize(stream));
    let error = waited.expect_err("memory without access rights cannot be written");
    if let DriverError::Code { code, .. } = error {
        println!("the driver refused the call with code {code} before it reached the device");
        assert!(device.alloc(4096).is_ok(), "a refused call harms nothing");
        return;
    }
    println!("{error}");
    assert!(error.is_device_lost(), "{error:?}");
    assert!(device.alloc(4096).unwrap_err().is_device_lost());
    assert!(device.event_create().unwrap_err().is_device_lost());
    assert!(device.hold(stream).unwrap_err().is_device_lost());
}
