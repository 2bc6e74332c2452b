//! Events, used again once they completed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use xlog_driver::sync::Mutex;
use xlog_driver::{Driver, DriverResult, EventHandle};

/// Spare events of one device.
#[derive(Debug)]
pub(crate) struct EventPool {
    driver: Arc<dyn Driver>,
    spare: Mutex<Vec<EventHandle>>,
}

/// More spare events than this are destroyed.
const KEEP: usize = 1024;

impl EventPool {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self { driver, spare: Mutex::new(Vec::new()) })
    }

    /// An event that nobody uses.
    pub(crate) fn take(self: &Arc<Self>) -> DriverResult<Arc<PooledEvent>> {
        let spare = self.spare.lock().pop();
        let handle = match spare {
            Some(handle) => handle,
            None => self.driver.event_create()?,
        };
        Ok(Arc::new(PooledEvent {
            handle,
            pool: Arc::downgrade(self),
            driver: Arc::clone(&self.driver),
            complete: AtomicBool::new(false),
        }))
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        for handle in self.spare.lock().drain(..) {
            // A lost device has taken its events with it.
            let _ = self.driver.event_destroy(handle);
        }
    }
}

/// An event while somebody needs it. It goes back to the pool only if its record is known to have completed: an event is not
/// recorded again before that.
#[derive(Debug)]
pub(crate) struct PooledEvent {
    handle: EventHandle,
    pool: Weak<EventPool>,
    driver: Arc<dyn Driver>,
    complete: AtomicBool,
}

impl PooledEvent {
    pub(crate) fn handle(&self) -> EventHandle {
        self.handle
    }

    /// True when the record has completed. An event that cannot be asked has not.
    pub(crate) fn is_complete(&self) -> bool {
        if self.complete.load(Ordering::Acquire) {
            return true;
        }
        let complete = matches!(self.driver.event_query(self.handle), Ok(true));
        if complete {
            self.complete.store(true, Ordering::Release);
        }
        complete
    }

    /// Waits until the record has completed.
    pub(crate) fn synchronize(&self) -> DriverResult<()> {
        self.driver.event_synchronize(self.handle)?;
        self.complete.store(true, Ordering::Release);
        Ok(())
    }

    /// It is known from elsewhere that the record has completed, or none was made.
    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if self.complete.load(Ordering::Acquire)
            && let Some(pool) = self.pool.upgrade()
        {
            let mut spare = pool.spare.lock();
            if spare.len() < KEEP {
                spare.push(self.handle);
                return;
            }
        }
        let _ = self.driver.event_destroy(self.handle);
    }
}
