//! Captures and launches beside other threads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::support::{BYTES, assert_empty, copy, fill, manager, runtimes};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{AllocTag, CaptureMode, CaptureOptions, CaptureScope};
use xlog_cuda::driver::sync::Mutex;
use xlog_cuda::sim::Call;
use xlog_testing::{for_each_device, threads};

/// Schedules of two threads.
const SEEDS: u64 = 500;

/// Every driver call of the second thread on the captured stream is over before the capture begins, or is not made.
#[test]
fn a_capture_that_begins_beside_requests_frees_and_waits_on_its_stream_stays_whole() {
    for seed in 0..SEEDS {
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        for runtime in runtimes(&device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let other = runtime.stream_pool().lease().unwrap();
            let captures = || {
                for value in 0..4 {
                    let graph = runtime.capture(stream.id(), |scope| {
                        let inside = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                        fill(&runtime, scope.id(), &inside, value)
                    });
                    let graph = graph.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                    graph.launch(stream.id()).unwrap();
                }
            };
            let works = || {
                for _ in 0..4 {
                    // What meets the capture is refused, or comes from its arena.
                    let block = runtime.allocate(BYTES, stream.id(), AllocTag("rows"));
                    let _ = stream.query();
                    let _ = block.and_then(|block| runtime.deallocate(block));
                    let _ = stream.synchronize();
                    let _ = stream.wait_for(&other);
                    drop(stream.done());
                }
            };
            threads(&device, vec![Box::new(captures), Box::new(works)]);
            stream.synchronize().unwrap();
            other.synchronize().unwrap();
            assert_empty(&runtime);
        }
        assert!(device.races().is_empty(), "seed {seed}: {:?}", device.races());
    }
}

#[test]
fn a_free_that_meets_the_end_of_a_capture_loses_no_block() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    for runtime in runtimes(&device) {
        let stream = runtime.stream_pool().lease().unwrap();
        for _ in 0..1000 {
            let block = runtime.allocate(BYTES, stream.id(), AllocTag("rows")).unwrap();
            let is_open = AtomicBool::new(false);
            let captures = || {
                let open = |_: &CaptureScope<'_>| {
                    is_open.store(true, Ordering::Release);
                    Ok(())
                };
                drop(runtime.capture(stream.id(), open).unwrap());
            };
            let frees = || {
                while !is_open.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                runtime.deallocate(block).unwrap();
            };
            threads(&device, vec![Box::new(captures), Box::new(frees)]);
        }
        assert_empty(&runtime);
    }
    assert!(device.races().is_empty(), "{:?}", device.races());
}

/// The other library has a stream of the runtime, and tells nothing when it begins to capture. Not in the global mode: other tests of this
/// process would break such a capture.
#[test]
fn captures_that_other_code_begins_stay_whole_beside_trims_reaps_and_requests() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let driver = device.driver();
            let graphs = driver.graphs().unwrap();
            let theirs = runtime.stream_pool().lease().unwrap();
            let ours = runtime.stream_pool().lease().unwrap();
            let (handle, tag) = (theirs.handle(), AllocTag("rows"));
            let kept = runtime.allocate(BYTES, theirs.id(), tag).unwrap();
            let captures = || {
                for round in 0..40 {
                    let block = runtime.allocate(3 << 20, theirs.id(), tag).unwrap();
                    // SAFETY: the block is live, and this is its own stream.
                    unsafe { theirs.memset(block.ptr, 1, BYTES) }.unwrap();
                    runtime.deallocate(block).unwrap();
                    let mode = [CaptureMode::ThreadLocal, CaptureMode::Relaxed][round % 2];
                    graphs.begin_capture(handle, mode).unwrap();
                    // SAFETY: the graph is not launched.
                    unsafe { driver.memset(kept.ptr, 2, BYTES, handle) }.unwrap();
                    let graph = graphs.end_capture(handle).expect("the capture is whole");
                    // SAFETY: made above, and not used any more.
                    unsafe { graphs.graph_destroy(graph) }.unwrap();
                }
            };
            let works = || {
                for _ in 0..40 {
                    let block = runtime.allocate(5 << 20, ours.id(), tag).unwrap();
                    runtime.deallocate(block).unwrap();
                    runtime.trim().unwrap();
                    runtime.reap_completed().unwrap();
                    runtime.reap_pending().unwrap();
                    ours.synchronize().unwrap();
                }
            };
            threads(device, vec![Box::new(captures), Box::new(works)]);
            runtime.deallocate(kept).unwrap();
            assert_empty(&runtime);
        }
    });
}

/// The driver may crash when an event is recorded on a stream while another thread begins or ends a capture there. So the frees, which
/// name the stream, record the events, and other calls only ask them.
#[test]
fn reaps_and_trims_record_no_event_on_a_stream_that_other_code_may_capture() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let faults = device.sim().unwrap().faults();
    for runtime in runtimes(&device) {
        let theirs = runtime.stream_pool().lease().unwrap();
        let (handle, tag) = (theirs.handle(), AllocTag("rows"));
        for is_busy in [false, true] {
            let block = runtime.allocate(3 << 20, theirs.id(), tag).unwrap();
            let held = is_busy.then(|| faults.hold_back(handle).unwrap());
            // SAFETY: the block is live, and this is its own stream.
            unsafe { theirs.memset(block.ptr, 1, BYTES) }.unwrap();
            runtime.deallocate(block).unwrap();
            let recorded = faults.calls(Call::EventRecord);
            runtime.reap_completed().unwrap();
            runtime.trim().unwrap();
            drop(held);
            runtime.reap_pending().unwrap();
            runtime.trim().unwrap();
            assert_eq!(faults.calls(Call::EventRecord), recorded);
            assert_empty(&runtime);
        }
    }
    assert!(device.races().is_empty(), "{:?}", device.races());
}

#[test]
fn a_handle_that_is_taken_during_a_capture_is_still_known_after_it() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let mut taken = None;
            let captured = runtime.capture(stream.id(), |scope| {
                taken = Some(stream.handle());
                let inside = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                fill(&runtime, scope.id(), &inside, 1)
            });
            drop(captured.unwrap());
            let (handle, graphs) = (taken.unwrap(), device.driver().graphs().unwrap());
            graphs.begin_capture(handle, CaptureMode::ThreadLocal).unwrap();
            assert!(runtime.allocate(BYTES, stream.id(), AllocTag("rows")).is_err());
            let graph = graphs.end_capture(handle).expect("the capture is whole");
            // SAFETY: made above, and not used any more.
            unsafe { graphs.graph_destroy(graph) }.unwrap();
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_capture_that_begins_beside_waits_of_another_thread_stays_whole() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let other = runtime.stream_pool().lease().unwrap();
            let block = memory.on_stream(stream.id()).alloc_zeroed::<u8>(BYTES).unwrap();
            let copied = memory.on_stream(other.id()).alloc_zeroed::<u8>(BYTES).unwrap();
            // Two uses of a block that are open at once have no order: the threads take turns at it.
            let turn = Mutex::new(());
            let captures = || {
                for value in 0..8 {
                    // Work of the captured stream, which the other thread has to wait for.
                    {
                        let _turn = turn.lock();
                        fill(&runtime, stream.id(), &block, value).unwrap();
                    }
                    let graph = runtime.capture(stream.id(), |scope| {
                        let inside = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                        fill(&runtime, scope.id(), &inside, value)
                    });
                    graph.unwrap().launch(stream.id()).unwrap();
                }
            };
            let waits = || {
                for _ in 0..16 {
                    // Its stream waits for work from before the capture, and never joins the capture.
                    {
                        let _turn = turn.lock();
                        copy(&runtime, other.id(), &block, &copied).unwrap();
                    }
                    other.synchronize().unwrap();
                }
            };
            threads(device, vec![Box::new(captures), Box::new(waits)]);
            copy(&runtime, other.id(), &block, &copied).unwrap();
            assert_eq!(copied.to_vec().unwrap(), [7; BYTES]);
            drop((block, copied));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn launches_of_two_threads_in_one_arena_follow_each_other() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let first = runtime.stream_pool().lease().unwrap();
            let second = runtime.stream_pool().lease().unwrap();
            let work = |scope: &CaptureScope<'_>, value| {
                let inside = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                fill(&runtime, scope.id(), &inside, value)
            };
            let one = runtime.capture(first.id(), |scope| work(scope, 1)).unwrap();
            let options = CaptureOptions::default().sharing(&one);
            let two = runtime.capture_with(second.id(), &options, |scope| work(scope, 2)).unwrap();
            let launch = || {
                for _ in 0..10 {
                    one.launch(first.id()).unwrap();
                }
            };
            let launch_both = || {
                for _ in 0..5 {
                    two.launch(second.id()).unwrap();
                    one.launch(second.id()).unwrap();
                }
            };
            threads(device, vec![Box::new(launch), Box::new(launch_both)]);
            drop((one, two, options));
            assert_empty(&runtime);
        }
    });
}
