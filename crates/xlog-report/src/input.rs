//! The input of every command that reads a log: its format, progress on a terminal, and the result of reading.
//!
//! A memory snapshot of PyTorch is converted once, to a temporary log that all passes read.
use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io::{BufReader, BufWriter, IsTerminal, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use xlog_trace::import::{MAX_SNAPSHOT_BYTES, convert_torch_snapshot, looks_like_snapshot};
use xlog_trace::{LogState, ReadReport, Reader, Record, Source, Strictness, TraceError};

use crate::escape;
use crate::format::LogFormat;
use crate::text_report::TextReport;

const EVERY: Duration = Duration::from_millis(200);
/// Records between two checks of the clock.
const PROGRESS_STEP: u64 = 4096;

/// The first bytes of an xtrace file.
const XTRACE: [u8; 8] = *b"\x89XTRACE\n";

/// Whether the first bad record ends the reading.
#[derive(Clone, Copy, Debug)]
pub struct Strict(pub bool);

/// The reason why a command that reads logs failed.
#[derive(Debug)]
pub enum Trouble {
    /// It could not run: exit status 2 and no output.
    Refused(String),
    /// It ran and found a problem: exit status 1 and a report.
    Found(String),
}

impl Trouble {
    /// Returns the message.
    pub fn into_line(self) -> String {
        match self {
            Self::Refused(line) | Self::Found(line) => line,
        }
    }
}

/// A log that can be read any number of times.
///
/// A pipe can be read once, so the first pass copies it to an unnamed file, which all passes then read.
pub struct Input<'a> {
    path: &'a Path,
    format: Option<LogFormat>,
    strict: Strict,
    is_read_once: bool,
    copy: OnceCell<Arc<File>>,
    is_snapshot: Cell<bool>,
    /// The number of passes so far.
    passes: Arc<AtomicU64>,
}

impl<'a> Input<'a> {
    /// Names a log, with its format if that is known. `-` is standard input.
    pub fn new(path: &'a Path, format: Option<LogFormat>, strict: Strict) -> Self {
        Self {
            path,
            format,
            strict,
            is_read_once: false,
            copy: OnceCell::new(),
            is_snapshot: Cell::new(false),
            passes: Arc::default(),
        }
    }

    /// Concatenates several logs, such as those of a run's processes, under the display name `name`. Each must be an xtrace file.
    pub fn joined(name: &'a Path, paths: &[PathBuf], strict: Strict) -> Result<Self, String> {
        let whole = tempfile::tempfile().map_err(|error| format!("a temporary file: {error}"))?;
        for path in paths {
            let refuse = |reason: String| format!("{}: {reason}", path.display());
            let mut file =
                File::open(path).map_err(|error| refuse(format!("opening the log: {error}")))?;
            let mut head = [0; XTRACE.len()];
            let begun = file.read_exact(&mut head).is_ok() && head == XTRACE;
            if !begun {
                return Err(refuse(
                    "it is not an xtrace log; of several logs each must be one, see xlogmem convert".to_owned(),
                ));
            }
            let copied =
                (&whole).write_all(&head).and_then(|()| std::io::copy(&mut file, &mut &whole));
            copied
                .map_err(|error| refuse(format!("copying the log to a temporary file: {error}")))?;
        }
        let input = Self::new(name, Some(LogFormat::Xtrace), strict);
        let _ = input.copy.set(Arc::new(whole));
        Ok(input)
    }

    /// Returns the log as the user named it.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Declares that the log is read once, so a pipe needs no copy.
    pub fn once(mut self) -> Self {
        self.is_read_once = true;
        self
    }

    /// Returns the file to read and whether it is seekable.
    fn file(&self) -> Result<(Arc<File>, bool), TraceError> {
        if let Some(copy) = self.copy.get() {
            return Ok((Arc::clone(copy), true));
        }
        let path = if self.path == Path::new("-") { Path::new("/dev/stdin") } else { self.path };
        let mut file = File::open(path).map_err(blame("opening the log"))?;
        let metadata = file.metadata().map_err(blame("opening the log"))?;
        if metadata.is_dir() {
            return Err(blame("opening the log")(std::io::ErrorKind::IsADirectory.into()));
        }
        if metadata.is_file() {
            return self.without_snapshot(file);
        }
        if self.is_read_once && self.format != Some(LogFormat::Torch) {
            return Ok((Arc::new(file), false));
        }
        let mut copy = tempfile::tempfile().map_err(blame("creating a temporary file"))?;
        std::io::copy(&mut file, &mut copy)
            .map_err(blame("copying the log, which can be read once, to a temporary file"))?;
        let (copy, has_places) = self.without_snapshot(copy)?;
        Ok((Arc::clone(self.copy.get_or_init(|| copy)), has_places))
    }

    /// Returns a seekable file. A snapshot is replaced by the log converted from it.
    fn without_snapshot(&self, file: File) -> Result<(Arc<File>, bool), TraceError> {
        let mut head = [0; 2];
        let read = file.read_at(&mut head, 0).map_err(blame("reading the log"))?;
        let wanted = match self.format {
            None => looks_like_snapshot(head.get(..read).unwrap_or(&[])),
            Some(format) => format == LogFormat::Torch,
        };
        if !wanted {
            return Ok((Arc::new(file), true));
        }
        let file = Arc::new(file);
        let whole = Counted { file, has_places: true, read: Arc::default() };
        let mut bytes = Vec::new();
        whole
            .take(MAX_SNAPSHOT_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(blame("reading the snapshot"))?;
        let log = tempfile::tempfile().map_err(blame("creating a temporary file"))?;
        convert_torch_snapshot(&bytes, BufWriter::new(&log))?;
        self.is_snapshot.set(true);
        Ok((Arc::clone(self.copy.get_or_init(|| Arc::new(log))), true))
    }

    /// Opens the log at its beginning.
    pub fn open(&self) -> Result<Watched, TraceError> {
        let (file, has_places) = self.file()?;
        let total = file.metadata().map_or(0, |metadata| metadata.len());
        let read = Arc::new(AtomicU64::new(0));
        let counted = Counted { file, has_places, read: Arc::clone(&read) };
        let stream = BufReader::with_capacity(1 << 18, counted);
        let strictness = if self.strict.0 { Strictness::Strict } else { Strictness::Lenient };
        let reader = match self.format.and_then(LogFormat::log) {
            Some(format) => Reader::with_format(format, stream, strictness)?,
            None => Reader::from_stream(stream, strictness)?,
        };
        let written = std::io::stderr().is_terminal().then(Instant::now);
        let format = match self.is_snapshot.get() {
            true => LogFormat::Torch,
            false => LogFormat::from(reader.format()),
        };
        let (name, passes) = (self.path.display().to_string(), Arc::clone(&self.passes));
        Ok(Watched { reader, format, read, total, records: 0, written, shown: false, name, passes })
    }

    /// Opens the log at its beginning; any failure is [`Trouble::Refused`].
    pub fn begin(&self) -> Result<Watched, Trouble> {
        self.open().map_err(|error| Trouble::Refused(format!("{}: {error}", self.path.display())))
    }

    /// Checks a log that was read to its end. It is refused if no record is good and the log is damaged or truncated. A strict
    /// reader reports an incomplete log as found.
    pub fn check(&self, report: &ReadReport) -> Result<(), Trouble> {
        let log = self.path.display();
        match &report.first_bad {
            Some(bad) if report.records == 0 => {
                let line = format!("{log}: no record of it is good, the first bad place is {bad}");
                return Err(Trouble::Refused(line));
            }
            None if report.records == 0 && report.truncated => {
                let line =
                    format!("{log}: no record of it is good, it is cut off before the first");
                return Err(Trouble::Refused(line));
            }
            _ => {}
        }
        let refusal = ReadingReport::new(report).refusal(&log.to_string());
        match refusal.filter(|_| self.strict.0) {
            Some(line) => Err(Trouble::Found(line)),
            None => Ok(()),
        }
    }

    /// Names the file in an error while reading. For a strict reader, a bad record is a finding.
    pub fn blame(&self, error: &TraceError) -> Trouble {
        let line = format!("{}: {error}", self.path.display());
        match error {
            TraceError::Bad(_) if self.strict.0 => Trouble::Found(line),
            _ => Trouble::Refused(line),
        }
    }
}

/// Names the step that failed.
fn blame(context: &'static str) -> impl FnOnce(std::io::Error) -> TraceError {
    move |source| TraceError::Io { context: context.to_owned(), source }
}

struct Counted {
    file: Arc<File>,
    /// Whether reads are positioned, so that several passes share the file.
    has_places: bool,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let bytes = match self.has_places {
            true => self.file.read_at(buffer, self.read.load(Ordering::Relaxed))?,
            false => (&*self.file).read(buffer)?,
        };
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// A reader that shows its progress on a terminal.
pub struct Watched {
    reader: Reader,
    format: LogFormat,
    read: Arc<AtomicU64>,
    total: u64,
    records: u64,
    /// When the progress was last shown; `None` without a terminal.
    written: Option<Instant>,
    shown: bool,
    name: String,
    passes: Arc<AtomicU64>,
}

impl Watched {
    /// Returns the format of the log.
    pub fn format(&self) -> LogFormat {
        self.format
    }

    #[cold]
    fn report_progress(&mut self) {
        let Some(written) = &mut self.written else { return };
        if written.elapsed() >= EVERY {
            *written = Instant::now();
            self.shown = true;
            let read = self.read.load(Ordering::Relaxed);
            let percent = (read * 100).checked_div(self.total).unwrap_or(100).min(100);
            let name = escape::line(&self.name);
            let pass = match self.passes.load(Ordering::Relaxed) {
                0 | 1 => String::new(),
                pass => format!(" again (pass {pass})"),
            };
            // A closed terminal must not end the command.
            let _ = write!(
                std::io::stderr(),
                "\rreading {name}{pass}: {} records, {percent} %\x1b[K",
                self.records
            );
        }
    }
}

impl Source for Watched {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        if self.records == 0 {
            self.passes.fetch_add(1, Ordering::Relaxed);
        }
        self.records += 1;
        if self.records.is_multiple_of(PROGRESS_STEP) {
            self.report_progress();
        }
        self.reader.next_record()
    }

    fn state(&self) -> &LogState {
        self.reader.state()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// The counts and faults of reading a log, as they appear in JSON.
#[derive(Serialize, Clone, Debug)]
pub struct ReadingReport {
    /// Good records.
    pub records: u64,
    /// Faults: lines, or ranges of bytes.
    pub skipped: u64,
    /// The first fault: its line or byte, and what was expected.
    pub first_bad: Option<String>,
    /// The file ends inside a record.
    pub cut_off: bool,
    /// The writer did not close the log, so later records may be missing. Always false for text formats.
    pub not_closed: bool,
    /// Records that the writer reports as dropped.
    pub dropped_by_writer: u64,
    /// No sign of missing records was found.
    pub complete: bool,
    /// The reason why records are or may be missing; `null` for a complete log.
    pub incomplete: Option<String>,
}

impl ReadingReport {
    /// Copies the counts and faults so far.
    pub fn new(report: &ReadReport) -> Self {
        Self {
            records: report.records,
            skipped: report.skipped,
            first_bad: report.first_bad.as_ref().map(ToString::to_string),
            cut_off: report.truncated,
            not_closed: report.unclosed,
            dropped_by_writer: report.dropped_at_source,
            complete: !report.is_incomplete(),
            incomplete: Self::missing(report),
        }
    }

    /// Adds its lines to a text.
    pub fn render(&self, page: &mut TextReport) {
        page.line("good records", &self.records.to_string());
        page.line("bad places skipped", &self.skipped.to_string());
        if let Some(bad) = &self.first_bad {
            page.line("first bad place", bad);
        }
        if self.cut_off {
            page.line("end", "cut off in the middle of a record");
        } else if self.not_closed {
            page.line("end", "not closed by its writer; records after these may be missing");
        }
        if self.dropped_by_writer > 0 {
            page.line("dropped by writer", &self.dropped_by_writer.to_string());
        }
    }
}
