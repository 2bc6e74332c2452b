//! The transitive closure with fixed capacities: lengths stay on the device, so rounds need no word from the host and can be captured.
//!
//! Capacities are powers of two. A batch of rounds is queued at once, kernel by kernel or as one graph; the host then reads four numbers. Rounds
//! after the last one find no pair and do nothing, so a batch is as long as the longest run so far: mostly a run is one batch and one read. If
//! something did not fit, capacities are doubled and the run begins anew. Graphs are captured again for new capacities and for longer batches.
//! Both forms queue the same kernels through the same code, and read at the same rounds.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use xlog_cuda::device_runtime::{AllocTag, CaptureOptions, Graph};
use xlog_cuda::{Result, StreamId, XlogError};

use super::fixpoint::Fixpoint;
use super::kernels::rounds::{ENTRIES, OVERFLOW, PAIRS, ROUNDS, Round, STATE_WORDS};
use super::{Column, EMPTY, Session, table_places};

/// Rounds of the first batch. Every batch is a multiple of `BATCH_STEP`.
pub const BATCH: usize = 16;

/// Batches grow by this; even, because pairs go back and forth between two buffers.
const BATCH_STEP: usize = 8;

/// The longest batch.
const MAX_BATCH: usize = 512;

/// The batch in which a run of `rounds` rounds ends.
fn batch_for(rounds: usize) -> usize {
    rounds.next_multiple_of(BATCH_STEP).clamp(BATCH, MAX_BATCH)
}

/// Capacities may be doubled this often.
const MAX_DOUBLINGS: u32 = 16;

/// The form in which rounds are queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Each kernel is launched.
    Kernels,
    /// A batch is one graph.
    Graph,
}

/// Elements of the buffers, powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Pairs of a round.
    pub pairs: usize,
    /// Places of the set.
    pub set: usize,
}

impl Capacity {
    /// The capacities that a graph of `rows` edges begins with.
    #[must_use]
    pub fn for_edges(rows: usize) -> Self {
        Self { pairs: rows.next_power_of_two(), set: table_places(8 * rows) }
    }

    fn doubled(self) -> Self {
        Self { pairs: self.pairs * 2, set: self.set * 2 }
    }
}

/// The buffers of the rounds.
#[derive(Debug)]
struct Buffers {
    table: Column<u64>,
    set: Column<u64>,
    pairs: [Column<u64>; 2],
    state: Column<u64>,
    found: Column<u64>,
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
            table: alloc(table_places(rows))?,
            set: alloc(capacity.set)?,
            pairs: [alloc(capacity.pairs)?, alloc(capacity.pairs)?],
            state: alloc(STATE_WORDS)?,
            found: alloc(1)?,
        })
    }

    fn all(&self) -> [&Column<u64>; 6] {
        let [first, second] = &self.pairs;
        [&self.table, &self.set, first, second, &self.state, &self.found]
    }

    /// The buffers of an even or an odd round.
    fn round(&self, number: usize) -> Round<'_> {
        let [even, odd] = &self.pairs;
        let (pairs, fresh) = if number.is_multiple_of(2) { (even, odd) } else { (odd, even) };
        let Self { table, set, state, found, .. } = self;
        Round { pairs, fresh, table, set, state, found }
    }
}

/// Bytes of the buffers, each rounded as the runtime rounds it.
fn bytes_for(rows: usize, capacity: Capacity) -> usize {
    let lengths =
        [table_places(rows), capacity.set, capacity.pairs, capacity.pairs, STATE_WORDS, 1];
    lengths.iter().map(|len| (len * size_of::<u64>()).next_multiple_of(256)).sum()
}

/// The graphs of one capacity: the beginning of a run with its first batch, and a further batch.
#[derive(Debug)]
struct Graphs {
    first: Graph,
    further: Graph,
}

/// A fixpoint with fixed capacities, for runs on several data of one size.
#[derive(Debug)]
pub struct FixedFixpoint<'s> {
    session: &'s Session<'s>,
    stream: StreamId,
    rows: usize,
    capacity: Capacity,
    /// Rounds that are queued between two reads.
    batch: usize,
    edges: Column<u64>,
    buffers: Buffers,
    graphs: Option<Graphs>,
    form: Form,
    captures: u32,
    capture_time: Duration,
}

/// One run.
#[derive(Debug)]
#[must_use]
pub struct FixedRun {
    /// The pairs, which may still be on their way.
    pub result: Column<u64>,
    /// The number of rounds that found pairs.
    pub rounds: u32,
    /// How often the host read the state.
    pub reads: u32,
}

impl<'s> FixedFixpoint<'s> {
    /// Buffers and, for graphs, captures for graphs of `rows` edges, on the first stream of the session.
    pub fn new(
        session: &'s Session<'s>,
        rows: usize,
        form: Form,
        capacity: Capacity,
    ) -> Result<Self> {
        let stream = session.stream(0);
        let edges = session.alloc::<u64>(stream, rows, "fixpoint edges")?;
        let (begun, batch) = (Instant::now(), BATCH);
        let rounds = Rounds { session, stream, edges: &edges, batch };
        let (buffers, graphs) = rounds.build(form, capacity)?;
        let (captures, capture_time) = match form {
            Form::Graph => (1, begun.elapsed()),
            Form::Kernels => (0, Duration::ZERO),
        };
        Ok(Self {
            session,
            stream,
            rows,
            capacity,
            batch,
            edges,
            buffers,
            graphs,
            form,
            captures,
            capture_time,
        })
    }

    /// Finds the closure of the work's edges.
    #[allow(unsafe_code)]
    pub fn run(&mut self, work: &Fixpoint) -> Result<FixedRun> {
        if work.rows != self.rows {
            let text = format!("{} edges, and the buffers are for {}", work.rows, self.rows);
            return Err(XlogError::Kernel(text));
        }
        let edges = &self.edges;
        self.session
            .launch("generate_edges", self.stream)
            .write(edges)
            .moves(edges.size_bytes())
            // SAFETY: the launch names the buffer.
            .run(|kernels, stream| unsafe {
                kernels.generate_edges(stream, edges, work.edge_seed(), work.vertices())
            })?;
        let mut reads = 0;
        for _ in 0..MAX_DOUBLINGS {
            if let Some(state) = self.close(&mut reads)? {
                let (result, rounds) = (self.collect(state[ENTRIES] as usize)?, state[ROUNDS]);
                self.lengthen(rounds as usize)?;
                return Ok(FixedRun { result, rounds: rounds as u32, reads });
            }
            self.grow()?;
        }
        Err(XlogError::Kernel(format!("the closure does not fit {:?}", self.capacity)))
    }

    fn rounds(&self) -> Rounds<'_> {
        let Self { session, stream, edges, batch, .. } = self;
        Rounds { session, stream: *stream, edges, batch: *batch }
    }

    /// Queues batches until no pair is left; `None` if something did not fit.
    fn close(&self, reads: &mut u32) -> Result<Option<[u64; STATE_WORDS]>> {
        match &self.graphs {
            Some(graphs) => graphs.first.launch(self.stream)?,
            None => self.rounds().queue_first(&self.buffers)?,
        }
        loop {
            let mut state = [0; STATE_WORDS];
            self.buffers.state.copy_to_slice_on(&mut state, self.stream)?;
            *reads += 1;
            if state[OVERFLOW] != 0 {
                return Ok(None);
            }
            if state[PAIRS] == 0 {
                return Ok(Some(state));
            }
            match &self.graphs {
                Some(graphs) => graphs.further.launch(self.stream)?,
                None => self.rounds().queue_batch(&self.buffers)?,
            }
        }
    }

    /// Doubles the capacities; graphs are captured again.
    fn grow(&mut self) -> Result<()> {
        self.capacity = self.capacity.doubled();
        self.graphs = None;
        let begun = Instant::now();
        let (buffers, graphs) = self.rounds().build(self.form, self.capacity)?;
        (self.buffers, self.graphs) = (buffers, graphs);
        self.count_capture(begun);
        Ok(())
    }

    /// Makes batches long enough for a run that took more than one; graphs are captured again, in the same memory.
    fn lengthen(&mut self, rounds: usize) -> Result<()> {
        let batch = batch_for(rounds);
        if batch <= self.batch {
            return Ok(());
        }
        self.batch = batch;
        if let Some(graphs) = self.graphs.take() {
            let begun = Instant::now();
            let options = CaptureOptions::default().sharing(&graphs.first);
            self.graphs = Some(self.rounds().capture(&options, |_| Ok(&self.buffers))?);
            self.count_capture(begun);
        }
        Ok(())
    }

    fn count_capture(&mut self, begun: Instant) {
        if self.form == Form::Graph {
            self.captures += 1;
            self.capture_time += begun.elapsed();
        }
    }

    /// Lists the set, in a buffer of exactly its size.
    #[allow(unsafe_code)]
    fn collect(&self, len: usize) -> Result<Column<u64>> {
        let (session, stream, set) = (self.session, self.stream, &self.buffers.set);
        let pairs = session.alloc::<u64>(stream, len, "fixpoint closure")?;
        let count = session.alloc::<u64>(stream, 1, "fixpoint count")?;
        session.fill(stream, &count, 0)?;
        session
            .launch("collect", stream)
            .read(set)
            .write(&pairs)
            .read_write(&count)
            .moves(set.size_bytes() + pairs.size_bytes())
            // SAFETY: there is room for all of the set, and the launch names all it touches.
            .run(|kernels, stream| unsafe { kernels.collect(stream, set, &pairs, &count) })?;
        Ok(pairs)
    }

    /// The capacities now.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Bytes that the rounds keep: the arena of the graphs, or the blocks of the buffers.
    pub fn held_bytes(&self) -> usize {
        match &self.graphs {
            Some(graphs) => graphs.first.arena_bytes(),
            None => {
                let blocks = self.buffers.all().map(|buffer| buffer.runtime_block());
                blocks.into_iter().flatten().map(|block| block.bytes).sum()
            }
        }
    }

    /// How often graphs were captured, and how long that took.
    pub fn captures(&self) -> (u32, Duration) {
        (self.captures, self.capture_time)
    }
}

/// What queues the rounds, kernel by kernel or into a capture.
#[derive(Clone, Copy)]
struct Rounds<'a> {
    session: &'a Session<'a>,
    stream: StreamId,
    edges: &'a Column<u64>,
    batch: usize,
}

impl Rounds<'_> {
    /// The buffers of a capacity, and their graphs.
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
        let graphs = self.capture(&options, |stream| {
            if buffers.get().is_none() {
                let _ = buffers.set(alloc(stream)?);
            }
            let missing = || XlogError::Kernel("the capture made no buffers".to_owned());
            buffers.get().ok_or_else(missing)
        })?;
        let missing = || XlogError::Kernel("the capture made no buffers".to_owned());
        Ok((buffers.into_inner().ok_or_else(missing)?, Some(graphs)))
    }

    /// Captures both graphs on the buffers that `buffers` gives inside the captures.
    fn capture<'b>(
        self,
        options: &CaptureOptions,
        buffers: impl Fn(StreamId) -> Result<&'b Buffers>,
    ) -> Result<Graphs> {
        let runtime = self.session.runtime();
        let first = runtime
            .capture_with(self.stream, options, |scope| self.queue_first(buffers(scope.id())?))?;
        let sharing = CaptureOptions::default().sharing(&first);
        let further = runtime
            .capture_with(self.stream, &sharing, |scope| self.queue_batch(buffers(scope.id())?))?;
        Ok(Graphs { first, further })
    }

    /// Begins a run, and queues its first batch.
    fn queue_first(self, buffers: &Buffers) -> Result<()> {
        queue_start(self.session, self.stream, self.edges, buffers)?;
        self.queue_batch(buffers)
    }

    fn queue_batch(self, buffers: &Buffers) -> Result<()> {
        for number in 0..self.batch {
            queue_extend(self.session, self.stream, buffers.round(number))?;
            queue_begin(self.session, self.stream, buffers.round(number + 1))?;
        }
        Ok(())
    }
}

/// Hashes the edges and lets them through the empty set: they are the pairs of the first round.
#[allow(unsafe_code)]
fn queue_start(
    session: &Session<'_>,
    stream: StreamId,
    edges: &Column<u64>,
    buffers: &Buffers,
) -> Result<()> {
    let Buffers { table, set, pairs: [first, _], state, found } = buffers;
    session.fill(stream, table, EMPTY as u8)?;
    session
        .launch("build_pairs", stream)
        .read(edges)
        .read_write(table)
        .moves(edges.len() * 24)
        // SAFETY: the table has an empty place for every edge, and the launch names all it touches.
        .run(|kernels, stream| unsafe { kernels.build_pairs(stream, edges, table) })?;
    session.fill(stream, set, EMPTY as u8)?;
    session.fill(stream, state, 0)?;
    session.fill(stream, found, 0)?;
    session
        .launch("insert_new", stream)
        .read(edges)
        .read_write(set)
        .write(first)
        .read_write(found)
        .moves(edges.size_bytes() * 3)
        .run(|kernels, stream| {
            // SAFETY: set and buffer have room for all edges, and the launch names all it touches.
            unsafe { kernels.insert_new(stream, edges, set, first, found) }
        })?;
    queue_begin(session, stream, buffers.round(0))
}

#[allow(unsafe_code)]
fn queue_begin(session: &Session<'_>, stream: StreamId, round: Round<'_>) -> Result<()> {
    session
        .launch("begin_round", stream)
        .read_write(round.state)
        .read_write(round.found)
        .moves(round.state.size_bytes())
        // SAFETY: the launch names both buffers.
        .run(|kernels, stream| unsafe { kernels.begin_round(stream, round) })
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
        .read_write(round.found)
        // SAFETY: no pair is written beyond the capacity, and the launch names all it touches.
        .run(|kernels, stream| unsafe { kernels.extend_pairs(stream, round) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use xlog_testing::specs;

    use super::super::SessionOptions;
    use super::*;
    use crate::stack::{Stack, StackKind, StackOptions};

    const ROWS: usize = 900;

    /// What three runs leave.
    #[derive(PartialEq, Eq, Debug)]
    struct Left {
        captures: u32,
        capacity: Capacity,
        batch: usize,
        reads: Vec<u32>,
    }

    /// Runs three graphs of edges.
    fn closures(spec: &str, kind: StackKind, form: Form, capacity: Capacity) -> Left {
        let _turn = xlog_testing::turn(spec);
        let options = StackOptions { streams: 4, ..StackOptions::new(kind) };
        let stack = Stack::build(spec.parse().unwrap(), options).unwrap();
        let last = {
            let session = Session::open(&stack, 1, SessionOptions::default()).unwrap();
            let mut program = FixedFixpoint::new(&session, ROWS, form, capacity).unwrap();
            let mut reads = Vec::new();
            for seed in 1..4 {
                let work = Fixpoint { rows: ROWS, seed };
                let found = program.run(&work).unwrap();
                let verdict = work.verify(&found.result.to_vec().unwrap(), 1);
                assert_eq!(verdict.wrong, None, "{spec} {kind:?} {form:?}");
                assert!(found.rounds > 2);
                assert!(program.batch >= found.rounds as usize, "{found:?}");
                reads.push(found.reads);
            }
            let (captures, capacity) = (program.captures().0, program.capacity());
            Left { captures, capacity, batch: program.batch, reads }
        };
        stack.drain().unwrap();
        assert_eq!(stack.runtime().bytes_outstanding(), 0);
        assert!(stack.device().races().is_empty(), "{:?}", stack.device().races());
        last
    }

    #[test]
    fn both_forms_find_the_closure_and_what_does_not_fit_is_captured_again() {
        for spec in specs() {
            for kind in [StackKind::Pool, StackKind::Async] {
                let fitting = Capacity::for_edges(ROWS);
                let [graph, kernels] =
                    [Form::Graph, Form::Kernels].map(|form| closures(&spec, kind, form, fitting));
                assert_eq!((kernels.captures, kernels.capacity), (0, fitting));
                assert_eq!(graph.capacity, fitting);
                // Both forms read as often; once per run, as soon as batches are as long as runs.
                assert_eq!((graph.batch, &graph.reads), (kernels.batch, &kernels.reads));
                assert!(graph.batch > BATCH && graph.reads[0] > 1, "{graph:?}");
                assert!(graph.reads.contains(&1), "{graph:?}");
                let lengthened = graph.reads.iter().filter(|reads| **reads > 1).count();
                assert_eq!(graph.captures as usize, 1 + lengthened);

                // Room for the edges, and not for what can be reached.
                let small = Capacity { pairs: 1024, set: 2048 };
                for form in [Form::Graph, Form::Kernels] {
                    let left = closures(&spec, kind, form, small);
                    assert!(left.capacity.set > small.set, "{left:?}");
                    assert!(left.captures > graph.captures || form == Form::Kernels, "{left:?}");
                }
            }
        }
    }
}
