//! `xlogmem report`: the memory use of a log as a page, a text or a picture.
//!
//! Unreadable logs and unwritable outputs are refused before anything is written. Outputs are written to temporary files
//! and moved to their destinations when all are complete.
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use xlog_report::figures::{Figures, WrittenFile};
use xlog_report::text_report::{set_width, size};
use xlog_report::{
    Analysis, Demand, Input, LogFormat, Strict, Trouble, analyse, html, picture, text,
};

use crate::Output;
use crate::atomic_file::{AtomicFile, is_stdout};
use crate::cli::{Refusal, option};

/// The arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = "Without -o, --svg, --png and --json the report is printed as text.

Exit status: 0 written; 1 written, and the peak is above --budget; 2 the command line was refused, a log cannot be read or is not whole, or an output cannot be written.")]
pub(crate) struct ReportArguments {
    /// The log: xtrace, csv, rmm-csv, or a memory snapshot of PyTorch; - is standard input. Several xtrace files, such as those of the
    /// processes of a run, make one report
    #[arg(value_name = "LOG", required = true)]
    logs: Vec<PathBuf>,

    /// Write the report as one page that opens in a browser, offline; - is standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Print the report as text, with bars; 80 columns
    #[arg(long, conflicts_with = "json")]
    text: bool,

    /// Draw memory over time by tag as an SVG picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Draw memory over time by tag as a PNG picture
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,

    /// Show what changed since this log
    #[arg(long, value_name = "OTHER")]
    compare: Option<PathBuf>,

    /// Draw this limit, such as 4GiB or 512MB, and fail if the peak is above it
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    budget: Option<String>,

    /// The format of the logs, where their beginning is damaged [default: what the file begins with]
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,

    /// Read the intact part of a damaged or truncated log
    #[arg(long)]
    partial: bool,

    /// Refuse a log that is incomplete in any way: also one with dropped records, and one that its writer did not close
    #[arg(long, conflicts_with = "partial")]
    strict: bool,

    /// Print the figures as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &ReportArguments) -> Result<Output, Refusal> {
    let (output, analysis, other) = report(arguments).map_err(Refusal::Line)?;
    let logs = [Some(&analysis), other.as_ref()].into_iter().flatten();
    Ok(output.warn(logs.map(|analysis| (analysis.log.as_str(), Some(&analysis.reading)))))
}

fn report(arguments: &ReportArguments) -> Result<(Output, Analysis, Option<Analysis>), String> {
    let from = option("--from", arguments.from.as_deref(), LogFormat::parse_input)?;
    let budget = option("--budget", arguments.budget.as_deref(), crate::size::parse)?;
    check_outputs(arguments)?;
    if arguments.output.is_some() {
        // The page also contains the text, whose width must not depend on a terminal.
        set_width(80);
    }
    let open = |log| -> Result<Input<'_>, String> {
        let input = Input::new(log, from, Strict(false));
        input.begin().map_err(Trouble::into_line)?;
        Ok(input)
    };
    let name = joined_name(&arguments.logs);
    // Logs and outputs are opened before any work is done.
    let log = match arguments.logs.as_slice() {
        [log] => open(log)?,
        several => {
            let input = Input::joined(&name, several, Strict(false))?;
            input.begin().map_err(Trouble::into_line)?;
            input
        }
    };
    let compared = arguments.compare.as_deref().map(open).transpose()?;
    let create = |path: &Option<PathBuf>| path.as_deref().map(AtomicFile::create).transpose();
    let (page, svg, png) =
        (create(&arguments.output)?, create(&arguments.svg)?, create(&arguments.png)?);

    let demand = Demand::new(arguments.partial, arguments.strict);
    let read = |log: &Input<'_>| -> Result<Analysis, String> {
        analyse(log, &log.path().display().to_string(), demand)
    };
    let analysis = read(&log)?;
    let other = compared.as_ref().map(read).transpose()?;

    let text = |name| text::render(&analysis, other.as_ref(), budget, name);
    let mut files = Vec::new();
    if let (Some(part), Some(path)) = (page, &arguments.output) {
        let page = html::render(&analysis, other.as_ref(), budget, &text(|log| &log.file))?;
        files.push((part, path, page.into_bytes()));
    }
    let picture = picture::draw(&analysis, budget);
    if let (Some(part), Some(path)) = (svg, &arguments.svg) {
        files.push((part, path, picture::svg(&picture)));
    }
    if let (Some(part), Some(path)) = (png, &arguments.png) {
        files.push((part, path, picture::png(&picture)?));
    }
    let written = write(files)?;
    let failure = analysis.over_budget(budget);
    let outputs = [&arguments.output, &arguments.svg, &arguments.png];
    if outputs.into_iter().flatten().any(|output| is_stdout(output)) {
        return Ok((Output { failure, ..Output::default() }, analysis, other));
    }
    if arguments.json {
        let text = crate::json_text(&Figures::new(&analysis, other.as_ref(), budget, &written))?;
        return Ok((Output { text, failure, ..Output::default() }, analysis, other));
    }
    let lines = written.iter().map(|file| {
        format!("{} is written, {}\n", xlog_report::escape::line(&file.path), size(file.bytes))
    });
    let text = match arguments.text || written.is_empty() {
        true => text(|log| &log.log),
        false => lines.collect(),
    };
    Ok((Output { text, failure, ..Output::default() }, analysis, other))
}

/// Returns a common name of several logs.
pub(crate) fn joined_name(logs: &[PathBuf]) -> PathBuf {
    match logs {
        [first, rest @ ..] if !rest.is_empty() => {
            PathBuf::from(format!("{} and {} more", first.display(), rest.len()))
        }
        [first, ..] => first.clone(),
        [] => PathBuf::new(),
    }
}

/// Writes all temporary files, then moves all of them to their destinations.
fn write(files: Vec<(AtomicFile, &PathBuf, Vec<u8>)>) -> Result<Vec<WrittenFile>, String> {
    for (part, path, bytes) in &files {
        let blame = |error: std::io::Error| format!("{}: {error}", path.display());
        (&part.file).write_all(bytes).map_err(blame)?;
    }
    let commit = |(part, path, bytes): (AtomicFile, &PathBuf, Vec<u8>)| {
        part.commit(path)?;
        Ok(WrittenFile { path: path.display().to_string(), bytes: bytes.len() as u64 })
    };
    files.into_iter().map(commit).collect()
}

/// Refuses outputs that would overwrite each other or a log.
fn check_outputs(arguments: &ReportArguments) -> Result<(), String> {
    let place = |path: &PathBuf| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let outputs = [&arguments.output, &arguments.svg, &arguments.png];
    let mut taken: Vec<(PathBuf, &str)> =
        arguments.logs.iter().map(|log| (place(log), "the log")).collect();
    taken.extend(arguments.compare.as_ref().map(|path| (place(path), "the log to compare with")));
    for path in outputs.into_iter().flatten() {
        let own = place(path);
        if let Some((_, what)) = taken.iter().find(|(taken, _)| *taken == own && own.is_file()) {
            return Err(format!("{}: it is {what}; expected another file", path.display()));
        }
        if taken.iter().any(|(taken, what)| *taken == own && *what == "an output") {
            return Err(format!("{}: it is given twice; expected another file", path.display()));
        }
        taken.push((own, "an output"));
    }
    Ok(())
}
