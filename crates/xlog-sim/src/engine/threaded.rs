//! The concurrent engine: one thread per stream, started with its first work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_base::Condvar;

use super::{Guard, SharedMachine, perform};
use crate::op::{Op, OpKind};
use crate::state::{State, Worker};

/// The maximum number of operations in a batch.
const BATCH: usize = 64;
/// Polls of a thread before it sleeps, because a wake-up costs more than a short poll.
const MAX_SPINS: usize = 1000;
/// Spins of a thread that saw new work before it contends for the lock with the queueing thread.
const GATHER: usize = 50;
/// Spins between two short batches that touch no memory, while no thread waits for them.
const BETWEEN_ROWS: usize = 400;

/// A stream thread's references to its `Worker`.
struct Signals {
    wake: Arc<Condvar>,
    queued: Arc<AtomicU64>,
    interrupt: Arc<AtomicBool>,
}

/// Starts or wakes the thread of a stream with new work.
pub(super) fn queued(shared: &Arc<SharedMachine>, state: &mut State, handle: u64) {
    let Some(stream) = state.streams.get_mut(&handle) else {
        return;
    };
    match &mut stream.worker {
        Some(worker) => {
            worker.queued.fetch_add(1, Ordering::Relaxed);
            if worker.asleep {
                worker.asleep = false;
                worker.wake.notify_one();
            }
        }
        None => {
            let signals = Signals {
                wake: Arc::new(Condvar::new()),
                queued: Arc::new(AtomicU64::new(0)),
                interrupt: Arc::new(AtomicBool::new(false)),
            };
            stream.worker = Some(Worker {
                wake: Arc::clone(&signals.wake),
                queued: Arc::clone(&signals.queued),
                interrupt: Arc::clone(&signals.interrupt),
                asleep: false,
            });
            let shared = Arc::clone(shared);
            let started = std::thread::Builder::new()
                .name(format!("xlog-sim-{handle}"))
                .spawn(move || run(&shared, handle, &signals));
            if let Err(error) = started {
                let ordinal = stream.ordinal;
                stream.worker = None;
                let dropped = state.lose(ordinal, 999, format!("no thread for a stream: {error}"));
                state.discarded.extend(dropped);
            }
        }
    }
}

/// Wakes the threads whose streams can progress or were destroyed.
pub(super) fn wake_workers(state: &mut State) {
    let sleeping: Vec<u64> = state
        .streams
        .iter()
        .filter(|(_, stream)| stream.worker.as_ref().is_some_and(|worker| worker.asleep))
        .map(|(&handle, _)| handle)
        .collect();
    for handle in sleeping {
        if state.is_ready(handle) || state.streams.get(&handle).is_some_and(|s| s.destroyed) {
            wake(state, handle);
        }
    }
}

/// Wakes every thread.
pub(super) fn wake_all(state: &mut State) {
    for handle in state.streams.keys().copied().collect::<Vec<_>>() {
        wake(state, handle);
    }
}

fn wake(state: &mut State, handle: u64) {
    if let Some(worker) = state.streams.get_mut(&handle).and_then(|s| s.worker.as_mut()) {
        worker.asleep = false;
        worker.wake.notify_one();
    }
}

fn run(shared: &SharedMachine, handle: u64, signals: &Signals) {
    let (wake, queued, interrupt) = (&signals.wake, &signals.queued, &signals.interrupt);
    let mut state = shared.lock();
    let mut looked = false;
    loop {
        let Some(ordinal) = state.streams.get(&handle).map(|stream| stream.ordinal) else {
            return;
        };
        let batch = start_batch(shared, &mut state, handle);
        if !batch.is_empty() {
            looked = false;
            drop(state);
            let short = batch.len() < BATCH && batch.iter().all(touches_nothing);
            let mut performed = Vec::with_capacity(batch.len());
            let mut outcome = Ok(());
            let mut rest = batch.into_iter();
            for op in rest.by_ref() {
                performed.push(op.meta.sequence);
                outcome = perform(shared.machine, op);
                if outcome.is_err() || interrupt.load(Ordering::Relaxed) {
                    break;
                }
            }
            if let Err(reason) = outcome {
                shared.lose(ordinal, 700, reason);
            }
            state = shared.lock();
            // Requeues first, so that a destroyed stream does not look empty when its performed operations finish.
            let lost = state.requeue(handle, rest.collect());
            for sequence in performed {
                state.finish(handle, sequence);
            }
            shared.wake(&mut state);
            // No thread waits for the batch and it was not full, so let the next one grow.
            let pause = short && state.waiters == 0;
            if !lost.is_empty() || pause {
                drop(state);
                drop(lost);
                if pause {
                    gather(BETWEEN_ROWS);
                }
                state = shared.lock();
            }
            continue;
        }
        if state.shutdown || !state.streams.contains_key(&handle) {
            return;
        }
        if !looked {
            let before = queued.load(Ordering::Relaxed);
            drop(state);
            for look in 0..MAX_SPINS {
                if queued.load(Ordering::Relaxed) != before {
                    gather(GATHER);
                    break;
                }
                std::hint::spin_loop();
                if look % 32 == 31 {
                    std::thread::yield_now();
                }
            }
            looked = true;
            state = shared.lock();
            continue;
        }
        if let Some(worker) = state.streams.get_mut(&handle).and_then(|s| s.worker.as_mut()) {
            worker.asleep = true;
        }
        state = sleep(wake, state);
        looked = false;
    }
}

/// Spins until more operations are queued: a thread that queues one usually queues more, and each would contend for the lock.
fn gather(spins: usize) {
    for _ in 0..spins {
        std::hint::spin_loop();
    }
}

fn sleep<'a>(wake: &Condvar, state: Guard<'a>) -> Guard<'a> {
    wake.wait(state)
}

/// Completes immediate operations, and takes the next work: one operation, or a batch of operations that touch no memory.
///
/// No other thread can wait for a point inside such a batch, and the batch holds no bytes of other streams. So the whole batch may count as
/// running until its end, even if a host function in it blocks. An interrupt makes the thread requeue the operations it has not begun.
fn start_batch(shared: &SharedMachine, state: &mut State, handle: u64) -> Vec<Op> {
    let mut batch: Vec<Op> = Vec::new();
    if let Some(worker) = state.streams.get(&handle).and_then(|stream| stream.worker.as_ref()) {
        // This poll of the stream observes the cause of the interrupt.
        worker.interrupt.store(false, Ordering::Relaxed);
    }
    let mut immediate = false;
    loop {
        if batch.is_empty() {
            if !state.is_ready(handle) {
                break;
            }
        } else if batch.len() == BATCH || !state.front_joins(handle) {
            break;
        }
        match state.start(handle) {
            Some(op) => {
                let lone = !touches_nothing(&op);
                batch.push(op);
                if lone {
                    break;
                }
            }
            None => immediate = true,
        }
    }
    if immediate {
        shared.wake(state);
    }
    batch
}

fn touches_nothing(op: &Op) -> bool {
    matches!(op.kind, OpKind::HostFn(_) | OpKind::Kernel(_)) && op.arguments.is_empty()
}

impl State {
    /// Requeues operations that were taken and not begun. On a lost device it returns them, to be dropped without the lock.
    fn requeue(&mut self, handle: u64, rest: Vec<Op>) -> Vec<Op> {
        let ordinals = &self.ordinals;
        match self.streams.get_mut(&handle) {
            Some(stream) if ordinals[stream.ordinal as usize].lost.is_none() => {
                stream.analysed += rest.len();
                for op in rest.into_iter().rev() {
                    stream.queue.push_front(op);
                }
                Vec::new()
            }
            _ => rest,
        }
    }

    /// True if the next operation of a running stream may join its batch.
    fn front_joins(&self, handle: u64) -> bool {
        self.streams.get(&handle).is_some_and(|stream| {
            stream.held_back == 0
                && stream.analysed > 0
                && stream.queue.front().is_some_and(touches_nothing)
        })
    }
}
