//! Random allocations and frees on any stack, with the contents of every block verified.
//!
//! Like all workloads, a run measures first and judges afterwards. `xlog_workloads` generates the sequence; `blocks` handles
//! each block.

mod blocks;
mod report;
mod threads;
mod witness;

use std::time::Instant;

use clap::Args;
use xlog_cuda::Result;
use xlog_cuda::device_runtime::StreamLease;
use xlog_cuda::driver::DeviceKind;
use xlog_workloads::stack::{Stack, StackKind, StackOptions};
use xlog_workloads::{RandomAllocations, RunCounts, Sizes, SmallBlocks, Target};

use crate::Output;
use crate::cli::{Refusal, option};
use crate::run::arguments::StackArguments;
use crate::run::report::{RunReport, run_on_stack};
use crate::size::count;
use blocks::{Blocks, Checks, Dry};
use report::Report;
use witness::Witness;

/// The arguments of `run churn`.
#[derive(Args, Debug)]
#[command(after_help = "Workloads:
  rmm-random    RMM's random allocations, bit for bit: sizes uniform up to
                --max, at most 16000 MiB live
  small-blocks  4 B to --max (4 KiB), many live, freed and allocated ten
                times over
  threads       4 B to --max on all streams by all threads, a fifth of the
                blocks left for any thread to free

Exit status: 0 every block verified and all memory back; 1 something is
wrong, or the device failed; 2 the command line was refused.")]
pub(crate) struct ChurnArguments {
    /// rmm-random, small-blocks or threads
    #[arg(long, value_name = "NAME", default_value = "rmm-random")]
    pub(super) workload: String,

    #[command(flatten)]
    pub(super) stack: StackArguments,

    /// How many allocations; of small-blocks, how many live blocks [default: a few seconds' worth]
    #[arg(long, value_name = "N", value_parser = count::<u64>(1..=10_000_000))]
    pub(super) allocations: Option<u64>,

    /// The largest block [default: 1MiB; 4KiB for small-blocks]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(super) max: Option<String>,

    /// How small blocks and those of threads are spread: uniform, or log-uniform
    #[arg(long, value_name = "NAME", default_value = "uniform")]
    pub(super) sizes: String,

    /// How many threads, in the workload of that name [default: 4]
    #[arg(long, value_name = "N", value_parser = count::<u32>(1..=64))]
    pub(super) threads: Option<u32>,

    /// How many streams blocks are allocated and used on [default: 1; 4 with threads]
    #[arg(long, value_name = "N", value_parser = count::<u32>(1..=64))]
    pub(super) streams: Option<u32>,

    /// The seed of the generator; RMM's is 1
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>(0..=u64::MAX))]
    pub(super) seed: u64,

    /// Write and check both ends of every block; the default
    #[arg(long, overrides_with = "no_verify")]
    pub(super) verify: bool,

    /// Only allocate and free
    #[arg(long)]
    pub(super) no_verify: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Workload {
    RmmRandom,
    SmallBlocks,
    Threads,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) workload: Workload,
    pub(super) kind: StackKind,
    pub(super) budget: Option<u64>,
    pub(super) allocations: u64,
    pub(super) max: u64,
    pub(super) sizes: Sizes,
    pub(super) threads: u32,
    pub(super) streams: u32,
    pub(super) seed: u64,
    pub(super) verify: bool,
}

impl Plan {
    fn new(arguments: &ChurnArguments, stack: &StackOptions, is_gpu: bool) -> Result<Self, String> {
        let workload = match arguments.workload.as_str() {
            "rmm-random" => Workload::RmmRandom,
            "small-blocks" => Workload::SmallBlocks,
            "threads" => Workload::Threads,
            other => {
                return Err(format!(
                    "--workload {other:?}: expected rmm-random, small-blocks or threads"
                ));
            }
        };
        let threaded = workload == Workload::Threads;
        if !threaded && arguments.threads.is_some_and(|threads| threads > 1) {
            return Err("--threads: only --workload threads has more than one".to_owned());
        }
        let max = option("--max", arguments.max.as_deref(), crate::size::parse)?;
        let small = workload == Workload::SmallBlocks;
        let usual = match (small, is_gpu) {
            (true, true) => 100_000,
            (true, false) => 10_000,
            (false, true) => 100_000,
            (false, false) => 20_000,
        };
        Ok(Self {
            workload,
            kind: stack.kind,
            budget: stack.budget,
            allocations: arguments.allocations.unwrap_or(usual),
            max: max.unwrap_or(if small { 4 << 10 } else { 1 << 20 }),
            sizes: arguments
                .sizes
                .parse()
                .map_err(|error| format!("--sizes {:?}: {error}", arguments.sizes))?,
            threads: if threaded { arguments.threads.unwrap_or(4) } else { 1 },
            streams: arguments.streams.unwrap_or(if threaded { 4 } else { 1 }),
            seed: arguments.seed,
            verify: !arguments.no_verify,
        })
    }

    /// Returns an upper bound of the number of blocks, each of which is numbered.
    fn max_blocks(&self) -> u64 {
        match self.workload {
            Workload::SmallBlocks => self.allocations.saturating_mul(11),
            Workload::RmmRandom | Workload::Threads => self.allocations,
        }
    }

    /// Runs a single-threaded workload.
    fn drive<T: Target>(&self, target: &mut T) -> Result<RunCounts, T::Error> {
        match self.workload {
            Workload::SmallBlocks => SmallBlocks::new(self.allocations, self.sizes)
                .with_max_bytes(self.max)
                .with_seed(self.seed)
                .run(target),
            Workload::RmmRandom | Workload::Threads => {
                RandomAllocations::new(self.allocations, self.max).with_seed(self.seed).run(target)
            }
        }
    }
}

/// Runs `run churn`. It refuses invalid arguments; a failure of the device is part of the output.
pub(crate) fn churn(arguments: &ChurnArguments) -> Result<Output, Refusal> {
    let selection = arguments.stack.select()?;
    let spec = selection.spec;
    let options = arguments.stack.options(StackKind::Pool, spec)?;
    let plan = Plan::new(arguments, &options, !spec.is_simulated())?;
    let options = StackOptions { streams: plan.streams as usize, ..options };
    let report = Report::new(selection.describe(), &plan);
    let report = run_on_stack(&arguments.stack, spec, options, report, |stack, report| {
        measure(stack, &plan, report)
    })?;
    Ok(report.finish(arguments.json))
}

fn measure(stack: &Stack, plan: &Plan, report: &mut Report) -> Result<()> {
    let streams = (0..plan.streams)
        .map(|_| Ok(stack.streams().lease()?))
        .collect::<Result<Vec<StreamLease>>>()?;
    let witness = match plan.verify {
        true => Some(Witness::new(stack.device(), plan.max_blocks(), plan.seed)?),
        false => None,
    };
    let checks = Checks::new(stack, &streams, witness.as_ref(), plan.max_blocks());
    let start = Instant::now();
    let outcome = match plan.workload {
        Workload::Threads => threads::run(plan, &checks, stack, report),
        Workload::RmmRandom | Workload::SmallBlocks => alone(plan, &checks, report),
    };
    report.seconds = Some(start.elapsed().as_secs_f64());
    let settled = stack.drain();
    // Drain before counting, even after a failure.
    report.note(&checks, stack);
    if let Some(witness) = &witness {
        report.note_witness(witness.compare()?);
    }
    report.races = stack.device().races().iter().map(ToString::to_string).collect();
    report.detects_races = stack.device().properties().kind != DeviceKind::Cuda;
    outcome?;
    settled
}

/// Runs a single-threaded workload. A dry run first finds the peak of live bytes and the end, so that the pool can be
/// sampled there.
fn alone(plan: &Plan, checks: &Checks<'_>, report: &mut Report) -> Result<()> {
    let mut dry = Dry::default();
    let Ok(expected) = plan.drive(&mut dry);
    let mut blocks = Blocks::new(checks);
    blocks.sample_at = [dry.peak_at, expected.allocations + expected.frees];
    let outcome = plan.drive(&mut blocks);
    let [peak, end] = blocks.samples;
    report.note_blocks(&blocks.counts);
    report.note_pool(peak.as_ref(), end.as_ref());
    let tally = outcome?;
    report.note_counts(&tally, &expected);
    Ok(())
}
