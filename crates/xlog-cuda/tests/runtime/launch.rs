//! The launch recorder: every launch is ordered against every other use of its buffers, on every way out.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::support::{Script, direct, manager, runtime, scripted};
use xlog_cuda::device_runtime::{
    Access, BlockState, ResourceError, ResourceResult, StreamId, StreamLease, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder, TrackedCudaSlice, XlogError};
use xlog_testing::for_each_device;

const LEN: usize = 1024;

struct Bench {
    runtime: Arc<XlogDeviceRuntime>,
    script: Arc<Script>,
    manager: GpuMemoryManager,
    stream: StreamLease,
}

impl Bench {
    fn new(device: &Arc<CudaDevice>) -> Self {
        let (runtime, script) = scripted(device);
        let stream = runtime.stream_pool().lease().unwrap();
        let manager = GpuMemoryManager::with_runtime(runtime.clone());
        Self { runtime, script, manager, stream }
    }

    fn buffer(&self, value: u8) -> TrackedCudaSlice<u8> {
        let mut buffer = self.manager.alloc::<u8>(LEN).unwrap();
        buffer.fill_bytes(value).unwrap();
        buffer
    }

    fn strict(&self) -> LaunchRecorder {
        LaunchRecorder::new_strict(self.stream.id())
    }

    /// The work of a launch: copies one buffer to another.
    fn copy(&self, to: &TrackedCudaSlice<u8>, from: &TrackedCudaSlice<u8>) {
        // SAFETY: both are live; whether the copy is ordered is what the tests are about.
        unsafe { self.stream.copy_dtod(to.ptr(), from.ptr(), LEN).unwrap() };
    }

    /// Nothing is open and everything that was freed can be reaped.
    fn assert_closed(&self) {
        assert_eq!(self.script.open_uses(), 0);
        self.runtime.reap_pending().unwrap();
        assert_eq!(self.runtime.statistics().retired_blocks, 0);
    }
}

fn misuse(result: ResourceResult<()>) -> String {
    match result {
        Err(ResourceError::StreamMisuse(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn scratch_dropped_right_after_the_launch_outlives_it() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let (scratch, result) = (bench.buffer(7), bench.buffer(0));
        let gate = bench.stream.hold().unwrap();
        let mut recorder = bench.strict();
        recorder.read(&scratch).write(&result);
        recorder.preflight(&bench.runtime).unwrap();
        bench.copy(&result, &scratch);
        recorder.commit(&bench.runtime).unwrap();
        drop(scratch);
        let reuse = bench.buffer(9);
        gate.release();
        assert_eq!(result.to_vec().unwrap(), [7; LEN]);
        drop((reuse, result));
        bench.assert_closed();
    });
}

#[test]
fn the_same_block_twice_counts_once_with_the_union_of_its_accesses() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let buffers = [1, 2, 3, 4].map(|value| bench.buffer(value));
        bench.script.finishes.lock().unwrap().clear();
        let before = bench.script.prepares.load(std::sync::atomic::Ordering::SeqCst);
        let mut recorder = bench.strict();
        recorder.write(&buffers[3]).read(&buffers[0]).write(&buffers[0]).read(&buffers[1]);
        recorder.read(&buffers[1]).read_write(&buffers[2]).read(&buffers[2]).write(&buffers[3]);
        recorder.preflight(&bench.runtime).unwrap();
        recorder.commit(&bench.runtime).unwrap();
        let after = bench.script.prepares.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(after - before, 4);
        let expected =
            [(3, Access::Write), (0, Access::ReadWrite), (1, Access::Read), (2, Access::ReadWrite)]
                .map(|(index, access): (usize, _)| (buffers[index].id().unwrap(), access));
        assert_eq!(*bench.script.finishes.lock().unwrap(), [expected.to_vec()]);
    });
}

#[test]
fn many_buffers_of_one_launch_take_one_event_and_one_wait() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let buffers: Vec<_> = (0..64).map(|value| bench.buffer(value)).collect();
        let before = bench.runtime.statistics();
        let mut recorder = bench.strict();
        for buffer in &buffers {
            recorder.read_write(buffer);
        }
        recorder.preflight(&bench.runtime).unwrap();
        recorder.commit(&bench.runtime).unwrap();
        let after = bench.runtime.statistics();
        assert_eq!(after.waits_inserted - before.waits_inserted, 1);
        // One for what the launch waits for, one for what waits for the launch.
        assert!(after.events_recorded - before.events_recorded <= 2, "{before:?} {after:?}");
    });
}

#[test]
fn strict_refuses_what_is_not_tracked_before_anything_is_opened() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let tracked = bench.buffer(1);
        // SAFETY: it is never given to any work.
        let foreign = unsafe { TrackedCudaSlice::<u8>::from_foreign(0x1000, LEN) };
        let elsewhere = manager(device).alloc::<u8>(LEN).unwrap();
        for (untracked, why) in [(&foreign, "no runtime backs"), (&elsewhere, "another runtime")] {
            let before = bench.script.prepares.load(std::sync::atomic::Ordering::SeqCst);
            let mut recorder = bench.strict();
            recorder.write(&tracked).read(untracked);
            let said = misuse(recorder.preflight(&bench.runtime));
            assert!(said.contains(why) && said.contains("unsupported"), "{said}");
            let after = bench.script.prepares.load(std::sync::atomic::Ordering::SeqCst);
            assert_eq!(before, after, "a use was opened before the refusal");

            let mut recorder = LaunchRecorder::new_permissive(bench.stream.id());
            recorder.write(&tracked).read(untracked);
            recorder.preflight(&bench.runtime).unwrap();
            assert_eq!((recorder.skipped(), bench.script.open_uses()), (1, 1));
            recorder.commit(&bench.runtime).unwrap();
        }
        bench.assert_closed();
    });
}

#[test]
fn strict_refuses_a_resource_that_tracks_nothing_and_permissive_passes_over_it() {
    for_each_device(|device| {
        let runtime = direct(device);
        let buffer = GpuMemoryManager::with_runtime(runtime.clone()).alloc::<u8>(LEN).unwrap();
        let mut recorder = LaunchRecorder::new_strict(StreamId::DEFAULT);
        recorder.write(&buffer);
        let said = misuse(recorder.preflight(&runtime));
        assert!(said.contains("tracks no uses"), "{said}");
        misuse(recorder.commit(&runtime));

        let mut recorder = LaunchRecorder::new_permissive(StreamId::DEFAULT);
        recorder.write(&buffer);
        recorder.preflight(&runtime).unwrap();
        assert_eq!(recorder.skipped(), 1);
        recorder.commit(&runtime).unwrap();
    });
}

#[test]
fn empty_buffers_are_no_uses_even_for_a_strict_launch() {
    for_each_device(|device| {
        for runtime in [runtime(device), direct(device)] {
            let empty = GpuMemoryManager::with_runtime(runtime.clone()).alloc::<u8>(0).unwrap();
            let mut recorder = LaunchRecorder::new_strict(StreamId::DEFAULT);
            recorder.read(&empty).write(&empty);
            recorder.preflight(&runtime).unwrap();
            recorder.commit(&runtime).unwrap();
        }
    });
}

#[test]
fn an_operator_that_fails_half_way_still_protects_its_scratch() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let result = bench.buffer(0);
        let operator = || -> Result<(), &'static str> {
            let scratch = bench.buffer(5);
            let mut recorder = bench.strict();
            recorder.read(&scratch).write(&result);
            recorder.preflight(&bench.runtime).map_err(|_| "preflight")?;
            bench.copy(&result, &scratch);
            Err("the second kernel failed to launch")
        };
        let gate = bench.stream.hold().unwrap();
        assert!(operator().is_err());
        let reuse = bench.buffer(9);
        gate.release();
        assert_eq!(result.to_vec().unwrap(), [5; LEN]);
        drop((reuse, result));
        bench.assert_closed();
    });
}

#[test]
fn a_recorder_dropped_between_preflight_and_commit_closes_its_uses() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let buffer = bench.buffer(1);
        let id = buffer.id().unwrap();
        let mut recorder = bench.strict();
        recorder.write(&buffer);
        recorder.preflight(&bench.runtime).unwrap();
        drop(buffer);
        bench.runtime.reap_pending().unwrap();
        assert_eq!(bench.runtime.block_state(id), BlockState::Retired, "freed under an open use");
        drop(recorder);
        bench.assert_closed();
        assert_eq!(bench.runtime.block_state(id), BlockState::Freed);
    });
}

#[test]
fn a_stream_given_back_between_preflight_and_commit_keeps_no_block_from_being_freed() {
    for_each_device(|device| {
        let Bench { runtime, manager, stream, .. } = Bench::new(device);
        let buffer = manager.alloc::<u8>(LEN).unwrap();
        let mut recorder = LaunchRecorder::new_strict(stream.id());
        recorder.write(&buffer);
        recorder.preflight(&runtime).unwrap();
        drop((stream, buffer));
        recorder.commit(&runtime).unwrap();
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.bytes_outstanding(), 0);
    });
}

#[test]
fn a_recorder_may_outlive_the_runtime_object_it_was_prepared_on() {
    for_each_device(|device| {
        let Bench { runtime, script, manager, stream } = Bench::new(device);
        let buffer = manager.alloc::<u8>(LEN).unwrap();
        let mut recorder = LaunchRecorder::new_strict(stream.id());
        recorder.write(&buffer);
        recorder.preflight(&runtime).unwrap();
        drop((buffer, manager, runtime));
        assert_eq!(script.open_uses(), 1);
        drop(recorder);
        assert_eq!(script.open_uses(), 0);
    });
}

#[test]
fn a_refusal_in_the_middle_of_preflight_closes_what_was_opened_and_can_be_tried_again() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let buffers = [1, 2, 3].map(|value| bench.buffer(value));
        let mut recorder = bench.strict();
        recorder.read(&buffers[0]).read(&buffers[1]).read(&buffers[2]);
        *bench.script.fail_prepare_after.lock().unwrap() = Some(2);
        let error = recorder.preflight(&bench.runtime).unwrap_err();
        assert!(matches!(error, ResourceError::Driver(_)), "{error:?}");
        assert_eq!(bench.script.open_uses(), 0);
        recorder.preflight(&bench.runtime).unwrap();
        assert_eq!(bench.script.open_uses(), 3);
        recorder.commit(&bench.runtime).unwrap();
        drop(buffers);
        bench.assert_closed();
    });
}

#[test]
fn a_buffer_freed_before_preflight_is_refused() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let (kept, gone) = (bench.buffer(1), bench.buffer(2));
        let mut recorder = bench.strict();
        recorder.read(&kept).read(&gone);
        drop(gone);
        let error = recorder.preflight(&bench.runtime).unwrap_err();
        assert!(matches!(error, ResourceError::UseAfterFree { .. }), "{error:?}");
        drop((recorder, kept));
        bench.assert_closed();
    });
}

#[test]
fn use_after_preflight_is_refused_and_what_was_prepared_stays_protected() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let (early, late) = (bench.buffer(1), bench.buffer(2));

        let mut recorder = bench.strict();
        recorder.read(&early);
        recorder.preflight(&bench.runtime).unwrap();
        let said = misuse(recorder.preflight(&bench.runtime));
        assert!(said.contains("twice"), "{said}");
        assert_eq!(bench.script.open_uses(), 1);
        recorder.commit(&bench.runtime).unwrap();
        assert_eq!(bench.script.open_uses(), 0);

        let mut recorder = bench.strict();
        recorder.read(&early);
        recorder.preflight(&bench.runtime).unwrap();
        recorder.write(&late).read(&early);
        let said = misuse(recorder.preflight(&bench.runtime));
        assert!(said.contains(&format!("{:#x}", late.ptr())), "{said}");
        assert_eq!(bench.script.open_uses(), 1);
        assert_eq!(misuse(recorder.commit(&bench.runtime)), said);
        drop((early, late));
        bench.assert_closed();
    });
}

#[test]
fn commit_elsewhere_or_without_preflight_is_refused_and_leaves_nothing_open() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let other = Bench::new(device);
        let buffer = bench.buffer(1);
        other.script.finishes.lock().unwrap().clear();

        let mut recorder = bench.strict();
        recorder.write(&buffer);
        recorder.preflight(&bench.runtime).unwrap();
        let said = misuse(recorder.commit(&other.runtime));
        assert!(said.contains("another runtime"), "{said}");
        assert!(other.script.finishes.lock().unwrap().is_empty());
        bench.assert_closed();

        let mut recorder = bench.strict();
        recorder.write(&buffer);
        let said = misuse(recorder.commit(&bench.runtime));
        assert!(said.contains("without a preflight"), "{said}");
    });
}

#[test]
fn one_failing_finish_does_not_stop_the_others() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let buffers = [1, 2, 3].map(|value| bench.buffer(value));
        let mut recorder = bench.strict();
        for buffer in &buffers {
            recorder.write(buffer);
        }
        recorder.preflight(&bench.runtime).unwrap();
        // The first use is closed behind the recorder's back, so that closing it again fails.
        let first = buffers[0].id().unwrap();
        bench.runtime.finish_block_use(first, bench.stream.id(), Access::Write).unwrap();
        assert!(recorder.commit(&bench.runtime).is_err());
        drop(buffers);
        bench.runtime.reap_pending().unwrap();
        assert_eq!(bench.runtime.bytes_outstanding(), 0, "a use was left open");
    });
}

#[test]
fn run_closes_the_uses_when_the_launch_succeeds_fails_and_panics() {
    for_each_device(|device| {
        let bench = Bench::new(device);
        let (from, to) = (bench.buffer(6), bench.buffer(0));
        let recorder = || {
            let mut recorder = bench.strict();
            recorder.read(&from).write(&to);
            recorder
        };
        let answer = recorder().run(&bench.runtime, |stream| {
            assert_eq!((stream.id(), bench.script.open_uses()), (bench.stream.id(), 2));
            bench.copy(&to, &from);
            Ok(42)
        });
        assert_eq!(answer, Ok(42));
        assert_eq!(to.to_vec().unwrap(), [6; LEN]);

        let failed = XlogError::Kernel("no such kernel".to_owned());
        let answer = recorder().run(&bench.runtime, |_| Err::<(), _>(failed.clone()));
        assert_eq!(answer, Err(failed));
        assert_eq!(bench.script.open_uses(), 0);

        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = recorder()
                .run(&bench.runtime, |_| -> Result<(), XlogError> { panic!("in the launch") });
        }));
        assert!(panicked.is_err());

        let mut lost = LaunchRecorder::new_strict(StreamId(u32::MAX));
        lost.read(&from);
        let answer = lost.run(&bench.runtime, |_| -> Result<(), XlogError> {
            panic!("launched on a stream that does not exist")
        });
        assert!(matches!(answer, Err(XlogError::UnknownStream { .. })), "{answer:?}");
        drop((from, to));
        bench.assert_closed();
    });
}
