//! Notifications about the segments that a resource takes from the device and returns to it.

/// A range of device memory that a resource holds, whether blocks occupy it or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentRange {
    /// The first address.
    pub ptr: u64,
    /// The size.
    pub bytes: u64,
}

/// Receives segment notifications; see [`DeviceMemoryResource::watch_segments`](super::DeviceMemoryResource::watch_segments).
///
/// Any thread may notify, after the driver call. An implementation must not call the resource.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::sync::Arc;
/// use xlog_cuda::device_runtime::{SegmentRange, SegmentWatcher, StreamPool};
/// use xlog_cuda::prelude::*;
///
/// #[derive(Default)]
/// struct Reserved(AtomicU64);
///
/// impl SegmentWatcher for Reserved {
///     fn taken(&self, segment: SegmentRange) {
///         self.0.fetch_add(segment.bytes, Ordering::Relaxed);
///     }
///     fn returned(&self, segment: SegmentRange, _ticket: u64) {
///         self.0.fetch_sub(segment.bytes, Ordering::Relaxed);
///     }
/// }
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let streams = Arc::new(StreamPool::with_defaults(device.clone()));
/// let pool = PoolResource::new(device, 0, streams, PoolConfig::default())?;
/// let reserved = Arc::new(Reserved::default());
/// let watcher: Arc<dyn SegmentWatcher> = reserved.clone();
/// assert!(pool.watch_segments(&Arc::downgrade(&watcher)));
/// let block = pool.allocate(1000, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert!(reserved.0.load(Ordering::Relaxed) >= block.bytes as u64);
/// # pool.deallocate(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait SegmentWatcher: Send + Sync {
    /// Called after a range was taken from the device.
    fn taken(&self, segment: SegmentRange);

    /// Called before ranges are returned to the device. The result is passed to [`returned`](Self::returned) for each of them. It orders
    /// the return before any later segment at those addresses.
    fn ticket(&self) -> u64 {
        0
    }

    /// Called after a range was returned: a segment, a part of one, or several adjacent ones.
    fn returned(&self, segment: SegmentRange, ticket: u64);
}
