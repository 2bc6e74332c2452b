//! The execution of queued operations, with threads or with a seed.
//!
//! Two engines share one state. `threaded` gives every stream a thread. `seeded` runs one operation at a time on the thread that calls the
//! driver, as its seed decides. Both start an operation only when it is analysed, at the front of its stream, and in conflict with no
//! running one.

mod perform;
mod seeded;
mod threaded;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xlog_base::{Condvar, Mutex, MutexGuard};
use xlog_driver::{DriverError, DriverResult};

use crate::config::SimConfig;
use crate::faults::{Call, Fault};
use crate::op::{GateState, Known, Marker, Op, OpKind};
use crate::state::State;
use crate::threads;

pub(crate) use perform::{gather, perform, scatter};

thread_local! {
    /// The machine and the clock of the host function that this thread executes.
    static EXECUTING: RefCell<Option<(u64, Known)>> = const { RefCell::new(None) };
}

/// The part of a machine that its devices, gates and stream threads share.
pub(crate) struct SharedMachine {
    pub(crate) machine: u64,
    pub(crate) config: SimConfig,
    state: Mutex<State>,
    /// Notified when a waiting host thread may continue.
    changed: Condvar,
}

impl std::fmt::Debug for SharedMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimMachine").field("config", &self.config).finish_non_exhaustive()
    }
}

pub(crate) type Guard<'a> = MutexGuard<'a, State>;

/// An operation that a host thread waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// The number of its stream.
    pub(crate) stream: u64,
    pub(crate) sequence: u64,
}

impl Target {
    fn of(marker: &Marker) -> Self {
        Self { stream: marker.stream.number(), sequence: marker.sequence }
    }
}

impl SharedMachine {
    pub(crate) fn new(config: SimConfig, machine: u64) -> Arc<Self> {
        let state = State::new(&config, machine);
        Arc::new(Self { machine, config, state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        self.state.lock()
    }

    /// Starts every driver call: offers a switch to other logical threads, counts the call, and fails if a fault is planned or the device
    /// is lost.
    pub(crate) fn enter(&self, ordinal: u32, call: Call) -> DriverResult<Guard<'_>> {
        threads::yield_point(self.machine);
        let mut state = self.lock();
        if !state.discarded.is_empty() {
            let discarded = std::mem::take(&mut state.discarded);
            drop(state);
            drop(discarded);
            state = self.lock();
        }
        let released = state.take_released();
        if !released.is_empty() {
            drop(state);
            drop(released);
            state = self.lock();
        }
        if let Some(action) = state.faults.action(ordinal, call) {
            drop(state);
            action();
            state = self.lock();
        }
        let fault = state.faults.on_call(ordinal, call);
        check_alive(&state, ordinal, call)?;
        if let Some(fault) = fault {
            match fault {
                Fault::OutOfMemory => {
                    return Err(DriverError::OutOfMemory { call: call.name(), requested: 0 });
                }
                Fault::Unsupported => return Err(DriverError::Unsupported { call: call.name() }),
                Fault::Code(code) => {
                    let name = "injected fault".to_owned();
                    return Err(DriverError::Code { call: call.name(), code, name });
                }
                Fault::DeviceLost => {
                    drop(state);
                    self.lose(ordinal, 719, "lost by fault injection".to_owned());
                    state = self.lock();
                    check_alive(&state, ordinal, call)?;
                }
            }
        }
        if self.config.seed.is_some() {
            state = self.advance(state);
            check_alive(&state, ordinal, call)?;
        }
        Ok(state)
    }

    /// Waits until `ready` returns true, which needs the operation `target` to complete.
    ///
    /// A deadlock that cannot be proven is assumed after the configured patience, if no dependency of the target has progressed and none is
    /// running or ready to run.
    pub(crate) fn wait<'a>(
        &'a self,
        mut state: Guard<'a>,
        ordinal: u32,
        call: Call,
        target: Target,
        mut ready: impl FnMut(&mut State) -> bool,
    ) -> DriverResult<Guard<'a>> {
        let mut since: Option<(u64, Instant)> = None;
        loop {
            if ready(&mut state) {
                return Ok(state);
            }
            check_alive(&state, ordinal, call)?;
            if self.config.seed.is_some() {
                let (guard, stepped) = self.step(state);
                state = guard;
                if stepped {
                    continue;
                }
                if ready(&mut state) {
                    return Ok(state);
                }
                let progress = state.progress;
                if threads::is_logical(self.machine) {
                    drop(state);
                    let stuck = threads::blocked(self.machine, progress);
                    state = self.lock();
                    if stuck && state.progress == progress && !ready(&mut state) {
                        return Err(deadlock(&state, call));
                    }
                    continue;
                }
            }
            let mut left = since.map_or(Duration::ZERO, |(_, at)| {
                self.config.patience.saturating_sub(at.elapsed())
            });
            if left.is_zero() {
                let way = state.way_to(target);
                if since.is_some_and(|(moved, _)| moved == way.moved) && !way.goes_on {
                    return Err(deadlock(&state, call));
                }
                since = Some((way.moved, Instant::now()));
                left = self.config.patience;
            }
            state.waiters += 1;
            state = self.changed.wait_timeout(state, left);
            state.waiters -= 1;
        }
    }

    /// Waits for a marker and joins its clock into the host's.
    pub(crate) fn wait_for<'a>(
        &'a self,
        state: Guard<'a>,
        ordinal: u32,
        call: Call,
        marker: &Marker,
    ) -> DriverResult<Guard<'a>> {
        let target = Target::of(marker);
        let mut state = self.wait(state, ordinal, call, target, |_| marker.is_done())?;
        check_alive(&state, ordinal, call)?;
        if let Some(point) = marker.reached.get() {
            state.host_learns(&point.clock, point.time);
        }
        Ok(state)
    }

    /// Wakes the threads that may continue after a change.
    pub(crate) fn wake(&self, state: &mut State) {
        if self.config.seed.is_none() {
            threaded::wake_workers(state);
        }
        if state.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Notifies the engine of new work on `stream`.
    pub(crate) fn queued(self: &Arc<Self>, state: &mut State, stream: u64) {
        if self.config.seed.is_none() {
            threaded::queued(self, state, stream);
        }
        if state.waiters > 0 {
            self.changed.notify_all();
        }
    }

    pub(crate) fn open_gate(&self, gate: &GateState) {
        let passed_on = EXECUTING.with(|slot| {
            let slot = slot.borrow();
            let (machine, known) = slot.as_ref()?;
            (*machine == self.machine).then(|| (Arc::new(known.clock()), known.time))
        });
        let mut state = self.lock();
        let (clock, time) = match passed_on {
            Some(known) => known,
            None => (Arc::clone(&state.host), state.host_time),
        };
        state.open_gate(gate, clock, time);
        self.wake(&mut state);
    }

    pub(crate) fn lose(&self, ordinal: u32, code: u32, reason: String) {
        let mut state = self.lock();
        let dropped = state.lose(ordinal, code, reason);
        self.wake(&mut state);
        drop(state);
        // Closures may own anything, including devices of this machine.
        drop(dropped);
    }

    /// Shuts the machine down: threads stop when they have no work.
    pub(crate) fn shut_down(&self) {
        let mut state = self.lock();
        state.shutdown = true;
        threaded::wake_all(&mut state);
    }
}

impl State {
    /// True if the operation at the front of `stream` can be executed now.
    pub(crate) fn is_ready(&self, stream: u64) -> bool {
        let Some(stream) = self.streams.get(&stream) else {
            return false;
        };
        if stream.running || stream.held_back > 0 || stream.analysed == 0 {
            return false;
        }
        match stream.queue.front() {
            Some(op) => match &op.kind {
                OpKind::Wait(marker) => marker.is_done(),
                OpKind::CopyOut => false,
                _ => !self.conflicts(op),
            },
            None => false,
        }
    }

    /// True if the copy to the host that its caller waits for is at the front and can run.
    pub(crate) fn is_copy_out_ready(&self, stream: u64, sequence: u64) -> bool {
        self.streams.get(&stream).is_some_and(|stream| {
            !stream.running
                && stream.held_back == 0
                && stream.analysed > 0
                && stream
                    .queue
                    .front()
                    .is_some_and(|op| op.meta.sequence == sequence && !self.conflicts(op))
        })
    }

    /// True if the last operation of `stream` touches only mapped memory.
    pub(crate) fn is_fault_free(&self, stream: u64) -> bool {
        let last = self.streams.get(&stream).and_then(|stream| stream.queue.back());
        last.is_some_and(|op| op.fault.is_none())
    }

    /// Summarises the work that an operation depends on: the work ahead of it on its stream and, transitively, ahead of the markers that
    /// this work waits for.
    fn way_to(&self, target: Target) -> Way {
        let mut way = Way { moved: 0, goes_on: false };
        let mut upto: BTreeMap<u64, u64> = BTreeMap::new();
        let mut open = vec![target];
        while let Some(Target { stream: handle, sequence }) = open.pop() {
            let looked_at = upto.get(&handle).copied();
            let Some(stream) = self.streams.get(&handle) else {
                continue;
            };
            if looked_at.is_some_and(|seen| seen >= sequence) {
                continue;
            }
            upto.insert(handle, sequence);
            if looked_at.is_none() {
                let place = (handle << 32) ^ stream.executed;
                way.moved = (way.moved ^ place).wrapping_mul(0x0000_0100_0000_01b3);
                way.goes_on |= stream.running || stream.can_go_on();
            }
            for op in stream.queue.iter().take_while(|op| op.meta.sequence <= sequence) {
                if let OpKind::Wait(marker) = &op.kind
                    && !marker.is_done()
                {
                    open.push(Target::of(marker));
                }
            }
        }
        way
    }

    fn conflicts(&self, op: &Op) -> bool {
        self.running.iter().any(|(_, touched)| op.conflicts(touched))
    }

    /// Takes the operation at the front of a ready stream. An immediate operation is completed and gives `None`.
    pub(crate) fn start(&mut self, handle: u64) -> Option<Op> {
        let stream = self.streams.get_mut(&handle)?;
        let op = stream.queue.pop_front()?;
        stream.analysed -= 1;
        let place = (u64::from(stream.line.slot) << 40) ^ stream.executed;
        self.order_hash = (self.order_hash ^ place).wrapping_mul(0x0000_0100_0000_01b3);
        if op.kind.is_immediate() && op.fault.is_none() {
            if let OpKind::Record(marker) | OpKind::Free(marker) = &op.kind {
                marker.set_done();
            }
            stream.executed += 1;
            self.progress += 1;
            self.bury(handle);
            return None;
        }
        stream.running = true;
        let touched = op.touched();
        if !touched.is_empty() {
            self.running.push((op.meta.sequence, touched));
        }
        Some(op)
    }

    /// Completes an operation that was executed.
    pub(crate) fn finish(&mut self, handle: u64, sequence: u64) {
        if let Some(at) = self.running.iter().position(|(running, _)| *running == sequence) {
            self.running.swap_remove(at);
        }
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.running = false;
            stream.executed += 1;
        }
        self.progress += 1;
        self.bury(handle);
    }
}

/// The progress of the work that a wait depends on.
struct Way {
    /// A hash that changes when any of this work progresses.
    moved: u64,
    /// True if any of this work is running or ready to run.
    goes_on: bool,
}

pub(crate) fn check_alive(state: &State, ordinal: u32, call: Call) -> DriverResult<()> {
    match &state.ordinals[ordinal as usize].lost {
        Some((code, reason)) => {
            Err(DriverError::DeviceLost { call: call.name(), code: *code, reason: reason.clone() })
        }
        None => Ok(()),
    }
}

fn deadlock(state: &State, call: Call) -> DriverError {
    let standing: Vec<String> = state
        .streams
        .values()
        .filter(|stream| !stream.is_drained())
        .map(|stream| stream.standing())
        .collect();
    let reason =
        if standing.is_empty() { "nothing is queued".to_owned() } else { standing.join("; ") };
    DriverError::Deadlock { call: call.name(), reason }
}
