//! The progress of a run, on one line of a terminal.
//!
//! Nothing is written if standard error is not a terminal. Workers report progress directly and never wait for each other.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use xlog_base::Mutex;

const EVERY: Duration = Duration::from_millis(100);

/// A progress line that is overwritten in place.
pub(super) struct Progress {
    /// The phase of the run.
    pass: &'static str,
    what: &'static str,
    total: u32,
    done: AtomicU32,
    /// When the line was last written; `None` without a terminal.
    written: Option<Mutex<Instant>>,
}

impl Progress {
    /// Starts counting `total` of `what` in a phase.
    pub(super) fn new(pass: &'static str, what: &'static str, total: u32) -> Self {
        let written = std::io::stderr().is_terminal().then(|| Mutex::new(Instant::now()));
        Self { pass, what, total, done: AtomicU32::new(0), written }
    }

    /// Counts one more.
    pub(super) fn step(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(mut written) = self.written.as_ref().and_then(Mutex::try_lock) else {
            return;
        };
        if written.elapsed() >= EVERY {
            *written = Instant::now();
            // A closed terminal must not end the run.
            let Self { pass, what, total, .. } = self;
            let _ = write!(std::io::stderr(), "\r{pass}: {done} of {total} {what}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.written.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
