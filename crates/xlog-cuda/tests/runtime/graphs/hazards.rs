//! What can go wrong with the memory and the order of graphs, by name.

#![allow(clippy::unwrap_used)]

use super::support::{BYTES, assert_empty, configured, copy, fill, manager, runtimes};
use xlog_cuda::device_runtime::{CaptureMode, CaptureOptions, ResourceError, StreamId, StreamPool};
use xlog_cuda::{LaunchRecorder, XlogError};
use xlog_testing::{WatchedGate, for_each_device, for_each_sim};

#[test]
fn captured_work_runs_at_each_launch_with_memory_inside_and_outside() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
                let memory = manager(&runtime);
                let stream = runtime.stream_pool().lease().unwrap();
                let input = memory.alloc::<u8>(BYTES).unwrap();
                let mut output = None;
                let options = CaptureOptions::default().with_mode(mode);
                let graph = runtime
                    .capture_with(stream.id(), &options, |scope| {
                        let inside = memory.on_stream(scope.id());
                        let temporary = inside.alloc::<u8>(BYTES)?;
                        copy(&runtime, scope.id(), &input, &temporary)?;
                        let result = inside.alloc::<u8>(BYTES)?;
                        copy(&runtime, scope.id(), &temporary, &result)?;
                        drop(temporary);
                        output = Some(result);
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(graph.outside_blocks(), 1);
                let output = output.unwrap();
                for value in 1..4 {
                    fill(&runtime, StreamId::DEFAULT, &input, value).unwrap();
                    graph.launch(stream.id()).unwrap();
                    assert_eq!(output.to_vec_on(StreamId::DEFAULT).unwrap(), [value; BYTES]);
                }
                drop((graph, output, input));
                assert_empty(&runtime);
            }
        }
    });
}

#[test]
fn memory_freed_inside_serves_the_next_request_of_its_stream() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let inside = memory.on_stream(scope.id());
                    let first = inside.alloc::<u8>(3 << 20)?;
                    fill(&runtime, scope.id(), &first, 1)?;
                    let (ptr, held) = (first.ptr(), scope.arena_bytes());
                    drop(first);
                    for _ in 0..20 {
                        let next = inside.alloc::<u8>(3 << 20)?;
                        fill(&runtime, scope.id(), &next, 2)?;
                        assert_eq!((next.ptr(), scope.arena_bytes()), (ptr, held));
                    }
                    Ok(())
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn memory_that_a_branch_freed_is_reused_only_in_captured_order() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            for limit in [usize::MAX, 2 << 20] {
                let memory = manager(&runtime);
                let (stream, branch) = leases(runtime.stream_pool());
                let large = 2 << 20;
                let options = CaptureOptions::default().with_limit(limit);
                let graph = runtime
                    .capture_with(stream.id(), &options, |scope| {
                        scope.fork(branch.id())?;
                        let on_branch = memory.on_stream(branch.id()).alloc::<u8>(large)?;
                        fill(&runtime, branch.id(), &on_branch, 1)?;
                        let ptr = on_branch.ptr();
                        drop(on_branch);
                        let next = memory.on_stream(scope.id()).alloc::<u8>(large)?;
                        // Without room the arena reuses it, with a wait that the detector would miss.
                        assert_eq!(next.ptr() == ptr, limit == large);
                        fill(&runtime, scope.id(), &next, 2)
                    })
                    .unwrap();
                graph.launch(stream.id()).unwrap();
                graph.launch(branch.id()).unwrap();
            }
            assert_empty(&runtime);
        }
    });
}

fn leases(
    streams: &std::sync::Arc<StreamPool>,
) -> (xlog_cuda::device_runtime::StreamLease, xlog_cuda::device_runtime::StreamLease) {
    (streams.lease().unwrap(), streams.lease().unwrap())
}

#[test]
fn branches_that_share_a_block_are_ordered_inside_the_capture() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, branch) = leases(runtime.stream_pool());
            let outside = memory.alloc::<u8>(BYTES).unwrap();
            let mut output = None;
            let graph = runtime
                .capture(stream.id(), |scope| {
                    scope.fork(branch.id())?;
                    let result = memory.on_stream(branch.id()).alloc::<u8>(BYTES)?;
                    let shared = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    // The branch follows the allocation of the shared block, but not the fill after it.
                    fill(&runtime, scope.id(), &outside, 4)?;
                    copy(&runtime, branch.id(), &outside, &result)?;
                    // Unannounced work of the block's own stream, before another stream's first use.
                    // SAFETY: the block is live, and the fill is on its own stream.
                    unsafe { scope.stream().memset(shared.ptr(), 5, BYTES)? };
                    copy(&runtime, branch.id(), &shared, &result)?;
                    copy(&runtime, branch.id(), &shared, &outside)?;
                    fill(&runtime, scope.id(), &shared, 6)?;
                    copy(&runtime, scope.id(), &outside, &shared)?;
                    output = Some(result);
                    Ok(())
                })
                .unwrap();
            for _ in 0..3 {
                graph.launch(stream.id()).unwrap();
            }
            assert_eq!(output.as_ref().unwrap().to_vec().unwrap(), [5; BYTES]);
            assert_eq!(outside.to_vec().unwrap(), [5; BYTES]);
            drop((graph, output, outside));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_launch_waits_for_outside_writers_and_later_readers_wait_for_the_launch() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, writer) = leases(runtime.stream_pool());
            let input = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let output = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let graph =
                runtime.capture(stream.id(), |scope| copy(&runtime, scope.id(), &input, &output));
            let graph = graph.unwrap();
            let gate = WatchedGate::new(writer.hold().unwrap());
            fill(&runtime, writer.id(), &input, 7).unwrap();
            graph.launch(stream.id()).unwrap();
            assert!(!stream.query().unwrap(), "the launch did not wait for the writer");
            // The free of the input follows the launch.
            drop(input);
            gate.release();
            assert_eq!(output.to_vec_on(writer.id()).unwrap(), [7; BYTES]);
            drop((graph, output));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_stream_that_the_capture_follows_is_waited_for_by_each_launch() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, other) = leases(runtime.stream_pool());
            let input = memory.on_stream(other.id()).alloc::<u8>(BYTES).unwrap();
            let gate = WatchedGate::new(other.hold().unwrap());
            // SAFETY: the block is live, and this is its own stream.
            unsafe { other.memset(input.ptr(), 9, BYTES) }.unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| {
                    scope.follow(other.id())?;
                    let temporary = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    fill(&runtime, scope.id(), &temporary, 1)
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            assert!(!stream.query().unwrap(), "the launch did not wait");
            gate.release();
            stream.synchronize().unwrap();
            drop((graph, input));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_launch_is_refused_once_a_block_that_it_uses_was_freed() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let input = memory.alloc_zeroed::<u8>(BYTES).unwrap();
            let graph = runtime
                .capture(stream.id(), |scope| fill(&runtime, scope.id(), &input, 1))
                .unwrap();
            graph.launch(stream.id()).unwrap();
            let generation = input.runtime_block().unwrap().generation;
            drop(input);
            let refused = graph.launch(stream.id()).unwrap_err();
            let expected = ResourceError::UseAfterFree { generation };
            assert_eq!(refused, XlogError::Resource(expected));
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_block_of_the_graph_that_is_freed_outside_stays_the_graphs() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let mut output = None;
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    fill(&runtime, scope.id(), &block, 3)?;
                    output = Some(block);
                    Ok(())
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            assert_eq!(output.as_ref().unwrap().to_vec().unwrap(), [3; BYTES]);
            let held = runtime.bytes_outstanding();
            assert!(held >= graph.arena_bytes());
            drop(output);
            runtime.reap_pending().unwrap();
            assert_eq!(runtime.bytes_outstanding(), held);
            // Other requests do not get its memory.
            let others: Vec<_> =
                (0..64).map(|_| memory.alloc_zeroed::<u8>(BYTES).unwrap()).collect();
            graph.launch(stream.id()).unwrap();
            assert!(others.iter().all(|other| other.to_vec().unwrap() == [0; BYTES]));
            drop((graph, others));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_live_block_keeps_its_memory_without_the_graph() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let mut output = None;
            let graph = runtime
                .capture(stream.id(), |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    fill(&runtime, scope.id(), &block, 3)?;
                    output = Some(block);
                    Ok(())
                })
                .unwrap();
            graph.launch(stream.id()).unwrap();
            drop(graph);
            runtime.reap_pending().unwrap();
            let others: Vec<_> =
                (0..64).map(|_| memory.alloc_zeroed::<u8>(BYTES).unwrap()).collect();
            assert_eq!(output.as_ref().unwrap().to_vec().unwrap(), [3; BYTES]);
            drop((output, others));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn graphs_of_one_arena_share_its_memory_and_never_run_at_once() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (first, second) = leases(runtime.stream_pool());
            let work = |scope: &xlog_cuda::device_runtime::CaptureScope<'_>, value| {
                let temporary = memory.on_stream(scope.id()).alloc::<u8>(1 << 20)?;
                fill(&runtime, scope.id(), &temporary, value)
            };
            let one = runtime.capture(first.id(), |scope| work(scope, 1)).unwrap();
            let options = CaptureOptions::default().sharing(&one);
            let two = runtime.capture_with(second.id(), &options, |scope| work(scope, 2)).unwrap();
            assert_eq!(one.arena_bytes(), two.arena_bytes());
            assert_eq!(runtime.statistics().live_blocks, 1, "one chunk serves both");
            // Nothing here orders the two streams: the detector would report it.
            for _ in 0..4 {
                one.launch(first.id()).unwrap();
                two.launch(second.id()).unwrap();
            }
            drop(one);
            two.launch(second.id()).unwrap();
            drop((two, options));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_live_block_of_one_graph_is_not_given_to_another_in_its_arena() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let stream = runtime.stream_pool().lease().unwrap();
            let mut output = None;
            let one = runtime
                .capture(stream.id(), |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    fill(&runtime, scope.id(), &block, 1)?;
                    output = Some(block);
                    Ok(())
                })
                .unwrap();
            let output = output.unwrap();
            let mut copied = None;
            let options = CaptureOptions::default().sharing(&one);
            let two = runtime
                .capture_with(stream.id(), &options, |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(BYTES)?;
                    assert_ne!(block.ptr(), output.ptr());
                    copy(&runtime, scope.id(), &output, &block)?;
                    copied = Some(block);
                    Ok(())
                })
                .unwrap();
            one.launch(stream.id()).unwrap();
            two.launch(stream.id()).unwrap();
            assert_eq!(copied.as_ref().unwrap().to_vec().unwrap(), [1; BYTES]);
            drop((one, two, options, output, copied));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn the_memory_of_a_graph_is_one_entry_of_the_budget_and_the_statistics() {
    for_each_device(|device| {
        let runtime = configured(device);
        let memory = manager(&runtime);
        let stream = runtime.stream_pool().lease().unwrap();
        let budget = runtime.budget().unwrap();
        let before = budget.reserved_bytes();
        let options = CaptureOptions::default().with_arena(4 << 20);
        let graph = runtime
            .capture_with(stream.id(), &options, |scope| {
                let blocks: Vec<_> = (0..100)
                    .map(|_| memory.on_stream(scope.id()).alloc::<u8>(BYTES))
                    .collect::<Result<_, _>>()?;
                fill(&runtime, scope.id(), &blocks[99], 1)
            })
            .unwrap();
        assert_eq!(graph.arena_bytes(), 4 << 20);
        assert_eq!(budget.reserved_bytes() - before, 4 << 20);
        let live = runtime.usage().unwrap().live_blocks();
        let of_graphs = live.iter().filter(|block| block.tag == graph.tag()).count();
        assert_eq!(of_graphs, 1, "{live:?}");
        drop(graph);
        assert_empty(&runtime);
        assert_eq!(budget.reserved_bytes(), before);
    });
}

#[test]
fn work_from_before_a_capture_can_be_waited_for_while_it_is_open() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, branch) = leases(runtime.stream_pool());
            let other = runtime.stream_pool().lease().unwrap();
            let block = memory.on_stream(stream.id()).alloc::<u8>(BYTES).unwrap();
            let second = memory.on_stream(branch.id()).alloc::<u8>(BYTES).unwrap();
            // SAFETY: the blocks are live, and this is work on their own streams.
            unsafe {
                stream.memset(block.ptr(), 3, BYTES).unwrap();
                branch.memset(second.ptr(), 4, BYTES).unwrap();
            }
            let graph = runtime
                .capture(stream.id(), |scope| {
                    scope.fork(branch.id())?;
                    let found = memory.on_stream(other.id()).alloc::<u8>(BYTES)?;
                    copy(&runtime, other.id(), &block, &found)?;
                    assert_eq!(found.to_vec()?, [3; BYTES]);
                    copy(&runtime, other.id(), &second, &found)?;
                    assert_eq!(found.to_vec()?, [4; BYTES]);
                    Ok(())
                })
                .unwrap();
            drop((graph, block, second));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_block_of_an_earlier_graph_that_is_freed_inside_is_reused_in_captured_order() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, branch) = leases(runtime.stream_pool());
            let options = CaptureOptions::default().with_limit(2 << 20);
            let mut output = None;
            let first = runtime
                .capture_with(stream.id(), &options, |scope| {
                    let block = memory.on_stream(scope.id()).alloc::<u8>(2 << 20)?;
                    fill(&runtime, scope.id(), &block, 1)?;
                    output = Some(block);
                    Ok(())
                })
                .unwrap();
            let output = output.unwrap();
            let sharing = CaptureOptions::default().sharing(&first);
            let second = runtime
                .capture_with(stream.id(), &sharing, |scope| {
                    scope.fork(branch.id())?;
                    fill(&runtime, branch.id(), &output, 2)?;
                    drop(output);
                    let next = memory.on_stream(scope.id()).alloc::<u8>(2 << 20)?;
                    fill(&runtime, scope.id(), &next, 3)
                })
                .unwrap();
            // It uses a block that was freed, so it cannot be launched; the first one still can.
            assert!(second.launch(stream.id()).is_err());
            first.launch(stream.id()).unwrap();
            drop((first, second, sharing));
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_stream_works_as_before_after_it_was_captured() {
    for_each_device(|device| {
        for runtime in runtimes(device) {
            let memory = manager(&runtime);
            let (stream, branch) = leases(runtime.stream_pool());
            let graph = runtime
                .capture(stream.id(), |scope| {
                    scope.fork(branch.id())?;
                    fill(&runtime, branch.id(), &memory.on_stream(branch.id()).alloc(BYTES)?, 1)
                })
                .unwrap();
            for stream in [&stream, &branch] {
                let mut block = memory.on_stream(stream.id()).alloc::<u8>(BYTES).unwrap();
                block.copy_from_slice(&[4; BYTES]).unwrap();
                assert_eq!(block.to_vec().unwrap(), [4; BYTES]);
                stream.synchronize().unwrap();
            }
            drop(graph);
            assert_empty(&runtime);
        }
    });
}

#[test]
fn a_replay_that_no_recorder_orders_against_a_reader_is_a_race() {
    for_each_sim(|device, sim| {
        let runtime = runtimes(device).remove(0);
        let memory = manager(&runtime);
        let (stream, reader) = leases(runtime.stream_pool());
        let block = memory.alloc_zeroed::<u8>(BYTES).unwrap();
        let copied = memory.on_stream(reader.id()).alloc::<u8>(BYTES).unwrap();
        let graph =
            runtime.capture(stream.id(), |scope| fill(&runtime, scope.id(), &block, 1)).unwrap();
        graph.launch(stream.id()).unwrap();
        let mut recorder = LaunchRecorder::new_strict(reader.id());
        recorder.read(&block).write(&copied);
        recorder
            .run(&runtime, |reader| {
                // SAFETY: both blocks are live, and the recorder orders the copy.
                unsafe { reader.copy_dtod(copied.ptr(), block.ptr(), BYTES) }
            })
            .unwrap();
        // A second read that is not announced: the next launch does not know of it.
        // SAFETY: the blocks are live; that nothing orders it is what the test is about.
        unsafe { reader.copy_dtod(copied.ptr(), block.ptr(), BYTES) }.unwrap();
        assert!(sim.races().is_empty(), "{:?}", sim.races());
        graph.launch(stream.id()).unwrap();
        let races = sim.races();
        assert!(!races.is_empty(), "the replay was not compared with the reader");
        let _ = (stream.synchronize(), reader.synchronize());
        drop((graph, block, copied));
        let _ = sim.take_unread_races();
    });
}
