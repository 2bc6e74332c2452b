//! The arguments of `top`.

use std::time::Duration;

use clap::Args;

use crate::size::duration;

/// The arguments of `top`.
#[derive(Args, Debug)]
#[command(
    after_help = "Keys: q quits, p pauses, s sorts by the next column, h explains, arrows and page keys scroll. NO_COLOR turns \
                  colours off.\n\n\
                  Under a process are the tags that hold most of its blocks. Processes tell them while they are watched, five times \
                  a second; one that tells none is of another program or an older version.\n\n\
                  Exit status: 0 shown, 1 one of several ledgers cannot be read, 2 the command line was refused, or what --ledger names cannot be \
                  read."
)]
pub(crate) struct TopArguments {
    /// The directory of ledgers, or one ledger's file KEY.ledger
    ///
    /// Default: XLOG_DEVICE_LEDGER, else the default directory.
    #[arg(long, value_name = "PATH")]
    pub(crate) ledger: Option<String>,

    /// Show the workers of a Ray or Dask cluster, once: HOST:PORT of metrics pages, or a file of service discovery
    ///
    /// Without a value: the file that the head node of Ray writes.
    #[arg(
        long, value_name = "WHERE", num_args = 0..=1, default_missing_value = super::cluster::RAY,
        conflicts_with_all = ["ledger", "sort"]
    )]
    pub(crate) cluster: Option<String>,

    /// Print one picture and exit, after two readings for the rates
    #[arg(long)]
    pub(crate) once: bool,

    /// The time between two readings, such as 0.5s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration(0.01..=3600.0))]
    pub(crate) every: Duration,

    /// The column to sort by: used, peak, rate, pid or name
    #[arg(long, value_name = "COLUMN", default_value = "used")]
    pub(crate) sort: super::view::Column,

    /// Print one JSON object instead of text; implies --once
    #[arg(long)]
    pub(crate) json: bool,
}
