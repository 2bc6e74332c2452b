//! Owned non-blocking streams, leased by id.
//!
//! A pool has one default stream, [`StreamId::DEFAULT`], created at first use, and up to `max_streams` others at a time:
//! acquired ones, which their user releases by id, and leased ones, which the drop of the lease releases. Every lease
//! has an id of its own, so a stale id never names the stream of another user.
//!
//! Invariants: an id resolves in the pool that issued it, until it is released; a failed call leaves the pool
//! unchanged; handles and leases may outlive the pool. The pool orders nothing between its streams. `stream_table` decides
//! which driver stream serves a lease.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use xlog_base::debug_fields;
use xlog_driver::{DriverResult, StreamHandle};

use super::StreamId;
use super::ordering::ClockHeaders;
use super::stream_table::{Holder, StreamTable};
use crate::stream::RawStream;
use crate::{CudaDevice, DeviceStream, Result, XlogError};

/// The `max_streams` of [`StreamPool::with_defaults`].
pub const DEFAULT_MAX_STREAMS: usize = 16;

/// The reason why a stream could not be leased.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamPoolError {
    /// All streams of the pool are leased.
    #[error("all {max} streams of the pool are leased; release one, or raise max_streams")]
    Capacity {
        /// The maximum number of leased streams.
        max: usize,
    },
    /// The driver did not create a stream; the text is its error.
    #[error("the driver did not make a stream: {0}")]
    ForkFailed(String),
}

/// The priority of a stream, in the range of the device.
///
/// A device with few levels maps neighbours to the same level. The priority is a hint to the device and orders nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum StreamPriority {
    /// The most urgent level of the device.
    High,
    /// The default level.
    #[default]
    Normal,
    /// The least urgent level of the device.
    Low,
}

impl StreamPriority {
    pub(super) fn on(self, device: &CudaDevice) -> i32 {
        let properties = device.properties();
        let (greatest, least) = (properties.greatest_priority, properties.least_priority);
        match self {
            Self::High => greatest,
            Self::Normal => 0.max(greatest).min(least),
            Self::Low => least,
        }
    }
}

/// The streams of one runtime.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::{CudaDevice, device_runtime::{StreamId, StreamPool}};
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let pool = StreamPool::new(device, 2);
/// assert!(pool.resolve(StreamId::DEFAULT).is_some());
///
/// let lease = pool.lease()?;
/// let acquired = pool.acquire()?;
/// assert_eq!(pool.non_default_len(), 2);
/// assert!(pool.lease().is_err());
///
/// drop(lease);
/// assert!(pool.release(acquired));
/// assert!(pool.resolve(acquired).is_none());
/// assert_eq!(pool.non_default_len(), 0);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
pub struct StreamPool {
    pub(super) table: Arc<StreamTable>,
}

impl StreamPool {
    /// Creates a pool that leases at most `max_streams` streams besides the default one; 0 counts as 1.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>, max_streams: usize) -> Self {
        Self { table: Arc::new(StreamTable::new(device, max_streams)) }
    }

    /// Creates a pool of [`DEFAULT_MAX_STREAMS`].
    #[must_use]
    pub fn with_defaults(device: Arc<CudaDevice>) -> Self {
        Self::new(device, DEFAULT_MAX_STREAMS)
    }

    /// Leases a stream until [`StreamPool::release`]. Never the default stream.
    pub fn acquire(&self) -> Result<StreamId, StreamPoolError> {
        self.acquire_with(StreamPriority::Normal)
    }

    /// [`StreamPool::acquire`] with a priority.
    pub fn acquire_with(&self, priority: StreamPriority) -> Result<StreamId, StreamPoolError> {
        Ok(self.table.lease(priority, Holder::Caller)?.id())
    }

    /// Leases a stream for as long as the lease lives.
    pub fn lease(&self) -> Result<StreamLease, StreamPoolError> {
        self.lease_with(StreamPriority::Normal)
    }

    /// [`StreamPool::lease`] with a priority.
    pub fn lease_with(&self, priority: StreamPriority) -> Result<StreamLease, StreamPoolError> {
        let stream = self.table.lease(priority, Holder::Lease)?;
        Ok(StreamLease { table: self.table.clone(), stream })
    }

    /// Returns a future of [`StreamPool::lease`] that waits while all streams are leased. Waiting tasks are not ordered.
    pub fn lease_async(
        &self,
    ) -> impl Future<Output = Result<StreamLease, StreamPoolError>> + Send + use<> {
        AwaitedLease { pool: Self { table: self.table.clone() }, wait: None }
    }

    /// Releases an acquired stream. Its queued work still runs.
    ///
    /// Returns false, with nothing changed, for an id that is not acquired from this pool: a stale id, the default
    /// stream, or the id of a lease.
    pub fn release(&self, id: StreamId) -> bool {
        self.table.release(id, Holder::Caller)
    }

    /// Returns the stream of an id; `None` for an id that this pool has not leased, or if the default stream cannot be created.
    ///
    /// The handle stays valid after the stream was released and after the pool is gone.
    #[must_use]
    pub fn resolve(&self, id: StreamId) -> Option<Arc<DeviceStream>> {
        if id == StreamId::DEFAULT {
            return self.default_stream().ok();
        }
        self.table.resolve(id)
    }

    /// [`StreamPool::resolve`] with the reason of a failure: [`XlogError::UnknownStream`], or the error of creating the
    /// default stream.
    pub fn try_resolve(&self, id: StreamId) -> Result<Arc<DeviceStream>> {
        if id == StreamId::DEFAULT {
            return Ok(self.default_stream()?);
        }
        self.resolve(id).ok_or(XlogError::UnknownStream { id })
    }

    /// Returns the stream of [`StreamId::DEFAULT`], created at first use; a failure is retried at the next call.
    pub fn default_stream(&self) -> Result<Arc<DeviceStream>, StreamPoolError> {
        self.table.default_stream()
    }

    /// Returns the driver stream that is leased under an id.
    #[inline]
    pub(crate) fn raw(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        self.table.raw(id)
    }

    /// Returns the driver stream in a slot; see [`StreamClock::slot`](super::ordering::StreamClock::slot).
    #[inline]
    pub(crate) fn at(&self, slot: u32) -> Option<&Arc<RawStream>> {
        self.table.at(slot)
    }

    /// Returns the clock headers of the streams, by slot.
    pub(crate) fn headers(&self) -> &Arc<ClockHeaders> {
        &self.table.headers
    }

    /// Issues an id for a stream of other code; see [`StreamPool::enlist`].
    pub(super) fn enlist_handle(&self, handle: StreamHandle) -> DriverResult<StreamId> {
        Ok(self.table.enlist(handle)?.id())
    }

    /// Returns the number of leased streams, without the default one.
    pub fn non_default_len(&self) -> usize {
        self.table.leased()
    }

    /// Returns the maximum number of leased streams, without the default one.
    pub fn max_streams(&self) -> usize {
        self.table.max_streams
    }

    /// Returns the number of this pool, which is unique in the process and names the pool in messages.
    pub fn number(&self) -> u64 {
        self.table.number
    }

    /// Returns the device of the streams.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.table.device
    }
}

/// The future of [`StreamPool::lease_async`]. Its drop ends the wait.
struct AwaitedLease {
    pool: StreamPool,
    /// The number of its wait in the table.
    wait: Option<u64>,
}

impl Future for AwaitedLease {
    type Output = Result<StreamLease, StreamPoolError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pool, wait } = &mut *self;
        for is_waiting in [false, true] {
            match pool.lease() {
                Err(StreamPoolError::Capacity { .. }) if is_waiting => break,
                // The loop leases again after this: a stream may have been released before the registration.
                Err(StreamPoolError::Capacity { .. }) => {
                    pool.table.wake_on_release(wait, context.waker());
                }
                leased => {
                    pool.table.forget_wait(wait);
                    return Poll::Ready(leased);
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for AwaitedLease {
    fn drop(&mut self) {
        self.pool.table.forget_wait(&mut self.wait);
    }
}

debug_fields!(self: StreamPool {
    number: self.number(), device: self.device().spec(), max_streams: self.max_streams(),
    out: self.non_default_len(), driver_streams: self.table.made(),
});

/// A leased stream, which the drop returns to its pool. Its queued work still runs then.
#[must_use = "dropping the lease gives the stream back at once"]
pub struct StreamLease {
    table: Arc<StreamTable>,
    stream: Arc<DeviceStream>,
}

impl StreamLease {
    /// Returns the id under which the pool resolves this stream while the lease lives.
    pub fn id(&self) -> StreamId {
        self.stream.id()
    }

    /// Returns a handle that may outlive the lease.
    pub fn stream(&self) -> &Arc<DeviceStream> {
        &self.stream
    }
}

impl Deref for StreamLease {
    type Target = DeviceStream;

    fn deref(&self) -> &DeviceStream {
        &self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        self.table.release(self.stream.id(), Holder::Lease);
    }
}

impl fmt::Debug for StreamLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamLease").field(&self.stream).finish()
    }
}
