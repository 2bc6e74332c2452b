//! The listener thread of a runtime: returns cached memory when another process requests it, and publishes what the runtime holds.
//!
//! The thread waits on a word of the ledger's mapping. It exists while the runtime holds memory of the device: the first physical byte
//! starts it, and it ends when there is none. Allocations do no work for it.
//!
//! Invariant: while the listener runs, the slot is published and every request is answered. So the thread that takes the first byte
//! publishes before it starts the listener, and the listener withdraws only if there is no memory.
//!
//! - *Request*: it trims what has completed, publishes what is left, and answers. It announces memory whose work is still running, so
//!   that the other process asks again.
//! - *Otherwise* it publishes cached and pending bytes once a second, and the largest tags as well while a viewer watches.
//!
//! Published figures are for display. If the thread cannot start, other processes do not wait for this one.

use std::sync::{Arc, Weak};
use std::time::Duration;

use xlog_base::debug_fields;
use xlog_ledger::{AskListener, Heard, Ledger};

use super::background_thread::BackgroundThread;
use super::report::catch_panic;
use crate::device_runtime::budget::BudgetHandle;
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::Statistics;

/// The interval of publications while a viewer watches.
const WATCHED: Duration = Duration::from_millis(200);
/// The interval of publications otherwise.
const UNWATCHED: Duration = Duration::from_secs(1);
/// The maximum number of published tags.
const MAX_TAGS: usize = 8;

/// The listener of one runtime. It runs until [`Listener::end`], at most until the process ends.
pub(crate) struct Listener {
    ledger: Arc<Ledger>,
    resource: Weak<dyn DeviceMemoryResource + Send + Sync>,
    budget: BudgetHandle,
    statistics: Statistics,
    thread: BackgroundThread,
}

impl Listener {
    pub(super) fn new(
        ledger: Arc<Ledger>,
        resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
        budget: BudgetHandle,
        statistics: Statistics,
    ) -> Self {
        Self {
            ledger,
            resource: Arc::downgrade(resource),
            budget,
            statistics,
            thread: BackgroundThread::new("xlog-ledger"),
        }
    }

    /// Starts the thread, unless it runs.
    #[inline]
    pub(crate) fn start(self: &Arc<Self>) {
        if !self.thread.is_running() {
            self.start_thread();
        }
    }

    #[cold]
    fn start_thread(self: &Arc<Self>) {
        let prepare = || {
            let listener = self.clone();
            let asks = AskListener::new(self.ledger.clone());
            self.ledger.publish_memory(0, 0);
            move || listener.listen(asks)
        };
        self.thread.start(prepare, || self.ledger.withdraw_memory());
    }

    /// Ends the thread, and waits for its end. The listener neither trims nor publishes afterwards.
    pub(super) fn end(&self) {
        self.thread.end(|| self.ledger.wake_listeners());
    }

    fn listen(&self, mut asks: AskListener<Arc<Ledger>>) {
        let has_memory = || self.ledger.used() > 0;
        let is_over = || self.thread.is_over() || !has_memory();
        let mut interval = Duration::ZERO;
        loop {
            match asks.wait(interval, is_over) {
                Heard::Ask => asks.answer(self.return_cached()),
                Heard::Closed => return self.thread.stop(),
                _ if is_over() => {
                    if self.thread.stop_unless(has_memory, || self.ledger.withdraw_memory()) {
                        return;
                    }
                }
                _ => interval = self.publish(),
            }
        }
    }

    /// Returns cached memory to the device. Returns whether more can be returned once work on streams has completed.
    fn return_cached(&self) -> bool {
        let Some(resource) = self.resource.upgrade() else { return false };
        let returned = catch_panic(|| {
            // The user's next reap retries a failed free, and returns its error.
            let _ = resource.reap_completed();
            let _ = resource.trim_under_pressure();
            let held = resource.memory_use().unwrap_or_default();
            self.ledger.publish_memory(held.cached as u64, held.pending as u64);
            held.pending > 0
        });
        returned.unwrap_or(false)
    }

    /// Publishes what the runtime holds. Returns the time until the next publication.
    fn publish(&self) -> Duration {
        let Some(resource) = self.resource.upgrade() else { return UNWATCHED };
        // Not `memory_use`, which scans every free range. No driver call either: the process may be ending.
        if let Some(outstanding) = catch_panic(|| resource.bytes_outstanding()) {
            let cached = self.ledger.used().saturating_sub(outstanding as u64);
            self.ledger.publish_memory(cached, self.budget.pending_bytes() as u64);
        }
        if !self.ledger.is_watched() {
            return UNWATCHED;
        }
        let by_tag = self.statistics.snapshot().by_tag;
        let largest = by_tag.iter().take(MAX_TAGS);
        self.ledger.publish_tags(largest.map(|(tag, usage)| (tag.0, usage.current_bytes as u64)));
        WATCHED
    }
}

debug_fields!(self: Listener { thread: self.thread, .. });
