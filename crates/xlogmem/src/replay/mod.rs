//! `xlogmem replay`: repeats the operations of a log on a device, with one resource or several for comparison.

mod execute;
mod plan;
mod report;
mod samples;
use std::path::PathBuf;

use clap::Args;
use xlog_cuda::DeviceSpec;
use xlog_report::{Input, LogFormat, ReadingReport, Strict, Trouble};
use xlog_trace::{Ordered, Source};
use xlog_workloads::stack::{Stack, StackKind};

use crate::Output;
use crate::cli::{self, Refusal};
use crate::doctor::{Cuda, select};
use crate::size;
use execute::{Failure, Mode, replay, streams_of};
use plan::{Plan, Problem};
pub(crate) use report::PoolReport;
use report::{Report, RunReport};

/// The arguments of `replay`.
#[derive(Args, Debug)]
#[command(
    after_help = "Calls that had failed when the log was written are not replayed. Frees of unknown blocks are counted and left \
                        out; a block whose address is handed out again is freed before. Blocks that the log never frees are \
                        freed after the replay. A free on another stream than the allocation's waits for that stream. All devices and processes of a log go to the one device. Up to \
                        128 streams and 64 threads are told apart.

Exit status: 0 every operation of the log was served; 1 some were not, or the device cannot be used, or --strict found \
                        something wrong with the log; 2 the command line was refused, or the log cannot be read."
)]
pub(crate) struct ReplayArguments {
    /// The log: xtrace, csv, rmm-csv, or a memory snapshot of PyTorch
    #[arg(value_name = "LOG")]
    log: PathBuf,

    /// The device: cuda:N, sim, or sim:SEED
    ///
    /// Without it: what XLOG_DEVICE says, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,

    /// The memory resource: direct, async or pool [default: what XLOG_DEVICE_RESOURCE says, else pool]
    #[arg(long, value_name = "NAME")]
    resource: Option<String>,

    /// Several resources side by side, such as direct,async,pool; ratios are to the first
    #[arg(long, value_name = "NAMES", conflicts_with = "resource")]
    compare: Option<String>,

    /// Bytes that blocks may have together, such as 4GiB or 512MB [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    budget: Option<String>,

    /// sequential: one thread, in recorded order; threads: a thread for each recorded one, as fast as possible; recorded:
    /// the same, in recorded time
    #[arg(long, value_name = "MODE", default_value = "sequential")]
    mode: String,

    /// How much faster recorded time goes by
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    speed: f64,

    /// The format of the log, where its beginning is damaged [default: what the file begins with]
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,

    /// Fail at the first bad record, free of an unknown block or missing free, before anything is replayed
    #[arg(long)]
    strict: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

struct Request {
    kinds: Vec<StackKind>,
    budget: Option<u64>,
    mode: Mode,
    from: Option<LogFormat>,
}

impl Request {
    fn new(arguments: &ReplayArguments) -> Result<Self, String> {
        // Not read by clap: a set variable must not conflict with `--compare`.
        let variable = std::env::var("XLOG_DEVICE_RESOURCE").ok();
        let (option, names) = match (&arguments.compare, &arguments.resource, &variable) {
            (Some(names), _, _) => ("--compare", names.as_str()),
            (None, Some(name), _) => ("--resource", name.as_str()),
            (None, None, Some(name)) => ("XLOG_DEVICE_RESOURCE", name.as_str()),
            (None, None, None) => ("--resource", "pool"),
        };
        let mut kinds = Vec::new();
        for name in names.split(',') {
            let kind: StackKind = name.parse().map_err(|error| format!("{option}: {error}"))?;
            if kinds.contains(&kind) {
                return Err(format!("{option}: {kind} is there twice; expected each once"));
            }
            kinds.push(kind);
        }
        if arguments.compare.is_none() && kinds.len() > 1 {
            return Err(format!(
                "{option} {names}: expected one resource; --compare takes several"
            ));
        }
        if !(arguments.speed > 0.0 && arguments.speed <= 1e9) {
            let speed = arguments.speed;
            return Err(format!("--speed {speed}: expected a number above 0, at most 1e9"));
        }
        let mode = match arguments.mode.as_str() {
            "sequential" => Mode::Sequential,
            "threads" => Mode::Threads,
            "recorded" => Mode::Recorded(arguments.speed),
            other => {
                return Err(format!("--mode {other:?}: expected sequential, threads or recorded"));
            }
        };
        if arguments.speed != 1.0 && !matches!(mode, Mode::Recorded(_)) {
            return Err("--speed: only --mode recorded keeps time".to_owned());
        }
        let budget = cli::option("--budget", arguments.budget.as_deref(), size::parse)?;
        let from = cli::option("--from", arguments.from.as_deref(), LogFormat::parse_input)?;
        Ok(Self { kinds, budget, mode, from })
    }
}

pub(crate) fn run(arguments: &ReplayArguments) -> Result<Output, Refusal> {
    let request = Request::new(arguments)?;
    let selection = select(arguments.device.as_deref(), &Cuda::find())?;
    let spec = selection.spec;
    if matches!((request.mode, spec), (Mode::Recorded(_), DeviceSpec::SimSeeded(_))) {
        return Err(Refusal::Line(format!(
            "--mode recorded: the scheduler of {spec} keeps no time; use --device sim, or --mode threads"
        )));
    }
    let mut report =
        Report::new(selection.describe(), &arguments.log, request.mode, request.budget);
    report.error = Refusal::or_found(work(arguments, &request, spec, &mut report))?;
    report.judge();
    let output = Output::of(&report, arguments.json, Report::render, report.error.clone());
    Ok(output.warn([(report.log.as_str(), report.reading.as_ref())]))
}

fn work(
    arguments: &ReplayArguments,
    request: &Request,
    spec: DeviceSpec,
    report: &mut Report,
) -> Result<(), Trouble> {
    let input = Input::new(&arguments.log, request.from, Strict(arguments.strict)).once();
    let source = input.begin()?;
    report.format = Some(source.format().name());
    let mut source = Ordered::new(source);
    let plan = Plan::read(&mut source, arguments.strict);
    report.reading = Some(ReadingReport::new(source.report()));
    let mut plan = plan.map_err(|problem| match problem {
        Problem::Reading(error) => input.blame(&error),
        Problem::TooLong(line) => Trouble::Refused(format!("{}: {line}", arguments.log.display())),
        Problem::Found(line) => Trouble::Found(format!("{}: {line}", arguments.log.display())),
    })?;
    input.check(source.report())?;
    plan.figures.late_records = source.late();
    drop(source);
    if let Mode::Recorded(speed) = request.mode {
        let fits = plan.check_recorded_time(speed);
        fits.map_err(|line| Trouble::Refused(format!("{}: {line}", arguments.log.display())))?;
    }
    report.log_figures = Some(plan.figures.clone());
    for &kind in &request.kinds {
        let run = run_once(&plan, request, spec, kind).map_err(|failure| match failure {
            Failure::Device(error) => Trouble::Found(format!("{spec}, {kind}: {error}")),
            Failure::TooLarge(line) => {
                Trouble::Refused(format!("{}: {line}", arguments.log.display()))
            }
        })?;
        report.add(run);
    }
    Ok(())
}

fn run_once(
    plan: &Plan,
    request: &Request,
    spec: DeviceSpec,
    kind: StackKind,
) -> Result<RunReport, Failure> {
    let stack = Stack::open(spec, kind, request.budget, streams_of(plan))?;
    let outcome = replay(plan, &stack, request.mode)?;
    stack.drain()?;
    Ok(RunReport::new(kind, &stack, &outcome))
}
