//! How far a run is, on one line of a terminal.
//!
//! Nothing is written when standard error is not a terminal. Workers report from where they are and never wait for each other.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use xlog_base::Mutex;

const EVERY: Duration = Duration::from_millis(100);

/// One line that is written over.
pub(super) struct Progress {
    /// The pass of the run that is counted.
    pass: &'static str,
    what: &'static str,
    total: u32,
    done: AtomicU32,
    /// When the line was last written; `None` where there is no terminal.
    written: Option<Mutex<Instant>>,
}

impl Progress {
    /// Counts `total` of `what` in a pass.
    pub(super) fn new(pass: &'static str, what: &'static str, total: u32) -> Self {
        let written = std::io::stderr().is_terminal().then(|| Mutex::new(Instant::now()));
        Self { pass, what, total, done: AtomicU32::new(0), written }
    }

    /// One more is done.
    pub(super) fn step(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(mut written) = self.written.as_ref().and_then(Mutex::try_lock) else {
            return;
        };
        if written.elapsed() >= EVERY {
            *written = Instant::now();
            // A terminal that is gone is no reason to stop.
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
