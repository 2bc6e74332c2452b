//! `run handoff`: buffers passed from stream to stream, with every round verified.

mod report;
mod work;

use std::time::Instant;

use xlog_cuda::device_runtime::ResourceStatistics;
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{CudaDevice, GpuMemoryManager, Result};
use xlog_workloads::stack::{Stack, StackKind, StackOptions};

use super::report::{RunReport, run_on_stack};
use crate::Output;
use crate::cli::{HandoffArguments, Refusal};
use report::Report;
use work::{Outcome, Plan};

/// Default rounds of a GPU and of a simulated device: a second or two.
const GPU_ROUNDS: u32 = 20_000;
const SIM_ROUNDS: u32 = 2_000;

/// Runs `run handoff`. It refuses a bad device spec and a resource that tracks no uses; a failure of the device is part of
/// the output.
pub(crate) fn handoff(arguments: &HandoffArguments) -> Result<Output, Refusal> {
    arguments.stack.require_tracking("a handoff between streams")?;
    let selection = arguments.stack.select()?;
    let options = arguments.stack.options(StackKind::Pool, selection.spec)?;
    let options = StackOptions { streams: arguments.streams as usize, ..options };
    let report = Report::new(selection.describe(), options.kind.name(), arguments);
    let spec = selection.spec;
    let report = run_on_stack(&arguments.stack, spec, options, report, |stack, report| {
        measure(stack, arguments, report)
    })?;
    Ok(report.finish(arguments.json))
}

fn measure(stack: &Stack, arguments: &HandoffArguments, report: &mut Report) -> Result<()> {
    let device = stack.device();
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
    // Drain before counting, even after a failure.
    let settled = stack.drain();
    note(report, &manager.runtime().statistics(), &manager, &outcome);
    report.races = device.races().iter().map(ToString::to_string).collect();
    outcome.error.map_or(Ok(()), Err)?;
    settled
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
    report.note_rate();
}
