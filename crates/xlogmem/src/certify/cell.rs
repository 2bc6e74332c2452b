//! One bug under one stack, in its own process, which a wrong access may end.
//!
//! The process writes two lines with one JSON object each to standard output: the planned access before it is made, and
//! the detections after it. A process that the access ends has written only the first.

#![allow(unsafe_code)]

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xlog_base::Mutex;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DirectCudaResource, GuardConfig, GuardHandle, GuardMode, LeakReport,
    PagePlacement, PoolConfig, PoolResource, PoolSanitizer, ResourceError, StreamLease, StreamPool,
    XlogDeviceRuntime, set_leak_handler,
};
use xlog_cuda::driver::DriverError;
use xlog_cuda::{CudaDevice, DeviceSpec, Result, XlogError};
use xlog_kernels::certify::Certify;

use super::plan::{Bug, Stack};
use crate::write_json_line;

/// The block size, which is no multiple of any allocation granule.
pub(super) const BYTES: usize = 1000;
const VICTIM: AllocTag = AllocTag("victim");

/// A detector of bugs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum By {
    /// The debug guard.
    Guard,
    /// A check of the resource or the runtime on the host.
    Host,
    /// The GPU, by a fault that ends the context.
    Fault,
    /// The simulated device: the address is not mapped.
    Race,
    /// The simulated device: no memory is there.
    Device,
    /// compute-sanitizer.
    Memcheck,
}

/// A detection: the detector and its message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Catch {
    pub(crate) by: By,
    pub(crate) detail: String,
}

/// A line that a cell writes.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// The block, and the address of the wrong access.
    Plan {
        ptr: u64,
        bytes: usize,
        address: u64,
    },
    Done {
        caught: Vec<Catch>,
        error: Option<String>,
    },
}

/// Plants the bug, prints the detections, and ends the process.
pub(super) fn run(spec: DeviceSpec, bug: Bug, stack: Stack) -> std::process::ExitCode {
    let mut caught = Vec::new();
    let error = plant(spec, bug, stack, &mut caught).err().map(|error| error.to_string());
    let said = write_json_line(&Line::Done { caught, error });
    // Nothing is torn down: after a fault every call would fail.
    std::process::exit(i32::from(said.is_err()))
}

static LEAK: Mutex<Option<String>> = Mutex::new(None);

fn note_leak(leak: &LeakReport) {
    *LEAK.lock() = Some(leak.to_string());
}

struct Rig<'a> {
    device: Arc<CudaDevice>,
    runtime: XlogDeviceRuntime,
    guard: Option<GuardHandle>,
    kernels: Certify,
    own: StreamLease,
    other: StreamLease,
    caught: &'a mut Vec<Catch>,
}

fn plant(spec: DeviceSpec, bug: Bug, stack: Stack, caught: &mut Vec<Catch>) -> Result<()> {
    set_leak_handler(note_leak);
    let device = Arc::new(CudaDevice::open_spec(spec)?);
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let (own, other) = (streams.lease()?, streams.lease()?);
    let (resource, guard) = resource(&device, &streams, bug, stack)?;
    let ordinal = device.ordinal();
    let runtime = XlogDeviceRuntime::with_resource(Arc::clone(&device), ordinal, streams, resource);
    let kernels = Certify::load(&device)?;
    let mut rig = Rig { device, runtime, guard, kernels, own, other, caught };
    rig.plant(bug)?;
    rig.check();
    if bug == Bug::Leak {
        drop(rig);
        let leak = LEAK.lock().take();
        caught.extend(leak.map(|detail| Catch { by: By::Host, detail }));
    }
    caught.sort_by_key(|catch| catch.by);
    caught.dedup_by_key(|catch| catch.by);
    Ok(())
}

type Made = (Box<dyn DeviceMemoryResource + Send + Sync>, Option<GuardHandle>);

fn resource(
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
    bug: Bug,
    stack: Stack,
) -> Result<Made> {
    let (device, streams, ordinal) = (device.clone(), streams.clone(), device.ordinal());
    let pool = |config: PoolConfig| {
        PoolResource::new(device.clone(), ordinal, streams.clone(), config).map(Box::new)
    };
    let guarded = |config: GuardConfig| -> Result<Made> {
        let guard = DebugGuardResource::new(pool(PoolConfig::default())?, config);
        let handle = guard.handle();
        Ok((Box::new(guard), Some(handle)))
    };
    Ok(match stack {
        Stack::Direct => (Box::new(DirectCudaResource::new(device, ordinal)), None),
        Stack::Async => (Box::new(AsyncCudaResource::new(device, ordinal, streams)), None),
        Stack::Pool => (pool(PoolConfig::default())?, None),
        Stack::Nvtx => (pool(PoolConfig::default().with_sanitizer(PoolSanitizer::On))?, None),
        Stack::Guard => guarded(GuardConfig::default())?,
        Stack::Pages => {
            // The guard page is on the side that the bug touches.
            let placement = match bug {
                Bug::Underflow => PagePlacement::Start,
                _ => PagePlacement::End,
            };
            let pages = GuardConfig::default().with_mode(GuardMode::Pages);
            guarded(pages.with_placement(placement))?
        }
    })
}

impl Rig<'_> {
    fn plant(&mut self, bug: Bug) -> Result<()> {
        match bug {
            Bug::None => self.none(),
            Bug::Overflow => self.stray(BYTES as i64),
            Bug::Underflow => self.stray(-1),
            Bug::WriteAfterFree => self.write_after_free(),
            Bug::UseBeforeAllocation => self.use_before_allocation(),
            Bug::MissingWait => self.missing_wait(),
            Bug::DoubleFree => self.double_free(),
            Bug::Leak => self.allocate(0).map(|_| ()),
        }
    }

    /// Allocates a block, lets its stream write all of it, and announces the wrong access at an offset.
    fn allocate(&mut self, offset: i64) -> Result<DeviceBlock> {
        let block = self.runtime.allocate(BYTES, self.own.id(), VICTIM)?;
        let address = block.ptr.wrapping_add_signed(offset);
        let line = Line::Plan { ptr: block.ptr, bytes: BYTES, address };
        write_json_line(&line).map_err(|error| XlogError::Kernel(error.to_string()))?;
        // SAFETY: the range is the block, and the stream is its own.
        unsafe { self.own.memset(block.ptr, 1, BYTES)? };
        Ok(block)
    }

    /// Writes a byte and waits. An error of the driver is a detection, not a failure.
    fn poke(&mut self, address: u64) -> Result<()> {
        // SAFETY: the access may be wrong on purpose. It can only damage this process, which ends afterwards.
        let poked = unsafe { self.kernels.poke(&self.own, address, 0xee) };
        let waited = poked.and_then(|()| self.own.synchronize());
        self.note(waited)
    }

    fn none(&mut self) -> Result<()> {
        let block = self.allocate(0)?;
        let (first, last) = (block.ptr, block.ptr + BYTES as u64 - 1);
        self.poke(first)?;
        self.poke(last)?;
        if self.runtime.supports_block_use_tracking() {
            let id = BlockId::from_block(&block);
            self.runtime.prepare_block_use(id, self.other.id(), Access::ReadWrite)?;
            // SAFETY: both bytes belong to the block, and the runtime has ordered this work after the write.
            unsafe { self.kernels.carry(&self.other, first, last)? };
            self.runtime.finish_block_use(id, self.other.id(), Access::ReadWrite)?;
        }
        self.runtime.deallocate(block)?;
        self.runtime.reap_pending()?;
        Ok(())
    }

    fn stray(&mut self, offset: i64) -> Result<()> {
        let block = self.allocate(offset)?;
        self.poke(block.ptr.wrapping_add_signed(offset))?;
        let freed = self.runtime.deallocate(block);
        self.note(freed.map_err(XlogError::from))
    }

    fn write_after_free(&mut self) -> Result<()> {
        let offset = 10;
        let block = self.allocate(offset)?;
        let address = block.ptr.wrapping_add_signed(offset);
        self.runtime.deallocate(block)?;
        // All work on it has completed, so a memory checker knows that it was freed.
        self.runtime.reap_pending()?;
        self.poke(address)
    }

    /// Makes the resource reserve memory and the driver load the kernel, since neither may wait for a held stream.
    fn warm_up(&mut self) -> Result<()> {
        let block = self.runtime.allocate(BYTES, self.own.id(), AllocTag("warm"))?;
        self.poke(block.ptr)?;
        self.runtime.deallocate(block)?;
        self.runtime.reap_pending()?;
        Ok(())
    }

    fn use_before_allocation(&mut self) -> Result<()> {
        self.warm_up()?;
        let gate = self.own.hold()?;
        let block = self.runtime.allocate(BYTES, self.own.id(), VICTIM)?;
        let line = Line::Plan { ptr: block.ptr, bytes: BYTES, address: block.ptr };
        write_json_line(&line).map_err(|error| XlogError::Kernel(error.to_string()))?;
        // SAFETY: the access may be wrong on purpose. It can only damage this process, which ends afterwards.
        let poked = unsafe { self.kernels.poke(&self.other, block.ptr, 0xee) };
        gate.release();
        self.note(poked)?;
        self.wait_for_both()
    }

    fn missing_wait(&mut self) -> Result<()> {
        let block = self.allocate(0)?;
        let copy = self.runtime.allocate(BYTES, self.other.id(), AllocTag("copy"))?;
        // The other stream waits for the allocation, but not for the write that follows.
        self.other.wait_for(&self.own)?;
        // SAFETY: the access may be wrong on purpose. It can only damage this process, which ends afterwards.
        unsafe {
            self.kernels.poke(&self.own, block.ptr, 0xee)?;
            self.kernels.carry(&self.other, copy.ptr, block.ptr)?;
        }
        self.wait_for_both()
    }

    fn wait_for_both(&mut self) -> Result<()> {
        for stream in [&self.own, &self.other] {
            note(stream.synchronize(), self.caught)?;
        }
        Ok(())
    }

    fn double_free(&mut self) -> Result<()> {
        let block = self.allocate(0)?;
        let twin = DeviceBlock { tag: block.tag, ..block };
        self.runtime.deallocate(block)?;
        match self.runtime.deallocate(twin) {
            Err(error @ ResourceError::UseAfterFree { .. }) => {
                self.caught.push(Catch { by: By::Host, detail: error.to_string() });
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn check(&mut self) {
        // A guard's finding is returned as an error here; its details are in its reports.
        let _ = self.runtime.reap_pending();
        if let Some(guard) = &self.guard {
            let _ = guard.check_now();
            let reports = guard.reports();
            let first = reports.first().map(|report| report.to_string());
            self.caught.extend(first.map(|detail| Catch { by: By::Guard, detail }));
        }
        let races = self.device.races();
        let first = races.first().map(|race| race.to_string());
        self.caught.extend(first.map(|detail| Catch { by: By::Race, detail }));
    }

    fn note(&mut self, outcome: Result<()>) -> Result<()> {
        note(outcome, self.caught)
    }
}

/// Classifies an error: a detection, or another failure.
fn note(outcome: Result<()>, caught: &mut Vec<Catch>) -> Result<()> {
    let Err(error) = outcome else { return Ok(()) };
    let by = match &error {
        XlogError::Driver(DriverError::DeviceLost { .. }) => By::Fault,
        XlogError::Driver(DriverError::Race { .. }) => By::Race,
        XlogError::Driver(DriverError::Invalid { .. }) => By::Device,
        // Found by the guard, whose reports are collected later.
        XlogError::Resource(
            ResourceError::OutOfBounds { .. } | ResourceError::UseAfterFree { .. },
        ) => return Ok(()),
        // A consequence of what was already detected.
        XlogError::Resource(ResourceError::Driver(_)) if !caught.is_empty() => return Ok(()),
        _ => return Err(error),
    };
    caught.push(Catch { by, detail: error.to_string() });
    Ok(())
}
