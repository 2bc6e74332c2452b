//! The thread that returns idle memory to the device.
//!
//! It calls [`DeviceMemoryResource::return_idle`] several times within the resource's decay time. It exists while the resource
//! holds memory of the device: the first memory starts it, and it ends when there is none. Allocations and frees do no work for
//! it. A device with a seeded scheduler has no such thread, so that its programs replay.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::background_thread::BackgroundThread;
use super::report::catch_panic;
use crate::device_runtime::resource::DeviceMemoryResource;

/// The thread of one runtime. It runs until [`IdleReturns::end`], at most until the process ends.
#[derive(Debug)]
pub(super) struct IdleReturns {
    resource: Weak<dyn DeviceMemoryResource + Send + Sync>,
    thread: BackgroundThread,
}

impl IdleReturns {
    /// Starts the thread at the first growth of `resource`; `None` if the resource keeps idle memory.
    pub(super) fn begin(
        resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
    ) -> Option<Arc<Self>> {
        let thread = BackgroundThread::new("xlog-idle");
        let this = Arc::new(Self { resource: Arc::downgrade(resource), thread });
        let started = Arc::downgrade(&this);
        let on_growth = Arc::new(move |interval| {
            let this = started.upgrade();
            this.iter().for_each(|this| this.start(interval));
            this.is_some()
        });
        resource.on_growth(on_growth).then_some(this)
    }

    /// Starts the thread, unless it runs. Without a thread the memory stays until a reap or a trim.
    fn start(self: &Arc<Self>, interval: Duration) {
        let prepare = || {
            let this = Arc::clone(self);
            move || this.run(interval)
        };
        self.thread.start(prepare, || ());
    }

    /// Ends the thread, and waits for its end.
    pub(super) fn end(&self) {
        self.thread.end(|| ());
    }

    fn run(&self, interval: Duration) {
        // The resource may end on this thread, so nothing here keeps it beyond one return.
        let physical_bytes = || self.resource.upgrade().and_then(|it| it.physical_bytes());
        while self.thread.sleep(interval) {
            let Some(resource) = self.resource.upgrade() else { return };
            // A failed return is retried; a later trim returns the error.
            let _ = catch_panic(|| resource.return_idle(Instant::now()));
            drop(resource);
            let holds_memory = || physical_bytes() != Some(0);
            if !holds_memory() && self.thread.stop_unless(holds_memory, || ()) {
                return;
            }
        }
    }
}
