//! Random programs over streams, and what must come of them.
//!
//! The model knows nothing of clocks: it is a graph of steps, and order is reachability in it.

use std::collections::HashMap;
use std::sync::Arc;

use xlog_driver::{Access, AsyncPools, Driver, PoolOptions, StreamHandle};
use xlog_sim::{RaceKind, SimDevice, SimKernel};

use super::Random;

pub const MAX_BYTES: usize = 192;

#[derive(Clone, Debug)]
pub enum Step {
    Alloc {
        block: usize,
        stream: usize,
        bytes: usize,
    },
    Free {
        block: usize,
        stream: usize,
    },
    /// A kernel that mixes what it reads into what it writes.
    Work {
        stream: usize,
        reads: Vec<usize>,
        writes: Vec<usize>,
        salt: u8,
    },
    Memset {
        stream: usize,
        block: usize,
        value: u8,
    },
    Copy {
        stream: usize,
        to: usize,
        from: usize,
    },
    /// A host function that does nothing.
    Nothing {
        stream: usize,
    },
    Edge {
        from: usize,
        to: usize,
    },
    HostSync {
        stream: usize,
    },
    Hold {
        stream: usize,
    },
    ReleaseAll,
}

#[derive(Clone)]
pub struct Program {
    pub streams: usize,
    pub steps: Vec<Step>,
}

/// How a program comes about.
pub struct Shape {
    pub streams: usize,
    pub steps: usize,
    pub blocks: usize,
    pub gates: bool,
}

/// Ancestors of a step, as bits.
#[derive(Clone, Default, PartialEq)]
struct Bits(Vec<u64>);

impl Bits {
    fn set(&mut self, i: usize) {
        if self.0.len() <= i / 64 {
            self.0.resize(i / 64 + 1, 0);
        }
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a |= b;
        }
    }
}

/// Order as the generator sees it while it writes: a gate orders nothing before it is released.
#[derive(Default)]
struct Draft {
    tail: Vec<Bits>,
    host: Bits,
}

struct Live {
    bytes: usize,
    home: usize,
    /// Steps that the next writer must follow, with their streams.
    writes: Vec<(usize, usize)>,
    reads: Vec<(usize, usize)>,
}

impl Program {
    /// A program in which every needed order is there.
    pub fn well_ordered(random: &mut Random, shape: &Shape) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        let mut draft = Draft { tail: vec![Bits::default(); shape.streams], host: Bits::default() };
        let mut live: HashMap<usize, Live> = HashMap::new();
        let mut ids: Vec<usize> = Vec::new();
        let mut next_block = 0;
        let mut held = vec![false; shape.streams];
        while steps.len() < shape.steps {
            let stream = random.below(shape.streams);
            let roll = random.below(100);
            if ids.len() < 2 || (roll < 15 && ids.len() < shape.blocks) {
                let block = next_block;
                next_block += 1;
                let bytes = 1 + random.below(MAX_BYTES);
                draft.step(&mut steps, stream, Step::Alloc { block, stream, bytes });
                let at = steps.len() - 1;
                live.insert(
                    block,
                    Live { bytes, home: stream, writes: vec![(at, stream)], reads: vec![] },
                );
                ids.push(block);
            } else if roll < 27 {
                let block = ids.swap_remove(random.below(ids.len()));
                // A free may come on any stream, mostly its own.
                let home = live[&block].home;
                let stream = if random.chance(70) { home } else { stream };
                let needed = all(&live[&block]);
                draft.order(&mut steps, random, &mut held, stream, needed);
                live.remove(&block);
                draft.step(&mut steps, stream, Step::Free { block, stream });
            } else if roll < 75 {
                let (mut reads, mut writes) = (Vec::new(), Vec::new());
                for &block in &ids {
                    match random.below(ids.len().max(4)) {
                        0 => writes.push(block),
                        1 | 2 => reads.push(block),
                        _ => {}
                    }
                }
                if writes.is_empty() && reads.is_empty() {
                    continue;
                }
                let needed = reads
                    .iter()
                    .flat_map(|block| live[block].writes.clone())
                    .chain(writes.iter().flat_map(|block| all(&live[block])))
                    .collect();
                draft.order(&mut steps, random, &mut held, stream, needed);
                let at = steps.len();
                for block in &reads {
                    live.get_mut(block).unwrap().reads.push((at, stream));
                }
                for block in &writes {
                    let block = live.get_mut(block).unwrap();
                    (block.writes, block.reads) = (vec![(at, stream)], Vec::new());
                }
                let salt = random.next() as u8;
                draft.step(&mut steps, stream, Step::Work { stream, reads, writes, salt });
            } else if roll < 82 {
                let block = ids[random.below(ids.len())];
                draft.order(&mut steps, random, &mut held, stream, all(&live[&block]));
                let at = steps.len();
                let target = live.get_mut(&block).unwrap();
                (target.writes, target.reads) = (vec![(at, stream)], Vec::new());
                let value = random.next() as u8;
                draft.step(&mut steps, stream, Step::Memset { stream, block, value });
            } else if roll < 89 {
                let to = ids[random.below(ids.len())];
                let from = ids[random.below(ids.len())];
                if to == from {
                    continue;
                }
                let mut needed = all(&live[&to]);
                needed.extend(live[&from].writes.clone());
                draft.order(&mut steps, random, &mut held, stream, needed);
                let at = steps.len();
                live.get_mut(&from).unwrap().reads.push((at, stream));
                let target = live.get_mut(&to).unwrap();
                (target.writes, target.reads) = (vec![(at, stream)], Vec::new());
                draft.step(&mut steps, stream, Step::Copy { stream, to, from });
            } else if roll < 93 {
                draft.step(&mut steps, stream, Step::Nothing { stream });
            } else if roll < 95 && shape.gates && !held[stream] {
                held[stream] = true;
                draft.step(&mut steps, stream, Step::Hold { stream });
            } else if roll < 97 && held.iter().any(|&h| h) {
                held.fill(false);
                steps.push(Step::ReleaseAll);
            } else if roll < 98 {
                draft.host_sync(&mut steps, &mut held, stream);
            }
        }
        steps.push(Step::ReleaseAll);
        Self { streams: shape.streams, steps }
    }

    /// The same program without one step.
    pub fn without(&self, step: usize) -> Self {
        let mut program = self.clone();
        program.steps.remove(step);
        program
    }

    /// The steps that only order others.
    pub fn dependencies(&self) -> Vec<usize> {
        let orders = |step: &Step| matches!(step, Step::Edge { .. } | Step::HostSync { .. });
        (0..self.steps.len()).filter(|&i| orders(&self.steps[i])).collect()
    }

    /// Every pair of conflicting steps that the program does not order, with the kinds a report may have.
    pub fn races(&self) -> Vec<(usize, usize, RaceKind)> {
        let before = self.ancestors();
        let mut touched: HashMap<usize, Vec<(usize, Touch)>> = HashMap::new();
        let mut races = Vec::new();
        for (at, step) in self.steps.iter().enumerate() {
            for (block, touch) in touches(step) {
                let list = touched.entry(block).or_default();
                for &(earlier, what) in list.iter() {
                    let kind = match (what, touch) {
                        (Touch::Read, Touch::Read) => continue,
                        (_, Touch::Free) => RaceKind::UseAfterFree,
                        (Touch::Alloc, _) => RaceKind::UseBeforeAllocation,
                        (Touch::Write, Touch::Write) => RaceKind::WriteWrite,
                        _ => RaceKind::ReadWrite,
                    };
                    if !before[at].has(earlier) && !before[earlier].has(at) {
                        races.push((earlier, at, kind));
                    }
                }
                list.push((at, touch));
            }
        }
        races
    }

    /// For each step, everything that is ordered before it.
    fn ancestors(&self) -> Vec<Bits> {
        // A gate gets its order from a later step, so settle until nothing changes.
        let mut before = vec![Bits::default(); self.steps.len()];
        loop {
            let previous = before.clone();
            let mut tail: Vec<Option<usize>> = vec![None; self.streams];
            let mut host = Bits::default();
            let mut open: Vec<usize> = Vec::new();
            for (at, step) in self.steps.iter().enumerate() {
                let upto = |tail: Option<usize>, before: &[Bits]| {
                    let mut bits = Bits::default();
                    if let Some(tail) = tail {
                        bits.join(&before[tail]);
                        bits.set(tail);
                    }
                    bits
                };
                match step {
                    Step::HostSync { stream } => host.join(&upto(tail[*stream], &before)),
                    Step::ReleaseAll => {
                        for gate in open.drain(..) {
                            before[gate].join(&host);
                        }
                    }
                    Step::Edge { from, to } => {
                        // Both the record and the wait are made by a host that knows this much.
                        let mut bits = upto(tail[*from], &before);
                        bits.join(&upto(tail[*to], &before));
                        bits.join(&host);
                        before[at].join(&bits);
                        tail[*to] = Some(at);
                    }
                    Step::Alloc { stream, .. }
                    | Step::Free { stream, .. }
                    | Step::Work { stream, .. }
                    | Step::Memset { stream, .. }
                    | Step::Copy { stream, .. }
                    | Step::Nothing { stream }
                    | Step::Hold { stream } => {
                        let mut bits = upto(tail[*stream], &before);
                        bits.join(&host);
                        before[at].join(&bits);
                        tail[*stream] = Some(at);
                        if matches!(step, Step::Hold { .. }) {
                            open.push(at);
                        }
                    }
                }
            }
            if before == previous {
                return before;
            }
        }
    }

    /// What every live block holds at the end, in program order.
    pub fn expected(&self) -> HashMap<usize, Vec<u8>> {
        let mut blocks: HashMap<usize, Vec<u8>> = HashMap::new();
        for step in &self.steps {
            match step {
                Step::Alloc { block, bytes, .. } => {
                    blocks.insert(*block, vec![0; *bytes]);
                }
                Step::Free { block, .. } => {
                    blocks.remove(block);
                }
                Step::Work { reads, writes, salt, .. } => {
                    let inputs: Vec<Vec<u8>> = reads
                        .iter()
                        .filter(|block| !writes.contains(block))
                        .map(|block| blocks[block].clone())
                        .collect();
                    for block in writes {
                        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                        mix(&inputs, *salt, blocks.get_mut(block).unwrap());
                    }
                }
                Step::Memset { block, value, .. } => blocks.get_mut(block).unwrap().fill(*value),
                Step::Copy { to, from, .. } => {
                    let bytes = blocks[to].len().min(blocks[from].len());
                    let source = blocks[from][..bytes].to_vec();
                    blocks.get_mut(to).unwrap()[..bytes].copy_from_slice(&source);
                }
                _ => {}
            }
        }
        blocks
    }

    /// Runs the program and returns what the live blocks hold, read after everything completed.
    pub fn run(&self, device: &Arc<SimDevice>, options: &PoolOptions) -> HashMap<usize, Vec<u8>> {
        let streams: Vec<StreamHandle> =
            (0..self.streams).map(|_| device.stream_create(0).unwrap()).collect();
        let pool = device.pool_create(options).unwrap();
        let events: Vec<_> = (0..4).map(|_| device.event_create().unwrap()).collect();
        let mut next_event = 0;
        let mut gates = Vec::new();
        let mut blocks: HashMap<usize, (u64, usize)> = HashMap::new();
        for (at, step) in self.steps.iter().enumerate() {
            match step {
                Step::Alloc { block, stream, bytes } => {
                    let ptr = device.alloc_async(*bytes, pool, streams[*stream]).unwrap();
                    device.tag_memory(ptr, *bytes, &format!("b{block}")).unwrap();
                    // Reused memory holds what was there; the model starts from zero.
                    super::memset(device, ptr, 0, *bytes, streams[*stream]);
                    blocks.insert(*block, (ptr, *bytes));
                }
                Step::Free { block, stream } => {
                    let (ptr, _) = blocks.remove(block).unwrap();
                    // SAFETY: the block is live; whether it is in use is what the test is about.
                    unsafe { device.free_async(ptr, streams[*stream]) }.unwrap();
                }
                Step::Work { stream, reads, writes, salt } => {
                    let salt = *salt;
                    let inputs: Vec<usize> =
                        reads.iter().filter(|block| !writes.contains(block)).copied().collect();
                    let count = inputs.len();
                    let mut kernel = SimKernel::new(format!("k{at}"), move |args| {
                        let (reads, writes) = args.slices().split_at_mut(count);
                        let inputs: Vec<&[u8]> = reads
                            .iter()
                            .map(|slice| match slice {
                                xlog_sim::KernelSlice::Read(bytes) => *bytes,
                                xlog_sim::KernelSlice::Write(bytes) => bytes,
                            })
                            .collect();
                        for slice in writes {
                            if let xlog_sim::KernelSlice::Write(bytes) = slice {
                                mix(&inputs, salt, bytes);
                            }
                        }
                    });
                    for block in &inputs {
                        kernel = kernel.arg(blocks[block].0, blocks[block].1, Access::Read);
                    }
                    for block in writes {
                        kernel = kernel.arg(blocks[block].0, blocks[block].1, Access::ReadWrite);
                    }
                    device.launch(streams[*stream], kernel).unwrap();
                }
                Step::Memset { stream, block, value } => {
                    super::memset(
                        device,
                        blocks[block].0,
                        *value,
                        blocks[block].1,
                        streams[*stream],
                    );
                }
                Step::Copy { stream, to, from } => {
                    let bytes = blocks[to].1.min(blocks[from].1);
                    // SAFETY: both blocks are live and at least this long.
                    unsafe {
                        device.copy_dtod(blocks[to].0, blocks[from].0, bytes, streams[*stream])
                    }
                    .unwrap();
                }
                Step::Nothing { stream } => {
                    device.host_fn(streams[*stream], Box::new(|| {})).unwrap();
                }
                Step::Edge { from, to } => {
                    // Few events, recorded again and again.
                    let event = events[next_event % events.len()];
                    next_event += 1;
                    device.event_record(event, streams[*from]).unwrap();
                    device.stream_wait_event(streams[*to], event).unwrap();
                }
                Step::HostSync { stream } => {
                    let _ = device.stream_synchronize(streams[*stream]);
                }
                Step::Hold { stream } => gates.push(device.hold(streams[*stream]).unwrap()),
                Step::ReleaseAll => gates.clear(),
            }
        }
        let _ = device.synchronize();
        let _ = device.synchronize();
        blocks
            .iter()
            .map(|(&block, &(ptr, bytes))| {
                let mut out = vec![0; bytes];
                // SAFETY: the block is live.
                let _ = unsafe { device.copy_dtoh(&mut out, ptr, streams[0]) };
                (block, out)
            })
            .collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Touch {
    Alloc,
    Read,
    Write,
    Free,
}

fn touches(step: &Step) -> Vec<(usize, Touch)> {
    match step {
        Step::Alloc { block, .. } => vec![(*block, Touch::Alloc)],
        Step::Free { block, .. } => vec![(*block, Touch::Free)],
        Step::Work { reads, writes, .. } => reads
            .iter()
            .filter(|block| !writes.contains(block))
            .map(|&block| (block, Touch::Read))
            .chain(writes.iter().map(|&block| (block, Touch::Write)))
            .collect(),
        Step::Memset { block, .. } => vec![(*block, Touch::Write)],
        Step::Copy { to, from, .. } => vec![(*to, Touch::Write), (*from, Touch::Read)],
        _ => Vec::new(),
    }
}

fn all(live: &Live) -> Vec<(usize, usize)> {
    live.writes.iter().chain(&live.reads).copied().collect()
}

fn mix(inputs: &[&[u8]], salt: u8, out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        let mut value = byte.wrapping_mul(3).wrapping_add(salt).wrapping_add(i as u8);
        for input in inputs {
            value = value.rotate_left(1) ^ input[i % input.len()];
        }
        *byte = value;
    }
}

impl Draft {
    fn step(&mut self, steps: &mut Vec<Step>, stream: usize, step: Step) {
        let host = self.host.clone();
        self.tail[stream].join(&host);
        self.tail[stream].set(steps.len());
        steps.push(step);
    }

    fn host_sync(&mut self, steps: &mut Vec<Step>, held: &mut [bool], stream: usize) {
        // A host that waits for a closed gate waits for ever.
        if held.iter().any(|&h| h) {
            held.fill(false);
            steps.push(Step::ReleaseAll);
        }
        let tail = self.tail[stream].clone();
        self.host.join(&tail);
        steps.push(Step::HostSync { stream });
    }

    /// Orders `stream` after the steps it needs, and never more often than it must.
    fn order(
        &mut self,
        steps: &mut Vec<Step>,
        random: &mut Random,
        held: &mut [bool],
        stream: usize,
        needed: Vec<(usize, usize)>,
    ) {
        for (step, home) in needed {
            if self.tail[stream].has(step) || self.host.has(step) {
                continue;
            }
            if random.chance(6) {
                self.host_sync(steps, held, home);
            } else {
                let from = self.tail[home].clone();
                self.tail[stream].join(&from);
                let host = self.host.clone();
                self.tail[stream].join(&host);
                self.tail[stream].set(steps.len());
                steps.push(Step::Edge { from: home, to: stream });
            }
        }
    }
}
