//! Captures that other code begins and whose graphs it launches.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::support::{BYTES, assert_empty, manager, refused, runtimes};
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, CaptureError, CaptureOptions, ResourceError, StreamId,
    XlogDeviceRuntime,
};
use xlog_cuda::driver::{CaptureMode, Driver, GraphExecHandle, Graphs, StreamHandle};
use xlog_cuda::{CudaDevice, LaunchRecorder, XlogError};
use xlog_testing::{for_each_device, for_each_sim};

/// Another library: a stream of its own, which it captures.
struct Other {
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
}

impl Other {
    fn new(device: &Arc<CudaDevice>) -> Self {
        let driver = device.driver().clone();
        let stream = driver.stream_create(0).unwrap();
        Self { driver, stream }
    }

    fn graphs(&self) -> &dyn Graphs {
        self.driver.graphs().unwrap()
    }

    fn raw(&self) -> *mut std::ffi::c_void {
        let number = std::ptr::without_provenance_mut(self.stream.number() as usize);
        self.driver.raw_stream(self.stream).unwrap_or(number)
    }

    fn end_capture(&self) -> GraphExecHandle {
        let graph = self.graphs().end_capture(self.stream).unwrap();
        let exec = self.graphs().graph_instantiate(graph).unwrap();
        // SAFETY: made above, and not used any more.
        unsafe { self.graphs().graph_destroy(graph) }.unwrap();
        exec
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used any more.
        let _ = unsafe { self.driver.stream_destroy(self.stream) };
    }
}

/// Waits until the driver has reported the end of a graph, which it may do on a thread of its own.
fn assert_empty_soon(runtime: &XlogDeviceRuntime) {
    let begin = Instant::now();
    while runtime.bytes_outstanding() > 0 && begin.elapsed() < Duration::from_secs(120) {
        runtime.reap_pending().unwrap();
        std::thread::yield_now();
    }
    assert_empty(runtime);
}

#[test]
fn memory_of_a_foreign_capture_stays_until_its_executable_graph_is_gone() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            for is_announced in [true, false] {
                let memory = manager(&runtime);
                let other = Other::new(device);
                let input = memory.alloc_zeroed::<u8>(BYTES).unwrap();
                other.graphs().begin_capture(other.stream, CaptureMode::ThreadLocal).unwrap();
                // SAFETY: the stream lives until the end of this test.
                let adopted = unsafe { runtime.stream_pool().adopt(other.raw()) }.unwrap();
                let joined =
                    runtime.join_capture(adopted.id(), &CaptureOptions::default()).unwrap();
                let output = memory.on_stream(adopted.id()).alloc::<u8>(BYTES).unwrap();
                let mut recorder = LaunchRecorder::new_strict(adopted.id());
                recorder.read(&input).write(&output);
                recorder
                    .run(&runtime, |_| {
                        adopted.run(|| {
                            let (to, from) = (output.ptr(), input.ptr());
                            // SAFETY: both buffers are live, and the recorder orders the copy.
                            unsafe { other.driver.copy_dtod(to, from, BYTES, other.stream)? };
                            Ok(())
                        })
                    })
                    .unwrap();
                drop(adopted);
                let graph = joined.finish().unwrap();
                let exec = other.end_capture();
                assert_eq!(
                    graph.launch(StreamId::DEFAULT),
                    Err(XlogError::Resource(CaptureError::NotExecutable.into()))
                );

                let stream = runtime.stream_pool().lease().unwrap();
                for value in 1..3 {
                    let mut fill = LaunchRecorder::new_strict(stream.id());
                    fill.write(&input);
                    // SAFETY: the buffer is live, and the recorder orders the fill.
                    fill.run(&runtime, |s| unsafe { s.memset(input.ptr(), value, BYTES) }).unwrap();
                    let mut recorder = LaunchRecorder::new_strict(stream.id());
                    recorder.graph(&graph);
                    recorder
                        .run(&runtime, |s| {
                            // SAFETY: the recorder keeps what the graph uses.
                            unsafe { other.graphs().graph_launch(exec, s.handle())? };
                            Ok(())
                        })
                        .unwrap();
                    assert_eq!(output.to_vec_on(StreamId::DEFAULT).unwrap(), [value; BYTES]);
                }
                let held = graph.arena_bytes();
                drop((graph, output));
                runtime.reap_pending().unwrap();
                assert!(runtime.bytes_outstanding() >= held, "the other library can still launch");
                if !is_announced {
                    // SAFETY: the input is live, and this is the stream that used it last.
                    unsafe { other.graphs().graph_launch(exec, stream.handle()) }.unwrap();
                    stream.synchronize().unwrap();
                }
                drop(input);
                // SAFETY: made above, and not used any more.
                unsafe { other.graphs().graph_exec_destroy(exec) }.unwrap();
                assert_empty_soon(&runtime);
            }
        }
    });
}

#[test]
fn a_foreign_capture_that_is_broken_gives_everything_back() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let other = Other::new(device);
            other.graphs().begin_capture(other.stream, CaptureMode::Relaxed).unwrap();
            // SAFETY: the stream lives until the end of this test.
            let adopted = unsafe { runtime.stream_pool().adopt(other.raw()) }.unwrap();
            let joined = runtime.join_capture(adopted.id(), &CaptureOptions::default()).unwrap();
            let block = memory.on_stream(adopted.id()).alloc::<u8>(BYTES).unwrap();
            assert!(other.driver.stream_query(other.stream).is_err(), "a query breaks the capture");
            assert!(other.graphs().end_capture(other.stream).is_err());
            drop((joined, block, adopted));
            assert_empty_soon(&runtime);
        }
    });
}

#[test]
fn frees_on_a_stream_of_a_capture_that_was_not_joined_say_so_and_are_done_by_a_reap() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            // The stream is enlisted for the life of the pool.
            let other = std::mem::ManuallyDrop::new(Other::new(device));
            // SAFETY: the stream is not destroyed.
            let id = unsafe { runtime.stream_pool().enlist(other.raw()) }.unwrap();
            let memory = manager(&runtime).on_stream(id);
            let block = runtime.allocate(BYTES, id, AllocTag("rows")).unwrap();
            let (buffer, bytes) = (memory.alloc::<u8>(BYTES).unwrap(), runtime.bytes_outstanding());
            let state = |block| runtime.block_state(block);
            let (first, second) = (BlockId::from_block(&block), buffer.id().unwrap());
            other.graphs().begin_capture(other.stream, CaptureMode::Global).unwrap();
            let refused = runtime.deallocate(block).unwrap_err();
            assert_eq!(refused, ResourceError::from(CaptureError::NotJoined { stream: id }));
            assert!(refused.to_string().contains("join_capture"), "{refused}");
            drop(buffer);
            assert_eq!([first, second].map(state), [BlockState::Retired; 2]);
            // Reaps of other threads meanwhile leave them alone, and the capture whole.
            runtime.reap_completed().unwrap();
            runtime.reap_pending().unwrap();
            runtime.trim().unwrap();
            assert_eq!([first, second].map(state), [BlockState::Retired; 2]);
            assert_eq!(runtime.bytes_outstanding(), bytes, "nothing is lost");
            let exec = other.end_capture();
            // SAFETY: made above, and not used any more.
            unsafe { other.graphs().graph_exec_destroy(exec) }.unwrap();
            assert_empty(&runtime);
            assert_eq!([first, second].map(state), [BlockState::Freed; 2]);
        }
    });
}

#[test]
fn a_stream_that_is_not_captured_has_no_capture_to_join() {
    for_each_device(|device| {
        let runtime = runtimes(device).remove(0);
        let stream = runtime.stream_pool().lease().unwrap();
        let refused = runtime.join_capture(stream.id(), &CaptureOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("which is not being captured"), "{refused}");
        assert_empty(&runtime);
    });
}

#[test]
fn a_runtime_that_ends_after_a_foreign_graph_returns_its_memory() {
    for_each_sim(|device, sim| {
        let before = sim.memory_info().unwrap().free;
        // The driver's own pools keep what was returned to them.
        for runtime in runtimes(device).into_iter().step_by(2) {
            let memory = manager(&runtime);
            let other = Other::new(device);
            other.graphs().begin_capture(other.stream, CaptureMode::Relaxed).unwrap();
            // SAFETY: the stream lives until the end of this test.
            let adopted = unsafe { runtime.stream_pool().adopt(other.raw()) }.unwrap();
            let joined = runtime.join_capture(adopted.id(), &CaptureOptions::default()).unwrap();
            drop(memory.on_stream(adopted.id()).alloc::<u8>(BYTES).unwrap());
            drop(adopted);
            drop(joined);
            let exec = other.end_capture();
            // SAFETY: made above, and not used any more.
            unsafe { other.graphs().graph_exec_destroy(exec) }.unwrap();
            drop((memory, runtime));
        }
        assert_eq!(sim.memory_info().unwrap().free, before, "memory was left behind");
    });
}

#[test]
fn what_a_capture_that_is_not_joined_cannot_do_is_a_typed_error() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let other = Other::new(device);
            let mut buffer = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            // SAFETY: the stream lives until the end of this test.
            let before = unsafe { runtime.stream_pool().adopt(other.raw()) }.unwrap();
            other.graphs().begin_capture(other.stream, CaptureMode::ThreadLocal).unwrap();
            let is_captured = |error| matches!(error, CaptureError::AlreadyCaptured { .. });
            // SAFETY: the buffer is live; the call is refused.
            let adopted = unsafe { before.adopt::<u8>(&memory, buffer.ptr(), BYTES) };
            assert!(is_captured(refused(adopted.map(drop))));
            // SAFETY: as above.
            let inside = unsafe { runtime.stream_pool().adopt(other.raw()) }.unwrap();
            let is_host = |error| matches!(error, CaptureError::HostAccess { .. });
            let stream = inside.id();
            assert!(is_host(refused(buffer.copy_from_slice_on(&[1; BYTES], stream))));
            assert!(is_host(refused(buffer.to_vec_on(stream))));
            let given = memory.alloc::<u8>(BYTES).unwrap();
            assert!(is_captured(refused(buffer.copy_from_on(&given, stream))));
            assert!(is_captured(refused(before.give_back(given))));
            drop((inside, before));
            let exec = other.end_capture();
            // SAFETY: made above, and not used any more.
            unsafe { other.graphs().graph_exec_destroy(exec) }.unwrap();
            assert_eq!(buffer.to_vec().unwrap(), [0; BYTES]);
            drop(buffer);
            assert_empty_soon(&runtime);
        }
    });
}
