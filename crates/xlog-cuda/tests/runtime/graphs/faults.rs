//! A capture that fails at any driver call gives everything back, and its streams serve again.

#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::support::{BYTES, assert_empty, copy, fill, manager, runtimes};
use xlog_cuda::device_runtime::{
    Access, BlockState, CaptureError, CaptureOptions, ResourceError, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::sim::{Call, Fault};
use xlog_cuda::{LaunchRecorder, Result, XlogError};
use xlog_testing::for_each_sim;

const CALLS: [Call; 16] = [
    Call::BeginCapture,
    Call::EndCapture,
    Call::CaptureInfo,
    Call::StreamCapture,
    Call::GraphInstantiate,
    Call::GraphLaunch,
    Call::GraphDestroy,
    Call::GraphExecDestroy,
    Call::EventCreate,
    Call::EventRecord,
    Call::StreamWaitEvent,
    Call::Memset,
    Call::CopyDtod,
    Call::Create,
    Call::Map,
    Call::AllocAsync,
];

/// Captures with two streams, launches twice, and reads the result.
fn program(runtime: &Arc<XlogDeviceRuntime>) -> Result<()> {
    let memory = manager(runtime);
    let (stream, branch) = (runtime.stream_pool().lease()?, runtime.stream_pool().lease()?);
    let input = memory.alloc_zeroed::<u8>(BYTES)?;
    let mut output = None;
    let options = CaptureOptions::default().with_arena(2 << 20);
    let graph = runtime.capture_with(stream.id(), &options, |scope| {
        scope.fork(branch.id())?;
        scope.follow(StreamId::DEFAULT)?;
        let inside = memory.on_stream(scope.id());
        let temporary = inside.alloc::<u8>(BYTES)?;
        fill(runtime, scope.id(), &temporary, 1)?;
        let result = memory.on_stream(branch.id()).alloc::<u8>(BYTES)?;
        copy(runtime, branch.id(), &temporary, &result)?;
        copy(runtime, scope.id(), &input, &temporary)?;
        drop(temporary);
        let large = inside.alloc::<u8>(3 << 20)?;
        fill(runtime, scope.id(), &large, 2)?;
        output = Some(result);
        Ok(())
    })?;
    graph.launch(stream.id())?;
    graph.launch(branch.id())?;
    let output = output.map(|output| output.to_vec()).transpose()?;
    assert_eq!(output, Some(vec![1; BYTES]));
    Ok(())
}

#[test]
fn a_capture_that_fails_at_any_driver_call_gives_everything_back() {
    for_each_sim(|device, sim| {
        for (kind, runtime) in runtimes(device).into_iter().enumerate() {
            program(&runtime).unwrap();
            for call in CALLS {
                let mut failed = 0;
                for nth in 1..40 {
                    let before = sim.faults().calls(call);
                    sim.faults().fail_nth(call, nth, Fault::Code(999));
                    let outcome = program(&runtime);
                    let was_reached = sim.faults().calls(call) >= before + nth;
                    sim.faults().clear();
                    failed += u32::from(outcome.is_err());
                    runtime.reap_pending().unwrap();
                    assert_eq!(
                        runtime.bytes_outstanding(),
                        0,
                        "resource {kind}, {call:?} {nth}: {outcome:?}"
                    );
                    if !was_reached {
                        break;
                    }
                }
                let is_needed = matches!(
                    call,
                    Call::BeginCapture
                        | Call::EndCapture
                        | Call::GraphInstantiate
                        | Call::GraphLaunch
                        | Call::Memset
                );
                assert!(!is_needed || failed > 0, "{call:?} never failed the program");
            }
            program(&runtime).unwrap();
            assert!(sim.races().is_empty(), "{:?}", sim.races());
            assert_empty(&runtime);
        }
    });
}

#[test]
fn work_that_fails_or_panics_inside_a_capture_gives_everything_back() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let failed = runtime.capture(stream.id(), |scope| {
                let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                fill(&runtime, scope.id(), &block, 1)?;
                Err(XlogError::Kernel("no rows".to_owned()))
            });
            assert_eq!(failed.map(drop), Err(XlogError::Kernel("no rows".to_owned())));
            assert_empty(&runtime);

            let panicked = catch_unwind(AssertUnwindSafe(|| {
                runtime.capture(stream.id(), |scope| {
                    let _block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    std::panic::panic_any("a test");
                })
            }));
            assert!(panicked.is_err());
            assert_empty(&runtime);

            // A block that the caller keeps stays usable, and goes with its last handle.
            let mut kept = None;
            let failed = runtime.capture(stream.id(), |scope| {
                kept = Some(memory.on_stream(scope.id()).alloc::<u8>(BYTES)?);
                Err(XlogError::Kernel("no rows".to_owned()))
            });
            assert!(failed.is_err());
            kept.as_mut().unwrap().copy_from_slice(&[3; BYTES]).unwrap();
            assert_eq!(kept.as_ref().unwrap().to_vec().unwrap(), [3; BYTES]);
            drop(kept);
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_broken_capture_is_named_and_gives_everything_back() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let outcome = runtime.capture(stream.id(), |scope| {
                let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                fill(&runtime, scope.id(), &block, 1)?;
                assert!(device.synchronize().is_err());
                Ok(())
            });
            let error = outcome.map(drop).unwrap_err();
            let is_named = matches!(&error, XlogError::Resource(ResourceError::Capture(broken))
                if matches!(**broken, CaptureError::Broken { .. }));
            assert!(is_named, "{error:?}");
            assert_empty(&runtime);
            stream.synchronize().unwrap();
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_use_that_is_open_while_its_capture_breaks_leaves_the_block_usable() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let block = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let broken = runtime.capture(stream.id(), |scope| {
                let mut recorder = LaunchRecorder::new_strict(scope.id());
                recorder.write(&block);
                recorder.preflight(&runtime)?;
                assert!(device.synchronize().is_err(), "this breaks the capture");
                let _ = recorder.commit(&runtime);
                Ok(())
            });
            assert!(broken.is_err());
            fill(&runtime, stream.id(), &block, 4).unwrap();
            assert_eq!(block.to_vec().unwrap(), [4; BYTES]);
            drop(block);
            assert_eq!(memory.failed_frees(), 0);
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_recorder_that_is_older_than_the_capture_closes_where_it_opened() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let block = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let mut recorder = LaunchRecorder::new_strict(stream.id());
            recorder.write(&block);
            recorder.preflight(&runtime).unwrap();
            // SAFETY: the block is live, and the recorder orders the fill.
            unsafe { stream.memset(block.ptr(), 5, BYTES) }.unwrap();
            let graph = runtime.capture(stream.id(), |scope| {
                let _ = recorder.commit(&runtime);
                fill(&runtime, scope.id(), &memory.on_stream(scope.id()).alloc(BYTES)?, 1)
            });
            let graph = graph.unwrap();
            assert_eq!(block.to_vec_on(stream.id()).unwrap(), [5; BYTES]);
            drop((graph, block));
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_capture_that_fails_in_a_shared_arena_gives_its_chunks_back() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    fill(&runtime, scope.id(), &memory.on_stream(scope.id()).alloc(BYTES)?, 1)
                })
                .unwrap();
            let (held, of_graph) = (runtime.bytes_outstanding(), graph.arena_bytes());
            let options = CaptureOptions::default().sharing(&graph);
            let failed = runtime.capture_with(stream.id(), &options, |scope| {
                let large = memory.on_stream(scope.id()).alloc::<u8>(8 << 20)?;
                fill(&runtime, scope.id(), &large, 1)?;
                Err(XlogError::Kernel("no rows".to_owned()))
            });
            assert!(failed.is_err());
            runtime.reap_pending().unwrap();
            assert_eq!((runtime.bytes_outstanding(), graph.arena_bytes()), (held, of_graph));
            graph.launch(stream.id()).unwrap();
            drop((graph, options));
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_free_on_the_stream_of_a_broken_capture_is_deferred_and_not_reported() {
    for_each_sim(|device, _| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let block = memory.on_stream(stream.id()).alloc_zeroed::<u8>(BYTES).unwrap();
            let broken = runtime.capture(stream.id(), |_| {
                assert!(device.synchronize().is_err(), "this breaks the capture");
                drop(block);
                Ok(())
            });
            assert!(broken.is_err());
            assert_eq!(memory.failed_frees(), 0);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn uses_inside_and_outside_of_a_capture_are_closed_after_their_stream_was_given_back() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let mut stream = Some(runtime.stream_pool().lease().unwrap());
            let id = stream.as_ref().unwrap().id();
            let blocks = [(); 3].map(|()| memory.alloc_zeroed::<u8>(BYTES).unwrap());
            let uses = blocks.each_ref().map(|block| (block.id().unwrap(), Access::Write));
            let prepare =
                |index: usize| runtime.prepare_block_use(uses[index].0, id, Access::Write);
            [0, 2].into_iter().for_each(|index| prepare(index).unwrap());
            let graph = runtime.capture(id, |_| {
                prepare(1)?;
                drop(stream.take());
                // The capture refuses events on its stream for uses outside. They are closed all the same.
                let _ = runtime.finish_block_uses(&uses, id);
                Ok(())
            });
            drop((graph.unwrap(), blocks));
            assert_eq!(memory.failed_frees(), 0);
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}

#[test]
fn a_recorder_closes_its_uses_in_a_capture_whose_stream_was_given_back() {
    for_each_sim(|device, sim| {
        for runtime in runtimes(device) {
            let mut stream = Some(runtime.stream_pool().lease().unwrap());
            let id = stream.as_ref().unwrap().id();
            let memory = manager(&runtime).on_stream(id);
            let graph = runtime.capture(id, |_| {
                let block = memory.alloc::<u8>(BYTES)?;
                let name = block.id().unwrap();
                let mut recorder = LaunchRecorder::new_strict(id);
                recorder.write(&block);
                recorder.preflight(&runtime)?;
                drop(stream.take());
                recorder.commit(&runtime)?;
                drop(block);
                assert_eq!(runtime.block_state(name), BlockState::Freed);
                Ok(())
            });
            drop(graph.unwrap());
            assert_empty(&runtime);
            assert!(sim.races().is_empty(), "{:?}", sim.races());
        }
    });
}
