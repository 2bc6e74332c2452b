//! Captured work: it runs when its graph is launched, in its captured order, and the race detector sees every replay.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::{devices, edge, memset, read, seeded, two_streams};
use xlog_driver::{
    Access, CaptureMode, CaptureStatus, Driver, DriverError, DriverResult, GraphExecHandle, Graphs,
    StreamHandle,
};
use xlog_sim::{RaceKind, SimDevice, SimKernel};

const BYTES: usize = 64;

/// Captures what `work` queues, and makes it executable.
fn captured(device: &SimDevice, on: StreamHandle, work: impl FnOnce()) -> GraphExecHandle {
    device.begin_capture(on, CaptureMode::default()).unwrap();
    work();
    let graph = device.end_capture(on).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    // SAFETY: made above, and not used any more.
    unsafe { device.graph_destroy(graph) }.unwrap();
    exec
}

fn launch(device: &SimDevice, exec: GraphExecHandle, stream: StreamHandle) {
    // SAFETY: the simulated device checks the ranges itself.
    unsafe { device.graph_launch(exec, stream) }.unwrap();
}

fn increment(device: &SimDevice, ptr: u64, stream: StreamHandle) -> DriverResult<()> {
    let kernel = SimKernel::repeatable("increment", |args| {
        args.bytes_mut(0).iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    });
    device.launch(stream, kernel.arg(ptr, BYTES, Access::ReadWrite))
}

#[test]
fn captured_work_runs_at_each_launch_and_not_before() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        memset(&device, block, 1, BYTES, a);
        let exec = captured(&device, a, || {
            increment(&device, block, a).unwrap();
            increment(&device, block, a).unwrap();
        });
        assert_eq!(read(&device, block, BYTES, a), [1; BYTES]);
        launch(&device, exec, a);
        launch(&device, exec, a);
        assert_eq!(read(&device, block, BYTES, a), [5; BYTES]);
        edge(&device, a, b);
        launch(&device, exec, b);
        assert_eq!(read(&device, block, BYTES, b), [7; BYTES]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn launches_of_one_executable_graph_follow_each_other_on_any_streams() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        memset(&device, block, 0, BYTES, a);
        let exec = captured(&device, a, || increment(&device, block, a).unwrap());
        launch(&device, exec, a);
        for stream in [b, a, b] {
            launch(&device, exec, stream);
        }
        assert_eq!(read(&device, block, BYTES, b), [4; BYTES]);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
    }
}

#[test]
fn a_replay_without_order_against_a_reader_is_a_race() {
    for device in devices().into_iter().chain((100..400).map(seeded)) {
        for ordered in [false, true] {
            let (a, b) = two_streams(&device);
            let block = device.alloc(BYTES).unwrap();
            memset(&device, block, 0, BYTES, a);
            let exec = captured(&device, a, || increment(&device, block, a).unwrap());
            launch(&device, exec, a);
            edge(&device, a, b);
            let reader = SimKernel::new("reader", |_| {}).arg(block, BYTES, Access::Read);
            device.launch(b, reader).unwrap();
            if ordered {
                edge(&device, b, a);
            }
            let before = device.races().len();
            launch(&device, exec, a);
            let races = device.races();
            assert_eq!(races.len() > before, !ordered, "{device:?} {races:?}");
            if !ordered {
                assert_eq!(races[before].kind, RaceKind::ReadWrite);
                assert!(races[before].to_string().contains("increment"), "{}", races[before]);
                assert!(device.stream_synchronize(a).is_err());
            }
        }
    }
}

#[test]
fn branches_of_a_graph_are_concurrent_and_joins_are_order() {
    for device in devices().into_iter().chain((100..200).map(seeded)) {
        for is_joined_first in [true, false] {
            let (a, b) = two_streams(&device);
            let block = device.alloc(BYTES).unwrap();
            let exec = captured(&device, a, || {
                increment(&device, block, a).unwrap();
                edge(&device, a, b);
                increment(&device, block, b).unwrap();
                if is_joined_first {
                    edge(&device, b, a);
                    increment(&device, block, a).unwrap();
                } else {
                    increment(&device, block, a).unwrap();
                    edge(&device, b, a);
                }
            });
            let before = device.races().len();
            launch(&device, exec, a);
            let races = device.races();
            assert_eq!(races.len() == before, is_joined_first, "{device:?} {races:?}");
            let _ = device.stream_synchronize(a);
            // SAFETY: made above, and not used any more.
            unsafe { device.graph_exec_destroy(exec) }.unwrap();
        }
    }
}

#[test]
fn calls_that_cuda_forbids_break_the_capture_and_the_stream_works_again() {
    type Forbidden = fn(&SimDevice, StreamHandle, StreamHandle) -> DriverResult<()>;
    let forbidden: [(&str, Forbidden); 4] = [
        ("stream_query", |device, a, _| device.stream_query(a).map(drop)),
        ("stream_synchronize", |device, a, _| device.stream_synchronize(a)),
        ("a wait for outside work", |device, a, b| {
            let event = device.event_create()?;
            device.event_record(event, b)?;
            device.stream_wait_event(a, event)
        }),
        ("synchronize", |device, _, _| device.synchronize()),
    ];
    for device in devices() {
        for (name, call) in forbidden {
            let (a, b) = two_streams(&device);
            device.begin_capture(a, CaptureMode::Global).unwrap();
            assert!(call(&device, a, b).is_err(), "{name}");
            assert_eq!(device.stream_capture(a).unwrap(), CaptureStatus::Invalidated, "{name}");
            assert_eq!(device.capture_info(a).unwrap(), None);
            let error = device.end_capture(a).unwrap_err();
            assert!(matches!(error, DriverError::Invalid { .. }), "{error:?}");
            assert_eq!(device.stream_capture(a).unwrap(), CaptureStatus::None, "{name}");
            device.stream_synchronize(a).unwrap();
        }
    }
}

#[test]
fn what_a_graph_cannot_repeat_is_refused_and_leaves_the_capture_whole() {
    for device in devices() {
        let (a, _) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        let exec = captured(&device, a, || {
            let once = SimKernel::new("once", |_| {}).arg(block, BYTES, Access::Read);
            let error = device.launch(a, once).unwrap_err();
            assert!(error.to_string().contains("SimKernel::repeatable"), "{error}");
            assert!(device.host_fn(a, Box::new(|| {})).is_err());
            assert!(device.hold(a).is_err());
            // SAFETY: the simulated device checks the range itself.
            assert!(unsafe { device.copy_htod(block, &[1], a) }.is_err());
            // SAFETY: as above.
            assert!(unsafe { device.copy_dtoh(&mut [0], block, a) }.is_err());
            increment(&device, block, a).unwrap();
        });
        launch(&device, exec, a);
        device.stream_synchronize(a).unwrap();
    }
}

#[test]
fn a_branch_that_is_not_joined_fails_the_end_and_two_captures_cannot_meet() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        device.begin_capture(a, CaptureMode::default()).unwrap();
        edge(&device, a, b);
        assert_eq!(device.capture_info(a).unwrap(), device.capture_info(b).unwrap());
        increment(&device, block, b).unwrap();
        let error = device.end_capture(a).unwrap_err().to_string();
        assert!(error.contains("was not joined"), "{error}");
        assert_eq!(device.stream_capture(b).unwrap(), CaptureStatus::None);

        device.begin_capture(a, CaptureMode::default()).unwrap();
        device.begin_capture(b, CaptureMode::default()).unwrap();
        let event = device.event_create().unwrap();
        device.event_record(event, a).unwrap();
        assert!(device.stream_wait_event(b, event).is_err());
        assert!(device.end_capture(a).is_err() && device.end_capture(b).is_err());
        let error = device.stream_wait_event(b, event).unwrap_err().to_string();
        assert!(error.contains("has ended"), "{error}");
    }
}

#[test]
fn what_a_graph_retains_is_released_once_after_the_last_launch() {
    for device in devices() {
        let (a, b) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        let released = Arc::new(AtomicU32::new(0));
        device.begin_capture(a, CaptureMode::default()).unwrap();
        increment(&device, block, a).unwrap();
        let info = device.capture_info(a).unwrap().unwrap();
        let count = released.clone();
        let release = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        device.graph_retain(info.graph, Box::new(release)).unwrap();
        let graph = device.end_capture(a).unwrap();
        let exec = device.graph_instantiate(graph).unwrap();
        // SAFETY: made above, and not used any more.
        unsafe { device.graph_destroy(graph) }.unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 0, "the executable graph has it");
        let gate = device.hold(a).unwrap();
        launch(&device, exec, a);
        // SAFETY: made above, and not used any more.
        unsafe { device.graph_exec_destroy(exec) }.unwrap();
        device.memory_info().unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 0, "the launch still waits");
        gate.release();
        device.stream_synchronize(a).unwrap();
        device.memory_info().unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 1);
        // The release came after the work: no event is needed to use its memory.
        memset(&device, block, 3, BYTES, b);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
        device.stream_synchronize(b).unwrap();
    }
}

#[test]
fn a_launch_whose_memory_is_gone_is_refused() {
    for device in devices() {
        let (a, _) = two_streams(&device);
        let block = device.alloc(BYTES).unwrap();
        let exec = captured(&device, a, || increment(&device, block, a).unwrap());
        // SAFETY: nothing has run on it.
        unsafe { device.free(block) }.unwrap();
        // SAFETY: the simulated device checks the ranges itself.
        let refused = unsafe { device.graph_launch(exec, a) };
        assert!(matches!(refused, Err(DriverError::Invalid { .. })), "{refused:?}");
        device.stream_synchronize(a).unwrap();
    }
}
