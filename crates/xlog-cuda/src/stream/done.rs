//! Completion of a stream's work as a future, for any executor.
//!
//! [`DeviceStream::done`] records an event, and the future polls it. One thread of this library polls the events of pending
//! futures and wakes their tasks; it starts with the first wait and blocks while there is none. A host function would cost
//! stream time, and is not called after an error. On a device with a seeded schedule work advances only in driver calls, so
//! the future wakes its own task there, and each poll is such a call.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use xlog_base::Mutex;
use xlog_driver::EventHandle;

use super::{DeviceStream, RawStream};
use crate::Result;
use crate::device_runtime::runtime::catch_panic;
use crate::device_wait::Backoff;

/// Completion of all work queued on a stream before [`DeviceStream::done`]. Dropping it cancels nothing on the device.
#[must_use = "the stream is not waited for unless this is awaited"]
pub struct StreamDone(Result<Arc<Wait>>);

struct Wait {
    stream: Arc<RawStream>,
    event: EventHandle,
    /// The stamp that the event covers, if this thread owned the clock.
    stamp: Option<u64>,
    task: Mutex<Task>,
}

#[derive(Default)]
struct Task {
    waker: Option<Waker>,
    /// Whether the thread polls the event.
    is_watched: bool,
}

impl DeviceStream {
    /// Returns a future of the completion of all work queued on this stream so far. Errors are those of
    /// [`DeviceStream::synchronize`].
    ///
    /// ```
    /// use xlog_cuda::prelude::*;
    ///
    /// # let executor = tokio::runtime::Builder::new_current_thread().build().unwrap();
    /// # executor.block_on(async {
    /// let runtime = XlogDeviceRuntime::open("sim")?;
    /// let stream = runtime.stream_pool().lease_async().await?; // waits for a stream if all are leased
    /// let memory = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(stream.id());
    /// let rows = memory.alloc_from(&[7_u32; 1024])?;
    /// stream.done().await?; // the task sleeps until the copy is done
    /// # drop(rows);
    /// # Ok::<(), XlogError>(())
    /// # })?;
    /// # Ok::<(), XlogError>(())
    /// ```
    pub fn done(&self) -> StreamDone {
        StreamDone(self.record_wait())
    }

    fn record_wait(&self) -> Result<Arc<Wait>> {
        let raw = &self.raw;
        let stamp = raw.clock().is_local().then(|| raw.clock().step());
        let event = self.host_access("done", |raw| raw.record_apart("done"))?;
        let wait = Wait { stream: raw.clone(), event, stamp, task: Mutex::new(Task::default()) };
        Ok(Arc::new(wait))
    }
}

impl Wait {
    /// Returns the outcome; `None` while work is pending.
    fn outcome(&self) -> Option<Result<()>> {
        let driver = self.stream.device.driver();
        match driver.event_query(self.event) {
            Ok(false) => None,
            // Complete, so it does not wait. It reports errors of the device.
            Ok(true) => {
                Some(driver.event_synchronize(self.event).map_err(Into::into).inspect(|()| {
                    if let Some(stamp) = self.stamp {
                        self.stream.clock().completed_up_to(stamp);
                    }
                }))
            }
            Err(error) => Some(Err(error.into())),
        }
    }

    /// Wakes the task if the wait is over. Returns false while it is pending and awaited.
    fn is_over(self: &Arc<Self>) -> bool {
        if Arc::strong_count(self) == 1 {
            return true; // the future was dropped
        }
        // A driver that panics would end the polling thread. The task polls again, and panics itself.
        let queried = catch_panic(|| self.stream.device.driver().event_query(self.event));
        if matches!(queried, Some(Ok(false))) {
            return false;
        }
        let waker = {
            let mut task = self.task.lock();
            task.is_watched = false;
            task.waker.take()
        };
        // The waker is code of an executor.
        catch_panic(|| waker.map(Waker::wake));
        true
    }
}

impl Future for StreamDone {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let wait = match &self.0 {
            Ok(wait) => wait,
            Err(error) => return Poll::Ready(Err(error.clone())),
        };
        if let Some(outcome) = wait.outcome() {
            return Poll::Ready(outcome);
        }
        let is_new = {
            let mut task = wait.task.lock();
            task.waker = Some(context.waker().clone());
            !std::mem::replace(&mut task.is_watched, true)
        };
        if wait.stream.device.is_seeded() || (is_new && !watch(wait)) {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        // Caught, because the polling thread may be the last owner.
        catch_panic(|| {
            #[allow(unsafe_code)]
            // SAFETY: created by `done`, and not used any more. A pending event may be destroyed.
            let _ = unsafe { self.stream.device.driver().event_destroy(self.event) };
        });
    }
}

/// Passes a wait to the polling thread. Returns false if there is no thread.
fn watch(wait: &Arc<Wait>) -> bool {
    static WATCHER: OnceLock<Option<Sender<Arc<Wait>>>> = OnceLock::new();
    let watcher = WATCHER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new().name("xlog-stream-waits".to_owned());
        thread.spawn(move || poll_waits(&receiver)).ok().map(|_| sender)
    });
    watcher.as_ref().is_some_and(|sender| sender.send(wait.clone()).is_ok())
}

fn poll_waits(receiver: &Receiver<Arc<Wait>>) {
    let mut waits: Vec<Arc<Wait>> = Vec::new();
    let mut backoff = Backoff::default();
    loop {
        let before = waits.len();
        if waits.is_empty() {
            let Ok(wait) = receiver.recv() else { return };
            waits.push(wait);
        }
        waits.extend(receiver.try_iter());
        let all = waits.len();
        waits.retain(|wait| !wait.is_over());
        if all != before || waits.len() != all {
            backoff = Backoff::default();
        }
        backoff.pause();
    }
}

impl fmt::Debug for StreamDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let event = self.0.as_ref().map(|wait| wait.event);
        f.debug_tuple("StreamDone").field(&event).finish()
    }
}
