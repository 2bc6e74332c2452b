//! The transitive closure with fixed capacities: lengths stay on the device, so rounds need no host and can be captured.
//!
//! A round is one kernel with its own counter in the state: it extends the pairs that its counter gives and adds what it finds
//! to the next one. A batch of rounds is queued at once, as kernels or as one graph. The host then reads the counters and
//! queues a further, short batch unless the last counter is 0. Rounds after the last productive one do nothing.
//!
//! - The first batch grows to the longest run so far, so most runs take one batch and one read.
//! - The kernels of the first batch have one thread per pair that their round extended in the run that set its length. A thread
//!   per pair of capacity would keep the kernels of other runs off the processors.
//! - Capacities are powers of two. If one overflows, all are doubled and the run restarts. Graphs are captured again for new
//!   capacities; that of the first batch also after the first run and whenever it grows.
//! - Both forms queue the same kernels by the same code and read at the same rounds.
//! - A run begins and finishes in two calls, and the first never waits. So one host thread can have runs of several programs in
//!   flight, each on its own stream.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use xlog_cuda::device_runtime::{AllocTag, CaptureOptions, Graph};
use xlog_cuda::{Result, StreamId, XlogError};

use super::fixpoint::{Fixpoint, collect};
use super::kernels::rounds::{FOUND, OVERFLOW, Round, state_words};
use super::{Column, Session, table_places};

/// Rounds of the first batch of a first run, and of every further batch: a multiple of `BATCH_STEP`.
pub const BATCH: usize = 16;

/// The increment of first batches; even, because pairs alternate between two buffers.
const BATCH_STEP: usize = 8;

/// The maximum number of rounds in a batch.
const MAX_BATCH: usize = 512;

/// Returns the slots of the edge table. At most a quarter is used, because the longest probe sequence delays the round.
fn edge_places(rows: usize) -> usize {
    table_places(rows.saturating_mul(2))
}

/// Returns the rounds of the first batch that holds a run of `rounds` rounds.
fn batch_for(rounds: usize) -> usize {
    rounds.next_multiple_of(BATCH_STEP).clamp(BATCH, MAX_BATCH)
}

/// The maximum number of times that capacities are doubled.
const MAX_DOUBLINGS: u32 = 16;

/// How rounds are queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Each kernel is launched separately.
    Kernels,
    /// A batch is launched as one graph.
    Graph,
}

/// The capacities of the buffers in elements, powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Pairs of a round.
    pub pairs: usize,
    /// Slots of the set.
    pub set: usize,
}

impl Capacity {
    /// Returns the initial capacities for a graph of `rows` edges.
    #[must_use]
    pub fn for_edges(rows: usize) -> Self {
        Self { pairs: rows.next_power_of_two(), set: table_places(8 * rows) }
    }

    fn doubled(self) -> Self {
        Self { pairs: self.pairs * 2, set: self.set * 2 }
    }
}

#[derive(Debug)]
struct Buffers {
    table: Column<u64>,
    set: Column<u64>,
    pairs: [Column<u64>; 2],
    state: Column<u64>,
}

impl Buffers {
    fn alloc(
        session: &Session<'_>,
        stream: StreamId,
        rows: usize,
        capacity: Capacity,
    ) -> Result<Self> {
        let alloc = |len| session.alloc::<u64>(stream, len, "fixpoint fixed");
        Ok(Self {
            table: alloc(edge_places(rows))?,
            set: alloc(capacity.set)?,
            pairs: [alloc(capacity.pairs)?, alloc(capacity.pairs)?],
            state: alloc(state_words(MAX_BATCH))?,
        })
    }

    fn all(&self) -> [&Column<u64>; 5] {
        let [first, second] = &self.pairs;
        [&self.table, &self.set, first, second, &self.state]
    }

    /// Returns the buffers of a round of a batch.
    fn round(&self, number: usize, expected: usize) -> Round<'_> {
        let [even, odd] = &self.pairs;
        let (pairs, fresh) = if number.is_multiple_of(2) { (even, odd) } else { (odd, even) };
        let Self { table, set, state, .. } = self;
        Round { number, expected, pairs, fresh, table, set, state }
    }
}

/// Returns the bytes of the buffers, each rounded as the runtime rounds it.
fn bytes_for(rows: usize, capacity: Capacity) -> usize {
    let Capacity { pairs, set } = capacity;
    let lengths = [edge_places(rows), set, pairs, pairs, state_words(MAX_BATCH)];
    lengths.iter().map(|len| (len * size_of::<u64>()).next_multiple_of(256)).sum()
}

/// The graphs of one capacity: the start of a run with its first batch, and a further batch, which never grows.
#[derive(Debug)]
struct Graphs {
    first: Graph,
    further: Graph,
}

/// A fixpoint with fixed capacities, for several runs on data of one size.
#[derive(Debug)]
pub struct FixedFixpoint<'s> {
    session: &'s Session<'s>,
    stream: StreamId,
    rows: usize,
    capacity: Capacity,
    /// Rounds of the first batch.
    batch: usize,
    /// The pairs that each round extended in the run that set the length of the first batch.
    lengths: Vec<usize>,
    edges: Column<u64>,
    buffers: Buffers,
    graphs: Option<Graphs>,
    form: Form,
    captures: u32,
    capture_time: Duration,
    /// Launches that were captured.
    captured: usize,
    running: Option<Running>,
}

/// The counters at the start of a run in flight.
#[derive(Clone, Copy, Debug)]
struct Running {
    /// Launches of the program before the run.
    launches: usize,
}

/// The result of one run.
#[derive(Debug)]
#[must_use]
pub struct FixedRun {
    /// The pairs, which the device may still be writing.
    pub result: Column<u64>,
    /// The number of rounds that found pairs.
    pub rounds: u32,
    /// How often the host read the state.
    pub reads: u32,
    /// Launches of the run; a graph counts once.
    pub launches: usize,
}

/// The sum of a run's counters.
#[derive(Default, Debug)]
struct Closed {
    /// Pairs in the set.
    entries: usize,
    /// The pairs that each round extended.
    lengths: Vec<usize>,
}

impl Closed {
    /// Returns the number of rounds that found pairs.
    fn rounds(&self) -> usize {
        self.lengths.iter().filter(|length| **length > 0).count()
    }
}

impl<'s> FixedFixpoint<'s> {
    /// Allocates buffers and, for [`Form::Graph`], captures the graphs for `rows` edges, on the session's first stream.
    pub fn new(
        session: &'s Session<'s>,
        rows: usize,
        form: Form,
        capacity: Capacity,
    ) -> Result<Self> {
        let stream = session.stream(0);
        let edges = session.alloc::<u64>(stream, rows, "fixpoint edges")?;
        let (begun, batch) = (Capture::begin(session), BATCH);
        let rounds = Rounds { session, stream, edges: &edges, batch, lengths: &[] };
        let (buffers, graphs) = rounds.build(form, capacity)?;
        let mut program = Self {
            session,
            stream,
            rows,
            capacity,
            batch,
            lengths: Vec::new(),
            edges,
            buffers,
            graphs,
            form,
            captures: 0,
            capture_time: Duration::ZERO,
            captured: 0,
            running: None,
        };
        program.count_capture(&begun);
        Ok(program)
    }

    /// Finds the closure of the work's edges.
    pub fn run(&mut self, work: &Fixpoint) -> Result<FixedRun> {
        self.begin(work)?;
        self.finish()
    }

    /// Queues the generation of the edges and the first batch of a run, without waiting. [`FixedFixpoint::finish`] must end the
    /// run before another one begins.
    pub fn begin(&mut self, work: &Fixpoint) -> Result<()> {
        if work.rows != self.rows {
            let text = format!("{} edges, and the buffers are for {}", work.rows, self.rows);
            return Err(XlogError::Kernel(text));
        }
        if self.running.is_some() {
            return Err(XlogError::Kernel("a run is in flight; finish it first".to_owned()));
        }
        let launches = self.launches();
        work.generate(self.session, self.stream, &self.edges)?;
        self.queue_first()?;
        self.running = Some(Running { launches });
        Ok(())
    }

    /// Waits for the run in flight and continues it until its closure is complete.
    pub fn finish(&mut self) -> Result<FixedRun> {
        let missing = || XlogError::Kernel("no run is in flight; begin one first".to_owned());
        let running = self.running.take().ok_or_else(missing)?;
        let mut reads = 0;
        for _ in 0..MAX_DOUBLINGS {
            if let Some(closed) = self.close(&mut reads)? {
                // The run has zeroed the state's first word.
                let Buffers { set, state, .. } = &self.buffers;
                let result = collect(self.session, self.stream, set, closed.entries, state)?;
                let rounds = closed.rounds();
                self.lengthen(closed)?;
                let graphs = if self.form == Form::Graph { reads as usize } else { 0 };
                let launches = self.launches() - running.launches + graphs;
                return Ok(FixedRun { result, rounds: rounds as u32, reads, launches });
            }
            self.grow()?;
            self.queue_first()?;
        }
        Err(XlogError::Kernel(format!("the closure does not fit {:?}", self.capacity)))
    }

    /// Returns the session's launches so far, without the captured ones.
    fn launches(&self) -> usize {
        self.session.launches() - self.captured
    }

    fn rounds(&self) -> Rounds<'_> {
        let Self { session, stream, edges, batch, lengths, .. } = self;
        Rounds { session, stream: *stream, edges, batch: *batch, lengths }
    }

    fn queue_first(&self) -> Result<()> {
        match &self.graphs {
            Some(graphs) => graphs.first.launch(self.stream),
            None => self.rounds().queue_first(&self.buffers),
        }
    }

    /// After the first batch, queues further ones until no pair is left; returns `None` if a capacity overflowed.
    fn close(&self, reads: &mut u32) -> Result<Option<Closed>> {
        let (mut batch, mut closed) = (self.batch, Closed::default());
        loop {
            let state = self.buffers.state.slice(..state_words(batch))?.to_vec_on(self.stream)?;
            *reads += 1;
            let found = state.get(FOUND..).unwrap_or_default();
            let too_many = found.iter().any(|pairs| *pairs > self.capacity.pairs as u64);
            if too_many || state.get(OVERFLOW) != Some(&0) {
                return Ok(None);
            }
            // The last counter is the first of the next batch, and is counted there.
            let Some((left, extended)) = found.split_last() else { return Ok(None) };
            closed.entries += extended.iter().sum::<u64>() as usize;
            closed.lengths.extend(extended.iter().map(|pairs| *pairs as usize));
            if *left == 0 {
                return Ok(Some(closed));
            }
            batch = BATCH;
            match &self.graphs {
                Some(graphs) => graphs.further.launch(self.stream)?,
                None => self.rounds().queue_further(&self.buffers)?,
            }
        }
    }

    /// Doubles the capacities and captures the graphs again.
    fn grow(&mut self) -> Result<()> {
        self.capacity = self.capacity.doubled();
        self.graphs = None;
        let begun = Capture::begin(self.session);
        let (buffers, graphs) = self.rounds().build(self.form, self.capacity)?;
        (self.buffers, self.graphs) = (buffers, graphs);
        self.count_capture(&begun);
        Ok(())
    }

    /// Extends the first batch for a run that took more than one, with threads for its pairs, and captures its graph again in the
    /// same memory. The first run always does so.
    fn lengthen(&mut self, closed: Closed) -> Result<()> {
        let batch = batch_for(closed.rounds()).max(self.batch);
        if batch == self.batch && !self.lengths.is_empty() {
            return Ok(());
        }
        self.lengths = closed.lengths;
        let begun = Capture::begin(self.session);
        let longer = Rounds { batch, ..self.rounds() };
        let capture = |graphs: &Graphs| {
            let options = CaptureOptions::default().sharing(&graphs.first);
            longer.capture_first(&options, |_| Ok(&self.buffers))
        };
        let first = self.graphs.as_ref().map(capture).transpose()?;
        self.batch = batch;
        if let Some((graphs, first)) = self.graphs.as_mut().zip(first) {
            graphs.first = first;
            self.count_capture(&begun);
        }
        Ok(())
    }

    fn count_capture(&mut self, begun: &Capture) {
        if self.form == Form::Graph {
            self.captures += 1;
            self.capture_time += begun.at.elapsed();
            self.captured += self.session.launches() - begun.launches;
        }
    }

    /// Returns its session.
    pub fn session(&self) -> &Session<'s> {
        self.session
    }

    /// Returns the current capacities.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Returns the bytes kept for the rounds: the arena of the graphs, or the blocks of the buffers.
    pub fn held_bytes(&self) -> usize {
        match &self.graphs {
            Some(graphs) => graphs.first.arena_bytes(),
            None => {
                let blocks = self.buffers.all().map(|buffer| buffer.runtime_block());
                blocks.into_iter().flatten().map(|block| block.bytes).sum()
            }
        }
    }

    /// Returns how often graphs were captured, and the total time.
    pub fn captures(&self) -> (u32, Duration) {
        (self.captures, self.capture_time)
    }
}

/// The time and the number of launches at the start of a capture.
struct Capture {
    at: Instant,
    launches: usize,
}

impl Capture {
    fn begin(session: &Session<'_>) -> Self {
        Self { at: Instant::now(), launches: session.launches() }
    }
}

/// Queues the rounds, kernel by kernel or into a capture.
#[derive(Clone, Copy)]
struct Rounds<'a> {
    session: &'a Session<'a>,
    stream: StreamId,
    edges: &'a Column<u64>,
    batch: usize,
    /// The pairs that each round of the first batch is expected to extend; the capacity for rounds without a value.
    lengths: &'a [usize],
}

impl Rounds<'_> {
    /// Allocates the buffers of a capacity and captures their graphs.
    fn build(self, form: Form, capacity: Capacity) -> Result<(Buffers, Option<Graphs>)> {
        let rows = self.edges.len();
        let alloc = |stream| Buffers::alloc(self.session, stream, rows, capacity);
        if form == Form::Kernels {
            return Ok((alloc(self.stream)?, None));
        }
        let options = CaptureOptions::default()
            .with_tag(AllocTag("fixpoint graph"))
            .with_arena(bytes_for(rows, capacity));
        let buffers = OnceCell::new();
        let missing = || XlogError::Kernel("the capture made no buffers".to_owned());
        let graphs = self.capture(&options, |stream| {
            if buffers.get().is_none() {
                let _ = buffers.set(alloc(stream)?);
            }
            buffers.get().ok_or_else(missing)
        })?;
        Ok((buffers.into_inner().ok_or_else(missing)?, Some(graphs)))
    }

    /// Captures both graphs on the buffers that `buffers` returns inside the captures.
    fn capture<'b>(
        self,
        options: &CaptureOptions,
        buffers: impl Fn(StreamId) -> Result<&'b Buffers>,
    ) -> Result<Graphs> {
        let first = self.capture_first(options, &buffers)?;
        let sharing = CaptureOptions::default().sharing(&first);
        let further = self.session.runtime().capture_with(self.stream, &sharing, |scope| {
            self.queue_further(buffers(scope.id())?)
        })?;
        Ok(Graphs { first, further })
    }

    fn capture_first<'b>(
        self,
        options: &CaptureOptions,
        buffers: impl Fn(StreamId) -> Result<&'b Buffers>,
    ) -> Result<Graph> {
        let runtime = self.session.runtime();
        runtime.capture_with(self.stream, options, |scope| self.queue_first(buffers(scope.id())?))
    }

    /// Starts a run and queues its first batch.
    fn queue_first(self, buffers: &Buffers) -> Result<()> {
        queue_start(self.session, self.stream, self.edges, buffers)?;
        self.queue_rounds(buffers, self.batch, self.lengths)
    }

    /// Queues a batch that continues the previous one.
    #[allow(unsafe_code)]
    fn queue_further(self, buffers: &Buffers) -> Result<()> {
        let state = &buffers.state;
        self.session
            .launch("next_batch", self.stream)
            .read_write(state)
            .moves(state.size_bytes() * 2)
            // SAFETY: the launch names the buffer.
            .run(|kernels, stream| unsafe { kernels.next_batch(stream, state) })?;
        self.queue_rounds(buffers, BATCH, &[])
    }

    fn queue_rounds(self, buffers: &Buffers, rounds: usize, lengths: &[usize]) -> Result<()> {
        (0..rounds).try_for_each(|number| {
            let expected = lengths.get(number).copied().unwrap_or(usize::MAX);
            queue_extend(self.session, self.stream, buffers.round(number, expected))
        })
    }
}

/// Hashes the edges and inserts them into the empty set: they are the pairs of the first round.
#[allow(unsafe_code)]
fn queue_start(
    session: &Session<'_>,
    stream: StreamId,
    edges: &Column<u64>,
    buffers: &Buffers,
) -> Result<()> {
    let first = buffers.round(0, edges.len());
    let Round { pairs, table, set, state, .. } = first;
    session
        .launch("clear_fixpoint", stream)
        .write(table)
        .write(set)
        .write(state)
        .moves(table.size_bytes() + set.size_bytes() + state.size_bytes())
        // SAFETY: the launch names all buffers.
        .run(|kernels, stream| unsafe { kernels.clear_fixpoint(stream, table, set, state) })?;
    session
        .launch("insert_edges", stream)
        .read(edges)
        .read_write(table)
        .read_write(set)
        .write(pairs)
        .read_write(state)
        .moves(edges.len() * 48)
        // SAFETY: the table has an empty slot for every edge, no pair is written beyond the capacity, and the launch names all its buffers.
        .run(|kernels, stream| unsafe { kernels.insert_edges(stream, edges, first) })
}

#[allow(unsafe_code)]
fn queue_extend(session: &Session<'_>, stream: StreamId, round: Round<'_>) -> Result<()> {
    session
        .launch("extend_pairs", stream)
        .read(round.pairs)
        .read_write(round.state)
        .read(round.table)
        .read_write(round.set)
        .write(round.fresh)
        // SAFETY: no pair is written beyond the capacity, and the launch names all its buffers.
        .run(|kernels, stream| unsafe { kernels.extend_pairs(stream, round) })
}

#[cfg(test)]
mod tests;
