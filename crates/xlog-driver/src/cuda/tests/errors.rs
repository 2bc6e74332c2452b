//! Codes and the decisions they become.

use crate::cuda::CudaDriver;
use crate::cuda::errors::is_sticky;
use crate::cuda::fake::{self, Without, fail, logged};
use crate::{Driver, DriverError, StreamHandle};

#[test]
fn an_unknown_code_is_only_a_number() {
    let device = fake::device();
    fail("cuMemGetInfo_v2", 4242);
    match device.memory_info().unwrap_err() {
        DriverError::Code { call, code, name } => {
            assert_eq!((call, code), ("cuMemGetInfo", 4242));
            assert_eq!(name, "no name known to this driver");
        }
        other => panic!("{other:?}"),
    }
    fail("cuMemGetInfo_v2", u32::MAX);
    assert!(matches!(device.memory_info(), Err(DriverError::Code { code: u32::MAX, .. })));
}

#[test]
fn a_known_code_has_the_drivers_name() {
    let device = fake::device();
    fail("cuEventCreate", 1);
    let error = device.event_create().unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
}

#[test]
fn a_driver_without_names_still_has_numbers() {
    let api = fake::load(Without(&[c"cuGetErrorName"])).unwrap();
    let device = CudaDriver::open_with(api, 0).unwrap();
    fail("cuEventCreate", 1);
    let error = device.event_create().unwrap_err();
    assert!(matches!(error, DriverError::Code { code: 1, .. }));
}

#[test]
fn out_of_memory_carries_the_request() {
    let device = fake::device();
    fail("cuMemAlloc_v2", 2);
    let expected = DriverError::OutOfMemory { call: "cuMemAlloc", requested: 4096 };
    assert_eq!(device.alloc(4096), Err(expected));
}

#[test]
fn pinned_memory_that_is_out_is_not_device_memory_that_is_out() {
    let device = fake::device();
    fail("cuMemHostAlloc", 2);
    let stream = device.stream_create(0).unwrap();
    // SAFETY: the fake device's memory is live.
    let error = unsafe { device.copy_htod(fake::BASE, &[1], stream) }.unwrap_err();
    assert!(!error.is_out_of_memory(), "{error}");
    assert!(matches!(error, DriverError::Code { code: 2, .. }), "{error}");
}

#[test]
fn not_supported_is_a_feature_to_do_without() {
    let device = fake::device();
    fail("cuStreamGetId", 801);
    let stream = device.stream_create(0).unwrap();
    let expected = DriverError::Unsupported { call: "cuStreamGetId" };
    assert_eq!(device.stream_id(stream), Err(expected));
}

#[test]
fn not_ready_is_no_error() {
    let device = fake::device();
    fail("cuStreamQuery", 600);
    fail("cuEventQuery", 600);
    let stream = device.stream_create(0).unwrap();
    let event = device.event_create().unwrap();
    assert_eq!(device.stream_query(stream), Ok(false));
    assert_eq!(device.event_query(event), Ok(false));
    fail("cuEventQuery", 0);
    assert_eq!(device.event_query(event), Ok(true));
}

#[test]
fn only_what_the_driver_calls_final_is_a_lost_device() {
    let lost = [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];
    for code in lost {
        assert!(is_sticky(code), "{code}");
    }
    for code in [0, 1, 2, 3, 46, 100, 101, 201, 400, 600, 701, 713, 720, 801, 900, 999, 4242] {
        assert!(!is_sticky(code), "{code}");
    }
}

#[test]
fn a_lost_device_stays_lost_with_the_first_code() {
    let device = fake::device();
    let (stream, event) = (device.stream_create(0).unwrap(), device.event_create().unwrap());
    fail("cuStreamSynchronize", 700);
    match device.stream_synchronize(stream).unwrap_err() {
        DriverError::DeviceLost { code: 700, reason, .. } => {
            assert!(reason.contains("illegal memory access"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    fail("cuStreamSynchronize", 0);
    let before = fake::with(|state| state.log.len());
    assert!(matches!(
        device.alloc(1),
        Err(DriverError::DeviceLost { call: "alloc", code: 700, .. })
    ));
    assert!(device.event_query(event).unwrap_err().is_device_lost());
    let asked = fake::with(|state| state.log[before..].to_vec());
    let all_names = asked.iter().all(|call| call.starts_with("cuGetError"));
    assert!(all_names, "a lost device is not called: {asked:?}");
}

#[test]
fn the_default_streams_are_refused() {
    let device = fake::device();
    for handle in 0..=2 {
        let stream = StreamHandle::numbered(handle);
        assert!(matches!(device.stream_synchronize(stream), Err(DriverError::Invalid { .. })));
        // SAFETY: the call is refused.
        let queued = unsafe { device.memset(fake::BASE, 0, 16, stream) };
        assert!(matches!(queued, Err(DriverError::Invalid { .. })));
        assert_eq!(device.raw_stream(stream), None);
    }
    assert_eq!(logged("cuMemsetD8Async") + logged("cuStreamSynchronize"), 0);
}

#[test]
fn priorities_are_clamped_to_the_range() {
    let device = fake::device();
    for (asked, given) in [(7, 0), (0, 0), (-3, -3), (i32::MIN, -5)] {
        device.stream_create(asked).unwrap();
        assert_eq!(fake::with(|state| state.priority), given);
    }
}
