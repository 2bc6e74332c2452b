//! The live check: bytes go to the device, move on it, and come back.

use std::sync::Arc;
use std::time::Instant;

use xlog_cuda::device_runtime::StreamPool;
use xlog_cuda::{CudaDevice, DeviceStream, Result, XlogError};

use super::Check;

const BYTES: usize = 1 << 20;
const FILL: u8 = 0xa5;

/// Checks an open device through a stream of a pool.
pub(super) fn run(device: CudaDevice) -> Check {
    let device = Arc::new(device);
    let start = Instant::now();
    let outcome = round_trip(&device);
    let microseconds = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let error = outcome.err().map(|error| error.to_string());
    Check { ok: error.is_none(), bytes: BYTES, microseconds, error }
}

fn round_trip(device: &Arc<CudaDevice>) -> Result<()> {
    let pool = StreamPool::new(device.clone(), 1);
    let stream = pool.lease()?;
    let source = Block::new(device)?;
    let target = Block::new(device)?;
    let sent: Vec<u8> = (0..BYTES / 2).map(|at| (at * 31 % 251) as u8).collect();
    let back = exchange(&stream, &source, &target, &sent)?;
    if back[..BYTES / 2] != sent[..] || back[BYTES / 2..].iter().any(|byte| *byte != FILL) {
        return Err(XlogError::Kernel(
            "the bytes that came back are not those that were sent".into(),
        ));
    }
    match device.races().first() {
        Some(race) => Err(XlogError::Kernel(race.to_string())),
        None => Ok(()),
    }
}

#[allow(unsafe_code)]
fn exchange(stream: &DeviceStream, source: &Block, target: &Block, sent: &[u8]) -> Result<Vec<u8>> {
    let mut back = vec![0; BYTES];
    // SAFETY: both blocks are `BYTES` long and live; all work is on one stream, and the last call waits for it.
    unsafe {
        stream.memset(source.ptr, FILL, BYTES)?;
        stream.copy_htod(source.ptr, sent)?;
        stream.copy_dtod(target.ptr, source.ptr, BYTES)?;
        stream.copy_dtoh(&mut back, target.ptr)?;
    }
    Ok(back)
}

/// Device memory that is freed whatever happens.
struct Block {
    device: Arc<CudaDevice>,
    ptr: u64,
}

impl Block {
    fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        Ok(Self { ptr: device.driver().alloc(BYTES)?, device: device.clone() })
    }
}

impl Drop for Block {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // A device that cannot be waited for is not asked for its memory back: the process ends soon.
        if self.device.synchronize().is_ok() {
            // SAFETY: the block is live, and all work on it has been waited for.
            let _ = unsafe { self.device.driver().free(self.ptr) };
        }
    }
}
