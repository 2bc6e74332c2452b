//! Captures and graphs: which calls are made, in which mode, and what becomes of the function that a graph retains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cuda::CudaDriver;
use crate::cuda::fake::{self, Without, fail, logged, with};
use crate::{CaptureMode, Driver, DriverError, Graphs};

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

#[test]
fn every_call_of_graphs_reaches_the_driver_in_the_mode_that_it_needs() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let graphs = device.graphs().unwrap();
    for (mode, number) in
        [(CaptureMode::Global, 0), (CaptureMode::ThreadLocal, 1), (CaptureMode::Relaxed, 2)]
    {
        graphs.begin_capture(stream, mode).unwrap();
        assert_eq!(with(|state| state.begun_mode), number);
        let info = graphs.capture_info(stream).unwrap().unwrap();
        graphs.graph_retain(info.graph, Box::new(|| {})).unwrap();
        let graph = graphs.end_capture(stream).unwrap();
        assert_eq!(graphs.capture_info(stream).unwrap(), None);
        let exec = graphs.graph_instantiate(graph).unwrap();
        // SAFETY: nothing was captured.
        unsafe { graphs.graph_launch(exec, stream) }.unwrap();
        // SAFETY: made above, and not used any more.
        unsafe {
            graphs.graph_destroy(graph).unwrap();
            graphs.graph_exec_destroy(exec).unwrap();
        }
    }
    for (call, mode) in [
        ("cuStreamBeginCapture_v2", GLOBAL),
        ("cuStreamEndCapture", GLOBAL),
        ("cuStreamGetCaptureInfo_v2", GLOBAL),
        ("cuGraphInstantiateWithFlags", RELAXED),
        ("cuGraphLaunch", RELAXED),
        ("cuGraphDestroy", RELAXED),
        ("cuGraphExecDestroy", RELAXED),
        ("cuUserObjectCreate", RELAXED),
        ("cuGraphRetainUserObject", RELAXED),
    ] {
        let of_call = |state: &mut fake::State| {
            let made = state.modes.iter().filter(|(name, _)| *name == call);
            let mut modes: Vec<u32> = made.map(|(_, mode)| *mode).collect();
            modes.dedup();
            modes
        };
        assert_eq!(with(of_call), [mode], "{call}");
    }
    assert_eq!(with(|state| state.capture_mode), GLOBAL);
    // SAFETY: made above, and not used any more.
    unsafe { device.stream_destroy(stream) }.unwrap();
}

#[test]
fn what_a_graph_retains_is_called_or_dropped_once_whatever_the_driver_answers() {
    for (call, code, calls) in
        [("", 0, 1), ("cuUserObjectCreate", 2, 0), ("cuGraphRetainUserObject", 1, 1)]
    {
        let device = fake::device();
        let stream = device.stream_create(0).unwrap();
        device.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        let info = device.capture_info(stream).unwrap().unwrap();
        let called = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&called);
        if !call.is_empty() {
            fail(call, code);
        }
        let release = Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(device.graph_retain(info.graph, release).is_ok(), code == 0, "{call}");
        fake::release_user_objects();
        assert_eq!(called.load(Ordering::Relaxed), calls, "{call}");
        assert_eq!(Arc::strong_count(&called), 1, "{call}: the function is still there");
    }
}

#[test]
fn a_driver_without_graphs_says_so_and_a_captured_stream_is_not_launched_on() {
    let api = fake::load(Without(&[c"cuGraphLaunch"])).unwrap();
    let device = CudaDriver::open_with(api, 0).unwrap();
    assert!(device.graphs().is_none());
    let stream = device.stream_create(0).unwrap();
    let refused = device.begin_capture(stream, CaptureMode::Global);
    assert_eq!(refused, Err(DriverError::Unsupported { call: "begin_capture" }));
    drop(device);

    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    device.begin_capture(stream, CaptureMode::Global).unwrap();
    let graph = device.end_capture(stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    with(|state| state.capturing = 1);
    // SAFETY: nothing was captured.
    let refused = unsafe { device.graph_launch(exec, stream) };
    assert!(matches!(refused, Err(DriverError::Invalid { .. })), "{refused:?}");
    assert_eq!(logged("cuGraphLaunch"), 0);
    with(|state| state.capturing = 0);
}

#[test]
fn a_graph_of_another_device_is_refused_before_the_driver_sees_it() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    device.begin_capture(stream, CaptureMode::Global).unwrap();
    let graph = device.end_capture(stream).unwrap();
    let other = CudaDriver::open_with(fake::api(), 0).unwrap();
    let refused = other.graph_instantiate(graph);
    assert!(matches!(refused, Err(DriverError::Invalid { .. })), "{refused:?}");
    assert_eq!(logged("cuGraphInstantiateWithFlags"), 0);
    fail("cuGraphDestroy", 0);
}
