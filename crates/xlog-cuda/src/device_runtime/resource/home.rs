//! Where a resource works, and whether two parts work in the same place.

use std::sync::Arc;

use crate::CudaDevice;
use crate::device_runtime::stream_pool::StreamPool;

/// The device of a resource, and the streams that its ids name.
///
/// ```
/// use xlog_cuda::device_runtime::ResourceHome;
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let home = ResourceHome::new(runtime.device().clone()).with_streams(runtime.stream_pool().clone());
/// assert_eq!(home.device.spec(), "sim");
/// # Ok::<(), XlogError>(())
/// ```
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

    /// Why a part on `device`, whose ids name streams of `streams`, cannot be put together with a resource of this home.
    ///
    /// Ids are compared by the pool that issued them: [`StreamId::DEFAULT`](super::StreamId::DEFAULT) names a stream in every pool.
    pub(crate) fn misfit(&self, device: &CudaDevice, streams: &StreamPool) -> Option<String> {
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
