//! Graphs on a GPU: kernels in captures of every mode beside busy threads, and captures of cudarc.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use xlog_cuda::device_runtime::{CaptureMode, CaptureOptions, XlogDeviceRuntime};
use xlog_cuda::interop::CudarcStream;
use xlog_cuda::{GpuMemoryManager, LaunchRecorder, XlogError};
use xlog_kernels::exercise::{Exercise, host};

use crate::gpu;

const ROWS: usize = 10_000;

fn pattern(seed: u32) -> Vec<u32> {
    (0..ROWS as u32).map(|at| host::word(seed, at)).collect()
}

/// Allocates, copies, waits and frees on streams of its own until it is told to stop.
fn keep_busy(runtime: &Arc<XlogDeviceRuntime>, stop: &AtomicBool) {
    let memory = GpuMemoryManager::with_runtime(runtime.clone());
    let stream = runtime.stream_pool().lease().unwrap();
    let mut rounds = 0_u32;
    while !stop.load(Ordering::Acquire) {
        let memory = memory.on_stream(stream.id());
        let mut small = memory.alloc::<u32>(256).unwrap();
        small.copy_from_slice(&[rounds; 256]).unwrap();
        let large = memory.alloc::<u8>(3 << 20).unwrap();
        assert_eq!(small.to_vec().unwrap(), [rounds; 256]);
        drop((small, large));
        stream.synchronize().unwrap();
        runtime.reap_pending().unwrap();
        runtime.trim().unwrap();
        rounds = rounds.wrapping_add(1);
    }
}

#[test]
fn captures_of_every_mode_stay_valid_beside_busy_threads() {
    let Some(device) = gpu::gpu("captures_of_every_mode_stay_valid_beside_busy_threads") else {
        return;
    };
    let runtime = gpu::runtime(&device, 8);
    let kernels = Exercise::load(&device).unwrap();
    let memory = GpuMemoryManager::with_runtime(runtime.clone());
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| keep_busy(&runtime, &stop));
        for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
            for round in 0..20_u32 {
                let (stream, branch) = (
                    runtime.stream_pool().lease().unwrap(),
                    runtime.stream_pool().lease().unwrap(),
                );
                let options = CaptureOptions::default().with_mode(mode);
                let mut output = None;
                let graph = runtime
                    .capture_with(stream.id(), &options, |scope| {
                        scope.fork(branch.id())?;
                        let source = memory.on_stream(scope.id()).alloc::<u32>(ROWS)?;
                        let mut recorder = LaunchRecorder::new_strict(scope.id());
                        recorder.write(&source);
                        recorder.run(&runtime, |stream| {
                            // SAFETY: the buffer is live and has this many elements.
                            unsafe { kernels.fill_pattern(stream, source.ptr(), ROWS, round) }
                        })?;
                        let mut copy = memory.on_stream(branch.id()).alloc::<u32>(ROWS)?;
                        copy.copy_from(&source)?;
                        output = Some(copy);
                        Ok(())
                    })
                    .unwrap();
                let output = output.unwrap();
                graph.launch(stream.id()).unwrap();
                graph.launch(branch.id()).unwrap();
                assert_eq!(output.to_vec().unwrap(), pattern(round));
                assert!(graph.arena_bytes() > 0);
            }
        }
        stop.store(true, Ordering::Release);
    });
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0);
}

#[test]
fn a_capture_that_cudarc_begins_gets_memory_until_its_graph_is_gone() {
    let Some(device) = gpu::gpu("a_capture_that_cudarc_begins_gets_memory_until_its_graph_is_gone")
    else {
        return;
    };
    let runtime = gpu::runtime(&device, 4);
    let lease = runtime.stream_pool().lease().unwrap();
    let ours = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
    let theirs = ours.context().new_stream().unwrap();
    let memory = GpuMemoryManager::with_runtime(runtime.clone());
    let input = memory.alloc_zeroed::<u8>(ROWS).unwrap();
    theirs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    // SAFETY: the stream lives until the end of this test.
    let adopted = unsafe { runtime.stream_pool().adopt(theirs.cu_stream().cast()) }.unwrap();
    let joined = runtime.join_capture(adopted.id(), &CaptureOptions::default()).unwrap();
    let output = memory.on_stream(adopted.id()).alloc::<u8>(ROWS).unwrap();
    let mut recorder = LaunchRecorder::new_strict(adopted.id());
    recorder.read(&input).write(&output);
    recorder
        .run(&runtime, |_| {
            adopted.run(|| {
                // SAFETY: both buffers are live and this long, and the recorder orders the copy.
                let code = unsafe {
                    sys::cuMemcpyDtoDAsync_v2(output.ptr(), input.ptr(), ROWS, theirs.cu_stream())
                };
                assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
                Ok(())
            })
        })
        .unwrap();
    drop(adopted);
    let graph = joined.finish().unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let their_graph = theirs.end_capture(flags).unwrap().unwrap();
    // SAFETY: the stream lives until the end of this test.
    let adopted = unsafe { runtime.stream_pool().adopt(theirs.cu_stream().cast()) }.unwrap();
    for value in 1..4 {
        let mut fill = LaunchRecorder::new_strict(lease.id());
        fill.write(&input);
        // SAFETY: the buffer is live, and the recorder orders the fill.
        fill.run(&runtime, |s| unsafe { s.memset(input.ptr(), value, ROWS) }).unwrap();
        let mut recorder = LaunchRecorder::new_strict(adopted.id());
        recorder.graph(&graph);
        recorder
            .run(&runtime, |_| {
                adopted.run(|| {
                    their_graph.launch().map_err(|error| XlogError::Kernel(error.to_string()))
                })
            })
            .unwrap();
        assert_eq!(output.to_vec_on(lease.id()).unwrap(), [value; ROWS]);
    }
    drop(adopted);
    let held = graph.arena_bytes();
    drop((graph, output, input));
    runtime.reap_pending().unwrap();
    assert!(runtime.bytes_outstanding() >= held, "cudarc can still launch");
    drop(their_graph);
    // The driver reports the end on a thread of its own.
    let begin = Instant::now();
    while runtime.bytes_outstanding() > 0 && begin.elapsed() < Duration::from_secs(120) {
        runtime.reap_pending().unwrap();
        std::thread::yield_now();
    }
    assert_eq!(runtime.bytes_outstanding(), 0);
}
