//! Chooses the segments for a configuration.

use std::sync::Arc;

use super::arena::UNIT;
use super::config::{PoolConfig, PoolSegments};
use super::sanitizer::Sanitizer;
use super::segments::{InnerSegments, MappedSegments, PlainSegments, SegmentConfig, Segments};
use crate::CudaDevice;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceResult};

/// Requests up to this size share small handles, so that a live block pins little memory.
const PRIVATE_BYTES: u64 = 32 << 20;
/// The size of the largest handle, for requests of many GiB. A partly occupied handle cannot be remapped.
const LARGEST_HANDLE: u64 = 128 << 20;

/// Returns sizes that round up to the granularity only: the pool decides how much it takes at a time.
fn sizes(config: &PoolConfig, granularity: u64) -> SegmentConfig {
    SegmentConfig {
        initial: config.initial_bytes as u64,
        maximum: config.maximum_bytes as u64,
        growth: granularity,
        handle_bytes: granularity,
        private_bytes: PRIVATE_BYTES,
        largest_handle: LARGEST_HANDLE,
    }
}

pub(super) fn of_device(
    device: &Arc<CudaDevice>,
    config: &PoolConfig,
    sanitizer: Option<&Sanitizer>,
) -> ResourceResult<Box<dyn Segments>> {
    let device = Arc::clone(device);
    if let Some(sanitizer) = sanitizer {
        // Memory checkers accept only driver allocations as heaps.
        let segments = PlainSegments::new(device, sizes(config, UNIT))?;
        return Ok(Box::new(segments.with_heaps(sanitizer.heaps.clone())));
    }
    let granularity = device.driver().virtual_memory().map(|memory| memory.granularity() as u64);
    match (config.segments, granularity) {
        (PoolSegments::Plain, _) | (PoolSegments::Automatic, None) => {
            Ok(Box::new(PlainSegments::new(device, sizes(config, UNIT))?))
        }
        (PoolSegments::Automatic | PoolSegments::Mapped, granularity) => {
            let sizes = sizes(config, granularity.unwrap_or(UNIT));
            Ok(Box::new(MappedSegments::new(device, sizes)?))
        }
    }
}

pub(super) fn of_inner(
    inner: Box<dyn DeviceMemoryResource + Send + Sync>,
    config: &PoolConfig,
) -> ResourceResult<Box<dyn Segments>> {
    Ok(Box::new(InnerSegments::new(inner, sizes(config, UNIT))?))
}
