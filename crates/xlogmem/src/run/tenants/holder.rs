//! The process that holds cached memory in `run tenants --pressure`: it peaks, keeps a part, and is idle or busy until EOF.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, DeviceStream, PoolConfig, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceSpec, Result, XlogError};

use super::arguments::Holder;
use super::worker;
use crate::{Output, write_json_line};

const TAG: AllocTag = AllocTag("holder");
/// Its parts of the limit, in twentieths: 60 % at its peak, of which it keeps 5 %.
pub(super) const PEAK: u64 = 12;
pub(super) const KEPT: u64 = 1;
pub(super) const PARTS: u64 = 20;
/// The budget of both processes: more than any GPU has, so that the ledger's limit is the effective one.
pub(super) const NO_BUDGET: u64 = 1 << 39;
/// The block size that a busy process allocates and frees while its kernels run.
const PAIR: usize = 64 << 10;
/// Fills that a busy process queues before it waits for them.
const QUEUED: u32 = 16;
/// The time limit for publishing its memory, which takes at most a second.
const PUBLISHED: Duration = Duration::from_secs(60);

/// A line that the process writes.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderLine {
    /// It holds memory, of which this many bytes are cached.
    Ready(u64),
    /// It succeeded. If it was busy: the median time of a pair before the request and after.
    Done { pair_before_ns: Option<u64>, pair_after_ns: Option<u64> },
}

pub(super) fn run(kind: Holder, spec: DeviceSpec, ledger: &Path, resource: &str) -> Output {
    let failure = hold(kind, spec, ledger, resource).err().map(|error| error.to_string());
    Output { text: String::new(), failure, ..Output::default() }
}

fn hold(kind: Holder, spec: DeviceSpec, ledger: &Path, resource: &str) -> Result<()> {
    let device = Arc::new(CudaDevice::open_spec(spec)?);
    // Cached memory stays until another process requests it.
    let pool = PoolConfig::default().without_decay();
    let config = worker::config(ledger, NO_BUDGET, resource)?.with_pool(pool);
    let runtime = XlogDeviceRuntime::with_config(device.clone(), &config)?;
    let limit = runtime.ledger_snapshot()?.map_or(0, |snapshot| snapshot.limit);
    let part = usize::try_from(limit / PARTS).unwrap_or(0);
    let stream = runtime.stream_pool().lease()?;
    let mut blocks = Vec::new();
    for _ in 0..PEAK {
        blocks.push(runtime.allocate(part, stream.id(), TAG)?);
    }
    let kept = blocks.split_off((PEAK - KEPT) as usize);
    for block in blocks {
        runtime.deallocate(block)?;
    }
    runtime.reap_pending()?;
    tell(&HolderLine::Ready(published(&runtime)?))?;
    let is_over = Arc::new(AtomicBool::new(false));
    let input = {
        let is_over = is_over.clone();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            is_over.store(true, Ordering::SeqCst);
        })
    };
    let mut done = HolderLine::Done { pair_before_ns: None, pair_after_ns: None };
    if kind == Holder::Busy {
        done = work(&runtime, &stream, &kept, &is_over)?;
    }
    // An idle process waits for the end of its input.
    if input.join().is_err() {
        return Err(XlogError::Kernel("the input could not be read".to_owned()));
    }
    device.synchronize()?;
    for block in kept {
        runtime.deallocate(block)?;
    }
    runtime.reap_pending()?;
    tell(&done)
}

fn tell(line: &HolderLine) -> Result<()> {
    write_json_line(line).map_err(|error| XlogError::Kernel(error.to_string()))
}

/// Waits until the listener has published all cached bytes, and returns them.
fn published(runtime: &XlogDeviceRuntime) -> Result<u64> {
    let began = Instant::now();
    let cached = runtime.memory_use().map_or(0, |held| held.cached) as u64;
    loop {
        let own = runtime.ledger().ledger().map(|ledger| ledger.slot());
        let slots = runtime.ledger_snapshot()?.map(|snapshot| snapshot.slots).unwrap_or_default();
        let slot = slots.iter().find(|slot| Some(slot.index) == own);
        let known = slot.and_then(|slot| slot.memory).map_or(0, |memory| memory.cached);
        if known >= cached || began.elapsed() > PUBLISHED {
            return Ok(known);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Keeps kernels running by filling its block repeatedly, and allocates and frees small blocks meanwhile.
fn work(
    runtime: &XlogDeviceRuntime,
    stream: &DeviceStream,
    kept: &[DeviceBlock],
    is_over: &AtomicBool,
) -> Result<HolderLine> {
    let pairs = runtime.stream_pool().lease()?;
    let used =
        |runtime: &XlogDeviceRuntime| runtime.ledger().ledger().map_or(0, |ledger| ledger.used());
    let peak = used(runtime);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    while !is_over.load(Ordering::SeqCst) {
        for turn in 0..QUEUED {
            for block in kept {
                #[allow(unsafe_code)]
                // SAFETY: the block is live until all work has completed, and only its own stream uses it.
                unsafe {
                    stream.memset(block.ptr, turn as u8, block.bytes)?;
                }
            }
        }
        for _ in 0..256 {
            let began = Instant::now();
            runtime.deallocate(runtime.allocate(PAIR, pairs.id(), TAG)?)?;
            let time = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            if used(runtime) < peak { after.push(time) } else { before.push(time) }
        }
        stream.synchronize()?;
    }
    Ok(HolderLine::Done { pair_before_ns: median(before), pair_after_ns: median(after) })
}

fn median(mut times: Vec<u64>) -> Option<u64> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}
