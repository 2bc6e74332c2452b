//! Two staging buffers in page-locked memory: while the device copies from one, the host fills the other.
//!
//!     cargo run --release -p xlog-cuda --example pinned_host            # on the simulated device
//!     XLOG_DEVICE=cuda:0 cargo run --release -p xlog-cuda --example pinned_host

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, PinnedHostResource, PoolConfig, PoolResource,
    StatisticsResource, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager};

const ROWS: usize = 1 << 16;
const STAGING: AllocTag = AllocTag("staging");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec = std::env::var("XLOG_DEVICE").unwrap_or_else(|_| "sim".to_owned());
    let device = Arc::new(CudaDevice::open(&spec)?);
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool = PoolResource::new(device.clone(), 0, streams.clone(), PoolConfig::default())?;
    let runtime =
        XlogDeviceRuntime::with_resource(device.clone(), 0, streams.clone(), Box::new(pool));
    let stream = streams.lease()?;
    let manager = GpuMemoryManager::with_runtime(Arc::new(runtime)).on_stream(stream.id());

    // At most 8 MiB, in chunks of 1 MiB; pinned now, so that the loop does not wait for the driver.
    let pinned = PinnedHostResource::new(device, 0, streams).with_chunk(1 << 20);
    let pinned = Arc::new(pinned.with_maximum(8 << 20));
    pinned.reserve(1 << 20)?;
    let counted = StatisticsResource::new(Box::new(pinned.clone()));
    let statistics = counted.handle();
    let resource: Arc<dyn DeviceMemoryResource + Send + Sync> = Arc::new(counted);
    let alloc = || pinned.alloc_through::<u32>(&resource, ROWS, stream.id(), STAGING);
    let mut staging = [alloc()?, alloc()?];

    let mut columns = Vec::new();
    for batch in 0..8_u32 {
        let mut column = manager.alloc::<u32>(ROWS)?;
        let buffer = &mut staging[batch as usize % 2];
        // Waits for the copy of the batch before the last, and for nothing later.
        buffer.as_mut_slice()?.fill(batch);
        buffer.copy_to(&mut column, stream.id())?;
        columns.push(column);
    }
    let mut back = alloc()?;
    for (batch, column) in columns.iter().enumerate() {
        back.copy_from(column, stream.id())?;
        assert!(back.as_slice()?.iter().all(|row| *row as usize == batch));
    }
    let usage = statistics.snapshot().tag(STAGING);
    println!("{} batches of {ROWS} rows went to {spec} and came back", columns.len());
    println!("{} KiB of page-locked memory held", pinned.bytes_held() >> 10);
    println!("{} KiB in use at the peak", usage.peak_bytes >> 10);
    drop((staging, back));
    resource.reap_pending()?;
    println!("{} KiB returned to the host", resource.trim()? >> 10);
    Ok(())
}
