//! A producer and a consumer on two streams; leave the wait out and the race is reported.

use std::sync::Arc;
use xlog_cuda::{CudaDevice, device_runtime::StreamPool};

fn main() -> xlog_cuda::Result<()> {
    let device = Arc::new(CudaDevice::open("sim:7")?); // or "sim", or "cuda:0"
    let pool = StreamPool::with_defaults(Arc::clone(&device));
    let (producer, consumer) = (pool.lease()?, pool.lease()?);
    let block = device.driver().alloc(1024)?;
    let mut bytes = [0; 1024];
    // SAFETY: the block is live until it is freed below, after all work on it has completed.
    unsafe {
        producer.memset(block, 7, 1024)?;
        consumer.wait_for(&producer)?; // leave this out, and the copy fails with the race it is
        consumer.copy_dtoh(&mut bytes, block)?;
        device.driver().free(block)?;
    }
    assert_eq!(bytes, [7; 1024]);
    assert!(device.races().is_empty());
    println!("1024 bytes handed over, no race");
    Ok(())
}
