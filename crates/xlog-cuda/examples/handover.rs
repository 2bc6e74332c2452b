//! A producer and a consumer on two streams; the recorder orders them.

use std::sync::Arc;
use xlog_cuda::device_runtime::{AsyncCudaResource, StreamPool, XlogDeviceRuntime};
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Arc::new(CudaDevice::open("sim:7")?); // or "sim", or "cuda:0"
    let pool = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let resource = AsyncCudaResource::new(Arc::clone(&device), 0, Arc::clone(&pool));
    let runtime =
        XlogDeviceRuntime::with_resource(device, 0, Arc::clone(&pool), Box::new(resource));
    let runtime = Arc::new(runtime);
    let (producer, consumer) = (pool.lease()?, pool.lease()?);

    let manager = GpuMemoryManager::with_runtime(Arc::clone(&runtime)).on_stream(producer.id());
    let mut rows = manager.alloc::<u32>(1024)?;
    rows.copy_from_slice(&vec![7; 1024])?; // on the producer's stream

    let mut launch = LaunchRecorder::new_strict(consumer.id());
    launch.read(&rows).preflight(&runtime)?; // the consumer's stream waits for the producer's
    let mut bytes = vec![0; 4096];
    // SAFETY: `rows` is live, and the recorder has ordered this copy after what was written.
    unsafe { consumer.copy_dtoh(&mut bytes, rows.ptr())? };
    launch.commit(&runtime)?;
    drop(rows); // freed once the consumer has read it
    assert_eq!(bytes[..4], 7_u32.to_ne_bytes());
    println!("1024 rows handed over");
    Ok(())
}
