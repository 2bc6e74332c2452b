//! Writes a log from a running program: emitting copies a record into the thread's ring, and a writer thread writes it.
//!
//! Emitting threads share no lock, format nothing and, after a thread's first record, allocate nothing. Emitting never
//! fails: a record that finds no space or cannot be written is counted. A kill loses at most the records of the last
//! [`RecorderConfig::write_interval`]; earlier ones are in the kernel, and the file ends at a record. Files are not
//! synced to disk, so a power failure may lose more.

mod config;
mod exit;
mod intern;
mod lock;
mod output;
mod rings;
mod sampled;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::TraceError;
use crate::record::{Fields, Record};

pub use config::{OnError, Overflow, RecorderConfig};
pub use exit::at_exit;
pub use intern::{intern, intern_site, intern_text};
pub use output::check_writable;
pub use sampled::{capture_stack, record_stack, resolve_stacks, stack_frames};

use output::Output;
use rings::{Placed, RecorderShared};
use writer::Writer;

/// How long a flush at exit or on panic waits for the writer.
const LAST_FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Counts of a recorder. They are exact after the emitting threads have ended and a flush has returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecorderStats {
    /// Records passed to the operating system.
    pub written: u64,
    /// Records that found their ring full, or no ring because their thread was ending.
    pub dropped_overflow: u64,
    /// Records that could not be written.
    pub dropped_io: u64,
    /// Records that the format cannot represent.
    pub left_out: u64,
    /// Failed attempts to open, rotate or write.
    pub io_errors: u64,
    /// Existing rings, in use or idle.
    pub rings: usize,
}

/// A log being written. Dropping it writes the remaining records and closes the file.
#[must_use = "dropping a recorder closes its log"]
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<RecorderShared>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Creates the file, replacing an existing one, and starts the writer.
    ///
    /// A file that another recorder writes is [`TraceError::InUse`] and stays unchanged.
    pub fn create(path: impl AsRef<Path>, config: RecorderConfig) -> Result<Self, TraceError> {
        config.check()?;
        let output = Output::create(path.as_ref(), &config)?;
        let shared = Arc::new(RecorderShared::new(&config));
        let writer = Writer::new(Arc::clone(&shared), output, &config);
        let thread = std::thread::Builder::new()
            .name("xlog-trace".to_owned())
            .spawn(move || writer.run())
            .map_err(TraceError::io(format!(
                "starting the writer of {}",
                path.as_ref().display()
            )))?;
        shared.set_writer(thread.thread().clone());
        exit::watch(&shared);
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Adds a record. Its process is this one unless it names another.
    ///
    /// Under [`Overflow::Drop`] it never waits. Under [`Overflow::Block`] it waits for space up to the configured limit.
    #[inline]
    pub fn emit(&self, mut record: Record) {
        if record.process == 0 {
            record.process = self.shared.process;
        }
        match self.shared.place(record) {
            Placed::Yes => {}
            Placed::Full => self.shared.overflowed(record),
            Placed::NoRing => self.shared.count_unplaced(),
        }
    }

    /// [`Recorder::emit`] for a record constructed in the ring, which saves a copy. Its process must be set.
    #[inline(always)]
    pub fn emit_fields(&self, fields: Fields) {
        match self.shared.place_fields(&fields) {
            Placed::Yes => {}
            Placed::Full => self.shared.overflowed(Record::from_fields(fields)),
            Placed::NoRing => self.shared.count_unplaced(),
        }
    }

    /// Waits until all records emitted before are in the file or counted as lost.
    ///
    /// Returns an error if the last write failed, or if this process is a fork of the file's writer. The records of such
    /// a fork are counted as dropped.
    pub fn flush(&self) -> Result<(), TraceError> {
        self.shared.flush(None);
        self.shared.last_error()
    }

    /// Returns the number of emitted records that are not, and will not be, in a file.
    pub fn dropped_records(&self) -> u64 {
        let stats = self.stats();
        stats.dropped_overflow + stats.dropped_io
    }

    /// Returns the counts so far.
    pub fn stats(&self) -> RecorderStats {
        self.shared.stats()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take().filter(|_| !self.shared.is_elsewhere()) {
            // A writer that panicked has nothing left to report.
            let _ = thread.join();
        }
    }
}
