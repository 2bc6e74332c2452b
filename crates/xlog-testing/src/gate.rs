//! A gate with a watchdog, so that a test cannot hang on it.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use xlog_cuda::Gate;

/// Longer than any correct call on a loaded machine.
const LIMIT: Duration = Duration::from_secs(240);

/// A gate that opens by itself after four minutes if a call waits for the held stream. [`WatchedGate::release`] then fails the test.
#[derive(Debug)]
#[must_use = "dropping the gate releases the stream at once"]
pub struct WatchedGate {
    open: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<bool>>,
}

/// Runs a call that must not wait for a held stream.
///
/// # Panics
/// If the call took so long that a watchdog must have released a stream; the message names `call`.
pub fn promptly<T>(call: &str, body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = body();
    let took = start.elapsed();
    assert!(took < LIMIT / 2, "{call} took {took:?}: it waits for a held stream");
    done
}

impl WatchedGate {
    /// Starts a watchdog for `gate`.
    pub fn new(gate: Gate) -> Self {
        let (open, opened) = mpsc::channel::<()>();
        let watchdog = std::thread::spawn(move || {
            let late = opened.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout);
            gate.release();
            late
        });
        Self { open: Some(open), watchdog: Some(watchdog) }
    }

    /// Releases the stream.
    ///
    /// # Panics
    /// If the watchdog released it before.
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
