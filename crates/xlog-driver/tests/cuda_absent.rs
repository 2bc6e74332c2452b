//! Without a GPU every way in is an error that says what to do, and never a panic.
//!
//! On a machine with a GPU the same calls must succeed, except for the ordinal that no machine has.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use xlog_driver::cuda::{
    CudaDriver, MINIMUM_DRIVER_VERSION, device_count, driver_version, library_path,
};
use xlog_driver::{Driver, DriverError};

fn assert_says_what_to_do(error: &DriverError) {
    let DriverError::Unavailable { what, remedy } = error else {
        panic!("not Unavailable: {error:?}")
    };
    assert!(!what.is_empty() && !remedy.is_empty());
    assert!(!error.to_string().ends_with('.'), "{error}");
}

#[test]
fn opening_is_a_device_or_an_explanation() {
    match (CudaDriver::open(0), library_path()) {
        (Ok(device), path) => {
            assert_eq!(device.properties().ordinal, 0);
            assert!(path.is_some());
        }
        (Err(error), None) => {
            assert_says_what_to_do(&error);
            assert!(error.to_string().contains("libcuda"), "{error}");
        }
        (Err(error), Some(_)) => assert_says_what_to_do(&error),
    }
}

#[test]
fn no_machine_has_device_9999() {
    let error = CudaDriver::open(9999).expect_err("there is no such device");
    assert_says_what_to_do(&error);
    if device_count().is_ok_and(|count| count > 0) {
        assert!(error.to_string().contains("9999"), "{error}");
    }
}

#[test]
fn diagnosis_opens_nothing_and_agrees_with_opening() {
    match driver_version() {
        Ok(version) if version >= MINIMUM_DRIVER_VERSION => {
            let count = device_count().unwrap_or(0);
            assert_eq!(count > 0, CudaDriver::open(0).is_ok());
        }
        Ok(_) => assert_says_what_to_do(&device_count().expect_err("the driver is too old")),
        Err(error) => {
            assert_says_what_to_do(&error);
            assert_eq!(device_count(), Err(error.clone()));
            assert_eq!(CudaDriver::open(0).expect_err("there is no driver"), error);
        }
    }
}

#[test]
fn a_failed_open_can_be_tried_again() {
    let first = CudaDriver::open(0).map(|_| ());
    assert_eq!(CudaDriver::open(0).map(|_| ()), first);
}
