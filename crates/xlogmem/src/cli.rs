//! The command line.
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, value_parser};
use xlog_report::Trouble;

use crate::ledger::LedgerArguments;
use crate::run::{RelationalArguments, StackArguments, TenantsArguments};

/// See, check and exercise device memory from the command line.
#[derive(Parser, Debug)]
#[command(name = "xlogmem", version, max_term_width = 80, disable_help_subcommand = true)]
#[command(
    after_help = "Exit status: 0 all is well; 1 the work was done and the answer is no, or the device failed; 2 the command \
                        could not be carried out as asked: a bad option, an input that cannot be read, an output that cannot be \
                        written."
)]
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
    /// Watch the processes that share devices: bytes, peaks, rates and tags, live
    Top(crate::top::TopArguments),
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
    /// Show what a log says of memory: a page, a text or a picture
    ///
    /// Memory over time by tag, who holds it at the peak, a map of addresses, lives and sizes of blocks, streams and what goes
    /// between them, what is held after its last use, failures and leaks.
    Report(crate::report::ReportArguments),
    /// Show what changed from one allocation log to another
    Diff(crate::diff::DiffArguments),
    /// Make an allocation log as programs of a kind would write it, for replay
    Generate(crate::generate::GenerateArguments),
    /// Measure what operations cost here, each against what it is made of
    Bench(crate::bench::BenchArguments),
    /// Write the completions of a shell
    Completions(crate::shell::CompletionsArguments),
    /// Write the manual page
    Man(crate::shell::ManArguments),
}

/// Which workload to run.
#[derive(Subcommand, Debug)]
pub(crate) enum RunCommand {
    /// Join two tables that never leave the device
    ///
    /// Both tables are made on the device. The first is hashed, the matches of each row of the second are counted, the counts are
    /// summed up, and the pairs are written into a buffer of exactly their number, which is all the host reads. Every pair is then
    /// compared with a join that the host computes for itself. Rows: of each table.
    Join(RelationalArguments),
    /// Find everything that can be reached in a graph, by joins, round by round
    ///
    /// A round joins the pairs that the round before found with the edges, in parts on all streams, and keeps what is new in a hash
    /// set, until there is nothing new. The pairs are then compared with a search of the host from every vertex. Rows: edges.
    Fixpoint(RelationalArguments),
    /// Sort numbers, with scratch that is dropped as soon as its launch is queued
    ///
    /// A radix sort of 64-bit numbers in eight passes. The result is then compared with the host's. Rows: numbers.
    Sort(RelationalArguments),
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
    #[command(flatten)]
    pub(crate) stack: StackArguments,

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

    /// What the contents of the buffers are made from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Help or version was asked for.
    Shown(String),
    /// The command cannot be carried out as asked: its line, its input or its output, in one line.
    Line(String),
}

impl Refusal {
    /// The answer of a command that reads logs, if it has one; a refusal where it could not be carried out.
    pub(crate) fn or_found(outcome: Result<(), Trouble>) -> Result<Option<String>, Self> {
        match outcome {
            Ok(()) => Ok(None),
            Err(Trouble::Found(answer)) => Ok(Some(answer)),
            Err(Trouble::Refused(line)) => Err(Self::Line(line)),
        }
    }
}

/// The whole command line, for those who describe it.
pub(crate) fn command() -> clap::Command {
    Cli::command()
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
