//! Where a resource works.

use std::sync::Arc;

use crate::CudaDevice;
use crate::device_runtime::stream_pool::StreamPool;

/// The device of a resource, and the streams that its ids name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ResourceHome {
    /// The device.
    pub device: Arc<CudaDevice>,
    /// The streams; `None` for a resource to which a stream is only a label.
    pub streams: Option<Arc<StreamPool>>,
}

impl ResourceHome {
    /// A device, and no streams.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>) -> Self {
        Self { device, streams: None }
    }

    /// The same with the streams that ids name.
    #[must_use]
    pub fn with_streams(mut self, streams: Arc<StreamPool>) -> Self {
        self.streams = Some(streams);
        self
    }
}
