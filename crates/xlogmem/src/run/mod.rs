//! `xlogmem run`: workloads whose results are verified.
//!
//! Like the doctor, a workload measures first and judges after: what came of it is one report, printed as text or as JSON.

mod arguments;
mod churn;
mod handoff;
mod log;
mod progress;
mod relational;
mod report;
mod tenants;

use std::time::Instant;

use xlog_cuda::device_runtime::ResourceStatistics;
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{CudaDevice, GpuMemoryManager, Result};
use xlog_workloads::stack::{Stack, StackKind};

use crate::Output;
use crate::cli::{HandoffArguments, Refusal};
pub(crate) use arguments::StackArguments;
pub(crate) use churn::{ChurnArguments, churn};
use handoff::{Outcome, Plan};
use log::RunLog;
pub(crate) use relational::{RelationalArguments, fixpoint, join, sort};
use report::Report;
pub(crate) use tenants::{TenantsArguments, tenants};

/// Rounds of a GPU and of a simulated device that take a second or two.
const GPU_ROUNDS: u32 = 20_000;
const SIM_ROUNDS: u32 = 2_000;

/// Runs `run handoff`. A bad device spec and a resource that cannot do it are refused; what fails on the device is in the
/// output.
pub(crate) fn handoff(arguments: &HandoffArguments) -> Result<Output, Refusal> {
    arguments.stack.require_tracking("a handoff between streams")?;
    let options = arguments.stack.options(StackKind::Async)?;
    let selection = arguments.stack.select()?;
    let options = options.with_streams(arguments.streams as usize);
    let options = arguments.stack.with_log(options, selection.spec)?;
    let log = RunLog::of(&arguments.stack, &options);
    let mut report = Report::new(selection.describe(), options.kind.name(), arguments);
    match Stack::build(selection.spec, options) {
        Ok(stack) => {
            if let Err(error) = measure(&stack, arguments, &mut report) {
                report.error = Some(format!("{}: {error}", report.selection.spec));
            }
        }
        Err(error) => report.error = Some(error.to_string()),
    }
    report.log = log.map(RunLog::end);
    report.judge();
    let failure = report.error.clone();
    let text = match arguments.json {
        true => crate::json_text(&report),
        false => Ok(report.render()),
    };
    Ok(Output::new(text, failure))
}

fn measure(stack: &Stack, arguments: &HandoffArguments, report: &mut Report) -> Result<()> {
    let device = stack.device();
    report.device_name = Some(device.properties().name.clone());
    let is_gpu = device.properties().kind == DeviceKind::Cuda;
    let rounds = arguments.rounds.unwrap_or(if is_gpu { GPU_ROUNDS } else { SIM_ROUNDS });
    report.rounds = Some(rounds);
    let manager = GpuMemoryManager::with_runtime(stack.runtime());

    let plan = Plan::new(manager.clone(), arguments, rounds)?;
    let calls_before = driver_calls(device);
    let start = Instant::now();
    let outcome = plan.run();
    report.seconds = Some(start.elapsed().as_secs_f64());
    report.driver_calls =
        driver_calls(device).zip(calls_before).map(|(after, before)| after - before);
    drop(plan);
    // What is counted below has to be settled, also after a failure.
    let settled = drain(device, &manager);
    note(report, &manager.runtime().statistics(), &manager, &outcome);
    report.races = device.races().iter().map(ToString::to_string).collect();
    outcome.error.map_or(Ok(()), Err)?;
    settled
}

fn drain(device: &CudaDevice, manager: &GpuMemoryManager) -> Result<()> {
    device.synchronize()?;
    manager.runtime().reap_pending()?;
    Ok(())
}

fn driver_calls(device: &CudaDevice) -> Option<u64> {
    device.sim().map(|sim| sim.faults().total_calls())
}

fn note(
    report: &mut Report,
    statistics: &ResourceStatistics,
    manager: &GpuMemoryManager,
    outcome: &Outcome,
) {
    report.blocks = statistics.allocations;
    report.edges = statistics.events_recorded;
    report.waits_inserted = statistics.waits_inserted;
    report.waits_elided = statistics.waits_elided;
    report.bytes_peak = manager.peak_bytes();
    report.bytes_left = statistics.bytes_outstanding;
    report.failed_frees = manager.failed_frees();
    report.rounds_verified = outcome.verified;
    report.rounds_wrong = outcome.wrong;
    report.first_wrong = outcome.first_wrong.clone();
}
