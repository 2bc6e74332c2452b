//! The command line.

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, value_parser};

use crate::ledger::LedgerArguments;
use crate::run::TenantsArguments;

/// See, check and exercise device memory from the command line.
#[derive(Parser, Debug)]
#[command(name = "xlogmem", version, max_term_width = 80, disable_help_subcommand = true)]
#[command(after_help = "Exit status: 0 done, 1 the device or the work failed, \
                        2 the command line was refused.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Say which device would be used and why, and check that it works
    Doctor(DoctorArguments),
    /// Show who holds what of each device, among the processes that share it
    Ledger(LedgerArguments),
    /// Run a workload on a device and verify what came of it
    #[command(subcommand, disable_help_subcommand = true)]
    Run(RunCommand),
    /// Plant bugs and show who notices: guard, race detector, compute-sanitizer
    ///
    /// Each bug runs under each memory resource in a process of its own, and, on a GPU, once more under compute-sanitizer where
    /// that is installed. Fails when a bug is not noticed that should be.
    Certify(crate::certify::CertifyArguments),
    /// Replay an allocation log, ours or RMM's, on a device
    ///
    /// Every allocation and free of the log is done again, on streams and by threads as recorded, and timed. The log may have
    /// been written by any resource on any device.
    Replay(crate::replay::ReplayArguments),
    /// Write an allocation log in another format
    Convert(crate::convert::ConvertArguments),
    /// Sum up an allocation log: peak, who held it, what was never freed
    Summary(crate::summary::SummaryArguments),
    /// Make an allocation log as programs of a kind would write it, for replay
    Generate(crate::generate::GenerateArguments),
}

/// Which workload to run.
#[derive(Subcommand, Debug)]
pub(crate) enum RunCommand {
    /// Pass buffers between streams, with the runtime keeping the order
    ///
    /// In each round one stream fills two buffers, a second mixes them into a third, and a third stream sums that up. Buffers
    /// are allocated on the stream that first needs them and dropped as soon as their last use is queued. The host waits for
    /// a sum only now and then, and compares every one with its own.
    Handoff(HandoffArguments),
    /// Share one limit between processes and executors, and verify that it holds
    ///
    /// Starts several processes that share a ledger, each with several tenants under a budget. Together they want more than
    /// there is. Every buffer is read back before it goes; the ledger is watched all the while.
    Tenants(TenantsArguments),
    /// Allocate and free at random, and verify that no block was damaged
    ///
    /// Both ends of every block are written on the device and copied aside, in stream order, just before the block is freed. At
    /// the end the copies are compared with what was written: memory that was handed out twice shows. With several streams,
    /// a block is written and read on other streams than its own, where the resource tracks uses.
    Churn(crate::run::ChurnArguments),
}

/// What `doctor` takes.
#[derive(Args, Debug)]
pub(crate) struct DoctorArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Without it: what XLOG_DEVICE says, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    pub(crate) device: Option<String>,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `run handoff` takes.
#[derive(Args, Debug)]
pub(crate) struct HandoffArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Without it: what XLOG_DEVICE says, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    pub(crate) device: Option<String>,

    /// How many streams the buffers travel over
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(2..=64))]
    pub(crate) streams: u32,

    /// How many host threads queue work, each its share of the rounds
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=64))]
    pub(crate) threads: u32,

    /// How many rounds [default: 20000 on a GPU, 2000 on a simulated device]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=100_000_000))]
    pub(crate) rounds: Option<u32>,

    /// How many rows a buffer has, of four bytes each
    #[arg(
        long, value_name = "N", default_value_t = 16384,
        value_parser = value_parser!(u32).range(1..=1 << 28)
    )]
    pub(crate) rows: u32,

    /// The memory resource: async or pool. The direct one tracks no uses and is refused
    #[arg(long, value_name = "NAME", env = "XLOG_DEVICE_RESOURCE", default_value = "async")]
    pub(crate) resource: String,

    /// What the contents of the buffers are made from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Log every operation, also uses, to this file, which ends in .xtrace or .csv; see xlogmem summary and replay
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<std::path::PathBuf>,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Help or version was asked for.
    Shown(String),
    /// The command line is wrong, in one line.
    Line(String),
}

/// Reads the command line of this process.
pub(crate) fn parse() -> Result<Command, Refusal> {
    Cli::try_parse().map(|cli| cli.command).map_err(|error| {
        let text = error.render().to_string();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Refusal::Shown(text),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                Refusal::Line("a command is missing; try 'xlogmem --help'".to_owned())
            }
            _ => Refusal::Line(one_line(&text)),
        }
    })
}

/// The first paragraph of the parser's message, which is what went wrong, as one line.
fn one_line(message: &str) -> String {
    let paragraph: Vec<&str> =
        message.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let text = paragraph.join(" ");
    format!("{}; try 'xlogmem --help'", text.strip_prefix("error: ").unwrap_or(&text))
}

/// The arguments of `run handoff`, as if given on the command line.
#[cfg(test)]
pub(crate) fn parse_handoff(arguments: &[&str]) -> HandoffArguments {
    let line = ["xlogmem", "run", "handoff"].iter().chain(arguments);
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Run(RunCommand::Handoff(arguments))) => arguments,
        other => panic!("not a handoff: {other:?}"),
    }
}

/// The arguments of `run tenants`, as if given on the command line.
#[cfg(test)]
pub(crate) fn parse_tenants(arguments: &[&str]) -> TenantsArguments {
    let line = ["xlogmem", "run", "tenants"].iter().chain(arguments);
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Run(RunCommand::Tenants(arguments))) => arguments,
        other => panic!("not a tenants run: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_message_of_many_lines_becomes_one() {
        let message = "error: the following are missing:\n  <A>\n  <B>\n\nUsage: x\n";
        assert_eq!(one_line(message), "the following are missing: <A> <B>; try 'xlogmem --help'");
    }
}
