//! A producer and a consumer on two streams; the recorder orders them.

use xlog_cuda::prelude::*;

fn main() -> xlog_cuda::Result<()> {
    let runtime = XlogDeviceRuntime::open("sim:7")?; // or "sim", or "cuda:0"
    let (producer, consumer) = (runtime.stream_pool().lease()?, runtime.stream_pool().lease()?);
    let memory = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(producer.id());
    let rows = memory.alloc_from(&[7_u32; 1024])?; // on the producer's stream

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
