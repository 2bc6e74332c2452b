//! The command line.
use std::fmt::Display;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use xlog_cuda::XlogError;
use xlog_report::Trouble;

use crate::ledger::LedgerArguments;
use crate::run::{FixpointArguments, RelationalArguments, StackArguments, TenantsArguments};
use crate::size::count;

/// See, check and exercise device memory from the command line.
#[derive(Parser, Debug)]
#[command(name = "xlogmem", version, max_term_width = 80, disable_help_subcommand = true)]
#[command(
    after_help = "Exit status: 0: success; 1: the command ran and the answer is negative, or the device failed; 2: the command \
                        could not be carried out as asked: a bad option, an input that cannot be read, an output that cannot be \
                        written."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Show which device would be used and why, and check that it works
    Doctor(DoctorArguments),
    /// Run any CUDA program under the ledger, with a limit and a log
    ///
    /// Preloads a library that counts every driver call that takes or gives device memory, refuses what is beyond the limit, and logs
    /// it with the library that asked. The program needs no change.
    Exec(crate::exec::ExecArguments),
    /// Show the memory of each device by process
    Ledger(LedgerArguments),
    /// Watch the processes that share devices: bytes, peaks, rates and tags, live
    Top(crate::top::TopArguments),
    /// Start processes that share a ledger, to look at with top
    Demo(crate::run::DemoArguments),
    /// Run a workload on a device and verify its result
    #[command(subcommand, disable_help_subcommand = true)]
    Run(RunCommand),
    /// Plant bugs and show which detectors catch them: guard, race detector, compute-sanitizer
    ///
    /// Each bug runs under each memory resource in a separate process, and on a GPU again under compute-sanitizer if that is
    /// installed. Fails if a bug is missed that must be caught.
    Certify(crate::certify::CertifyArguments),
    /// Replay an allocation log, ours or RMM's, on a device
    ///
    /// Repeats every allocation and free of the log, on streams and by threads as recorded, and times them. Any resource on any
    /// device may have written the log.
    Replay(crate::replay::ReplayArguments),
    /// Write an allocation log in another format
    Convert(crate::convert::ConvertArguments),
    /// Summarize an allocation log: its peak, the largest holders, leaks
    Summary(crate::summary::SummaryArguments),
    /// Report the memory use of a log as a page, a text or a picture
    ///
    /// Memory over time by tag, the holders at the peak, a map of addresses, lifetimes and sizes of blocks, streams and the blocks
    /// that move between them, memory that is idle after its last use, failures and leaks.
    Report(crate::report::ReportArguments),
    /// Show what changed from one allocation log to another
    Diff(crate::diff::DiffArguments),
    /// Generate the allocation log of a typical program, for replay
    Generate(crate::generate::GenerateArguments),
    /// Measure the cost of operations on this machine, relative to their parts
    Bench(crate::bench::BenchArguments),
    /// Write shell completions
    Completions(crate::shell::CompletionsArguments),
    /// Write the manual page
    Man(crate::shell::ManArguments),
}

/// The workloads.
#[derive(Subcommand, Debug)]
pub(crate) enum RunCommand {
    /// Join two tables that never leave the device
    ///
    /// Both tables are made on the device. The first is hashed, the matches of each row of the second are counted, the counts are
    /// summed up, and the pairs are written into a buffer of exactly their number, which is all the host reads. Every pair is then
    /// compared with a join that the host computes. Rows: of each table.
    Join(RelationalArguments),
    /// Find everything that can be reached in a graph, by joins, round by round
    ///
    /// A round joins the pairs that the round before found with the edges, in parts on all streams, and keeps what is new in a hash
    /// set, until there is nothing new. The pairs are then compared with a search of the host from every vertex. Rows: edges.
    Fixpoint(FixpointArguments),
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
    /// Starts several processes that share a ledger, each with several tenants under a budget. Together they request more than the
    /// limit. Every buffer is verified before its free, and the ledger is watched throughout.
    Tenants(TenantsArguments),
    /// Allocate and free at random, and verify that no block was damaged
    ///
    /// Both ends of every block are written on the device and copied aside, in stream order, just before the block is freed. At the
    /// end the copies are compared with what was written, which detects memory that was handed out twice. With several streams and
    /// a resource that tracks uses, a block is also written and read on other streams than its own.
    Churn(crate::run::ChurnArguments),
}

/// The arguments of `doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Default: XLOG_DEVICE, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    pub(crate) device: Option<String>,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `run handoff`.
#[derive(Args, Debug)]
pub(crate) struct HandoffArguments {
    #[command(flatten)]
    pub(crate) stack: StackArguments,

    /// The number of streams that the buffers pass through
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = count::<u32>(2..=64))]
    pub(crate) streams: u32,

    /// The number of host threads that queue work, each its share of the rounds
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count::<u32>(1..=64))]
    pub(crate) threads: u32,

    /// The number of rounds [default: 20000 on a GPU, 2000 on a simulated device]
    #[arg(long, value_name = "N", value_parser = count::<u32>(1..=100_000_000))]
    pub(crate) rounds: Option<u32>,

    /// The number of rows of a buffer, of four bytes each
    #[arg(
        long, value_name = "N", default_value_t = 16384,
        value_parser = count::<u32>(1..=1 << 28)
    )]
    pub(crate) rows: u32,

    /// The seed of the buffers' contents
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>(0..=u64::MAX))]
    pub(crate) seed: u64,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// The reason why no command runs.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Help or version was requested.
    Shown(String),
    /// The command line, the input or the output is unusable; the reason in one line.
    Line(String),
}

impl From<String> for Refusal {
    fn from(line: String) -> Self {
        Self::Line(line)
    }
}

impl From<XlogError> for Refusal {
    fn from(error: XlogError) -> Self {
        Self::Line(error.to_string())
    }
}

impl Refusal {
    /// Converts the outcome of a command that reads logs: `Found` becomes `Some`, `Refused` an error.
    pub(crate) fn or_found(outcome: Result<(), Trouble>) -> Result<Option<String>, Self> {
        match outcome {
            Ok(()) => Ok(None),
            Err(Trouble::Found(answer)) => Ok(Some(answer)),
            Err(Trouble::Refused(line)) => Err(Self::Line(line)),
        }
    }
}

/// Parses the value of an option, if present; an error names the option.
pub(crate) fn option<T, E: Display>(
    name: &str,
    value: Option<&str>,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, String> {
    value.map(parse).transpose().map_err(|error| format!("{name}: {error}"))
}

/// Returns the whole command line, for completions and manual pages.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}

/// Parses the command line of this process.
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

/// Joins the first paragraph of clap's message and the most similar name it suggests into one line.
fn one_line(message: &str) -> String {
    let paragraph: Vec<&str> =
        message.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let text = paragraph.join(" ");
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let tips = message.lines().filter(|line| line.trim().starts_with("tip:"));
    let similar = tips.filter_map(|tip| tip.split_once(" exist: ").or(tip.split_once(" exists: ")));
    // The most similar name comes last.
    let mut similar = similar.filter_map(|(_, names)| names.rsplit(", ").next());
    let help = help_of(message);
    match similar.next() {
        Some(name) => format!("{text}; did you mean {name}? Try '{help} --help'"),
        None => format!("{text}; try '{help} --help'"),
    }
}

/// Returns the help command for the message, from its usage line.
fn help_of(message: &str) -> String {
    let usage = message.lines().find_map(|line| line.strip_prefix("Usage: "));
    let is_name = |word: &&str| word.chars().all(|letter| letter.is_ascii_lowercase());
    let words: Vec<&str> =
        usage.unwrap_or_default().split_whitespace().take_while(is_name).collect();
    if words.first() == Some(&"xlogmem") { words.join(" ") } else { "xlogmem".to_owned() }
}

/// Parses the arguments of `run handoff`.
#[cfg(test)]
pub(crate) fn parse_handoff(arguments: &[&str]) -> HandoffArguments {
    let line = ["xlogmem", "run", "handoff"].iter().chain(arguments);
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Run(RunCommand::Handoff(arguments))) => arguments,
        other => panic!("not a handoff: {other:?}"),
    }
}

/// Parses the arguments of `run tenants`.
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
        let message =
            "error: unrecognized 'x'\n\n  tip: some similar subcommands exist: 'y', 'z'\n\n";
        let due = "unrecognized 'x'; did you mean 'z'? Try 'xlogmem --help'";
        assert_eq!(one_line(message), due);
        let message = "error: unexpected '--x'\n\nUsage: xlogmem run join [OPTIONS]\n";
        assert_eq!(one_line(message), "unexpected '--x'; try 'xlogmem run join --help'");
    }
}
