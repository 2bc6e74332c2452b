//! A gate that a test cannot hang on.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use xlog_cuda::Gate;

/// Longer than any honest call on a loaded machine.
const LIMIT: Duration = Duration::from_secs(240);

/// A gate with a watchdog: if a call waits for the held stream, the gate opens after four minutes and
/// [`WatchedGate::release`] fails the test.
#[derive(Debug)]
#[must_use = "dropping the gate releases the stream at once"]
pub struct WatchedGate {
    open: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<bool>>,
}

/// Runs what must not wait for a held stream, and says by name which call did.
///
/// # Panics
/// When it took so long that only the watchdog of a [`WatchedGate`] can have let it go on.
pub fn promptly<T>(call: &str, body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = body();
    let took = start.elapsed();
    assert!(took < LIMIT / 2, "{call} took {took:?}: it waits for a held stream");
    done
}

impl WatchedGate {
    /// Watches over `gate`.
    pub fn new(gate: Gate) -> Self {
        let (open, opened) = mpsc::channel::<()>();
        let watchdog = std::thread::spawn(move || {
            let late = opened.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout);
            gate.release();
            late
        });
        Self { open: Some(open), watchdog: Some(watchdog) }
    }

    /// Lets the stream go on.
    ///
    /// # Panics
    /// When the watchdog had to do so before.
    pub fn release(mut self) {
        let late = self.finish();
        assert!(!late, "a call waited {LIMIT:?} for a held stream before it returned");
    }

    fn finish(&mut self) -> bool {
        drop(self.open.take());
        self.watchdog.take().is_some_and(|watchdog| watchdog.join().unwrap_or(true))
    }
}

impl Drop for WatchedGate {
    fn drop(&mut self) {
        self.finish();
    }
}
