//! The device and the streams of a resource, and whether two parts share them.

use std::sync::Arc;

use crate::CudaDevice;
use crate::device_runtime::stream_pool::StreamPool;

/// The device of a resource, and the stream pool that resolves its ids.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ResourceHome {
    /// The device.
    pub device: Arc<CudaDevice>,
    /// The stream pool; `None` for a resource that does not resolve stream ids.
    pub streams: Option<Arc<StreamPool>>,
}

impl ResourceHome {
    /// Creates a home without streams.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>) -> Self {
        Self { device, streams: None }
    }

    /// Sets the streams.
    #[must_use]
    pub fn with_streams(mut self, streams: Arc<StreamPool>) -> Self {
        self.streams = Some(streams);
        self
    }

    /// Returns why a part on `device` with the stream pool `streams` cannot be combined with a resource of this home.
    ///
    /// The pools are compared, not the ids: [`StreamId::DEFAULT`](super::StreamId::DEFAULT) is a stream of every pool.
    pub(crate) fn mismatch(&self, device: &CudaDevice, streams: &StreamPool) -> Option<String> {
        if !self.device.is_same(device) {
            return Some(format!(
                "device {:?} of ordinal {} and a resource on another open device, {:?} of ordinal {}",
                device.spec(),
                device.ordinal(),
                self.device.spec(),
                self.device.ordinal()
            ));
        }
        let own = self.streams.as_deref()?;
        (own.number() != streams.number()).then(|| {
            format!(
                "stream pool {} and a resource on stream pool {}, both of device {:?}",
                streams.number(),
                own.number(),
                device.spec()
            )
        })
    }
}
