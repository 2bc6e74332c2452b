//! The arguments of `ledger`.

use std::time::Duration;

use clap::Args;

use crate::size::{count, duration};

/// The arguments of `ledger`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    xlogmem ledger                                every ledger of this user\n  \
    xlogmem ledger --watch                        the same, once a second\n  \
    xlogmem ledger --reclaim                      free what dead processes left\n  \
    xlogmem ledger --ledger /run/team/a.ledger --json\n  \
    xlogmem ledger --ledger /run/team/a.ledger --limit 32GiB\n  \
    xlogmem ledger --process 4711 --quota 10GiB   while it runs, from its next call\n\n\
    Exit status: 0 done (also when there is no ledger), 1 one of several ledgers\n\
    could not be read or changed, 2 the command line was refused, or what\n\
    --ledger or --process names cannot be read or changed.")]
pub(crate) struct LedgerArguments {
    /// A ledger's file, or a directory of ledgers.
    ///
    /// Default: XLOG_DEVICE_LEDGER, else the default directory.
    #[arg(long, value_name = "PATH")]
    pub(crate) ledger: Option<String>,

    /// Free the slots of dead processes first. Requests that need memory do this automatically
    #[arg(long)]
    pub(crate) reclaim: bool,

    /// Set the limit of all processes together, such as 32GiB; creates a file that --ledger names
    #[arg(long, value_name = "SIZE")]
    pub(crate) limit: Option<String>,

    /// Change the quota of this process, by its id: what is given of the next three. It holds from its next call
    #[arg(long, value_name = "PID")]
    pub(crate) process: Option<u32>,

    /// With --process: the most that it may use, such as 10GiB, 25% (of the ledger's limit), or none
    #[arg(long, value_name = "SIZE", requires = "process")]
    pub(crate) quota: Option<String>,

    /// With --process: the share that others leave free for it, such as 4GiB, 10%, or none
    #[arg(long, value_name = "SIZE", requires = "process")]
    pub(crate) guarantee: Option<String>,

    /// With --process: the name of its quota
    #[arg(long, value_name = "NAME", requires = "process")]
    pub(crate) quota_name: Option<String>,

    /// Print repeatedly, until interrupted
    #[arg(long)]
    pub(crate) watch: bool,

    /// With --watch: the time between two readings, such as 0.5s
    #[arg(
        long, value_name = "TIME", default_value = "1s", requires = "watch",
        value_parser = duration(0.01..=86_400.0)
    )]
    pub(crate) every: Duration,

    /// With --watch: the number of readings, instead of until interrupted
    #[arg(
        long, value_name = "N", requires = "watch",
        value_parser = count::<u64>(1..=u64::MAX)
    )]
    pub(crate) count: Option<u64>,

    /// Print JSON instead of text: one object, with --watch one line per reading
    #[arg(long)]
    pub(crate) json: bool,
}
