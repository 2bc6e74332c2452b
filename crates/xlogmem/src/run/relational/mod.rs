//! `run join`, `run fixpoint` and `run sort`: relational work on the device, verified by the host.
//!
//! Each thread is an executor that does the work several times, each time on other data. All threads share the streams and
//! the stack. The device is timed without the host's verification.

mod graph;
mod report;

use std::time::Instant;

use clap::Args;
use xlog_base::Mutex;
use xlog_cuda::Result;
use xlog_workloads::relational::fixpoint::Fixpoint;
use xlog_workloads::relational::join::Join;
use xlog_workloads::relational::numbers::seed_for;
use xlog_workloads::relational::sort::Sort;
use xlog_workloads::relational::{MAX_ROWS, Session, SessionOptions, Workload};
use xlog_workloads::stack::{Stack, StackKind, StackOptions, run_threads};

use super::StackArguments;
use super::progress::Progress;
use super::report::{RunReport, run_on_stack};
use crate::Output;
use crate::cli::Refusal;
use crate::size::count;
use report::{Report, Run};

/// The arguments of these runs.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 the result is right and all memory is back; 1 it is \
                        not, or the device failed; 2 the command line was refused.")]
pub(crate) struct RelationalArguments {
    #[command(flatten)]
    pub(super) stack: StackArguments,

    /// How many rows, such as 1000000 or 1e8 [default: a few seconds' worth]
    #[arg(long, value_name = "N", value_parser = count::<usize>(1..=MAX_ROWS as u64))]
    pub(super) rows: Option<usize>,

    /// How many streams the steps go round
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = count::<u32>(1..=64))]
    pub(super) streams: u32,

    /// How many host threads do the work at once, each on data of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<u32>(1..=64))]
    pub(super) threads: u32,

    /// How many times each thread does it
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count::<u32>(1..=1_000_000))]
    pub(super) repeat: u32,

    /// The seed of the data
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>(0..=u64::MAX))]
    pub(super) seed: u64,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(super) json: bool,
}

/// The arguments of `run fixpoint`.
#[derive(Args, Debug)]
pub(crate) struct FixpointArguments {
    #[command(flatten)]
    relational: RelationalArguments,

    /// Run the rounds as a CUDA graph, and compare with its kernels one by one and with exact sizes
    ///
    /// Lengths stay on the device and capacities are powers of two; if something does not fit, capacities are doubled and the graph is captured
    /// again.
    #[arg(long, conflicts_with = "threads")]
    graph: bool,

    /// With --graph: how many runs of the fixed capacities are in flight at once, each on a stream of its own
    ///
    /// One host thread queues them all. The program with exact sizes needs the host in every round, and runs alone.
    #[arg(long, value_name = "N", requires = "graph", default_value_t = 8, value_parser = count::<u32>(1..=64))]
    in_flight: u32,
}

pub(crate) fn join(arguments: &RelationalArguments) -> Result<Output, Refusal> {
    run(arguments, [100_000_000, 1_000_000], |rows, seed| Workload::Join(Join { rows, seed }))
}

pub(crate) fn fixpoint(arguments: &FixpointArguments) -> Result<Output, Refusal> {
    if arguments.graph {
        return graph::compare(&arguments.relational, arguments.in_flight);
    }
    let arguments = &arguments.relational;
    run(arguments, [10_000_000, 100_000], |rows, seed| Workload::Fixpoint(Fixpoint { rows, seed }))
}

pub(crate) fn sort(arguments: &RelationalArguments) -> Result<Output, Refusal> {
    run(arguments, [100_000_000, 1_000_000], |rows, seed| Workload::Sort(Sort { rows, seed }))
}

/// Runs a workload; `usual` is the default number of rows on a GPU and on a simulated device. It refuses invalid arguments;
/// a failure of the device is part of the output.
fn run(
    arguments: &RelationalArguments,
    usual: [usize; 2],
    work: impl Fn(usize, u64) -> Workload,
) -> Result<Output, Refusal> {
    arguments.stack.require_tracking("work of several streams on one buffer")?;
    let selection = arguments.stack.select()?;
    let options = arguments.stack.options(StackKind::Pool, selection.spec)?;
    let options = StackOptions { streams: arguments.streams as usize, ..options };
    let [on_gpu, simulated] = usual;
    let spec = selection.spec;
    let rows = arguments.rows.unwrap_or(if spec.is_simulated() { simulated } else { on_gpu });
    let work = work(rows, arguments.seed);
    let report = Report::new(selection.describe(), &work, rows, &options, arguments);
    let report = run_on_stack(&arguments.stack, spec, options, report, |stack, report| {
        measure(stack, &work, arguments, report)
    })?;
    Ok(report.finish(arguments.json))
}

fn measure(
    stack: &Stack,
    work: &Workload,
    arguments: &RelationalArguments,
    report: &mut Report,
) -> Result<()> {
    report.note_device(stack);
    let session = Session::open(stack, arguments.streams as usize, SessionOptions::default())?;
    let progress = Progress::new("querying", "runs", arguments.threads * arguments.repeat);
    let runs: Mutex<Vec<Result<Run>>> = Mutex::new(Vec::new());
    let start = Instant::now();
    let executor = |thread: u32| {
        for repeat in 0..arguments.repeat {
            // Every run has different data.
            let number = u64::from(thread) * u64::from(arguments.repeat) + u64::from(repeat);
            let work = work.with_seed(match number {
                0 => work.seed(),
                number => seed_for(work.seed(), number << 8),
            });
            let run = once(&session, &work, thread, arguments.threads);
            let failed = run.is_err();
            runs.lock().push(run);
            progress.step();
            if failed {
                return;
            }
        }
    };
    run_threads(stack.device(), arguments.threads, executor);
    report.seconds = Some(start.elapsed().as_secs_f64());
    drop(progress);
    // Drain before counting, even after a failure.
    let settled = stack.drain();
    report.note(stack, &session);
    let runs = runs.into_inner();
    report.note_runs(runs)?;
    settled
}

/// Does the work once and lets the host verify it.
fn once(session: &Session<'_>, work: &Workload, thread: u32, threads: u32) -> Result<Run> {
    let start = Instant::now();
    let executed = work.execute(session, thread as usize)?;
    let stream = session.runtime().stream_pool().try_resolve(executed.result.stream())?;
    stream.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    let result = executed.result.to_vec()?;
    drop(executed.result);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let verdict = work.verify(&result, cores.div_ceil(threads as usize));
    Ok(Run { seed: work.seed(), rows: executed.rows, rounds: executed.rounds, seconds, verdict })
}
