//! The state of a simulated machine, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_base::{Condvar, SplitMix};
use xlog_driver::{DriverError, DriverResult, StreamHandle};

use crate::clock::{Epoch, VectorClock};
use crate::config::SimConfig;
use crate::detector::{Detector, Notice};
use crate::faults::FaultTable;
use crate::graph::{CapturedPoint, GraphTable};
use crate::latency::LatencyModel;
use crate::memory::{AddressSpace, Backing, BackingRange, Pool};
use crate::op::{Argument, GateState, Label, Marker, Op, OpKind, OpMeta, Reached};
use crate::timeline::Timeline;

pub(crate) struct Stream {
    pub(crate) handle: StreamHandle,
    pub(crate) ordinal: u32,
    pub(crate) name: Option<Arc<str>>,
    pub(crate) queue: VecDeque<Op>,
    /// The number of analysed operations at the front of the queue.
    pub(crate) analysed: usize,
    pub(crate) line: Timeline,
    /// The number of executed operations.
    pub(crate) executed: u64,
    pub(crate) running: bool,
    /// The number of fault injections that hold the stream back.
    pub(crate) held_back: u32,
    pub(crate) destroyed: bool,
    /// The origin of the capture it belongs to: itself, or the stream whose captured event it waited for.
    pub(crate) captured_by: Option<u64>,
    /// The race that the next synchronisation returns.
    pub(crate) race: Option<Arc<str>>,
    pub(crate) worker: Option<Worker>,
}

/// The state by which a stream's thread is woken.
pub(crate) struct Worker {
    pub(crate) wake: Arc<Condvar>,
    /// Counts queued operations, for a thread that polls without the lock.
    pub(crate) queued: Arc<AtomicU64>,
    /// Interrupts the thread after its current operation, so that it requeues the rest of its batch.
    pub(crate) interrupt: Arc<AtomicBool>,
    pub(crate) asleep: bool,
}

impl Stream {
    /// Interrupts the stream's thread after its running operation.
    pub(crate) fn interrupt(&self) {
        if let Some(worker) = &self.worker {
            worker.interrupt.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.queue.is_empty() && !self.running
    }

    /// True if the next operation waits only for its turn or for a running operation on the same bytes.
    pub(crate) fn can_go_on(&self) -> bool {
        let next = self.queue.front().filter(|_| self.analysed > 0 && self.held_back == 0);
        next.is_some_and(|op| !matches!(&op.kind, OpKind::Wait(marker) if !marker.is_done()))
    }

    /// Describes what the stream waits for, in messages.
    pub(crate) fn standing(&self) -> String {
        let held = if self.held_back > 0 { ", held back by fault injection" } else { "" };
        match self.queue.front() {
            _ if self.running => format!("{} runs an operation{held}", self.handle),
            Some(op) if matches!(op.kind, OpKind::Gate(_)) && self.analysed == 0 => {
                format!("{} stands at a closed gate{held}", self.handle)
            }
            Some(op) => format!("{} stands at {}{held}", self.handle, op.meta.label),
            None => format!("{} is done", self.handle),
        }
    }
}

#[derive(Default)]
pub(crate) struct Event {
    pub(crate) marker: Option<Arc<Marker>>,
    /// The origin of the capture in which it was recorded.
    pub(crate) captured_by: Option<u64>,
    /// Its point in that capture.
    pub(crate) point: Option<CapturedPoint>,
}

pub(crate) struct Physical {
    pub(crate) ordinal: u32,
    pub(crate) bytes: u64,
    pub(crate) backing: Arc<Backing>,
    pub(crate) mappings: u32,
    pub(crate) destroyed: bool,
}

/// The memory and the loss of one device.
#[derive(Clone, Default)]
pub(crate) struct Ordinal {
    pub(crate) taken: u64,
    pub(crate) limit: Option<u64>,
    pub(crate) lost: Option<(u32, String)>,
    /// The joined clock of destroyed streams, which a synchronised host also covers.
    pub(crate) departed: VectorClock,
    pub(crate) departed_time: u64,
    /// The first unreturned race of destroyed streams.
    pub(crate) departed_race: Option<Arc<str>>,
}

pub(crate) struct State {
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: HashMap<u64, (u32, Event)>,
    pub(crate) pools: BTreeMap<u64, Pool>,
    pub(crate) graphs: GraphTable,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) ordinals: Vec<Ordinal>,
    pub(crate) space: AddressSpace,
    pub(crate) detector: Detector,
    pub(crate) host: Arc<VectorClock>,
    pub(crate) host_time: u64,
    pub(crate) latency: Option<LatencyModel>,
    pub(crate) faults: FaultTable,
    pub(crate) rng: SplitMix,
    pub(crate) order_hash: u64,
    /// Counts every change that could unblock a waiter.
    pub(crate) progress: u64,
    pub(crate) waiters: usize,
    /// The ranges that running operations touch, and whether each is written.
    pub(crate) running: Vec<(u64, Vec<(BackingRange, bool)>)>,
    pub(crate) shutdown: bool,
    /// Operations to drop without the lock, because their closures may own anything.
    pub(crate) discarded: Vec<Op>,
    /// Streams blocked at a closed gate, or at a wait for a marker that is not analysed.
    pub(crate) stalled: BTreeSet<u64>,
    slots: Vec<u64>,
    free_slots: Vec<u32>,
    retired_slots: Vec<u32>,
    next_sequence: u64,
    next_handle: u64,
    capacity: u64,
}

impl State {
    /// Joins a stream that waits for a captured event to that capture, if it is open.
    pub(crate) fn join_capture(&mut self, stream: StreamHandle, captured_by: Option<u64>) {
        let Some(origin) = captured_by else { return };
        let is_open =
            self.streams.get(&origin).is_some_and(|each| each.captured_by == Some(origin));
        if is_open && let Some(stream) = self.streams.get_mut(&stream.number()) {
            stream.captured_by = Some(origin);
        }
    }

    pub(crate) fn new(config: &SimConfig, machine: u64) -> Self {
        Self {
            streams: BTreeMap::new(),
            events: HashMap::new(),
            pools: BTreeMap::new(),
            graphs: GraphTable::default(),
            physical: HashMap::new(),
            ordinals: vec![Ordinal::default(); config.ordinals as usize],
            space: AddressSpace::new(machine, config.ordinals),
            detector: Detector::default(),
            host: Arc::default(),
            host_time: 0,
            latency: config.latency.clone(),
            faults: FaultTable::new(config.ordinals),
            rng: SplitMix::new(config.seed.unwrap_or(0)),
            order_hash: 0xcbf2_9ce4_8422_2325,
            progress: 0,
            waiters: 0,
            running: Vec::new(),
            shutdown: false,
            discarded: Vec::new(),
            stalled: BTreeSet::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            retired_slots: Vec::new(),
            next_sequence: 0,
            next_handle: 1,
            capacity: config.capacity,
        }
    }

    pub(crate) fn handle(&mut self) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        handle
    }

    pub(crate) fn sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }

    // Memory of a device.

    pub(crate) fn free_bytes(&self, ordinal: u32) -> u64 {
        let device = &self.ordinals[ordinal as usize];
        self.capacity.min(device.limit.unwrap_or(u64::MAX)).saturating_sub(device.taken)
    }

    /// Charges memory of the device, or fails if too little is free.
    pub(crate) fn charge_bytes(
        &mut self,
        call: &'static str,
        ordinal: u32,
        bytes: u64,
    ) -> DriverResult<()> {
        if bytes > self.free_bytes(ordinal) {
            return Err(DriverError::OutOfMemory { call, requested: bytes });
        }
        self.ordinals[ordinal as usize].taken += bytes;
        Ok(())
    }

    pub(crate) fn release_bytes(&mut self, ordinal: u32, bytes: u64) {
        let device = &mut self.ordinals[ordinal as usize];
        device.taken = device.taken.saturating_sub(bytes);
    }

    // Streams.

    pub(crate) fn add_stream(&mut self, ordinal: u32) -> StreamHandle {
        let host = Arc::clone(&self.host);
        let slots = &self.slots;
        let (known, unknown): (Vec<u32>, Vec<u32>) =
            self.retired_slots.drain(..).partition(|&slot| host.get(slot) >= slots[slot as usize]);
        self.free_slots.extend(known);
        self.retired_slots = unknown;
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(0);
            (self.slots.len() - 1) as u32
        });
        let handle = StreamHandle::numbered(self.handle());
        self.streams.insert(
            handle.number(),
            Stream {
                handle,
                ordinal,
                name: None,
                queue: VecDeque::new(),
                analysed: 0,
                line: Timeline::new(slot, self.slots[slot as usize], &self.host),
                executed: 0,
                running: false,
                held_back: 0,
                destroyed: false,
                captured_by: None,
                race: None,
                worker: None,
            },
        );
        handle
    }

    /// Removes a destroyed stream once all its work is done.
    pub(crate) fn bury(&mut self, handle: u64) {
        let gone = self.streams.get(&handle).is_some_and(|s| s.destroyed && s.is_drained());
        if !gone {
            return;
        }
        if let Some(stream) = self.streams.remove(&handle) {
            // The slot's count continues from here; a new owner must be ordered after all of it.
            let slot = stream.line.slot;
            let device = &mut self.ordinals[stream.ordinal as usize];
            device.departed.join(&stream.line.clock);
            device.departed_time = device.departed_time.max(stream.line.time);
            if let Some(race) = stream.race {
                device.departed_race.get_or_insert(race);
            }
            if let Some(worker) = &stream.worker {
                // If another thread ran the last operation, the stream's own thread must wake to end.
                worker.wake.notify_one();
            }
            self.slots[slot as usize] = stream.line.clock.get(slot);
            self.retired_slots.push(slot);
        }
    }

    /// Joins `clock` into the host's clock.
    pub(crate) fn host_learns(&mut self, clock: &VectorClock, time: u64) {
        self.host_time = self.host_time.max(time);
        if !self.host.includes(clock) {
            Arc::make_mut(&mut self.host).join(clock);
        }
    }

    // Queueing.

    pub(crate) fn meta(&mut self, label: Label, stream: Option<StreamHandle>) -> Arc<OpMeta> {
        let known = stream.and_then(|s| self.streams.get(&s.number()));
        let stream_name = known.and_then(|stream| stream.name.clone());
        let ordinal = known.map_or(0, |stream| stream.ordinal);
        Arc::new(OpMeta { sequence: self.sequence(), label, stream, stream_name, ordinal })
    }

    /// Queues an operation on a live stream.
    pub(crate) fn push(
        &mut self,
        stream: StreamHandle,
        label: Label,
        kind: OpKind,
        arguments: Vec<Argument>,
    ) -> u64 {
        let meta = self.meta(label, Some(stream));
        let sequence = meta.sequence;
        self.push_as(stream, meta, kind, arguments);
        sequence
    }

    pub(crate) fn push_as(
        &mut self,
        stream: StreamHandle,
        meta: Arc<OpMeta>,
        kind: OpKind,
        arguments: Vec<Argument>,
    ) {
        let op = Op {
            meta,
            kind,
            arguments,
            host: Arc::clone(&self.host),
            issued: self.host_time,
            known: None,
            fault: None,
        };
        if let Some(state) = self.streams.get_mut(&stream.number()) {
            state.queue.push_back(op);
            self.progress += 1;
            self.analyse(stream.number());
        }
    }

    /// Queues a marker at the end of a stream.
    pub(crate) fn push_marker(&mut self, stream: StreamHandle, label: &'static str) -> Arc<Marker> {
        let meta = self.meta(Label::Fixed(label), Some(stream));
        let marker = Marker::new(stream, meta.sequence);
        self.push_as(stream, meta, OpKind::Record(Arc::clone(&marker)), Vec::new());
        marker
    }

    /// Opens a gate with the clock and time of the thread that opens it.
    pub(crate) fn open_gate(&mut self, gate: &GateState, clock: Arc<VectorClock>, time: u64) {
        if gate.opened.set((clock, time)).is_ok() {
            self.progress += 1;
            for handle in self.stalled.iter().copied().collect::<Vec<_>>() {
                self.analyse(handle);
            }
        }
    }

    // Races.

    /// Makes the next synchronisation of each stream of a race fail.
    pub(crate) fn notify_races(&mut self, notices: Vec<Notice>) {
        for Notice { stream, ordinal, message } in notices {
            let race = match self.streams.get_mut(&stream.number()) {
                Some(stream) => &mut stream.race,
                None => &mut self.ordinals[ordinal as usize].departed_race,
            };
            race.get_or_insert(message);
        }
    }

    // Loss.

    /// Loses the device and returns its queued work, which the caller drops without the lock.
    pub(crate) fn lose(&mut self, ordinal: u32, code: u32, reason: String) -> Vec<Op> {
        let device = &mut self.ordinals[ordinal as usize];
        if device.lost.is_none() {
            device.lost = Some((code, reason));
        }
        self.progress += 1;
        let mut dropped = Vec::new();
        for (&handle, stream) in &mut self.streams {
            if stream.ordinal == ordinal {
                self.stalled.remove(&handle);
                stream.analysed = 0;
                stream.interrupt();
                dropped.extend(stream.queue.drain(..));
            }
        }
        // Unblocks streams of other devices that wait for these.
        for op in &dropped {
            if let OpKind::Record(marker) | OpKind::Free(marker) = &op.kind {
                let _ = marker.reached.set(Reached {
                    epoch: Epoch { slot: 0, count: 0 },
                    clock: Arc::clone(&self.host),
                    time: self.host_time,
                });
                marker.set_done();
            }
        }
        for handle in self.stalled.iter().copied().collect::<Vec<_>>() {
            self.analyse(handle);
        }
        dropped
    }
}
