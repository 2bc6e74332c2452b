//! Chooses the segments for a configuration.

use std::sync::Arc;

use super::config::{PoolConfig, PoolSegments};
use super::sanitizer::Sanitizer;
use super::segments::{InnerSegments, MappedSegments, PlainSegments, Segments};
use crate::CudaDevice;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceResult};

pub(super) fn of_device(
    device: &Arc<CudaDevice>,
    config: &PoolConfig,
    sanitizer: Option<&Sanitizer>,
) -> ResourceResult<Box<dyn Segments>> {
    let (device, maximum) = (Arc::clone(device), config.maximum_bytes as u64);
    if let Some(sanitizer) = sanitizer {
        // Memory checkers accept only driver allocations as heaps.
        let segments = PlainSegments::new(device, maximum);
        return Ok(Box::new(segments.with_heaps(sanitizer.heaps.clone())));
    }
    Ok(match config.segments {
        PoolSegments::Automatic if device.driver().virtual_memory().is_none() => {
            Box::new(PlainSegments::new(device, maximum))
        }
        PoolSegments::Plain => Box::new(PlainSegments::new(device, maximum)),
        PoolSegments::Automatic | PoolSegments::Mapped => {
            Box::new(MappedSegments::new(device, maximum)?)
        }
    })
}

pub(super) fn of_inner(
    inner: Box<dyn DeviceMemoryResource + Send + Sync>,
    config: &PoolConfig,
) -> Box<dyn Segments> {
    Box::new(InnerSegments::new(inner, config.maximum_bytes as u64))
}
