//! Options of all runs: the device and the stack.

use std::path::PathBuf;

use clap::Args;
use xlog_cuda::device_runtime::{Backtraces, GuardSetting, LedgerSetting, open_log};
use xlog_cuda::{ByteSize, CudaDevice, DeviceSpec};
use xlog_workloads::stack::{StackKind, StackOptions};

use crate::cli::{Refusal, option};
use crate::doctor::{Cuda, Selected, select};
use crate::size;

/// The device and the stack of a run. Options of every run belong here.
#[derive(Args, Clone, Debug)]
pub(crate) struct StackArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Default: XLOG_DEVICE, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    pub(crate) device: Option<String>,

    /// The memory resource: direct, async or pool [default: pool]
    ///
    /// The direct resource tracks no uses, so only churn accepts it.
    #[arg(long, value_name = "NAME", env = "XLOG_DEVICE_RESOURCE")]
    pub(crate) resource: Option<String>,

    /// The maximum bytes of all blocks, such as 4GiB or 50% of the device [default: no limit]
    #[arg(long, value_name = "SIZE", env = "XLOG_DEVICE_BUDGET", allow_negative_numbers = true)]
    pub(crate) budget: Option<String>,

    /// Put a guard under the blocks: off, canary, sync, pages or sampled:N
    ///
    /// A finding ends the run with status 1; see docs/debugging.md.
    #[arg(long, value_name = "MODE", env = "XLOG_DEVICE_GUARD")]
    pub(crate) guard: Option<String>,

    /// Charge the bytes of the device to a ledger: on, off, a folder or a file KEY.ledger [default: off]
    ///
    /// Processes on one ledger share its limit; watch them with xlogmem top.
    #[arg(long, value_name = "LEDGER", env = "XLOG_DEVICE_LEDGER")]
    pub(crate) ledger: Option<String>,

    /// Log every operation, also uses, to this file, which ends in .xtrace or .csv; see xlogmem summary and replay
    ///
    /// In its path %p stands for the process, %d for the device and %% for a percent sign.
    #[arg(long, value_name = "FILE", env = "XLOG_DEVICE_LOG")]
    pub(crate) log: Option<PathBuf>,

    /// Log the stack of the caller with allocations: off, all, or sampled:N for one in N [default: off]
    #[arg(long, value_name = "MODE", env = "XLOG_DEVICE_STACKS")]
    pub(crate) stacks: Option<String>,
}

impl StackArguments {
    /// Selects the device without opening it.
    pub(crate) fn select(&self) -> Result<Selected, Refusal> {
        Ok(select(self.device.as_deref(), &Cuda::find())?)
    }

    /// Returns the configured stack on a device, without its log and with one stream.
    pub(crate) fn options(
        &self,
        default: StackKind,
        device: DeviceSpec,
    ) -> Result<StackOptions, Refusal> {
        let kind = option("--resource", self.resource.as_deref(), str::parse)?;
        let budget = option("--budget", self.budget.as_deref(), size::parse_or_share)?;
        let budget = budget.map(|budget| match budget {
            ByteSize::Bytes(bytes) => bytes,
            // A device that cannot be opened is reported when the stack is built.
            share => share
                .of(CudaDevice::open_spec(device)
                    .map_or(0, |device| device.properties().total_bytes)),
        });
        let guard = option("--guard", self.guard.as_deref(), str::parse::<GuardSetting>)?;
        let ledger = option("--ledger", self.ledger.as_deref(), str::parse::<LedgerSetting>)?;
        let stacks = option("--stacks", self.stacks.as_deref(), str::parse::<Backtraces>)?;
        Ok(StackOptions {
            stacks: stacks.unwrap_or_default(),
            budget,
            ledger: ledger.unwrap_or(LedgerSetting::Off),
            guard: guard.unwrap_or_default(),
            ..StackOptions::new(kind.unwrap_or(default))
        })
    }

    /// Opens the log. This is the last step, so that a refused command line writes nothing.
    pub(crate) fn with_log(
        &self,
        options: StackOptions,
        device: DeviceSpec,
    ) -> Result<StackOptions, Refusal> {
        let ordinal = match device {
            DeviceSpec::Cuda(ordinal) => ordinal as u32,
            _ => 0,
        };
        let log = self.log.as_deref().map(|log| open_log(log, ordinal)).transpose();
        let log = log.map_err(|error| format!("--log: {error}"))?;
        Ok(StackOptions { log, ..options })
    }

    /// Refuses a resource that tracks no uses, before anything is opened.
    pub(crate) fn require_tracking(&self, why: &str) -> Result<(), Refusal> {
        match self.resource.as_deref() {
            Some("direct") => Err(Refusal::Line(format!(
                "--resource direct: this resource tracks no uses, so {why} cannot be ordered; use --resource async or pool"
            ))),
            _ => Ok(()),
        }
    }
}
