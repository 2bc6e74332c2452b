//! The thread that returns idle memory to the device.
//!
//! It calls [`DeviceMemoryResource::return_idle`] several times within the resource's decay time. It exists while the resource holds
//! memory of the device: growth starts it, and it ends when there is none. Allocations and frees do no work for it. A device with a
//! seeded scheduler has no such thread, so that its programs replay.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::report::catch_panic;
use crate::device_runtime::resource::DeviceMemoryResource;

/// The thread of one runtime. It runs until [`IdleReturns::end`], at most until the process ends.
pub(super) struct IdleReturns {
    resource: Weak<dyn DeviceMemoryResource + Send + Sync>,
    /// The process that started it: a forked child does not have the thread.
    process: u32,
    is_running: AtomicBool,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    is_over: bool,
    thread: Option<JoinHandle<()>>,
}

impl IdleReturns {
    /// Starts the thread at the first growth of `resource`; `None` if the resource keeps idle memory.
    pub(super) fn begin(
        resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
    ) -> Option<Arc<Self>> {
        let this = Arc::new(Self {
            resource: Arc::downgrade(resource),
            process: std::process::id(),
            is_running: AtomicBool::new(false),
            state: Mutex::default(),
            over: Condvar::new(),
        });
        let started = Arc::downgrade(&this);
        let on_growth = Arc::new(move |interval| {
            if let Some(this) = started.upgrade() {
                this.start(interval);
            }
        });
        resource.on_growth(on_growth).then_some(this)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread, unless it runs. Without a thread the memory stays until a reap or a trim.
    fn start(self: &Arc<Self>, interval: Duration) {
        if self.is_running.load(Ordering::SeqCst) || std::process::id() != self.process {
            return;
        }
        let mut state = self.state();
        if state.is_over || self.is_running.swap(true, Ordering::SeqCst) {
            return;
        }
        let this = Arc::clone(self);
        let named = thread::Builder::new().name("xlog-idle".to_owned());
        state.thread = named.spawn(move || this.run(interval)).ok();
        if state.thread.is_none() {
            self.is_running.store(false, Ordering::SeqCst);
        }
    }

    /// Ends the thread, and waits for its end.
    pub(super) fn end(&self) {
        // In a forked child the lock may be held for ever.
        if std::process::id() != self.process {
            return;
        }
        let mut state = self.state();
        state.is_over = true;
        let thread = state.thread.take();
        drop(state);
        self.over.notify_all();
        // The runtime may end on this thread.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id())
        {
            let _ = thread.join();
        }
    }

    fn run(&self, interval: Duration) {
        loop {
            let state = self.state();
            let waited = self.over.wait_timeout_while(state, interval, |state| !state.is_over);
            let is_over = waited.map_or(true, |(state, _)| state.is_over);
            let Some(resource) = self.resource.upgrade().filter(|_| !is_over) else { return };
            // A failed return is retried; a later trim returns the error.
            let _ = catch_panic(|| resource.return_idle(Instant::now()));
            if resource.physical_bytes() == Some(0) {
                self.is_running.store(false, Ordering::SeqCst);
                // Growth before the store has not started another thread.
                if resource.physical_bytes() == Some(0)
                    || self.is_running.swap(true, Ordering::SeqCst)
                {
                    return;
                }
            }
        }
    }
}

impl std::fmt::Debug for IdleReturns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_running = self.is_running.load(Ordering::Relaxed);
        f.debug_struct("IdleReturns").field("is_running", &is_running).finish_non_exhaustive()
    }
}
