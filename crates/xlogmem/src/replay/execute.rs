//! One replay of a plan on one stack.
//!
//! Sequential: one thread, in recorded order. By threads: one thread per recorded one, in its own order; an operation waits
//! until the earlier operations on its block are done. Both modes time only the calls of the resource. Blocks that the log
//! never frees are freed afterwards, untimed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use xlog_cuda::XlogError;
use xlog_cuda::device_runtime::{
    AllocRequest, AllocTag, BlockId, DeviceBlock, DeviceMemoryResource, PoolSnapshot,
    ResourceError, StreamLease,
};
use xlog_cuda::driver::sync::Mutex;
use xlog_trace::CallTimes;
use xlog_workloads::stack::{Stack, run_threads};

use super::plan::{MAX_STREAMS, MAX_THREADS, Operation, Plan, What};
use super::samples::{self, Sample};

/// The maximum number of failures listed.
const LISTED: usize = 10;

/// The order and the timing of operations.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Mode {
    Sequential,
    Threads,
    /// By threads, each operation no earlier than its recorded time, divided by this speed.
    Recorded(f64),
}

/// A failed call, with its record.
#[derive(Serialize, Clone, Debug)]
pub(super) struct Failed {
    pub(super) order: u64,
    pub(super) action: &'static str,
    /// As recorded; `null` if the log has more threads than are distinguished.
    pub(super) thread: Option<u64>,
    pub(super) stream: Option<u32>,
    pub(super) bytes: Option<u64>,
    pub(super) tag: Option<String>,
    pub(super) error: String,
}

#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) seconds: f64,
    pub(super) allocate: CallTimes,
    pub(super) free: CallTimes,
    pub(super) uses: CallTimes,
    pub(super) failures: u64,
    pub(super) first_failures: Vec<Failed>,
    /// Frees and uses of blocks whose allocation failed.
    pub(super) skipped: u64,
    pub(super) peak_live_bytes: u64,
    /// The maximum delay of an operation after its recorded time.
    pub(super) behind_nanos: u64,
    pub(super) at_peak: Option<PoolSnapshot>,
    pub(super) at_end: Option<PoolSnapshot>,
    /// By operation; the last sample is taken at the end.
    pub(super) over_time: Vec<Sample>,
}

/// The state of a block of the log.
#[derive(Debug, Default)]
enum State {
    #[default]
    Pending,
    Live(DeviceBlock, u64),
    Failed,
    Gone(BlockId),
}

#[derive(Debug, Default)]
struct Slot {
    /// The number of operations done on it.
    turns: u32,
    state: State,
}

#[derive(Default)]
struct Worker {
    outcome: Outcome,
}

struct Replay<'a> {
    plan: &'a Plan,
    stack: &'a Stack,
    resource: &'a (dyn DeviceMemoryResource + Send + Sync),
    tracks: bool,
    streams: Vec<StreamLease>,
    live: AtomicU64,
    peak: AtomicU64,
    at_peak: Mutex<Option<PoolSnapshot>>,
    sample_step: usize,
    samples: Mutex<Vec<Sample>>,
}

/// The reason why a replay could not be done.
#[derive(Debug)]
pub(super) enum Failure {
    Device(XlogError),
    /// It needs more memory than the system gives.
    TooLarge(String),
}

impl From<XlogError> for Failure {
    fn from(error: XlogError) -> Self {
        Self::Device(error)
    }
}

/// Blocks with their state after a replay.
type Slots = Box<dyn Iterator<Item = Slot>>;

/// Returns an empty vector with space for `count` parts of a replay.
fn vector<T>(count: usize) -> Result<Vec<T>, Failure> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| {
        let mib = count.saturating_mul(size_of::<T>()).div_ceil(1 << 20);
        Failure::TooLarge(format!(
            "the table of a replay takes {mib} MiB of memory, which the system does not give"
        ))
    })?;
    Ok(all)
}

/// Returns the number of streams that a replay of `plan` needs.
pub(super) fn streams_of(plan: &Plan) -> usize {
    plan.figures.streams.clamp(1, MAX_STREAMS)
}

/// Replays `plan` on `stack`. The outcome lists refused calls; an error means that the replay could not be done.
pub(super) fn replay(plan: &Plan, stack: &Stack, mode: Mode) -> Result<Outcome, Failure> {
    let streams = (0..streams_of(plan)).map(|_| Ok(stack.streams().lease()?));
    let streams = streams.collect::<xlog_cuda::Result<Vec<_>>>()?;
    let resource = stack.resource();
    let replay = Replay {
        plan,
        stack,
        resource,
        tracks: resource.supports_block_use_tracking(),
        streams,
        live: AtomicU64::new(0),
        peak: AtomicU64::new(0),
        at_peak: Mutex::new(None),
        sample_step: samples::step(plan.operations.len()),
        samples: Mutex::new(Vec::new()),
    };
    let (mut outcome, slots) = match mode {
        Mode::Sequential => replay.sequential()?,
        Mode::Threads => replay.by_threads(None)?,
        Mode::Recorded(speed) => replay.by_threads(Some(speed))?,
    };
    outcome.peak_live_bytes = replay.peak.load(Ordering::Relaxed);
    outcome.at_end = stack.snapshot();
    outcome.at_peak = replay.at_peak.into_inner();
    outcome.over_time = replay.samples.into_inner();
    let live = replay.live.load(Ordering::Relaxed);
    outcome.over_time.push(Sample::measure(plan.operations.len(), live, stack));
    outcome.over_time.sort_unstable_by_key(|sample| sample.operation);
    for slot in slots {
        if let State::Live(block, _) = slot.state
            && let Err(error) = resource.deallocate(block)
        {
            outcome.failures += 1;
            outcome.note(|| Failed::after_the_log(&error));
        }
    }
    Ok(outcome)
}

impl Replay<'_> {
    /// Returns a slot for each block of the log.
    fn slots<T: Default>(&self) -> Result<Vec<T>, Failure> {
        let mut slots = vector(self.plan.blocks as usize)?;
        slots.extend((0..self.plan.blocks).map(|_| T::default()));
        Ok(slots)
    }

    /// Returns the indices of the operations of each thread.
    fn shares(&self, threads: usize) -> Result<Vec<Vec<u32>>, Failure> {
        let of = |operation: &Operation| operation.thread as usize % threads;
        let mut counts = vec![0; threads];
        self.plan.operations.iter().for_each(|operation| counts[of(operation)] += 1);
        let mut shares = counts.into_iter().map(vector).collect::<Result<Vec<_>, _>>()?;
        for (at, operation) in self.plan.operations.iter().enumerate() {
            shares[of(operation)].push(at as u32);
        }
        Ok(shares)
    }

    fn sequential(&self) -> Result<(Outcome, Slots), Failure> {
        let mut slots: Vec<Slot> = self.slots()?;
        let mut worker = Worker::default();
        let mut none = Slot::default();
        let start = Instant::now();
        for (at, operation) in self.plan.operations.iter().enumerate() {
            let slot = slots.get_mut(operation.block as usize).unwrap_or(&mut none);
            self.perform(at, operation, slot, &mut worker);
        }
        worker.outcome.seconds = start.elapsed().as_secs_f64();
        Ok((worker.outcome, Box::new(slots.into_iter())))
    }

    fn by_threads(&self, speed: Option<f64>) -> Result<(Outcome, Slots), Failure> {
        let slots: Vec<Mutex<Slot>> = self.slots()?;
        let threads = self.plan.figures.threads.clamp(1, MAX_THREADS);
        let shares = self.shares(threads)?;
        let first = self.plan.operations.iter().map(|operation| operation.time).min().unwrap_or(0);
        let total = Mutex::new(Outcome::default());
        let start = Instant::now();
        let body = |thread: u32| {
            let mut worker = Worker::default();
            for &at in &shares[thread as usize] {
                let Some(operation) = self.plan.operations.get(at as usize) else { continue };
                if let Some(speed) = speed {
                    let due = (operation.time - first) as f64 / speed;
                    worker.wait_until(start, Duration::from_nanos(due as u64));
                }
                self.perform_in_turn(at as usize, operation, &slots, &mut worker);
            }
            total.lock().merge(worker.outcome);
        };
        run_threads(self.stack.device(), threads as u32, body);
        let mut outcome = total.into_inner();
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok((outcome, Box::new(slots.into_iter().map(Mutex::into_inner))))
    }

    /// Performs an operation after the earlier ones on its block. Waiting follows the recorded order, so there is no deadlock.
    fn perform_in_turn(
        &self,
        at: usize,
        operation: &Operation,
        slots: &[Mutex<Slot>],
        worker: &mut Worker,
    ) {
        let Some(slot) =
            slots.get(operation.block as usize).filter(|_| operation.what != What::Reap)
        else {
            return self.perform(at, operation, &mut Slot::default(), worker);
        };
        // There every look lets another thread run, and a pause would hold them all.
        let is_seeded = self.stack.device().sim().is_some_and(|sim| sim.seed().is_some());
        let mut looks = 0_u32;
        loop {
            let mut slot = slot.lock();
            if slot.turns >= operation.turn {
                return self.perform(at, operation, &mut slot, worker);
            }
            drop(slot);
            looks += 1;
            match looks {
                _ if is_seeded => {}
                0..64 => std::hint::spin_loop(),
                64..1024 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    fn perform(&self, at: usize, operation: &Operation, slot: &mut Slot, worker: &mut Worker) {
        slot.turns += 1;
        let outcome = &mut worker.outcome;
        let (called, action, bytes) = match operation.what {
            What::Allocate { bytes, align, .. } => {
                (self.allocate(operation, bytes, align, slot, outcome), "allocate", Some(bytes))
            }
            What::Free => (self.free(operation, slot, outcome), "free", None),
            What::Prepare(access) => {
                let call = |id, stream| self.resource.prepare_block_use(id, stream, access);
                (self.use_block(operation, slot, outcome, call), "use_prepare", None)
            }
            What::Finish(access) => {
                let call = |id, stream| self.resource.finish_block_use(id, stream, access);
                (self.use_block(operation, slot, outcome, call), "use_finish", None)
            }
            What::Reap => (self.resource.reap_pending(), "reap_pending", None),
        };
        if let Err(error) = called {
            outcome.failures += 1;
            let tag = self.tag_of(operation).map(|tag| tag.0.to_owned());
            let (thread, stream) = (self.plan.thread_of(operation), self.plan.stream_of(operation));
            let order = operation.order;
            let error = error.to_string();
            outcome.note(|| Failed { order, action, thread, stream, bytes, tag, error });
        }
        if at.is_multiple_of(self.sample_step) {
            let sample = Sample::measure(at, self.live.load(Ordering::Relaxed), self.stack);
            self.samples.lock().push(sample);
        }
        if at == self.plan.peak_at {
            *self.at_peak.lock() = self.stack.snapshot();
        }
    }

    fn tag_of(&self, operation: &Operation) -> Option<AllocTag> {
        let What::Allocate { tag, .. } = operation.what else { return None };
        self.plan.tags.get(tag as usize).copied()
    }

    fn stream(&self, number: u16) -> xlog_cuda::StreamId {
        let lease = self.streams.get(number as usize % self.streams.len().max(1));
        lease.map_or(xlog_cuda::StreamId::DEFAULT, StreamLease::id)
    }

    fn allocate(
        &self,
        operation: &Operation,
        bytes: u64,
        align: u32,
        slot: &mut Slot,
        outcome: &mut Outcome,
    ) -> Result<(), ResourceError> {
        let stream = self.stream(operation.stream);
        let tag = self.tag_of(operation).unwrap_or(AllocTag::UNTAGGED);
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let start = Instant::now();
        let request = AllocRequest::new(size, stream, tag);
        let made = match align {
            0 => self.resource.allocate(size, stream, tag),
            align => self.resource.allocate_request(request.aligned(align as usize), None),
        };
        outcome.allocate.add(nanos_since(start));
        match made {
            Ok(block) => {
                slot.state = State::Live(block, bytes);
                let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
                self.peak.fetch_max(live, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                slot.state = State::Failed;
                Err(error)
            }
        }
    }

    fn free(
        &self,
        operation: &Operation,
        slot: &mut Slot,
        outcome: &mut Outcome,
    ) -> Result<(), ResourceError> {
        let State::Live(block, bytes) = std::mem::replace(&mut slot.state, State::Failed) else {
            outcome.skipped += 1;
            return Ok(());
        };
        slot.state = State::Gone(BlockId::from_block(&block));
        let stream = self.stream(operation.stream);
        let start = Instant::now();
        // The log frees on another stream than the allocation's, so the free must wait for that stream's work so far.
        let used = match self.tracks && stream != block.alloc_stream {
            true => self.resource.record_block_use(&block, stream),
            false => Ok(()),
        };
        let freed = self.resource.deallocate(block);
        outcome.free.add(nanos_since(start));
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        used.and(freed)
    }

    fn use_block(
        &self,
        operation: &Operation,
        slot: &Slot,
        outcome: &mut Outcome,
        call: impl FnOnce(BlockId, xlog_cuda::StreamId) -> Result<(), ResourceError>,
    ) -> Result<(), ResourceError> {
        let id = match &slot.state {
            State::Live(block, _) if self.tracks => BlockId::from_block(block),
            State::Gone(id) if self.tracks => *id,
            _ => {
                outcome.skipped += 1;
                return Ok(());
            }
        };
        let start = Instant::now();
        let called = call(id, self.stream(operation.stream));
        outcome.uses.add(nanos_since(start));
        called
    }
}

impl Worker {
    fn wait_until(&mut self, start: Instant, due: Duration) {
        loop {
            let now = start.elapsed();
            let Some(left) = due.checked_sub(now).filter(|left| !left.is_zero()) else {
                let behind = u64::try_from((now - due).as_nanos()).unwrap_or(u64::MAX);
                self.outcome.behind_nanos = self.outcome.behind_nanos.max(behind);
                return;
            };
            match left > Duration::from_micros(200) {
                true => std::thread::sleep(left - Duration::from_micros(100)),
                false => std::hint::spin_loop(),
            }
        }
    }
}

impl Outcome {
    fn note(&mut self, failed: impl FnOnce() -> Failed) {
        if self.first_failures.len() < LISTED {
            self.first_failures.push(failed());
        }
    }

    fn merge(&mut self, other: Self) {
        self.allocate.merge(&other.allocate);
        self.free.merge(&other.free);
        self.uses.merge(&other.uses);
        self.failures += other.failures;
        self.skipped += other.skipped;
        self.behind_nanos = self.behind_nanos.max(other.behind_nanos);
        self.first_failures.extend(other.first_failures);
        self.first_failures.sort_by_key(|failed| failed.order);
        self.first_failures.truncate(LISTED);
    }
}

impl Failed {
    fn after_the_log(error: &ResourceError) -> Self {
        Self {
            order: u64::MAX,
            action: "free of what the log left",
            thread: None,
            stream: None,
            bytes: None,
            tag: None,
            error: error.to_string(),
        }
    }
}

fn nanos_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
