//! What a capture refuses, by name: the error is typed, comes at the call, says the way out, and changes nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::support::{BYTES, assert_empty, copy, fill, manager, refused, runtimes};
use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, CaptureError, CaptureOptions, LedgerSetting, ResourceError,
    RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::{LaunchRecorder, XlogError};
use xlog_testing::for_each_device;

#[test]
fn the_host_cannot_read_write_or_wait_inside_a_capture() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let mut output = None;
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let mut block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    let is_host = |error| matches!(error, CaptureError::HostAccess { .. });
                    assert!(is_host(refused(block.to_vec())));
                    assert!(is_host(refused(block.copy_from_slice(&[1; BYTES]))));
                    assert!(is_host(refused(scope.stream().synchronize())));
                    assert!(is_host(refused(scope.stream().query())));
                    assert!(is_host(refused(scope.stream().hold())));
                    assert!(is_host(refused(scope.stream().host_fn(|| ()))));
                    let done = std::pin::pin!(scope.stream().done());
                    let mut context = Context::from_waker(Waker::noop());
                    let Poll::Ready(done) = done.poll(&mut context) else { panic!("pending") };
                    assert!(is_host(refused(done)));
                    let (ptr, mut bytes) = (block.ptr(), [0; BYTES]);
                    #[allow(unsafe_code)]
                    // SAFETY: the block has these bytes; the calls are refused.
                    let copies = unsafe {
                        [
                            scope.stream().copy_htod(ptr, &bytes),
                            scope.stream().copy_dtoh(&mut bytes, ptr),
                        ]
                    };
                    assert!(copies.into_iter().all(|copy| is_host(refused(copy))));
                    block.fill_bytes(2)?;
                    output = Some(block);
                    Ok(())
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            assert_eq!(output.as_ref().unwrap().to_vec().unwrap(), [2; BYTES]);
            drop((graph, output));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_block_of_an_open_capture_is_refused_on_a_stream_outside() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let other = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    let error = refused(fill(&runtime, other.id(), &block, 1));
                    assert!(matches!(error, CaptureError::NotCaptured { .. }), "{error:?}");
                    assert!(error.to_string().contains("CaptureScope::fork"), "{error}");
                    scope.fork(other.id())?;
                    fill(&runtime, other.id(), &block, 1)
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn two_captures_cannot_wait_for_each_other() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let second = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    let inner = runtime.capture(second.id(), |inner| {
                        let is_other = |error| matches!(error, CaptureError::OtherCapture { .. });
                        assert!(is_other(refused(fill(&runtime, inner.id(), &block, 1))));
                        assert!(is_other(refused(second.wait_for(&stream))));
                        assert!(is_other(refused(inner.fork(scope.id()))));
                        assert!(is_other(refused(inner.join(scope.id()))));
                        Ok(())
                    })?;
                    drop(inner);
                    fill(&runtime, scope.id(), &block, 1)
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_captured_stream_cannot_wait_for_work_outside_and_the_capture_stays_whole() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let stream = runtime.stream_pool().lease().unwrap();
            let other = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let error = refused(stream.wait_for(&other));
                    let expected =
                        CaptureError::OutsideWait { stream: scope.id(), other: other.id() };
                    assert_eq!(error, expected);
                    assert_eq!(refused(scope.join(other.id())), expected);
                    assert!(error.to_string().contains("CaptureScope::follow"), "{error}");
                    scope.follow(other.id())
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn more_memory_than_the_arena_may_have_is_refused_and_the_rest_still_serves() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let options = CaptureOptions::default().with_limit(4 << 20);
            let graph = runtime
                .capture_with(stream.id(), &options, |scope| {
                    let inside = memory.on_stream(scope.id());
                    let first = inside.alloc::<u8>(3 << 20)?;
                    let error = refused(inside.alloc::<u8>(2 << 20));
                    let CaptureError::ArenaLimit { requested, limit, .. } = error else {
                        panic!("{error:?}")
                    };
                    assert_eq!((requested, limit), (2 << 20, 4 << 20));
                    assert!(matches!(
                        refused(inside.alloc::<u8>(isize::MAX as usize - 4096)),
                        CaptureError::ArenaLimit { .. }
                    ));
                    drop(first);
                    let second = inside.alloc::<u8>(2 << 20)?;
                    fill(&runtime, scope.id(), &second, 1)
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            assert!(graph.arena_bytes() <= 4 << 20);
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_use_that_is_closed_after_its_capture_has_ended_is_refused() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let outside = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let mut late = None;
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let mut recorder = LaunchRecorder::new_strict(scope.id());
                    recorder.write(&outside);
                    recorder.preflight(&runtime)?;
                    // SAFETY: the buffer is live, and the recorder orders the fill.
                    unsafe { scope.stream().memset(outside.ptr(), 8, BYTES)? };
                    late = Some(recorder);
                    Ok(())
                })
                .unwrap();
            let error = late.unwrap().commit(&runtime).unwrap_err();
            let ended = CaptureError::Ended { stream: stream.id() };
            assert_eq!(error, ResourceError::from(ended));
            // The launch knows of the use all the same.
            graph.launch(stream.id()).unwrap();
            assert_eq!(outside.to_vec().unwrap(), [8; BYTES]);
            drop((graph, outside));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn an_arena_has_one_capture_at_a_time_and_a_captured_stream_is_not_captured_again() {
    for_each_device(|device| {
        let runtime = runtimes(device).remove(0);
        let (stream, second) =
            (runtime.stream_pool().lease().unwrap(), runtime.stream_pool().lease().unwrap());
        let graph = runtime.capture(stream.id(), |_| Ok(())).unwrap();
        let options = CaptureOptions::default().sharing(&graph);
        let second_graph = runtime
            .capture_with(stream.id(), &options, |scope| {
                let busy = runtime.capture_with(second.id(), &options, |_| Ok(()));
                assert_eq!(refused(busy), CaptureError::ArenaBusy);
                let is_captured = |error| matches!(error, CaptureError::AlreadyCaptured { .. });
                assert!(is_captured(refused(runtime.capture(scope.id(), |_| Ok(())))));
                assert!(is_captured(refused(graph.launch(scope.id()))), "a launch is not captured");
                assert!(is_captured(refused(scope.follow(scope.id()))));
                let mut recorder = LaunchRecorder::new_strict(scope.id());
                recorder.graph(&graph);
                assert!(is_captured(refused(recorder.run(&runtime, |_| Ok(())))));
                Ok(())
            })
            .unwrap();
        drop((graph, second_graph, options));
        assert_empty(&runtime);
    });
}

#[test]
fn an_arena_without_a_stream_for_its_memory_says_so() {
    for_each_device(|device| {
        let config = RuntimeConfig::default().with_ledger(LedgerSetting::Off).with_max_streams(1);
        let runtime =
            XlogDeviceRuntime::with_config(device.clone(), &config).map(Arc::new).unwrap();
        let memory = manager(&runtime);
        let lease = runtime.stream_pool().lease().unwrap();
        let graph = runtime
            .capture(StreamId::DEFAULT, |scope| {
                let inside = memory.on_stream(scope.id());
                let error = refused(inside.alloc::<u8>(BYTES));
                assert_eq!(error, CaptureError::NoStreamLeft { max: 1 });
                assert!(error.to_string().contains("with_arena"), "{error}");
                Ok(())
            })
            .unwrap();
        let options = CaptureOptions::default().with_arena(BYTES);
        let sized = runtime.capture_with(StreamId::DEFAULT, &options, |scope| {
            memory.on_stream(scope.id()).alloc::<u8>(BYTES).map(drop)
        });
        drop((graph, sized.unwrap(), lease));
        assert_empty(&runtime);
    });
}

#[test]
fn a_block_freed_inside_is_not_usable_and_not_freed_again() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let stream = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let block = runtime.allocate(BYTES, scope.id(), AllocTag("rows"))?;
                    let id = BlockId::from_block(&block);
                    let twin = xlog_cuda::device_runtime::DeviceBlock { ..block };
                    runtime.deallocate(block)?;
                    let gone = ResourceError::UseAfterFree { generation: id.generation };
                    assert_eq!(runtime.deallocate(twin), Err(gone.clone()));
                    let used = runtime.prepare_block_use(id, scope.id(), Access::Read);
                    assert_eq!(used, Err(gone));
                    Ok(())
                })
                .unwrap();
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_block_from_outside_that_is_freed_inside_is_freed_when_the_capture_ends() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let outside = memory.on_stream(stream.id()).alloc_zeroed::<u8>(BYTES).unwrap();
            let kept = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    copy(&runtime, scope.id(), &outside, &kept)?;
                    drop(outside);
                    Ok(())
                })
                .unwrap();
            assert_eq!(memory.failed_frees(), 0);
            let refused = graph.launch(stream.id()).unwrap_err();
            let XlogError::Resource(ResourceError::UseAfterFree { .. }) = refused else {
                panic!("{refused:?}")
            };
            drop((graph, kept));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn an_arena_that_is_shared_grows_only_by_what_is_missing() {
    for_each_device(|device| {
        let runtime = runtimes(device).remove(0);
        let stream = runtime.stream_pool().lease().unwrap();
        let sized = |bytes| CaptureOptions::default().with_arena(bytes);
        let first = runtime.capture_with(stream.id(), &sized(4 << 20), |_| Ok(())).unwrap();
        let held = first.arena_bytes();
        let same = sized(4 << 20).sharing(&first);
        let second = runtime.capture_with(stream.id(), &same, |_| Ok(())).unwrap();
        assert_eq!(second.arena_bytes(), held);
        let larger = sized(6 << 20).sharing(&first);
        let third = runtime.capture_with(stream.id(), &larger, |_| Ok(())).unwrap();
        assert_eq!(third.arena_bytes(), held + (2 << 20));
        drop((first, second, third, same, larger));
        assert_empty(&runtime);
    });
}
