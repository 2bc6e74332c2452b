//! `xlogmem run tenants`: several processes, each with several executors, under one limit of one device.
//!
//! The command creates a ledger and starts itself as the processes that share it. It samples the ledger throughout, and
//! judges by the samples, by the report of each process, and by what remains at the end.

mod arguments;
mod demo;
mod holder;
mod pressure;
mod report;
mod watch;
mod worker;

use std::path::Path;
use std::process::{ChildStdout, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use xlog_cuda::device_runtime::ResourceKind;
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig, LedgerView};
use xlog_cuda::{ByteSize, CudaDevice, DeviceSpec, Result, XlogError};

use super::progress::Progress;
use super::report::RunReport;
use crate::cli::Refusal;
use crate::doctor::{Cuda, select};
use crate::{Output, write_json_line};
pub(crate) use arguments::TenantsArguments;
pub(crate) use demo::{DemoArguments, demo};
use report::Report;
use watch::{Scratch, Worker, listen, watch};
use worker::{Line, Outcome};

/// Runs `run tenants`. It refuses a bad device spec, size or resource; other failures are part of the output.
pub(crate) fn tenants(arguments: &TenantsArguments) -> std::result::Result<Output, Refusal> {
    let refuse = |name: &str, error: XlogError| Refusal::Line(format!("{name}: {error}"));
    let _: ResourceKind =
        arguments.resource.parse().map_err(|error| refuse("--resource", error))?;
    let budget: ByteSize = arguments.budget.parse().map_err(|error| refuse("--budget", error))?;
    let selection = select(arguments.device.as_deref(), &Cuda::find())?;
    if let (Some(number), Some(_)) = (arguments.worker, &arguments.ledger) {
        return Ok(be_worker(number, selection.spec, budget, arguments));
    }
    if let (Some(kind), Some(ledger)) = (arguments.holder, &arguments.ledger) {
        return Ok(holder::run(kind, selection.spec, ledger, &arguments.resource));
    }
    if arguments.pressure {
        return Ok(pressure::run(&selection, budget, arguments));
    }
    let mut report = Report::new(selection.describe(), arguments);
    if let Err(error) = measure(selection.spec, budget, arguments, &mut report) {
        report.head.error = Some(format!("{}: {error}", selection.spec));
    }
    Ok(report.finish(arguments.json))
}

/// Runs this process as one of those that a run has started.
fn be_worker(
    number: u32,
    spec: DeviceSpec,
    budget: ByteSize,
    arguments: &TenantsArguments,
) -> Output {
    let ledger = arguments.ledger.clone().unwrap_or_default();
    let config = worker::config(&ledger, budget.of(0), &arguments.resource);
    let outcome = match config {
        Ok(config) => worker::run(number, spec, &config, arguments),
        Err(error) => Outcome { error: Some(error.to_string()), ..Outcome::default() },
    };
    let failure = write_json_line(&Line::Done(outcome)).err().map(|error| error.to_string());
    Output { text: String::new(), failure, ..Output::default() }
}

/// Starts the processes of a run on the ledger at `path`.
fn spawn(
    spec: DeviceSpec,
    limit: u64,
    arguments: &TenantsArguments,
    path: &Path,
) -> std::io::Result<Vec<(Worker, Option<ChildStdout>)>> {
    let program = std::env::current_exe()?;
    let command = |number: u32| {
        let mut command = Command::new(&program);
        command
            .args(["run", "tenants", "--device", &spec.to_string()])
            .args(["--worker", &number.to_string()])
            .args(["--processes", &arguments.processes.to_string()])
            .args(["--tenants", &arguments.tenants.to_string()])
            .args(["--rounds", &arguments.rounds.to_string()])
            .args(["--seed", &arguments.seed.to_string()])
            .args(["--resource", &arguments.resource])
            .args(["--budget", &limit.to_string()])
            .arg("--ledger")
            .arg(path);
        command
    };
    (0..arguments.processes).map(|number| Worker::spawn(command(number))).collect()
}

fn measure(
    spec: DeviceSpec,
    budget: ByteSize,
    arguments: &TenantsArguments,
    report: &mut Report,
) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| XlogError::Kernel(error.to_string());
    let total = {
        let device = CudaDevice::open_spec(spec)?;
        report.head.device_name = Some(device.properties().name.clone());
        device.properties().total_bytes
    };
    let scratch = Scratch::new().map_err(|error| failed(&error))?;
    let path = scratch.ledger();
    let directory = path.parent().map(std::path::Path::to_owned).unwrap_or_default();
    let key = DeviceKey::new("tenants").map_err(|error| failed(&error))?;
    let config = LedgerConfig::new(key).with_directory(directory).with_limit(budget.of(total));
    // The ledger is created and closed; the processes join it.
    let limit = Ledger::open(config).and_then(|ledger| ledger.limit()).map_err(|e| failed(&e))?;
    report.limit_bytes = Some(limit);
    let view = LedgerView::open(&path).map_err(|error| failed(&error))?;

    let start = Instant::now();
    let started = spawn(spec, limit, arguments, &path).map_err(|error| failed(&error))?;
    let turns =
        arguments.processes.saturating_mul(arguments.tenants).saturating_mul(arguments.rounds);
    let progress = Progress::new("tenants", "turns", turns);
    let done = AtomicBool::new(false);
    let (peaks, outcomes) = std::thread::scope(|scope| {
        let eye = scope.spawn(|| watch(&view, &done));
        let ears: Vec<_> = started
            .into_iter()
            .map(|(worker, output)| {
                let progress = &progress;
                scope.spawn(move || (listen(output, progress), worker))
            })
            .collect();
        let outcomes: Vec<Outcome> = ears
            .into_iter()
            .zip(0..)
            .map(|(ear, number)| match ear.join() {
                Ok((Some(outcome), _worker)) => outcome,
                Ok((None, mut worker)) => Outcome {
                    process: number,
                    pid: worker.pid(),
                    error: Some(format!("ended without a word: {}", worker.wait())),
                    ..Outcome::default()
                },
                Err(_) => Outcome {
                    process: number,
                    error: Some("could not be listened to".to_owned()),
                    ..Outcome::default()
                },
            })
            .collect();
        done.store(true, Ordering::Release);
        (eye.join(), outcomes)
    });
    report.seconds = Some(start.elapsed().as_secs_f64());
    report.outcomes = outcomes;
    match peaks {
        Ok(Ok(peaks)) => report.note(peaks),
        Ok(Err(error)) => return Err(failed(&error)),
        Err(_) => return Err(failed(&"the ledger could not be watched")),
    }
    let left = view.snapshot().map_err(|error| failed(&error))?;
    report.left_bytes = left.used() + left.granted();
    Ok(())
}
