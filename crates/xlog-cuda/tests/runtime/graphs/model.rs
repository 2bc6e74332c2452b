//! Random programs with captures, against a model that runs everything in the order of the calls.
//!
//! Every use goes through a recorder, so the device must end with the bytes of the model and without a race, under every schedule. Blocks have one value
//! in all their bytes. The model of a graph is the list of its steps; a launch runs them. A launch also spoils what other graphs of its arena left
//! in their blocks.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Arc;

use super::support::{assert_empty, copy, fill, manager, runtimes};
use xlog_base::Random;
use xlog_cuda::device_runtime::{
    CaptureError, CaptureOptions, CaptureScope, Graph, ResourceError, StreamId, StreamLease,
    XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, Result, TrackedCudaSlice, XlogError};

const SIZE: usize = 1024;
const STEPS: usize = 30;

/// The programs of a run in CI.
const PROGRAMS: u64 = 500;

/// A block of the program, by number.
type Number = usize;

#[derive(Clone, Copy, Debug)]
enum Step {
    Fill(Number, u8),
    Copy { from: Number, to: Number },
}

struct Block {
    buffer: TrackedCudaSlice<u8>,
    /// `None` where the content is not defined.
    value: Option<u8>,
    /// The arena that it lies in.
    arena: Option<usize>,
}

struct Captured {
    graph: Graph,
    steps: Vec<Step>,
    outside: Vec<Number>,
    arena: usize,
}

struct Program {
    random: Random,
    runtime: Arc<XlogDeviceRuntime>,
    memory: GpuMemoryManager,
    streams: Vec<StreamLease>,
    blocks: HashMap<Number, Block>,
    graphs: Vec<Captured>,
    next_block: Number,
    next_arena: usize,
    counts: Counts,
}

/// How often programs met what they are meant to meet.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    launches: usize,
    /// Launches that were refused since a block had been freed.
    refusals: usize,
    /// Requests that the limit of an arena refused.
    limited: usize,
    /// Captures that added a chunk to an arena.
    grown: usize,
}

impl Program {
    fn new(runtime: Arc<XlogDeviceRuntime>, seed: u64) -> Self {
        let streams = (0..3).map(|_| runtime.stream_pool().lease().unwrap()).collect();
        Self {
            random: Random::new(seed),
            memory: manager(&runtime),
            runtime,
            streams,
            blocks: HashMap::new(),
            graphs: Vec::new(),
            next_block: 0,
            next_arena: 0,
            counts: Counts::default(),
        }
    }

    /// Allocates inside a capture; `None` if the arena has reached its limit.
    fn alloc_inside(
        &mut self,
        bytes: usize,
        stream: StreamId,
    ) -> Result<Option<TrackedCudaSlice<u8>>> {
        match self.memory.on_stream(stream).alloc::<u8>(bytes) {
            Err(XlogError::Resource(ResourceError::Capture(error)))
                if matches!(*error, CaptureError::ArenaLimit { .. }) =>
            {
                self.counts.limited += 1;
                Ok(None)
            }
            buffer => buffer.map(Some),
        }
    }

    fn stream(&mut self) -> StreamId {
        let place = self.random.below(self.streams.len());
        self.streams[place].id()
    }

    /// A random block, in an order that the seed repeats.
    fn pick(&mut self) -> Option<Number> {
        let mut numbers: Vec<Number> = self.blocks.keys().copied().collect();
        numbers.sort_unstable();
        (!numbers.is_empty()).then(|| numbers[self.random.below(numbers.len())])
    }

    fn add(&mut self, buffer: TrackedCudaSlice<u8>, arena: Option<usize>) -> Number {
        self.next_block += 1;
        self.blocks.insert(self.next_block, Block { buffer, value: None, arena });
        self.next_block
    }

    fn queue(&self, step: Step, stream: StreamId) -> Result<()> {
        match step {
            Step::Fill(block, value) => {
                fill(&self.runtime, stream, &self.blocks[&block].buffer, value)
            }
            Step::Copy { from, to } => {
                let (from, to) = (&self.blocks[&from].buffer, &self.blocks[&to].buffer);
                copy(&self.runtime, stream, from, to)
            }
        }
    }

    fn apply(values: &mut HashMap<Number, Option<u8>>, step: Step) {
        match step {
            Step::Fill(block, value) => drop(values.insert(block, Some(value))),
            Step::Copy { from, to } => {
                let value = values.get(&from).copied().flatten();
                values.insert(to, value);
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(12) {
            0 | 1 => {
                let stream = self.stream();
                let buffer = self.memory.on_stream(stream).alloc::<u8>(SIZE).unwrap();
                self.add(buffer, None);
            }
            2 => {
                if let Some(number) = self.pick() {
                    self.blocks.remove(&number);
                }
            }
            3..=5 => self.work_outside(),
            6 | 7 => self.capture(),
            8..=10 => self.launch(),
            _ => {
                self.check_one();
                if self.graphs.len() > 3 {
                    let place = self.random.below(self.graphs.len());
                    drop(self.graphs.remove(place));
                }
            }
        }
    }

    fn work_outside(&mut self) {
        let (Some(from), Some(to)) = (self.pick(), self.pick()) else { return };
        let stream = self.stream();
        let step = match from == to {
            true => Step::Fill(to, self.random.below(200) as u8),
            false => Step::Copy { from, to },
        };
        self.queue(step, stream).unwrap();
        let mut values: HashMap<_, _> =
            self.blocks.iter().map(|(number, block)| (*number, block.value)).collect();
        Self::apply(&mut values, step);
        self.blocks.iter_mut().for_each(|(number, block)| block.value = values[number]);
    }

    fn capture(&mut self) {
        let origin = self.stream();
        let shares = !self.graphs.is_empty() && self.random.below(3) == 0;
        let mut options = CaptureOptions::default();
        // Arenas that grow, that are full after a few blocks, and that have more than any capture needs.
        options = match self.random.below(4) {
            0 if !shares => options.with_arena(4 * SIZE),
            1 => options.with_limit(SIZE * (4 + self.random.below(12))),
            _ => options,
        };
        let arena = if shares {
            let other = &self.graphs[self.random.below(self.graphs.len())];
            options = options.sharing(&other.graph);
            other.arena
        } else {
            self.next_arena += 1;
            self.next_arena
        };
        let (mut steps, mut outside) = (Vec::new(), Vec::new());
        let runtime = Arc::clone(&self.runtime);
        let graph = runtime.capture_with(origin, &options, |scope| {
            self.captured_work(scope, arena, &mut steps, &mut outside)
        });
        let graph = graph.unwrap();
        self.counts.grown += usize::from(graph.arena_bytes() > 2 << 20);
        self.graphs.push(Captured { graph, steps, outside, arena });
    }

    /// Allocates, works and frees inside a capture. What stays alive is an output of the graph.
    fn captured_work(
        &mut self,
        scope: &CaptureScope<'_>,
        arena: usize,
        steps: &mut Vec<Step>,
        outside: &mut Vec<Number>,
    ) -> Result<()> {
        let mut streams = vec![scope.id()];
        let mut inside: Vec<Number> = Vec::new();
        for _ in 0..2 + self.random.below(14) {
            let stream = streams[self.random.below(streams.len())];
            match self.random.below(8) {
                0 => {
                    let other = self.stream();
                    if !streams.contains(&other) {
                        scope.fork(other)?;
                        streams.push(other);
                    }
                }
                1 | 2 => {
                    let Some(buffer) = self.alloc_inside(SIZE, stream)? else { continue };
                    let number = self.add(buffer, Some(arena));
                    let step = Step::Fill(number, self.random.below(200) as u8);
                    self.queue(step, stream)?;
                    steps.push(step);
                    inside.push(number);
                }
                3 => {
                    // Memory that no step uses, so that ranges of many sizes are free.
                    let bytes = 256 * (1 + self.random.below(64));
                    let Some(ballast) = self.alloc_inside(bytes, stream)? else { continue };
                    fill(&self.runtime, stream, &ballast, 255)?;
                }
                4 if !inside.is_empty() => {
                    let place = self.random.below(inside.len());
                    let number = inside.swap_remove(place);
                    self.blocks.remove(&number);
                    outside.retain(|used| *used != number);
                }
                5 if self.random.below(6) == 0 => {
                    // Of any kind: from outside, of an earlier graph, or of this one.
                    let Some(number) = self.pick() else { continue };
                    self.blocks.remove(&number);
                    if inside.contains(&number) {
                        inside.retain(|known| *known != number);
                        outside.retain(|used| *used != number);
                    }
                }
                _ => {
                    let (Some(from), Some(to)) = (self.pick(), self.pick()) else { continue };
                    let step = match from == to {
                        true => Step::Fill(to, self.random.below(200) as u8),
                        false => Step::Copy { from, to },
                    };
                    self.queue(step, stream)?;
                    steps.push(step);
                    let used = match step {
                        Step::Fill(block, _) => vec![block],
                        Step::Copy { from, to } => vec![from, to],
                    };
                    outside.extend(used.into_iter().filter(|used| !inside.contains(used)));
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let place = self.random.below(self.graphs.len());
        let stream = self.stream();
        let captured = &self.graphs[place];
        let launched = captured.graph.launch(stream);
        if captured.outside.iter().any(|number| !self.blocks.contains_key(number)) {
            let error = launched.unwrap_err();
            assert!(
                matches!(error, XlogError::Resource(ResourceError::UseAfterFree { .. })),
                "{error:?}"
            );
            self.counts.refusals += 1;
            return;
        }
        launched.unwrap();
        self.counts.launches += 1;
        let mut values: HashMap<_, _> = self
            .blocks
            .iter()
            .map(|(number, block)| {
                let is_spoiled = block.arena == Some(captured.arena);
                (*number, block.value.filter(|_| !is_spoiled))
            })
            .collect();
        for step in &captured.steps {
            Self::apply(&mut values, *step);
        }
        for (number, block) in &mut self.blocks {
            block.value = values[number];
        }
    }

    fn check_one(&mut self) {
        let Some(number) = self.pick() else { return };
        let block = &self.blocks[&number];
        if let Some(value) = block.value {
            let stream = self.stream();
            let found = self.blocks[&number].buffer.to_vec_on(stream).unwrap();
            assert_eq!(found, [value; SIZE], "block {number}");
        }
    }

    fn end(mut self) -> Counts {
        let mut numbers: Vec<Number> = self.blocks.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            let block = &self.blocks[&number];
            if let Some(value) = block.value {
                assert_eq!(block.buffer.to_vec().unwrap(), [value; SIZE], "block {number}");
            }
        }
        self.blocks.clear();
        self.graphs.clear();
        drop(std::mem::take(&mut self.streams));
        assert_empty(&self.runtime);
        self.counts
    }
}

#[test]
fn random_programs_with_captures_end_as_the_model_and_without_a_race() {
    let programs = std::env::var("XLOG_GRAPH_SEEDS").ok().and_then(|text| text.parse().ok());
    let from: u64 =
        std::env::var("XLOG_GRAPH_FROM").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut all = Counts::default();
    for seed in from..from + programs.unwrap_or(PROGRAMS) {
        struct Replay(u64);
        impl Drop for Replay {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    eprintln!("repeat with XLOG_GRAPH_FROM={} XLOG_GRAPH_SEEDS=1", self.0);
                }
            }
        }
        let _replay = Replay(seed);
        let device = Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap());
        let runtime = runtimes(&device).remove(seed as usize % 3);
        let mut program = Program::new(runtime, seed);
        for _ in 0..STEPS {
            program.step();
        }
        let counts = program.end();
        all.launches += counts.launches;
        all.refusals += counts.refusals;
        all.limited += counts.limited;
        all.grown += counts.grown;
        let races = device.races();
        assert!(races.is_empty(), "{:#?}", races);
    }
    let Counts { launches, refusals, limited, grown } = all;
    let is_covered = launches > 1000 && refusals > 50 && limited > 100 && grown > 100;
    assert!(programs.is_some() || is_covered, "{all:?}");
}
