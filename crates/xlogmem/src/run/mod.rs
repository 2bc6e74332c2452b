//! `xlogmem run`: workloads whose results are verified.
//!
//! Like the doctor, a workload measures first and judges after: what came of it is one report, printed as text or as JSON.

mod churn;
mod handoff;
mod progress;
mod report;
mod tenants;

use std::sync::Arc;
use std::time::Instant;

use xlog_cuda::device_runtime::{
    AsyncCudaResource, DeviceMemoryResource, LoggingResource, LoggingSink, PoolConfig,
    PoolResource, ResourceKind, ResourceStatistics, StreamPool, XlogDeviceRuntime, open_log,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{CudaDevice, GpuMemoryManager, Result};

use crate::Output;
use crate::cli::{HandoffArguments, Refusal};
use crate::doctor::{Cuda, select};
pub(crate) use churn::{ChurnArguments, churn};
use handoff::{Outcome, Plan};
use report::Report;
pub(crate) use tenants::{TenantsArguments, tenants};

/// Rounds of a GPU and of a simulated device that take a second or two.
const GPU_ROUNDS: u32 = 20_000;
const SIM_ROUNDS: u32 = 2_000;

/// Runs `run handoff`. A bad device spec and a resource that cannot do it are refused; what fails on the device is in the
/// output.
pub(crate) fn handoff(arguments: &HandoffArguments) -> Result<Output, Refusal> {
    let refuse = |error: String| Refusal::Line(error);
    let resource: ResourceKind =
        arguments.resource.parse().map_err(|error| refuse(format!("--resource: {error}")))?;
    if resource == ResourceKind::Direct {
        return Err(refuse(format!(
            "--resource {resource}: this resource tracks no uses, so a handoff between streams cannot be ordered; use \
             --resource async or pool"
        )));
    }
    let log = arguments.log.as_deref().map(open_log).transpose();
    let log = log.map_err(|error| refuse(format!("--log: {error}")))?;
    let selection = select(arguments.device.as_deref(), &Cuda::find())
        .map_err(|error| refuse(error.to_string()))?;
    let mut report = Report::new(selection.describe(), arguments);
    match CudaDevice::open_spec(selection.spec) {
        Ok(device) => {
            if let Err(error) = measure(Arc::new(device), resource, log, arguments, &mut report) {
                report.error = Some(format!("{}: {error}", report.selection.spec));
            }
        }
        Err(error) => report.error = Some(error.to_string()),
    }
    report.judge();
    let failure = report.error.clone();
    match arguments.json {
        false => Ok(Output { text: report.render(), failure }),
        true => Ok(match serde_json::to_string_pretty(&report) {
            Ok(json) => Output { text: json + "\n", failure },
            Err(error) => Output { text: String::new(), failure: Some(error.to_string()) },
        }),
    }
}

fn measure(
    device: Arc<CudaDevice>,
    resource: ResourceKind,
    log: Option<Arc<dyn LoggingSink>>,
    arguments: &HandoffArguments,
    report: &mut Report,
) -> Result<()> {
    report.device_name = Some(device.properties().name.clone());
    let is_gpu = device.properties().kind == DeviceKind::Cuda;
    let rounds = arguments.rounds.unwrap_or(if is_gpu { GPU_ROUNDS } else { SIM_ROUNDS });
    report.rounds = Some(rounds);

    let pool = Arc::new(StreamPool::new(device.clone(), arguments.streams as usize));
    let ordinal = device.ordinal();
    let resource: Box<dyn DeviceMemoryResource + Send + Sync> = match resource {
        ResourceKind::Pool => {
            let (device, pool) = (device.clone(), pool.clone());
            Box::new(PoolResource::new(device, ordinal, pool, PoolConfig::default())?)
        }
        _ => Box::new(AsyncCudaResource::new(device.clone(), ordinal, pool.clone())),
    };
    let resource: Box<dyn DeviceMemoryResource + Send + Sync> = match log {
        None => resource,
        Some(sink) => Box::new(LoggingResource::new(resource, sink).with_use_logging(true)),
    };
    let runtime = XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool, resource);
    let manager = GpuMemoryManager::with_runtime(Arc::new(runtime));

    let plan = Plan::new(manager.clone(), arguments, rounds)?;
    let calls_before = driver_calls(&device);
    let start = Instant::now();
    let outcome = plan.run();
    report.seconds = Some(start.elapsed().as_secs_f64());
    report.driver_calls =
        driver_calls(&device).zip(calls_before).map(|(after, before)| after - before);
    drop(plan);
    // What is counted below has to be settled, also after a failure.
    let settled = settle(&device, &manager);
    note(report, &manager.runtime().statistics(), &manager, &outcome);
    report.races = device.races().iter().map(ToString::to_string).collect();
    outcome.error.map_or(Ok(()), Err)?;
    settled
}

fn settle(device: &CudaDevice, manager: &GpuMemoryManager) -> Result<()> {
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
