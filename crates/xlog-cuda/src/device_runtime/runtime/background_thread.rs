//! A background thread of a runtime. It exists while there is work for it.
//!
//! The thread that creates work starts it, it stops by itself when no work is left, and the end of the runtime joins it.
//!
//! Invariants:
//! - At most one thread works. A thread that has stopped only calls the `stopped` of [`BackgroundThread::stop_unless`] and returns.
//! - No work stays without a thread. Work is created before [`BackgroundThread::start`] reads `is_running`, and the background thread
//!   looks for work after it has cleared `is_running`. So either it continues, or the other thread starts a new one.
//! - A forked child does not have the thread, and never waits for it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use xlog_base::Mutex;

/// The life cycle of a thread that is started on demand, under one name.
pub(super) struct BackgroundThread {
    name: &'static str,
    /// The process that starts it.
    process: u32,
    is_over: AtomicBool,
    is_running: AtomicBool,
    /// The threads that have not ended: the one that runs, and those that have stopped and still return. Locked during each start
    /// and each stop.
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl BackgroundThread {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            process: std::process::id(),
            is_over: AtomicBool::new(false),
            is_running: AtomicBool::new(false),
            handles: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::SeqCst)
    }

    /// Returns whether the thread must stop for good.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Starts the thread, unless it runs: calls `prepare` and runs the result. Calls `undo` if no thread can be created.
    pub(super) fn start<F: FnOnce() + Send + 'static>(
        &self,
        prepare: impl FnOnce() -> F,
        undo: impl FnOnce(),
    ) {
        // In a forked child the lock may be held for ever.
        if self.is_running() || std::process::id() != self.process {
            return;
        }
        let mut handles = self.handles.lock();
        if self.is_over() || self.is_running.swap(true, Ordering::SeqCst) {
            return;
        }
        let body = prepare();
        match thread::Builder::new().name(self.name.to_owned()).spawn(body) {
            Ok(handle) => {
                handles.retain(|handle| !handle.is_finished());
                handles.push(handle);
            }
            Err(_) => {
                undo();
                self.is_running.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Stops the calling background thread.
    pub(super) fn stop(&self) {
        self.is_running.store(false, Ordering::SeqCst);
    }

    /// Stops the calling background thread, unless `has_work`. Returns whether it must return. If no other thread was started meanwhile,
    /// `stopped` is called before another one can start.
    pub(super) fn stop_unless(
        &self,
        has_work: impl FnOnce() -> bool,
        stopped: impl FnOnce(),
    ) -> bool {
        self.stop();
        if !self.is_over() && has_work() && !self.is_running.swap(true, Ordering::SeqCst) {
            return false;
        }
        let _starting = self.handles.lock();
        if !self.is_running() {
            stopped();
        }
        true
    }

    /// Sleeps on the background thread for `time`, or until the end. Returns false at the end.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        let began = Instant::now();
        while !self.is_over() {
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                return true;
            }
            thread::park_timeout(left);
        }
        false
    }

    /// Ends the thread for good, and waits for the end of all that were started. `wake` interrupts its waits other than [`Self::sleep`].
    pub(super) fn end(&self, wake: impl FnOnce()) {
        self.is_over.store(true, Ordering::SeqCst);
        if std::process::id() != self.process {
            return;
        }
        let handles = std::mem::take(&mut *self.handles.lock());
        if handles.is_empty() {
            return;
        }
        wake();
        for handle in handles {
            handle.thread().unpark();
            // The runtime may end on this thread.
            if handle.thread().id() != thread::current().id() {
                let _ = handle.join();
            }
        }
    }
}

impl fmt::Debug for BackgroundThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_running = self.is_running.load(Ordering::Relaxed);
        let mut shown = f.debug_struct("BackgroundThread");
        shown.field("name", &self.name).field("is_running", &is_running).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(120);

    fn no_thread() {
        panic!("no thread can be created");
    }

    /// Runs `body` on a new background thread, and returns its result once that thread has ended.
    fn on_thread<T: Send + 'static>(
        body: impl FnOnce(&Arc<BackgroundThread>) -> T + Send + 'static,
    ) -> (Arc<BackgroundThread>, T) {
        let thread = Arc::new(BackgroundThread::new("test"));
        let (sent, received) = channel();
        let own = thread.clone();
        thread.start(|| move || sent.send(body(&own)).unwrap(), no_thread);
        let result = received.recv_timeout(TIMEOUT).unwrap();
        (thread, result)
    }

    #[test]
    fn work_added_before_the_thread_stops_keeps_it() {
        let (thread, (returns, was_stopped)) = on_thread(|thread| {
            // Another thread adds work and finds this one running.
            thread.start(|| || unreachable!("it runs"), no_thread);
            let mut was_stopped = false;
            (thread.stop_unless(|| true, || was_stopped = true), was_stopped)
        });
        assert_eq!((returns, was_stopped, thread.is_running()), (false, false, true));
        thread.end(|| ());
    }

    #[test]
    fn a_thread_started_during_a_stop_replaces_the_one_that_stops() {
        let (work, worked) = channel();
        let (thread, (returns, was_stopped)) = on_thread(move |thread| {
            let start = || thread.start(|| move || work.send(()).unwrap(), no_thread);
            let has_work = || {
                start();
                true
            };
            let mut was_stopped = false;
            (thread.stop_unless(has_work, || was_stopped = true), was_stopped)
        });
        worked.recv_timeout(TIMEOUT).unwrap();
        assert_eq!((returns, was_stopped, thread.is_running()), (true, false, true));
        thread.end(|| ());
        assert_eq!(Arc::strong_count(&thread), 1, "a thread that was replaced was not joined");
    }

    #[test]
    fn a_thread_without_work_stops_and_is_started_again() {
        let (thread, (returns, was_stopped)) = on_thread(|thread| {
            let mut was_stopped = false;
            (thread.stop_unless(|| false, || was_stopped = true), was_stopped)
        });
        assert_eq!((returns, was_stopped, thread.is_running()), (true, true, false));
        let (work, worked) = channel();
        thread.start(|| move || work.send(()).unwrap(), no_thread);
        worked.recv_timeout(TIMEOUT).unwrap();
        thread.end(|| ());
    }

    #[test]
    fn the_end_interrupts_a_sleep_joins_and_allows_no_start() {
        let thread = Arc::new(BackgroundThread::new("test"));
        let (ended, end) = channel();
        let own = thread.clone();
        let body = move || ended.send(own.sleep(TIMEOUT)).unwrap();
        thread.start(|| body, no_thread);
        thread.end(|| ());
        assert_eq!(end.try_recv(), Ok(false), "it slept to the end, or was not joined");
        thread.start(|| || unreachable!("it has ended"), no_thread);
    }
}
