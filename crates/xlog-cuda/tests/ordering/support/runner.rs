//! Runs a random program on a device, against the content that its order demands.
//!
//! A lane's lock is held while a step works on it, so the order of the steps on a lane is the order of its locks, and what
//! the lane must hold is known on the host. Everything else is left to the hooks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::{Mutex as StdMutex, PoisonError};

use xlog_cuda::Gate;
use xlog_cuda::device_runtime::{Access, BlockId, DeviceBlock, DeviceStream, Generation, StreamId};
use xlog_cuda::driver::sync::Mutex;
use xlog_cuda::sim::SimKernel;
use xlog_testing::threads;

use super::program::{Lane, Program, Step};
use super::rig::{Rig, copy, fill, looking, read};

/// What a lane holds, as far as the host knows.
#[derive(Default)]
struct Content {
    block: Option<BlockId>,
    ptr: u64,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Slot {
    lanes: [Mutex<Content>; 2],
    /// Changed only with both lanes locked.
    block: Mutex<Option<DeviceBlock>>,
}

pub struct Runner<'a> {
    program: &'a Program,
    rig: Rig,
    slots: Vec<Slot>,
    streams: Vec<Mutex<Arc<DeviceStream>>>,
    gates: Mutex<Vec<Gate>>,
    /// Blocks on which no hook was called, and the stream that may use them without. Work without hooks is queued, and the first hook
    /// is called, with the lock held.
    silent: Mutex<BTreeMap<Generation, StreamId>>,
    problems: Arc<StdMutex<Vec<String>>>,
    /// The step whose hooks are left out.
    without: Option<usize>,
}

/// What came of a run.
pub struct Outcome {
    pub problems: Vec<String>,
    pub races: Vec<Race>,
}

/// A race report without what changes from device to device, and with it.
pub struct Race {
    pub verdict: String,
    pub text: String,
}

type Guard<'a> = std::sync::MutexGuard<'a, Content>;

impl<'a> Runner<'a> {
    pub fn new(program: &'a Program, rig: Rig, without: Option<usize>) -> Self {
        let streams = (0..program.streams)
            .map(|_| Mutex::new(rig.pool.resolve(rig.pool.acquire().unwrap()).unwrap()))
            .collect();
        Self {
            program,
            rig,
            slots: (0..program.slots).map(|_| Slot::default()).collect(),
            streams,
            gates: Mutex::default(),
            silent: Mutex::default(),
            problems: Arc::default(),
            without,
        }
    }

    /// Runs the threads, then looks at everything, frees everything and counts.
    pub fn run(self) -> Outcome {
        if self.without.is_some() {
            // Nothing completes before the end: what completed could order what the program does not.
            for stream in 0..self.program.streams {
                self.gates.lock().push(self.stream(stream).hold().unwrap());
            }
        }
        let bodies = self.program.threads.iter().map(|steps| {
            let this = &self;
            let body: Box<dyn FnOnce() + Send + '_> =
                Box::new(move || steps.iter().enumerate().for_each(|(at, s)| this.step(at, s)));
            body
        });
        threads(&self.rig.device, bodies.collect());
        self.gates.lock().clear();
        if let Err(error) = self.rig.device.synchronize() {
            self.problem(error.to_string());
        }
        for slot in 0..self.slots.len() {
            for lane in 0..2 {
                self.read_back((slot, lane), slot % self.program.streams);
            }
            self.free(slot, None);
        }
        if let Err(error) = self.rig.resource.reap_pending() {
            self.problem(error.to_string());
        }
        let counted = self.rig.resource.statistics();
        let left =
            (self.rig.resource.bytes_outstanding(), counted.live_blocks, counted.retired_blocks);
        if left != (0, 0, 0) {
            self.problem(format!("(bytes, live, retired) = {left:?} are left"));
        }
        let races = self.rig.device.races().into_iter().map(|race| Race {
            verdict: format!("{} #{} #{}", race.kind, race.first.sequence, race.second.sequence),
            text: race.to_string(),
        });
        let races = races.collect();
        let problems =
            std::mem::take(&mut *self.problems.lock().unwrap_or_else(PoisonError::into_inner));
        Outcome { problems, races }
    }

    fn problem(&self, text: String) {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    fn stream(&self, index: usize) -> Arc<DeviceStream> {
        self.streams[index].lock().clone()
    }

    fn lane(&self, (slot, lane): Lane) -> Guard<'_> {
        self.slots[slot].lanes[lane].lock()
    }

    /// Both lanes in the order that everyone takes them.
    fn two(&self, a: Lane, b: Lane) -> (Guard<'_>, Guard<'_>) {
        if a < b {
            let first = self.lane(a);
            (first, self.lane(b))
        } else {
            let second = self.lane(b);
            (self.lane(a), second)
        }
    }

    /// Opens a use. The first one ends the time in which the own stream needs no hooks.
    fn prepare(&self, block: BlockId, stream: &DeviceStream, access: Access) {
        let mut silent = self.silent.lock();
        if silent.remove(&block.generation).is_none() {
            drop(silent);
        }
        self.rig.prepare(block, stream, access);
    }

    /// Work between its hooks, or without them.
    fn hooked(
        &self,
        at: usize,
        stream: &DeviceStream,
        uses: &[(BlockId, Access)],
        queue: impl FnOnce(),
    ) {
        let silent = self.silent.lock();
        let is_silent =
            |block: &BlockId| silent.get(&block.generation).is_some_and(|own| *own == stream.id());
        // Now and then the own stream announces its first use.
        if at % 4 != 3 && uses.iter().all(|(block, _)| is_silent(block)) {
            return queue();
        }
        drop(silent);
        let hooks = self.without != Some(at);
        for &(block, access) in uses.iter().filter(|_| hooks) {
            self.prepare(block, stream, access);
        }
        queue();
        if hooks {
            match uses {
                [(block, access)] => self.rig.finish(*block, stream, *access),
                uses => self.rig.resource.finish_block_uses(uses, stream.id()).unwrap(),
            }
        }
    }

    fn step(&self, at: usize, step: &Step) {
        match *step {
            Step::Alloc { slot, stream, first, lane_bytes } => {
                self.alloc(at, slot, [stream, first], lane_bytes);
            }
            Step::Free { slot, open } => self.free(slot, open),
            Step::Fill { at: lane, stream, value } => {
                let mut content = self.lane(lane);
                let Some(block) = content.block else { return };
                let stream = self.stream(stream);
                self.hooked(at, &stream, &[(block, Access::Write)], || {
                    fill(&stream, content.ptr, value, content.bytes.len());
                });
                content.bytes.fill(value);
            }
            Step::Mix { at: lane, stream, salt } => {
                let mut content = self.lane(lane);
                let Some(block) = content.block else { return };
                let stream = self.stream(stream);
                self.hooked(at, &stream, &[(block, Access::ReadWrite)], || {
                    self.mix(at, &stream, &mut content, salt);
                });
            }
            Step::Copy { to, from, stream } => self.copy(at, to, from, stream),
            Step::Look { at: lane, stream } => self.look(at, lane, stream),
            Step::Both { slot, streams, value, swap } => self.both(slot, streams, value, swap),
            Step::Inside { at, outer, inner, value, swap } => {
                self.inside(at, [outer, inner], value, swap);
            }
            Step::Recorded { at: lane, stream, value } => {
                let mut content = self.lane(lane);
                if content.block.is_none() {
                    return;
                }
                let stream = self.stream(stream);
                for other in 0..self.streams.len() {
                    stream.wait_for(&self.stream(other)).unwrap();
                }
                fill(&stream, content.ptr, value, content.bytes.len());
                let block = self.slots[lane.0].block.lock();
                self.silent.lock().remove(&block.as_ref().unwrap().generation);
                self.rig.resource.record_block_use(block.as_ref().unwrap(), stream.id()).unwrap();
                content.bytes.fill(value);
            }
            Step::Scratch { stream, bytes } => {
                let stream = self.stream(stream);
                let block = self.rig.allocate(bytes, &stream);
                fill(&stream, block.ptr, 0xc3, bytes);
                self.rig.free(block);
            }
            Step::Hold { stream } => {
                let gate = self.stream(stream).hold().unwrap();
                self.gates.lock().push(gate);
            }
            Step::Release => self.gates.lock().clear(),
            Step::ReapCompleted => self.rig.resource.reap_completed().unwrap(),
            Step::ReapPending => {
                if let Err(error) = self.rig.resource.reap_pending() {
                    self.problem(error.to_string());
                }
            }
            Step::ReadBack { at, stream } => self.read_back(at, stream),
            Step::Replace { stream } => {
                let mut place = self.streams[stream].lock();
                assert!(self.rig.pool.release(place.id()));
                *place = self.rig.pool.resolve(self.rig.pool.acquire().unwrap()).unwrap();
            }
        }
    }

    fn alloc(&self, at: usize, slot: usize, streams: [usize; 2], lane_bytes: usize) {
        let (mut first, mut second) = self.two((slot, 0), (slot, 1));
        if first.block.is_some() {
            return;
        }
        let [own, writer] = streams.map(|stream| self.stream(stream));
        let block = self.rig.allocate(2 * lane_bytes, &own);
        let id = BlockId::from_block(&block);
        if self.program.unannounced {
            self.silent.lock().insert(id.generation, own.id());
        }
        self.hooked(at, &writer, &[(id, Access::Write)], || {
            fill(&writer, id.ptr, 0, 2 * lane_bytes);
        });
        for (lane, content) in [&mut first, &mut second].into_iter().enumerate() {
            content.block = Some(id);
            content.ptr = block.ptr + (lane * lane_bytes) as u64;
            content.bytes = vec![0; lane_bytes];
        }
        *self.slots[slot].block.lock() = Some(block);
    }

    fn free(&self, slot: usize, open: Option<usize>) {
        let (mut first, mut second) = self.two((slot, 0), (slot, 1));
        let Some(block) = self.slots[slot].block.lock().take() else { return };
        let id = BlockId::from_block(&block);
        self.silent.lock().remove(&id.generation);
        match open.map(|stream| self.stream(stream)) {
            None => self.rig.free(block),
            Some(stream) => {
                self.prepare(id, &stream, Access::Read);
                self.rig.free(block);
                self.queue_look("read of a retired block", &stream, &first);
                self.rig.finish(id, &stream, Access::Read);
            }
        }
        (*first, *second) = (Content::default(), Content::default());
    }

    /// Looks at a lane in stream order, or not at all where that would wait behind a gate.
    fn queue_look(&self, name: &str, stream: &DeviceStream, content: &Content) {
        if self.rig.device.sim().is_some() {
            let problems = self.problems.clone();
            let tell = move |text| {
                problems.lock().unwrap_or_else(PoisonError::into_inner).push(text);
            };
            let kernel = looking(name.to_owned(), content.ptr, content.bytes.clone(), tell);
            stream.launch_sim(kernel).unwrap();
        } else if !self.program.gates {
            let back = read(stream, content.ptr, content.bytes.len()).unwrap();
            if back != content.bytes {
                self.problem(format!("{name} saw {back:x?}, {:x?} was due", content.bytes));
            }
        }
    }

    fn mix(&self, at: usize, stream: &DeviceStream, content: &mut Content, salt: u8) {
        if self.rig.device.sim().is_none() {
            fill(stream, content.ptr, salt, content.bytes.len());
            content.bytes.fill(salt);
            return;
        }
        let turn = move |bytes: &mut [u8]| {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = byte.wrapping_mul(3).wrapping_add(salt).wrapping_add(i as u8);
            }
        };
        let kernel = SimKernel::new(format!("mix of step {at}"), move |args| {
            turn(args.bytes_mut(0));
        });
        let kernel = kernel.arg(content.ptr, content.bytes.len(), Access::ReadWrite);
        stream.launch_sim(kernel).unwrap();
        turn(&mut content.bytes);
    }

    fn copy(&self, at: usize, to: Lane, from: Lane, stream: usize) {
        let (mut target, source) = self.two(to, from);
        let (Some(a), Some(b)) = (target.block, source.block) else { return };
        let stream = self.stream(stream);
        let bytes = target.bytes.len().min(source.bytes.len());
        let both = [(a, Access::Write), (b, Access::Read)];
        let one = [(a, Access::ReadWrite)];
        self.hooked(at, &stream, if a == b { &one } else { &both }, || {
            copy(&stream, target.ptr, source.ptr, bytes);
        });
        target.bytes[..bytes].copy_from_slice(&source.bytes[..bytes]);
    }

    fn look(&self, at: usize, lane: Lane, stream: usize) {
        let content = self.lane(lane);
        let Some(block) = content.block else { return };
        let stream = self.stream(stream);
        self.hooked(at, &stream, &[(block, Access::Read)], || {
            self.queue_look(&format!("look of step {at}"), &stream, &content);
        });
    }

    fn both(&self, slot: usize, streams: [usize; 2], value: u8, swap: bool) {
        let (mut first, mut second) = self.two((slot, 0), (slot, 1));
        let Some(block) = first.block else { return };
        let mut streams = streams.map(|stream| self.stream(stream));
        for stream in &streams {
            self.prepare(block, stream, Access::Write);
        }
        for (stream, content) in streams.iter().zip([&mut first, &mut second]) {
            fill(stream, content.ptr, value, content.bytes.len());
            content.bytes.fill(value);
        }
        if swap {
            streams.reverse();
        }
        for stream in &streams {
            self.rig.finish(block, stream, Access::Write);
        }
    }

    fn inside(&self, at: Lane, streams: [usize; 2], value: u8, swap: bool) {
        let mut content = self.lane(at);
        let Some(block) = content.block else { return };
        let [outer, inner] = streams.map(|stream| self.stream(stream));
        self.prepare(block, &outer, Access::Write);
        fill(&outer, content.ptr, !value, content.bytes.len());
        inner.wait_for(&outer).unwrap();
        self.prepare(block, &inner, Access::Write);
        fill(&inner, content.ptr, value, content.bytes.len());
        content.bytes.fill(value);
        for stream in if swap { [&outer, &inner] } else { [&inner, &outer] } {
            self.rig.finish(block, stream, Access::Write);
        }
    }

    fn read_back(&self, at: Lane, stream: usize) {
        let content = self.lane(at);
        let Some(block) = content.block else { return };
        let stream = self.stream(stream);
        self.prepare(block, &stream, Access::Read);
        match read(&stream, content.ptr, content.bytes.len()) {
            Ok(back) if back == content.bytes => {}
            other => self.problem(format!("{at:?}: {other:x?}, {:x?} was due", content.bytes)),
        }
        self.rig.finish(block, &stream, Access::Read);
    }
}
