//! The arguments of `run tenants`.

use std::path::PathBuf;

use clap::Args;

use crate::size::count;

/// The state of a process that holds cached memory.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holder {
    Idle,
    Busy,
}

/// The arguments of `run tenants`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:\n  \
    xlogmem run tenants --device sim\n  \
    xlogmem run tenants --device cuda:0 --processes 4 --tenants 4 --budget 8GiB\n  \
    xlogmem run tenants --device sim --resource pool --rounds 1000 --json\n  \
    xlogmem run tenants --device cuda:0 --pressure --budget 90%\n\n\
    Exit status: 0 every buffer was right, the limit held and everything came\n\
    back; 1 not so, 2 the command line was refused.")]
pub(crate) struct TenantsArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Default: XLOG_DEVICE, else the first GPU, else the simulated device. Each process has its own simulated device; they share
    /// the limit.
    #[arg(long, value_name = "SPEC")]
    pub(crate) device: Option<String>,

    /// The number of processes that share the limit
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count::<u32>(1..=64))]
    pub(crate) processes: u32,

    /// The number of tenants of each process, each with a thread and a budget scope
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count::<u32>(1..=64))]
    pub(crate) tenants: u32,

    /// The limit of all processes together: 512MB, 4GiB, 25% of the device.
    ///
    /// The async resource grows in steps of 32 MiB, so each process needs at least that much.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) budget: String,

    /// The number of allocations and frees of each tenant
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = count::<u32>(1..=100_000_000))]
    pub(crate) rounds: u32,

    /// The memory resource: pool, async or direct
    #[arg(long, value_name = "NAME", env = "XLOG_DEVICE_RESOURCE", default_value = "pool")]
    pub(crate) resource: String,

    /// The seed of sizes, contents and order
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>(0..=u64::MAX))]
    pub(crate) seed: u64,

    /// Show instead how one process gets the memory that another one has cached
    ///
    /// The other process peaks at 60 % of the limit, keeps 5 %, and is idle, busy, killed or stopped while this one asks for 70 %.
    #[arg(long)]
    pub(crate) pressure: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,

    /// The number of this process. The command passes it to the processes it starts
    #[arg(long, hide = true, requires = "ledger")]
    pub(crate) worker: Option<u32>,

    /// Whether this process holds memory under pressure, and is busy; likewise
    #[arg(long, hide = true, requires = "ledger")]
    pub(crate) holder: Option<Holder>,

    /// The ledger to join, likewise
    #[arg(long, hide = true)]
    pub(crate) ledger: Option<PathBuf>,
}
