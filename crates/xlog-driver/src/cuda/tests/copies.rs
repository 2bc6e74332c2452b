//! Copies through pinned buffers, and the reuse of the buffers.

use crate::cuda::CudaDriver;
use crate::cuda::fake::{self, BASE, fail, logged, run_queue, with};
use crate::cuda::staging::{KEEP_BYTES, LARGEST_BYTES};
use crate::{Driver, DriverError, DriverResult, StreamHandle, Waited};

fn copy_in(device: &CudaDriver, src: &[u8], stream: StreamHandle) -> DriverResult<()> {
    // SAFETY: the fake device's memory is live throughout.
    unsafe { device.copy_htod(BASE, src, stream) }
}

fn copy_out(device: &CudaDriver, dst: &mut [u8], stream: StreamHandle) -> DriverResult<()> {
    // SAFETY: the fake device's memory is live throughout.
    unsafe { device.copy_dtoh(dst, BASE, stream) }
}

fn pinned() -> usize {
    with(|state| state.host_blocks.len())
}

/// Nothing pinned and no event is left once the device is closed.
fn close(device: std::sync::Arc<CudaDriver>) {
    drop(device);
    assert_eq!(pinned(), 0, "pinned memory left");
    assert_eq!(with(|state| state.events.len()), 0, "events left");
}

#[test]
fn the_source_may_be_reused_at_once() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let mut source = vec![7_u8; 1000];
    copy_in(&device, &source, stream).unwrap();
    source.fill(9);
    assert!(run_queue());
    assert!(with(|state| state.memory[..1000].iter().all(|byte| *byte == 7)));
    close(device);
}

#[test]
fn queueing_behind_a_held_stream_takes_new_buffers_and_never_waits() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    for round in 0..1000_u32 {
        copy_in(&device, &round.to_ne_bytes(), stream).unwrap();
    }
    assert_eq!(device.core.staging.busy(), (1000, 0));
    assert_eq!(logged("cuEventSynchronize") + logged("cuCtxSynchronize"), 0);
    gate.release();
    assert!(run_queue());
    assert_eq!(with(|state| state.memory[..4].to_vec()), 999_u32.to_ne_bytes());
    close(device);
}

#[test]
fn completed_buffers_are_used_again() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    for _ in 0..100 {
        copy_in(&device, &vec![1; LARGEST_BYTES], stream).unwrap();
        assert!(run_queue());
    }
    assert_eq!(pinned(), 1);
    close(device);
}

#[test]
fn a_large_copy_arrives_whole_in_both_directions() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let bytes = 2 * LARGEST_BYTES + 4097;
    let source: Vec<u8> = (0..bytes).map(|index| ((index * 31) >> 7) as u8).collect();
    copy_in(&device, &source, stream).unwrap();
    let mut back = vec![0; bytes];
    copy_out(&device, &mut back, stream).unwrap();
    assert!(source == back);
    close(device);
}

#[test]
fn what_is_beyond_the_cap_goes_when_the_caller_may_wait() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    let source = vec![1; LARGEST_BYTES];
    for _ in 0..20 {
        copy_in(&device, &source, stream).unwrap();
    }
    gate.release();
    assert!(run_queue());
    copy_in(&device, &source, stream).unwrap();
    assert_eq!(logged("cuMemFreeHost"), 0, "queueing frees nothing");
    device.synchronize().unwrap();
    let kept: usize =
        with(|state| state.host_blocks.values().filter(|b| **b == LARGEST_BYTES).sum());
    assert_eq!(kept, KEEP_BYTES);
    close(device);
}

#[test]
fn a_refused_copy_gives_its_buffer_back() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuMemcpyHtoDAsync_v2", 1);
    fail("cuMemcpyDtoHAsync_v2", 1);
    for _ in 0..10 {
        copy_in(&device, &vec![1; LARGEST_BYTES], stream).unwrap_err();
        copy_out(&device, &mut vec![1; LARGEST_BYTES], stream).unwrap_err();
    }
    assert_eq!(pinned(), 1);
    assert_eq!(device.core.staging.busy(), (0, 0));
    close(device);
}

#[test]
fn a_buffer_without_an_event_behind_it_waits_for_the_device() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuEventRecord", 1);
    copy_in(&device, &[1; 16], stream).unwrap_err();
    assert_eq!(device.core.staging.busy(), (0, 1));
    fail("cuEventRecord", 0);
    device.synchronize().unwrap();
    assert_eq!(device.core.staging.busy(), (0, 0));
    close(device);
}

#[test]
fn a_buffer_without_an_event_behind_it_waits_for_a_stream_that_is_captured() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuEventRecord", 1);
    copy_in(&device, &[1; 16], stream).unwrap_err();
    fail("cuEventRecord", 0);
    with(|state| state.capturing = 1);
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForSome);
    assert_eq!(device.core.staging.busy(), (0, 1), "its copy may not have run");
    with(|state| state.capturing = 0);
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForAll);
    assert_eq!(device.core.staging.busy(), (0, 0));
    close(device);
}

#[test]
fn a_wait_that_fails_keeps_the_buffers_until_their_events_completed() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuEventSynchronize", 1);
    copy_out(&device, &mut vec![0; 3 * LARGEST_BYTES], stream).unwrap_err();
    assert_eq!(device.core.staging.busy(), (3, 0));
    close(device);
}

#[test]
fn an_event_that_cannot_be_made_leaks_no_buffer() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    fail("cuEventCreate", 2);
    for _ in 0..10 {
        copy_in(&device, &[1; LARGEST_BYTES], stream).unwrap_err();
    }
    assert_eq!(pinned(), 1);
    close(device);
}

#[test]
fn zero_bytes_queue_nothing() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let before = with(|state| state.log.len());
    copy_in(&device, &[], stream).unwrap();
    copy_out(&device, &mut [], stream).unwrap();
    // SAFETY: nothing is touched.
    unsafe { device.memset(BASE, 0, 0, stream) }.unwrap();
    // SAFETY: nothing is touched.
    unsafe { device.copy_dtod(BASE, BASE + 64, 0, stream) }.unwrap();
    assert_eq!(with(|state| state.log.len()), before);
    assert!(matches!(device.alloc(0), Err(DriverError::Invalid { .. })));
}

#[test]
fn a_captured_stream_gets_no_pinned_copy() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    with(|state| state.capturing = 1);
    let error = copy_in(&device, &[1], stream).unwrap_err();
    assert!(matches!(error, DriverError::Invalid { call: "copy_htod", .. }), "{error}");
    assert_eq!(logged("cuMemcpyHtoDAsync_v2"), 0);
}
