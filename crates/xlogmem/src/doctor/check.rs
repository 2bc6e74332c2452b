//! The live check: copies bytes to the device, on it, and back, in blocks of a runtime configured by the environment.

use std::sync::Arc;
use std::time::Instant;

use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceStream, Result, XlogError};

use super::Check;

/// The size of a block, unless the limit is small.
const BYTES: usize = 1 << 20;
const FILL: u8 = 0xa5;

/// Builds the runtime and checks it. Returns an error only if the runtime cannot be built.
pub(super) fn run(device: Arc<CudaDevice>, config: &RuntimeConfig) -> Result<Check> {
    let start = Instant::now();
    let runtime = XlogDeviceRuntime::with_config(device, config)?;
    let limit = runtime.effective_limit().map_or(usize::MAX, |limit| limit.bytes());
    let bytes = BYTES.min(limit / 4).max(2);
    let outcome = round_trip(&runtime, bytes);
    let microseconds = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let error = outcome.err().map(|error| error.to_string());
    Ok(Check { ok: error.is_none(), bytes, microseconds, error })
}

fn round_trip(runtime: &XlogDeviceRuntime, bytes: usize) -> Result<()> {
    let stream = runtime
        .stream_pool()
        .resolve(StreamId::DEFAULT)
        .ok_or_else(|| XlogError::Kernel("the runtime has no default stream".into()))?;
    let source = Block::new(runtime, bytes)?;
    let target = Block::new(runtime, bytes)?;
    let half = bytes / 2;
    let sent: Vec<u8> = (0..half).map(|at| (at * 31 % 251) as u8).collect();
    let back = exchange(&stream, source.ptr(), target.ptr(), &sent, bytes)?;
    if back[..half] != sent[..] || back[half..].iter().any(|byte| *byte != FILL) {
        return Err(XlogError::Kernel(
            "the bytes that came back are not those that were sent".into(),
        ));
    }
    source.free()?;
    target.free()?;
    runtime.reap_pending()?;
    match runtime.device().races().first() {
        Some(race) => Err(XlogError::Kernel(race.to_string())),
        None => Ok(()),
    }
}

#[allow(unsafe_code)]
fn exchange(
    stream: &DeviceStream,
    source: u64,
    target: u64,
    sent: &[u8],
    bytes: usize,
) -> Result<Vec<u8>> {
    let mut back = vec![0; bytes];
    // SAFETY: both blocks are live and have at least `bytes` bytes. All work is on their own stream, and the last call waits for it.
    unsafe {
        stream.memset(source, FILL, bytes)?;
        stream.copy_htod(source, sent)?;
        stream.copy_dtod(target, source, bytes)?;
        stream.copy_dtoh(&mut back, target)?;
    }
    Ok(back)
}

/// Frees its block on drop.
struct Block<'a> {
    runtime: &'a XlogDeviceRuntime,
    block: Option<DeviceBlock>,
}

impl<'a> Block<'a> {
    fn new(runtime: &'a XlogDeviceRuntime, bytes: usize) -> Result<Self> {
        let block = runtime.allocate(bytes, StreamId::DEFAULT, AllocTag("doctor"))?;
        Ok(Self { runtime, block: Some(block) })
    }

    fn ptr(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.ptr)
    }

    fn free(mut self) -> Result<()> {
        self.block.take().map_or(Ok(()), |block| Ok(self.runtime.deallocate(block)?))
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // The check has already failed with a reason of its own.
        if let Some(block) = self.block.take() {
            let _ = self.runtime.deallocate(block);
        }
    }
}
