//! Buffers that are passed between streams.
//!
//! A round has three steps on three consecutive streams of a ring, and every round starts one stream further. So every
//! stream fills, mixes and sums in turn, and blocks are used on streams that did not allocate them. The host waits only
//! when a thread has [`IN_FLIGHT`] pending sums: it reads the oldest and compares it with its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;
use xlog_base::Mutex;

use xlog_cuda::device_runtime::{AllocTag, StreamLease};
use xlog_cuda::{GpuMemoryManager, LaunchRecorder, Result, StreamId, TrackedCudaSlice, XlogError};
use xlog_kernels::exercise::{Exercise, host};
use xlog_workloads::stack::run_threads;

use super::super::progress::Progress;
use crate::cli::HandoffArguments;

/// The maximum number of pending sums of a thread.
const IN_FLIGHT: usize = 32;

const INPUT: AllocTag = AllocTag("handoff input");
const OUTPUT: AllocTag = AllocTag("handoff output");
const SUM: AllocTag = AllocTag("handoff sum");

pub(super) struct Plan {
    manager: GpuMemoryManager,
    kernels: Exercise,
    streams: Vec<StreamLease>,
    threads: u32,
    rounds: u32,
    rows: usize,
    seed: u64,
}

/// A sum that differs from the host's.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Wrong {
    pub(super) round: u32,
    pub(super) expected: u64,
    pub(super) found: u64,
}

#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) verified: u64,
    pub(super) wrong: u64,
    pub(super) first_wrong: Option<Wrong>,
    pub(super) error: Option<XlogError>,
}

struct HandoffShared {
    progress: Progress,
    stop: AtomicBool,
    verified: AtomicU64,
    wrong: AtomicU64,
    first_wrong: Mutex<Option<Wrong>>,
    error: Mutex<Option<XlogError>>,
}

/// A sum that the device may still be computing.
struct Pending {
    round: u32,
    sum: TrackedCudaSlice<u64>,
}

impl Plan {
    pub(super) fn new(
        manager: GpuMemoryManager,
        arguments: &HandoffArguments,
        rounds: u32,
    ) -> Result<Self> {
        let runtime = manager.runtime();
        let kernels = Exercise::load(runtime.device())?;
        let streams = (0..arguments.streams)
            .map(|_| Ok(runtime.stream_pool().lease()?))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            kernels,
            streams,
            threads: arguments.threads,
            rounds,
            rows: arguments.rows as usize,
            seed: arguments.seed,
            manager,
        })
    }

    /// Runs all rounds; a thread that fails stops the others.
    pub(super) fn run(&self) -> Outcome {
        let shared = HandoffShared {
            progress: Progress::new("handing over", "rounds", self.rounds),
            stop: AtomicBool::new(false),
            verified: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            first_wrong: Mutex::new(None),
            error: Mutex::new(None),
        };
        let thread = |number: u32| {
            if let Err(error) = self.rounds_of(number, &shared) {
                shared.stop.store(true, Ordering::Relaxed);
                shared.error.lock().get_or_insert(error);
            }
        };
        run_threads(self.manager.runtime().device(), self.threads, thread);
        Outcome {
            verified: shared.verified.into_inner(),
            wrong: shared.wrong.into_inner(),
            first_wrong: shared.first_wrong.into_inner(),
            error: shared.error.into_inner(),
        }
    }

    /// Runs the rounds of one thread: those whose number modulo the number of threads is its own.
    fn rounds_of(&self, thread: u32, shared: &HandoffShared) -> Result<()> {
        let mut pending = VecDeque::with_capacity(IN_FLIGHT);
        for round in (thread..self.rounds).step_by(self.threads as usize) {
            if shared.stop.load(Ordering::Relaxed) {
                break;
            }
            if pending.len() == IN_FLIGHT
                && let Some(oldest) = pending.pop_front()
            {
                self.verify(&oldest, shared)?;
            }
            pending.push_back(Pending { round, sum: self.round(round)? });
        }
        pending.iter().try_for_each(|sum| self.verify(sum, shared))
    }

    /// Queues one round and returns the buffer of its sum.
    fn round(&self, round: u32) -> Result<TrackedCudaSlice<u64>> {
        let stream = |step: usize| self.streams[(round as usize + step) % self.streams.len()].id();
        let (left, right) = self.produce(stream(0), round)?;
        let mixed = self.mix(stream(1), &left, &right)?;
        // Freed in stream order after the mixing has read them; this thread does not wait.
        drop((left, right));
        self.fold(stream(2), &mixed)
    }

    #[allow(unsafe_code)]
    fn produce(
        &self,
        stream: StreamId,
        round: u32,
    ) -> Result<(TrackedCudaSlice<u32>, TrackedCudaSlice<u32>)> {
        let memory = self.manager.on_stream(stream);
        let left = memory.alloc_tagged(self.rows, INPUT)?;
        let right = memory.alloc_tagged(self.rows, INPUT)?;
        let (left_salt, right_salt) = self.salts(round);
        let mut recorder = LaunchRecorder::new_strict(stream);
        recorder.write(&left).write(&right);
        recorder.run(self.manager.runtime(), |stream| {
            // SAFETY: both buffers are live and have `rows` rows, and the recorder orders the work.
            unsafe {
                self.kernels.fill_pattern(stream, left.ptr(), self.rows, left_salt)?;
                self.kernels.fill_pattern(stream, right.ptr(), self.rows, right_salt)
            }
        })?;
        Ok((left, right))
    }

    #[allow(unsafe_code)]
    fn mix(
        &self,
        stream: StreamId,
        left: &TrackedCudaSlice<u32>,
        right: &TrackedCudaSlice<u32>,
    ) -> Result<TrackedCudaSlice<u32>> {
        let mixed = self.manager.on_stream(stream).alloc_tagged(self.rows, OUTPUT)?;
        let mut recorder = LaunchRecorder::new_strict(stream);
        recorder.read(left).read(right).write(&mixed);
        recorder.run(self.manager.runtime(), |stream| {
            // SAFETY: the buffers are live and have `rows` rows, and the recorder orders the work.
            unsafe { self.kernels.mix(stream, mixed.ptr(), left.ptr(), right.ptr(), self.rows) }
        })?;
        Ok(mixed)
    }

    #[allow(unsafe_code)]
    fn fold(
        &self,
        stream: StreamId,
        mixed: &TrackedCudaSlice<u32>,
    ) -> Result<TrackedCudaSlice<u64>> {
        let sum = self.manager.on_stream(stream).alloc_tagged(1, SUM)?;
        let mut recorder = LaunchRecorder::new_strict(stream);
        recorder.read(mixed).read_write(&sum);
        recorder.run(self.manager.runtime(), |stream| {
            // SAFETY: both buffers are live and long enough, and the recorder orders the work.
            unsafe {
                stream.memset(sum.ptr(), 0, sum.size_bytes())?;
                self.kernels.fold(stream, mixed.ptr(), self.rows, sum.ptr())
            }
        })?;
        Ok(sum)
    }

    /// Returns the seeds of the two inputs of a round.
    fn salts(&self, round: u32) -> (u32, u32) {
        let number = self.seed.wrapping_add(u64::from(round)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (number as u32, (number >> 32) as u32)
    }

    /// Waits for a sum and compares it with the host's.
    fn verify(&self, pending: &Pending, shared: &HandoffShared) -> Result<()> {
        let (left, right) = self.salts(pending.round);
        let expected = host::mixed_sum(left, right, self.rows);
        let mut found = [0];
        pending.sum.copy_to_slice(&mut found)?;
        shared.progress.step();
        if found == [expected] {
            shared.verified.fetch_add(1, Ordering::Relaxed);
        } else {
            shared.wrong.fetch_add(1, Ordering::Relaxed);
            let wrong = Wrong { round: pending.round, expected, found: found[0] };
            shared.first_wrong.lock().get_or_insert(wrong);
        }
        Ok(())
    }
}
