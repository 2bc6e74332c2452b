//! Gates and host functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cuda::CudaDriver;
use crate::cuda::fake::{self, Without, fail, logged, run_queue, with};
use crate::{CaptureStatus, Driver, DriverError};

/// A stand-in for what a closure owns.
fn token() -> (Arc<AtomicU32>, Arc<AtomicU32>) {
    let token = Arc::new(AtomicU32::new(0));
    (Arc::clone(&token), token)
}

#[test]
fn work_behind_a_gate_runs_after_its_release() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    assert_eq!(device.stream_query(stream), Ok(false));
    gate.release();
    assert_eq!(device.stream_query(stream), Ok(true));
    let gate = device.hold(stream).unwrap();
    assert_eq!(device.stream_query(stream), Ok(false));
    drop(gate);
    assert_eq!(device.stream_query(stream), Ok(true));
}

#[test]
fn a_slot_serves_the_next_hold_before_the_device_looked() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    for _ in 0..500 {
        device.hold(stream).unwrap().release();
    }
    assert_eq!(with(|state| state.host_blocks.len()), 1, "one page is enough");
    let last = device.hold(stream).unwrap();
    assert!(!run_queue());
    assert_eq!(with(|state| state.queue.len()), 1, "the released 500 passed");
    last.release();
    assert!(run_queue());
}

#[test]
fn many_gates_are_independent_and_pages_grow() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let mut gates: Vec<_> = (0..200).map(|_| device.hold(stream).unwrap()).collect();
    let last = gates.pop();
    drop(gates);
    assert!(!run_queue());
    assert_eq!(with(|state| state.queue.len()), 1);
    drop(last);
    assert!(run_queue());
    assert_eq!(with(|state| state.host_blocks.len()), 4);
    drop(device);
    assert_eq!(with(|state| state.host_blocks.len()), 0);
}

#[test]
fn a_gate_may_outlive_the_driver() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    drop(device);
    assert_eq!(with(|state| state.retains), 1, "the gate keeps the context");
    gate.release();
    assert_eq!(with(|state| (state.retains, state.host_blocks.len())), (0, 0));
    assert!(with(|state| state.queue.is_empty()));
}

#[test]
fn a_failed_hold_gives_the_slot_back() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuStreamWaitValue32_v2", 1);
    for _ in 0..100 {
        assert!(matches!(device.hold(stream), Err(DriverError::Code { code: 1, .. })));
    }
    assert_eq!(with(|state| state.host_blocks.len()), 1);
    fail("cuStreamWaitValue32_v2", 0);
    let gate = device.hold(stream).unwrap();
    assert!(!run_queue());
    gate.release();
    assert!(run_queue());
}

#[test]
fn a_page_the_device_cannot_address_is_freed() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuMemHostGetDevicePointer_v2", 1);
    device.hold(stream).unwrap_err();
    assert_eq!(with(|state| state.host_blocks.len()), 0);
}

#[test]
fn without_wait_value_a_host_function_holds() {
    let api = fake::load(Without(&[c"cuStreamWaitValue32_v2"])).unwrap();
    let missing = CudaDriver::open_with(api, 0).unwrap();
    let stream = missing.stream_create(0).unwrap();
    let gate = missing.hold(stream).unwrap();
    assert_eq!(logged("cuLaunchHostFunc"), 1);
    gate.release();
    assert!(run_queue(), "the function finds the gate open");
    drop(missing);

    let refused = fake::device();
    let stream = refused.stream_create(0).unwrap();
    fail("cuStreamWaitValue32_v2", 801);
    refused.hold(stream).unwrap().release();
    refused.hold(stream).unwrap().release();
    assert_eq!(logged("cuStreamWaitValue32_v2"), 1, "a refusal is remembered");
    assert_eq!(logged("cuLaunchHostFunc"), 2);
    assert!(run_queue());
}

#[test]
fn a_host_function_runs_once_and_is_dropped() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let (inside, outside) = token();
    device.host_fn(stream, Box::new(move || _ = inside.fetch_add(1, Ordering::Relaxed))).unwrap();
    assert_eq!(outside.load(Ordering::Relaxed), 0);
    device.stream_synchronize(stream).unwrap();
    assert_eq!(outside.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&outside), 1);
}

#[test]
fn a_panic_in_a_host_function_is_swallowed() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let (inside, outside) = token();
    device
        .host_fn(
            stream,
            Box::new(move || {
                inside.fetch_add(1, Ordering::Relaxed);
                std::panic::resume_unwind(Box::new("no hook, no noise"));
            }),
        )
        .unwrap();
    device.stream_synchronize(stream).unwrap();
    assert_eq!((outside.load(Ordering::Relaxed), Arc::strong_count(&outside)), (1, 1));
}

#[test]
fn a_host_function_that_cannot_be_queued_is_dropped_unrun() {
    for code in [1, 700] {
        let device = fake::device();
        let stream = device.stream_create(0).unwrap();
        fail("cuLaunchHostFunc", code);
        let (inside, outside) = token();
        let queued =
            device.host_fn(stream, Box::new(move || _ = inside.fetch_add(1, Ordering::Relaxed)));
        assert!(queued.is_err());
        assert_eq!((outside.load(Ordering::Relaxed), Arc::strong_count(&outside)), (0, 1));
    }
}

#[test]
fn a_captured_stream_takes_no_host_function_and_no_gate() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    with(|state| state.capturing = 1);
    assert_eq!(device.stream_capture(stream), Ok(CaptureStatus::Active));
    let (inside, outside) = token();
    device.host_fn(stream, Box::new(move || drop(inside))).unwrap_err();
    assert_eq!(Arc::strong_count(&outside), 1);
    device.hold(stream).unwrap_err();
    with(|state| state.capturing = 2);
    assert_eq!(device.stream_capture(stream), Ok(CaptureStatus::Invalidated));
}

#[test]
fn a_driver_that_goes_in_a_host_function_is_closed_elsewhere() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let last = Arc::clone(&device);
    device.host_fn(stream, Box::new(move || drop(last))).unwrap();
    drop(device);
    assert!(run_queue());
    assert_eq!(logged("cuCtxSynchronize") + logged("cuDevicePrimaryCtxRelease_v2"), 0);
}
