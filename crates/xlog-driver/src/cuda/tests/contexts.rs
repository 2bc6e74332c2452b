//! Which context is current before, during and after a call.

use crate::Driver;
use crate::cuda::fake::{self, OURS, fail, logged, with};

const FOREIGN: usize = 0xf0;

#[test]
fn with_none_current_ours_is_set_once_and_stays() {
    let device = fake::device();
    assert_eq!(with(|state| state.contexts.clone()), [OURS]);
    device.memory_info().unwrap();
    device.memory_info().unwrap();
    assert_eq!(logged("cuCtxSetCurrent"), 1);
    assert_eq!(logged("cuCtxPushCurrent_v2"), 0);
}

#[test]
fn a_foreign_one_is_as_it_was_after_success_and_after_failure() {
    let device = fake::device();
    with(|state| state.contexts = vec![FOREIGN]);
    device.memory_info().unwrap();
    assert_eq!(with(|state| state.contexts.clone()), [FOREIGN]);
    fail("cuMemGetInfo_v2", 1);
    device.memory_info().unwrap_err();
    assert_eq!(with(|state| state.contexts.clone()), [FOREIGN]);
    assert_eq!(logged("cuCtxPushCurrent_v2"), 2);
    drop(device);
    assert_eq!(with(|state| state.contexts.clone()), [FOREIGN]);
}

#[test]
fn a_thread_is_not_left_with_a_dead_context() {
    let device = fake::device();
    drop(device);
    assert!(with(|state| state.contexts.is_empty()));
}

#[test]
fn a_context_that_others_keep_alive_stays_current() {
    let device = fake::device();
    with(|state| state.retains += 1);
    drop(device);
    assert_eq!(with(|state| state.contexts.clone()), [OURS]);
}

#[test]
fn a_context_that_cannot_be_bound_is_an_error_and_no_call_is_made() {
    let device = fake::device();
    with(|state| state.contexts = vec![FOREIGN]);
    fail("cuCtxPushCurrent_v2", 201);
    device.memory_info().unwrap_err();
    assert_eq!(logged("cuMemGetInfo_v2"), 0);
    assert_eq!(logged("cuCtxPopCurrent_v2"), 0);
}
