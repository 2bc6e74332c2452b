//! `xlogmem convert`: converts an allocation log to another format.
//!
//! The output is an [`AtomicFile`]: a failure leaves the destination unchanged, and with `--to` a log may be converted onto
//! itself. Bad input is skipped and counted; with `--strict` it ends the conversion.
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use xlog_report::text_report::TextReport;
use xlog_report::{Input, LogFormat, ReadingReport, Strict, Trouble};
use xlog_trace::export::{write_chrome_trace, write_torch_snapshot};
use xlog_trace::{Ordered, ReadReport, Source, TraceError, convert};

use crate::Output;
use crate::atomic_file::{AtomicFile, is_same_file, is_stdout};
use crate::cli::{Refusal, option};

const SCHEMA: u32 = 1;

/// The arguments of `convert`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 written, also when bad records were skipped; 1 --strict found something bad; 2 the command \
                        line was refused, IN cannot be read, or OUT cannot be written."
)]
pub(crate) struct ConvertArguments {
    /// The log to read: xtrace, csv, rmm-csv, or a memory snapshot of PyTorch; - is standard input
    #[arg(value_name = "IN")]
    input: PathBuf,

    /// The file to write; - is standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,

    /// The format of IN, where its beginning is damaged [default: what the file begins with]
    #[arg(long, value_name = "FORMAT")]
    from: Option<String>,

    /// The format of OUT: xtrace, csv, rmm-csv, chrome (trace events for Perfetto) or torch (memory snapshot for
    /// pytorch.org/memory_viz)
    ///
    /// Without it: .xtrace, .csv, .rmm.csv, .json or .pickle, by the end of the name.
    #[arg(long, value_name = "FORMAT")]
    to: Option<String>,

    /// Stop at the first bad record instead of skipping it
    #[arg(long)]
    strict: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The report of a conversion. Every field is always present.
#[derive(Serialize, Debug, Default)]
struct Report {
    schema: u32,
    ok: bool,
    error: Option<String>,
    input: String,
    output: String,
    from: Option<&'static str>,
    to: &'static str,
    reading: Option<ReadingReport>,
    /// The number of records, events or trace entries.
    written: u64,
    /// Records that the format cannot represent.
    left_out: u64,
    bytes: u64,
    /// Whether the output is marked as incomplete; false for complete input.
    carries_loss: bool,
}

impl Report {
    /// Warns that the input is incomplete and says whether the output shows it.
    fn loss(&self) -> Option<String> {
        let warning = self.reading.as_ref()?.warning(&self.input)?;
        let (to, output) = (self.to, &self.output);
        Some(match self.carries_loss {
            true => format!("{warning}; {output} is marked as incomplete"),
            false => format!("{warning}; {to} cannot say so, and {output} looks complete"),
        })
    }
}

pub(crate) fn run(arguments: &ConvertArguments) -> Result<Output, Refusal> {
    let from = option("--from", arguments.from.as_deref(), LogFormat::parse_input)?;
    let to = match option("--to", arguments.to.as_deref(), LogFormat::parse)? {
        Some(to) => to,
        None => LogFormat::of_path(&arguments.output)?,
    };
    let is_itself = is_same_file(&arguments.input, &arguments.output);
    if is_itself && arguments.to.is_none() {
        return Err(Refusal::Line(format!(
            "{}: it is the log; expected another file, or --to to replace the log",
            arguments.output.display()
        )));
    }
    let mut report = Report {
        schema: SCHEMA,
        input: arguments.input.display().to_string(),
        output: arguments.output.display().to_string(),
        from: from.map(LogFormat::name),
        to: to.name(),
        ..Report::default()
    };
    let strict = Strict(arguments.strict);
    let written = write(arguments, from, to, strict, &mut report);
    report.error = Refusal::or_found(written)?;
    report.ok = report.error.is_none();
    let mut output = Output::of(&report, arguments.json, render, report.error.clone());
    output.warnings.extend(report.loss());
    Ok(output.unless(is_stdout(&arguments.output)))
}

fn write(
    arguments: &ConvertArguments,
    from: Option<LogFormat>,
    to: LogFormat,
    strict: Strict,
    report: &mut Report,
) -> Result<(), Trouble> {
    let input = Input::new(&arguments.input, from, strict);
    // A log that cannot be opened creates no output.
    let probe = input.begin()?;
    report.from = Some(probe.format().name());
    drop(probe);

    let file = AtomicFile::create(&arguments.output).map_err(Trouble::Refused)?;
    let mut out = Noted { file: &file.file, error: None };
    let encoded = encode(&input, to, &mut out);
    // An error while reading the log may come from the output.
    if let Some(error) = out.error {
        return Err(Trouble::Refused(format!("{}: {error}", arguments.output.display())));
    }
    let (written, left_out, reading) = encoded?;
    input.check(&reading)?;
    report.bytes = file.commit(&arguments.output).map_err(Trouble::Refused)?;
    (report.written, report.left_out) = (written, left_out);
    report.reading = Some(ReadingReport::new(&reading));
    // CSV has the number of dropped records, but no end.
    report.carries_loss = match to {
        LogFormat::Xtrace => reading.is_incomplete(),
        LogFormat::Csv => reading.dropped_at_source > 0,
        _ => false,
    };
    Ok(())
}

/// A file that records why it could not be written.
struct Noted<'a> {
    file: &'a File,
    error: Option<String>,
}

impl Noted<'_> {
    fn note<T>(&mut self, result: std::io::Result<T>) -> std::io::Result<T> {
        result.inspect_err(|error| self.error = Some(error.to_string()))
    }
}

impl Write for Noted<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes);
        self.note(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let flushed = self.file.flush();
        self.note(flushed)
    }
}

fn encode(
    input: &Input<'_>,
    to: LogFormat,
    out: &mut Noted<'_>,
) -> Result<(u64, u64, ReadReport), Trouble> {
    let blame = |error: TraceError| input.blame(&error);
    let mut out = BufWriter::with_capacity(1 << 20, out);
    let counts = match (to, to.log()) {
        (_, Some(format)) => {
            let mut source = input.begin()?;
            let converted = convert(&mut source, format, &mut out).map_err(blame)?;
            (converted.written, converted.left_out, source.report().clone())
        }
        (LogFormat::Torch, None) => {
            let open = || input.open().map(Ordered::new);
            let counts = write_torch_snapshot(open, &mut out).map_err(blame)?;
            // The exporter opens the log once per device and keeps its sources, so one more pass yields the read report.
            let mut source = input.begin()?;
            while source.next_record().map_err(blame)?.is_some() {}
            (counts.trace_entries, counts.left_out, source.report().clone())
        }
        (_, None) => {
            let mut source = Ordered::new(input.begin()?);
            let counts = write_chrome_trace(&mut source, &mut out).map_err(blame)?;
            (counts.events, 0, source.report().clone())
        }
    };
    // The writer recorded the reason.
    out.flush().map_err(|error| Trouble::Refused(error.to_string()))?;
    Ok(counts)
}

fn render(report: &Report) -> String {
    let mut page = TextReport::default();
    page.title("Convert");
    let named = |path: &str, format: Option<&str>| match format {
        Some(format) => format!("{path} ({format})"),
        None => path.to_owned(),
    };
    page.line("from", &named(&report.input, report.from));
    page.line("to", &named(&report.output, Some(report.to)));
    if let Some(reading) = &report.reading {
        reading.render(&mut page);
        page.line("written", &report.written.to_string());
        page.line("left out", &report.left_out.to_string());
        page.line("size", &xlog_report::text_report::size(report.bytes));
    }
    match &report.error {
        Some(error) => page.close(error),
        None => {
            let is_complete = report.reading.as_ref().is_none_or(|reading| reading.complete);
            let note = match (is_complete, report.carries_loss) {
                (true, _) => "",
                (false, true) => ", marked as incomplete, as its input is",
                (false, false) => "; it looks complete, which its input is not",
            };
            page.close(&format!("{} is written{note}", report.output))
        }
    }
}
