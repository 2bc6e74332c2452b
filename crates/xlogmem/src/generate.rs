//! `xlogmem generate`: synthetic logs for replay.
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use xlog_report::LogFormat;
use xlog_report::text_report::{TextReport, size};
use xlog_workloads::logs::{LogKind, LogSettings, write_log};

use crate::Output;
use crate::atomic_file::{AtomicFile, is_stdout};
use crate::cli::Refusal;
use crate::size::count;

/// The arguments of `generate`.
#[derive(Args, Debug)]
#[command(after_help = "Kinds:
  dataframe  queries over columns by 4 threads on 4 streams: columns and
             validity bits, filter masks, hash tables, sort scratch; results
             are kept a while and freed by another thread
  llm        a language model that serves up to 24 requests: weights at the
             beginning, pages of the key-value cache, activations by prompt
             length, small buffers for each token; one thread, two streams
  datalog    relations that grow to a fixed point by 2 threads on 4 streams:
             join indexes, sort scratch, full relations built anew each round

The same kind, records, seed and scale give the same file.

Exit status: 0 written; 2 the command line was refused, or the file cannot be
written.")]
pub(crate) struct GenerateArguments {
    /// dataframe, llm or datalog
    #[arg(value_name = "KIND")]
    kind: String,

    /// The file to write: .xtrace, .csv or .rmm.csv; - is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// The format, where the name does not say it: xtrace, csv or rmm-csv
    #[arg(long, value_name = "FORMAT")]
    to: Option<String>,

    /// About how many records
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = count::<u64>(1..=1_000_000_000))]
    records: u64,

    /// The seed of the sizes and the order
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>(0..=u64::MAX))]
    seed: u64,

    /// Multiplies the sizes; 1 has a peak of 0.5 to 3 GiB
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    scale: f64,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize, Debug)]
struct Report {
    schema: u32,
    ok: bool,
    error: Option<String>,
    kind: &'static str,
    output: String,
    format: &'static str,
    seed: u64,
    scale: f64,
    records: u64,
    scripts: u64,
    peak_bytes: u64,
    peak_blocks: u64,
    bytes: u64,
}

pub(crate) fn run(arguments: &GenerateArguments) -> Result<Output, Refusal> {
    let kind: LogKind = arguments.kind.parse().map_err(|error| {
        Refusal::Line(format!("there is no kind of log {:?}; {error}", arguments.kind))
    })?;
    let format = match &arguments.to {
        Some(name) => LogFormat::parse_input(name).map_err(|error| format!("--to: {error}")),
        None => LogFormat::of_path(&arguments.output),
    };
    let format = format.map_err(Refusal::Line)?;
    let Some(log_format) = format.log() else {
        return Err(Refusal::Line(format!(
            "--output: {:?} is only written by convert; expected .xtrace, .csv or .rmm.csv",
            format.name()
        )));
    };
    // Row counts and widths are multiplied; larger scales are meaningless.
    if !(0.001..=1000.0).contains(&arguments.scale) {
        return Err(Refusal::Line(format!(
            "--scale {}: expected a number from 0.001 to 1000",
            arguments.scale
        )));
    }
    let settings = LogSettings::default()
        .with_records(arguments.records)
        .with_seed(arguments.seed)
        .with_scale(arguments.scale);
    let atomic_file = AtomicFile::create(&arguments.output).map_err(Refusal::Line)?;
    let made = write_log(kind, &settings, log_format, &atomic_file.file)
        .map_err(|error| Refusal::Line(format!("{}: {error}", arguments.output.display())))?;
    let bytes = atomic_file.commit(&arguments.output).map_err(Refusal::Line)?;
    let report = Report {
        schema: 1,
        ok: true,
        error: None,
        kind: kind.name(),
        output: arguments.output.display().to_string(),
        format: format.name(),
        seed: arguments.seed,
        scale: arguments.scale,
        records: made.records,
        scripts: made.scripts,
        peak_bytes: made.peak_bytes,
        peak_blocks: made.peak_blocks,
        bytes,
    };
    let output = Output::of(&report, arguments.json, render, None);
    Ok(output.unless(is_stdout(&arguments.output)))
}

fn render(report: &Report) -> String {
    let mut page = TextReport::default();
    page.title("Generate");
    page.line("kind", report.kind);
    page.line("seed", &report.seed.to_string());
    page.line("file", &format!("{} ({})", report.output, report.format));
    page.line("records", &report.records.to_string());
    page.line("scripts", &report.scripts.to_string());
    page.line("peak", &format!("{} in {} blocks", size(report.peak_bytes), report.peak_blocks));
    page.line("size", &size(report.bytes));
    page.close(&format!("{} is written", report.output))
}
