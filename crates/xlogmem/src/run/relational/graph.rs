//! `run fixpoint --graph`: compares a program of fixed capacities, as a graph and kernel by kernel, with one of exact sizes.
//!
//! All three find the closures of the same graphs, and the host verifies each. The programs of fixed capacities have several runs in
//! flight, queued by one host thread, which finishes the oldest one before it begins the next. The program of exact sizes needs the
//! host in every round.
//!
//! The forms take turns of several runs. A first run of each program, which is not counted, finds the capacities and captures the
//! graphs. A first turn of each form, not counted either, takes the memory for the results, which are kept until its end.

use std::time::Instant;

use serde::Serialize;
use xlog_cuda::Result;
use xlog_cuda::driver::DeviceKind;
use xlog_report::text_report::{TextReport, size};
use xlog_workloads::relational::fixed_fixpoint::{Capacity, FixedFixpoint, Form};
use xlog_workloads::relational::fixpoint::Fixpoint;
use xlog_workloads::relational::numbers::seed_for;
use xlog_workloads::relational::{Column, Session, SessionOptions};
use xlog_workloads::stack::{Stack, StackKind, StackOptions};

use super::RelationalArguments;
use crate::Output;
use crate::cli::Refusal;
use crate::doctor::Selection;
use crate::run::report::{RunHead, RunReport, race_problem, races_text, run_on_stack};

/// The maximum number of runs of each program before the next form's turn.
const RUNS_PER_TURN: usize = 16;
/// A turn has fewer runs if their results need more bytes than this.
const RESULT_BYTES_PER_TURN: usize = 256 << 20;

/// Default edges on a GPU and on a simulated device.
const USUAL: [usize; 2] = [100_000, 10_000];

#[derive(Serialize, Debug, Default)]
struct ProgramReport {
    runs_verified: u32,
    /// Time from the first begin to the last end of each turn.
    seconds: f64,
    runs_per_second: Option<f64>,
    /// Launches of the program; a graph counts once.
    launches: usize,
    /// Bytes kept for the rounds: an arena, buffers of fixed capacity, or the peak of exact buffers.
    bytes: usize,
    /// Bytes of the largest result.
    #[serde(skip)]
    result_bytes: usize,
}

impl ProgramReport {
    fn add(&mut self, run: &Self) {
        self.runs_verified += run.runs_verified;
        self.seconds += run.seconds;
        self.launches += run.launches;
    }

    fn rate(&mut self, runs: u32) {
        let seconds = self.seconds;
        self.runs_per_second = (seconds > 0.0).then(|| f64::from(runs) / seconds);
    }

    fn line(&self) -> String {
        let rate = self.runs_per_second.unwrap_or_default();
        format!("{rate:.1} runs/s, {}", size(self.bytes as u64))
    }
}

#[derive(Serialize, Debug, Default)]
struct GraphReport {
    #[serde(flatten)]
    head: RunHead,
    rows: usize,
    repeat: u32,
    in_flight: u32,
    seed: u64,
    graph: ProgramReport,
    kernels: ProgramReport,
    exact: ProgramReport,
    /// The rate of the graph relative to its kernels, then to the program of exact sizes.
    graph_over_kernels: Option<f64>,
    graph_over_exact: Option<f64>,
    /// Bytes of the graph relative to its kernels.
    bytes_over_kernels: Option<f64>,
    /// What the driver took of the device for the executable graphs, beside the pool's memory. What other processes took meanwhile is a
    /// part of it. `None` if the resource cannot say what it holds.
    driver_bytes: Option<u64>,
    pair_capacity: usize,
    set_capacity: usize,
    /// How often a counted run captured its graphs again, for a longer batch or larger capacities, and the time of these captures,
    /// which is a part of the graph's.
    recaptures: u32,
    recapture_seconds: f64,
    rounds: u32,
    first_wrong: Option<String>,
    races: Vec<String>,
    #[serde(skip)]
    detects_races: bool,
    bytes_left: usize,
}

pub(super) fn compare(arguments: &RelationalArguments, in_flight: u32) -> Result<Output, Refusal> {
    arguments.stack.require_tracking("a graph and other work on one buffer")?;
    let selection = arguments.stack.select()?;
    let options = arguments.stack.options(StackKind::Pool, selection.spec)?;
    let options = StackOptions { streams: (arguments.streams + in_flight) as usize, ..options };
    let (spec, [on_gpu, simulated]) = (selection.spec, USUAL);
    let rows = arguments.rows.unwrap_or(if spec.is_simulated() { simulated } else { on_gpu });
    let report = GraphReport {
        in_flight: in_flight.min(arguments.repeat),
        ..GraphReport::new(selection.describe(), rows, &options, arguments)
    };
    let report = run_on_stack(&arguments.stack, spec, options, report, |stack, report| {
        report.measure(stack, arguments)
    })?;
    Ok(report.finish(arguments.json))
}

impl GraphReport {
    fn new(
        selection: Selection,
        rows: usize,
        options: &StackOptions,
        arguments: &RelationalArguments,
    ) -> Self {
        Self {
            head: RunHead::new("fixpoint", selection, options.kind.name()),
            rows,
            repeat: arguments.repeat,
            seed: arguments.seed,
            ..Self::default()
        }
    }

    /// Returns the work of a run; runs from 1 to `repeat` are counted.
    fn work(&self, run: u32) -> Fixpoint {
        Fixpoint { rows: self.rows, seed: seed_for(self.seed, u64::from(run) << 8) }
    }

    fn measure(&mut self, stack: &Stack, arguments: &RelationalArguments) -> Result<()> {
        self.detects_races = stack.device().properties().kind != DeviceKind::Cuda;
        let open = |_| Session::open(stack, 1, SessionOptions::default());
        let sessions = (0..self.in_flight).map(open).collect::<Result<Vec<_>>>()?;
        let rows = self.rows;
        let programs = |form| {
            let capacity = Capacity::for_edges(rows);
            let make = |session| FixedFixpoint::new(session, rows, form, capacity);
            sessions.iter().map(make).collect::<Result<Vec<_>>>()
        };
        let mut kernels = programs(Form::Kernels)?;
        let exact = Session::open(stack, arguments.streams as usize, SessionOptions::default())?;
        let first = vec![self.work(0); sessions.len()];
        let result_bytes = self.measure_fixed(&mut kernels, &first)?.result_bytes;
        self.measure_exact(&exact, &first[..1])?;
        let fitting = RESULT_BYTES_PER_TURN / (result_bytes * sessions.len()).max(1);
        // At least two turns, so that each form is first once.
        let half = (self.repeat as usize).div_ceil(2).div_ceil(sessions.len());
        let turn = sessions.len() * fitting.min(half).clamp(1, RUNS_PER_TURN);
        let works = |runs: std::ops::RangeInclusive<u32>| -> Vec<_> {
            runs.map(|run| self.work(run)).collect()
        };
        let more = self.repeat.min(turn as u32);
        let warm_up = works(self.repeat.saturating_add(1)..=self.repeat.saturating_add(more));
        let works = works(1..=self.repeat);
        self.measure_fixed(&mut kernels, &warm_up)?;
        let before = beside_the_pool(stack)?;
        let mut graphs = programs(Form::Graph)?;
        self.measure_fixed(&mut graphs, &first)?;
        self.measure_fixed(&mut graphs, &warm_up)?;
        let growth = |(before, after): (u64, u64)| after.saturating_sub(before);
        self.driver_bytes = before.zip(beside_the_pool(stack)?).map(growth);
        let captured_before = captures(&graphs);
        // The forms take turns, and take turns at being first, so that all meet the same load on the device.
        for (turn, works) in works.chunks(turn).enumerate() {
            let graphs_first = turn % 2 == 0;
            if graphs_first {
                let run = self.measure_fixed(&mut graphs, works)?;
                self.graph.add(&run);
            }
            let run = self.measure_fixed(&mut kernels, works)?;
            self.kernels.add(&run);
            if !graphs_first {
                let run = self.measure_fixed(&mut graphs, works)?;
                self.graph.add(&run);
            }
            let run = self.measure_exact(&exact, works)?;
            self.exact.add(&run);
        }
        for program in [&mut self.graph, &mut self.kernels, &mut self.exact] {
            program.rate(self.repeat);
        }
        let held = |programs: &[FixedFixpoint<'_>]| {
            programs.iter().map(FixedFixpoint::held_bytes).sum::<usize>()
        };
        (self.graph.bytes, self.kernels.bytes) = (held(&graphs), held(&kernels));
        self.exact.bytes = exact.manager().peak_bytes();
        let captured = captures(&graphs);
        self.recaptures = captured.0 - captured_before.0;
        self.recapture_seconds = captured.1 - captured_before.1;
        for graph in &graphs {
            let capacity = graph.capacity();
            self.pair_capacity = self.pair_capacity.max(capacity.pairs);
            self.set_capacity = self.set_capacity.max(capacity.set);
        }
        drop((graphs, kernels));
        let over = |of: &ProgramReport| {
            self.graph.runs_per_second.zip(of.runs_per_second).map(|(graph, of)| graph / of)
        };
        (self.graph_over_kernels, self.graph_over_exact) = (over(&self.kernels), over(&self.exact));
        let (graph, kernels) = (self.graph.bytes as f64, self.kernels.bytes as f64);
        self.bytes_over_kernels = (kernels > 0.0).then(|| graph / kernels);
        stack.drain()?;
        self.races = stack.device().races().iter().map(ToString::to_string).collect();
        self.bytes_left = stack.resource().bytes_outstanding();
        Ok(())
    }

    /// Runs the works by programs of fixed capacities in turn, so that one run of each is in flight.
    fn measure_fixed(
        &mut self,
        programs: &mut [FixedFixpoint<'_>],
        works: &[Fixpoint],
    ) -> Result<ProgramReport> {
        let start = Instant::now();
        let mut found = Vec::with_capacity(works.len());
        for (turn, works) in works.chunks(programs.len().max(1)).enumerate() {
            for (program, work) in programs.iter_mut().zip(works) {
                if turn > 0 {
                    found.push(program.finish()?);
                }
                program.begin(work)?;
            }
        }
        // The oldest runs are those of the programs that had no work in the last turn.
        let begun = works.len().min(programs.len());
        programs.get_mut(..begun).unwrap_or_default().rotate_left(works.len() % begun.max(1));
        for program in programs.iter_mut().take(begun) {
            found.push(program.finish()?);
        }
        programs.iter().try_for_each(|program| program.session().synchronize())?;
        let mut all =
            ProgramReport { seconds: start.elapsed().as_secs_f64(), ..Default::default() };
        for (work, found) in works.iter().zip(&found) {
            all.launches += found.launches;
            all.result_bytes = all.result_bytes.max(found.result.len() * size_of::<u64>());
            self.verify(work, &found.result, found.rounds, &mut all)?;
        }
        Ok(all)
    }

    /// Runs the program of exact sizes, one run after another.
    fn measure_exact(
        &mut self,
        session: &Session<'_>,
        works: &[Fixpoint],
    ) -> Result<ProgramReport> {
        let (mut all, before) = (ProgramReport::default(), session.launches());
        for work in works {
            let start = Instant::now();
            let (result, rounds) = work.run(session, 0)?;
            session.synchronize()?;
            all.seconds += start.elapsed().as_secs_f64();
            self.verify(work, &result, rounds, &mut all)?;
        }
        all.launches = session.launches() - before;
        Ok(all)
    }

    /// Compares a result with the host's.
    fn verify(
        &mut self,
        work: &Fixpoint,
        result: &Column<u64>,
        rounds: u32,
        all: &mut ProgramReport,
    ) -> Result<()> {
        self.rounds = self.rounds.max(rounds);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let verdict = work.verify(&result.to_vec()?, cores);
        match &verdict.wrong {
            Some(wrong) => {
                self.first_wrong.get_or_insert(format!("with seed {}, {wrong}", work.seed));
            }
            None => all.runs_verified += 1,
        }
        Ok(())
    }
}

/// Returns the bytes of the device that are in use and not the pool's; `None` if the resource cannot say what it holds.
fn beside_the_pool(stack: &Stack) -> Result<Option<u64>> {
    let memory = stack.device().memory_info()?;
    let used = memory.total.saturating_sub(memory.free);
    Ok(stack.resource().physical_bytes().map(|held| used.saturating_sub(held as u64)))
}

/// Returns how often the graphs were captured, and the seconds.
fn captures(programs: &[FixedFixpoint<'_>]) -> (u32, f64) {
    programs.iter().fold((0, 0.0), |(count, seconds), program| {
        let (captures, time) = program.captures();
        (count + captures, seconds + time.as_secs_f64())
    })
}

impl RunReport for GraphReport {
    fn head(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn problem(&self) -> Option<String> {
        if let Some(wrong) = &self.first_wrong {
            return Some(format!("a result is wrong: {wrong}"));
        }
        if let Some(races) = race_problem(&self.races) {
            return Some(races);
        }
        let programs = [&self.graph, &self.kernels, &self.exact];
        if programs.iter().any(|program| program.runs_verified != self.repeat) {
            return Some("not every result was verified".to_owned());
        }
        (self.bytes_left > 0).then(|| format!("{} bytes were not returned", self.bytes_left))
    }

    fn render(&self) -> String {
        let mut page = self.head.begin("Fixpoint as a graph");
        page.line("resource", &self.head.resource);
        let work = format!("a graph of {} edges, {} times by each program", self.rows, self.repeat);
        page.line("work", &work);
        page.line("in flight", &format!("{} runs with fixed capacities", self.in_flight));
        page.line("seed", &self.seed.to_string());
        if self.set_capacity > 0 {
            self.figures(&mut page);
        }
        self.head.render_log(&mut page);
        self.head.end(page, "every result equals the host's")
    }
}

impl GraphReport {
    fn figures(&self, page: &mut TextReport) {
        page.title("Fixed capacities");
        let capacities = format!(
            "{} pairs of a round, {} places of the set",
            self.pair_capacity, self.set_capacity
        );
        page.line("capacities", &capacities);
        page.line("rounds", &format!("{} at the most", self.rounds));
        page.line("as a graph", &self.graph.line());
        page.line("kernel by kernel", &self.kernels.line());
        let times = |ratio: Option<f64>| ratio.map_or("unknown".to_owned(), |r| format!("{r:.2}x"));
        let (faster, larger) = (times(self.graph_over_kernels), times(self.bytes_over_kernels));
        page.line("graph / kernels", &format!("{faster} the rate, {larger} the memory"));
        let captured = self.recapture_seconds * 1e3;
        if let Some(bytes) = self.driver_bytes {
            page.line("driver's memory", &format!("{} for the executable graphs", size(bytes)));
        }
        page.line("captured again", &format!("{} times in {captured:.2} ms", self.recaptures));
        page.title("Exact sizes");
        page.line("exact program", &self.exact.line());
        page.line("graph / exact", &format!("{} the rate", times(self.graph_over_exact)));
        page.line("races", &races_text(&self.races, self.detects_races));
        page.line("left", &size(self.bytes_left as u64));
    }
}
