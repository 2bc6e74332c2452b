//! `xlogmem diff`: compares two logs.
//!
//! As with `diff`, the exit status is the answer: 0 the logs are equal, 1 they differ, 2 one of them cannot be read. Counts and
//! bytes are compared. Times, threads and addresses vary between runs and are only shown.
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use xlog_report::compare::{Comparison, compare, rows};
use xlog_report::text_report::TextReport;
use xlog_report::{Demand, Input, LogFormat, ReadingReport, Strict, Trouble, check};
use xlog_trace::{Ordered, Source, Summary};

use crate::Output;
use crate::atomic_file::is_same_file;
use crate::cli::{Refusal, option};

const SCHEMA: u32 = 1;
const DIFFER: &str = "the logs differ";

/// The arguments of `diff`.
#[derive(Args, Debug)]
#[command(
    after_help = "Compares counts and bytes, in total and by tag. Times are shown but do not affect the result.

Exit status: 0: the logs agree; 1: they differ; 2: the command line was refused, or a log cannot be read or is incomplete."
)]
pub(crate) struct DiffArguments {
    /// The log before: xtrace, csv, rmm-csv, or a memory snapshot of PyTorch; - is standard input
    #[arg(value_name = "A")]
    before: PathBuf,

    /// The log after
    #[arg(value_name = "B")]
    after: PathBuf,

    /// The format of the logs, where their beginning is damaged [default: what the file begins with]
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,

    /// Read the intact part of a damaged or truncated log
    #[arg(long)]
    partial: bool,

    /// Refuse a log that is incomplete in any way: also one with dropped records, and one that its writer did not close
    #[arg(long, conflicts_with = "partial")]
    strict: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The report, as it appears in JSON. Every field is always present.
#[derive(Serialize, Debug)]
struct Report {
    schema: u32,
    ok: bool,
    error: Option<String>,
    before: String,
    after: String,
    reading_before: ReadingReport,
    reading_after: ReadingReport,
    comparison: Comparison,
}

/// Runs the command; also returns whether the logs differ.
pub(crate) fn run(arguments: &DiffArguments) -> Result<(Output, bool), Refusal> {
    let report = read(arguments).map_err(Refusal::Line)?;
    let output = Output::of(&report, arguments.json, render, None);
    let mut logs = vec![(report.before.as_str(), Some(&report.reading_before))];
    if report.before != report.after {
        logs.push((report.after.as_str(), Some(&report.reading_after)));
    }
    Ok((output.warn(logs), !report.comparison.same))
}

fn read(arguments: &DiffArguments) -> Result<Report, String> {
    let from = option("--from", arguments.from.as_deref(), LogFormat::parse_input)?;
    let demand = Demand::new(arguments.partial, arguments.strict);
    let input = |path| Input::new(path, from, Strict(false));
    let before = input(&arguments.before);
    // A pipe that is named twice can be read only once.
    let after =
        (!is_same_file(&arguments.before, &arguments.after)).then(|| input(&arguments.after));
    let sum_up = |input: &Input<'_>, path: &Path| -> Result<(Summary, ReadingReport), String> {
        let mut source = Ordered::new(input.begin().map_err(Trouble::into_line)?);
        let summary = Summary::of(&mut source).map_err(|error| input.blame(&error).into_line())?;
        check(&path.display().to_string(), source.report(), demand)?;
        Ok((summary, ReadingReport::new(source.report())))
    };
    let (summary_before, reading_before) = sum_up(&before, &arguments.before)?;
    let (summary_after, reading_after) =
        sum_up(after.as_ref().unwrap_or(&before), &arguments.after)?;
    let comparison = compare(&summary_before, &summary_after);
    Ok(Report {
        schema: SCHEMA,
        ok: comparison.same,
        error: (!comparison.same).then(|| DIFFER.to_owned()),
        before: arguments.before.display().to_string(),
        after: arguments.after.display().to_string(),
        reading_before,
        reading_after,
        comparison,
    })
}

fn render(report: &Report) -> String {
    let mut page = TextReport::default();
    page.title("Two logs");
    page.line("before", &report.before);
    page.line("after", &report.after);
    rows(&mut page, &report.comparison);
    let logs = [(&report.before, &report.reading_before), (&report.after, &report.reading_after)];
    let incomplete = logs.iter().find_map(|(log, reading)| reading.refusal(log));
    page.close(&match (report.comparison.same, incomplete) {
        (true, None) => "the logs say the same of memory".to_owned(),
        (false, None) => DIFFER.to_owned(),
        (true, Some(why)) => {
            format!("their records say the same of memory, the rest is unknown; {why}")
        }
        (false, Some(why)) => format!("{DIFFER}, perhaps only by missing records; {why}"),
    })
}
