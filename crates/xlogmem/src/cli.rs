//! The command line.

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

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
