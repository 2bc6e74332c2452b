//! Other code begins to capture a stream whose handle it has, while the runtime works for other streams. Nothing that the runtime does may break
//! such a capture, wherever between two driver calls it begins.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::rig::{Rig, TAG, fill};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, PoolConfig, StreamLease,
};
use xlog_cuda::driver::{CaptureMode, Driver, StreamHandle};
use xlog_cuda::sim::{Call, SimConfig, SimDevice};
use xlog_testing::for_each_sim;

const MIB: usize = 1 << 20;

/// The calls before which a capture begins: those that a capture of their stream refuses, records, or is broken by.
const CALLS: [Call; 7] = [
    Call::StreamQuery,
    Call::StreamIsIdle,
    Call::StreamSynchronize,
    Call::StreamWaitEvent,
    Call::EventRecord,
    Call::EventQuery,
    Call::EventSynchronize,
];

/// Three streams; the handle of the first has escaped, and it has used and freed memory.
struct Beside {
    rig: Rig,
    streams: [StreamLease; 3],
    /// A block of the first stream, which it has written.
    block: DeviceBlock,
}

impl Beside {
    fn new(device: &Arc<CudaDevice>, is_pooled: bool) -> Self {
        let rig = match is_pooled {
            true => {
                let config = PoolConfig::default().with_growth(2 * MIB).with_maximum(16 * MIB);
                Rig::pooled(device, config)
            }
            false => Rig::new(device),
        };
        let streams: [StreamLease; 3] = rig.leases();
        let _escapes = streams[0].handle();
        let freed = rig.allocate(5 * MIB, &streams[0]);
        fill(&streams[0], freed.ptr, 1, freed.bytes);
        let block = rig.allocate(4096, &streams[0]);
        fill(&streams[0], block.ptr, 2, 4096);
        let small = rig.allocate(4096, &streams[0]);
        rig.free(freed);
        // Too small for an event of its own.
        rig.free(small);
        Self { rig, streams, block }
    }

    fn resource(&self) -> &dyn DeviceMemoryResource {
        &*self.rig.resource
    }
}

/// Queues a function that sets the result.
fn note_end(stream: &StreamLease) -> Arc<AtomicBool> {
    let is_over = Arc::new(AtomicBool::new(false));
    let noted = is_over.clone();
    stream.host_fn(move || noted.store(true, Ordering::Relaxed)).unwrap();
    is_over
}

/// Begins a capture of the first stream, and with `ends` ends it again.
fn capture(sim: &Arc<SimDevice>, stream: StreamHandle, ends: bool) {
    let graphs = sim.graphs().unwrap();
    graphs.begin_capture(stream, CaptureMode::Global).unwrap();
    if ends {
        end(sim, stream);
    }
}

fn end(sim: &Arc<SimDevice>, stream: StreamHandle) {
    let graphs = sim.graphs().unwrap();
    let graph = graphs.end_capture(stream).expect("the capture is whole");
    // SAFETY: made above, and not used any more.
    unsafe { graphs.graph_destroy(graph) }.unwrap();
}

/// Does `work` with a capture that begins before each of its driver calls in turn.
fn at_every_call(is_pooled: bool, work: impl Fn(&Beside)) {
    for_each_sim(|device, sim| {
        for ends in [false, true] {
            for call in CALLS {
                let mut nth = 0;
                loop {
                    nth += 1;
                    let beside = Beside::new(device, is_pooled);
                    let handle = beside.streams[0].handle();
                    let (acting, before) = (Arc::downgrade(sim), sim.faults().calls(call));
                    sim.faults().run_before_nth(call, nth, move || {
                        capture(&acting.upgrade().unwrap(), handle, ends);
                    });
                    work(&beside);
                    let has_begun = sim.faults().calls(call) >= before + nth;
                    sim.faults().clear();
                    if has_begun && !ends {
                        end(sim, handle);
                    }
                    // Nothing is lost: all streams serve, and everything is freed.
                    let Beside { rig, streams, block } = beside;
                    for stream in &streams {
                        rig.write(BlockId::from_block(&block), stream, 3, 4096);
                    }
                    rig.free(block);
                    rig.resource.reap_pending().unwrap();
                    assert_eq!(rig.resource.bytes_outstanding(), 0, "{call:?} {nth}");
                    if !has_begun {
                        break;
                    }
                }
            }
        }
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_trim_does_not_break_a_capture_that_begins_meanwhile() {
    at_every_call(true, |beside| {
        beside.resource().trim().unwrap();
    });
}

#[test]
fn an_answer_to_another_process_does_not_break_a_capture_that_begins_meanwhile() {
    at_every_call(true, |beside| {
        // Twice: the first one records events, the second one asks them.
        for _ in 0..2 {
            let _ = beside.resource().reap_completed();
            let _ = beside.resource().trim_under_pressure();
            let _ = beside.resource().memory_use();
        }
    });
}

#[test]
fn a_request_that_is_short_of_memory_does_not_break_a_capture_that_begins_meanwhile() {
    at_every_call(true, |beside| {
        let other = &beside.streams[1];
        // The free memory of the first stream is needed for the last one, which may be refused.
        let first = beside.resource().allocate(9 * MIB, other.id(), TAG);
        let second = beside.resource().allocate(5 * MIB, other.id(), TAG);
        for block in [first, second].into_iter().flatten() {
            beside.rig.free(block);
        }
    });
}

#[test]
fn a_reap_does_not_break_a_capture_that_begins_meanwhile() {
    for is_pooled in [true, false] {
        at_every_call(is_pooled, |beside| {
            let _ = beside.resource().reap_completed();
            let _ = beside.resource().reap_pending();
        });
    }
}

#[test]
fn a_use_on_another_stream_does_not_break_a_capture_that_begins_meanwhile() {
    for is_pooled in [true, false] {
        at_every_call(is_pooled, |beside| {
            let (id, other) = (BlockId::from_block(&beside.block), &beside.streams[2]);
            // It must follow the work of the first stream, or is refused.
            if beside.resource().prepare_block_use(id, other.id(), Access::Read).is_ok() {
                beside.rig.finish(id, other, Access::Read);
            }
        });
    }
}

/// The stamps of frees are noted only on streams whose handle others have.
#[test]
fn a_reap_waits_for_what_became_free_before_the_handle_was_taken() {
    for seed in 0..20 {
        let device = &Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let rig = Rig::pooled(device, PoolConfig::default());
        let [stream] = rig.leases();
        let block = rig.allocate(5 * MIB, &stream);
        let gate = stream.hold().unwrap();
        fill(&stream, block.ptr, 1, block.bytes);
        let is_over = note_end(&stream);
        rig.free(block);
        let _escapes = stream.handle();
        let reap = || {
            rig.resource.reap_pending().unwrap();
            assert!(is_over.load(Ordering::Relaxed), "seed {seed}: the reap did not wait");
        };
        xlog_testing::threads(device, vec![Box::new(reap), Box::new(move || gate.release())]);
    }
}

/// What the pool returns to an inner resource is a free on the stream, queued behind whatever runs there now.
#[test]
fn a_request_waits_for_segments_that_it_returns_behind_running_work() {
    for seed in 0..20 {
        let config = SimConfig::default().with_seed(seed).with_capacity(12 << 20);
        let device = &Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()));
        let inner = PoolConfig::default().with_growth(MIB).with_maximum(12 * MIB);
        let rig = Rig::pooled(device, inner);
        let [stream, other] = rig.leases();
        let _escapes = stream.handle();
        let running = rig.allocate(MIB, &stream);
        let freed = rig.allocate(6 * MIB, &stream);
        rig.free(freed);
        // The stream of another one follows its work, so its clock goes on.
        rig.write(BlockId::from_block(&running), &other, 2, MIB);
        rig.resource.reap_pending().unwrap();
        let gate = stream.hold().unwrap();
        fill(&stream, running.ptr, 1, MIB);
        xlog_testing::threads(
            device,
            vec![
                Box::new(|| {
                    let block = rig.allocate(9 * MIB, &other);
                    rig.free(block);
                }),
                Box::new(move || gate.release()),
            ],
        );
        rig.free(running);
    }
}

#[test]
fn reaps_that_wait_for_one_stream_all_wait() {
    for seed in 0..60 {
        let device = &Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let rig = Rig::new(device);
        let [stream] = rig.leases();
        let _escapes = stream.handle();
        for _ in 0..8 {
            let block = rig.allocate(4096, &stream);
            let id = BlockId::from_block(&block);
            let gate = stream.hold().unwrap();
            fill(&stream, block.ptr, 1, 4096);
            let is_over = note_end(&stream);
            rig.free(block);
            let reap = || {
                rig.resource.reap_pending().unwrap();
                assert_eq!(rig.resource.block_state(id), BlockState::Freed, "seed {seed}");
                assert!(is_over.load(Ordering::Relaxed), "seed {seed}: a reap did not wait");
            };
            xlog_testing::threads(
                device,
                vec![Box::new(reap), Box::new(reap), Box::new(move || gate.release())],
            );
        }
    }
}
