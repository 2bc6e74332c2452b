//! A device with one resource on it, for comparisons by commands and benches.
//!
//! Each stack opens its own device, so that a driver pool holds no memory of an earlier stack. It reports the peak of reserved
//! bytes: metered if the resource announces them, queried from the driver pool otherwise.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_cuda::device_runtime::{
    AsyncCudaResource, Backtraces, DebugGuardResource, DeviceMemoryResource, DirectCudaResource,
    GlobalDeviceBudget, GuardSetting, LedgerMeter, LedgerPreview, LedgerSetting, LoggingResource,
    LoggingSink, PhysicalMeter, PoolConfig, PoolResource, PoolSnapshot, ResourceResult,
    RuntimeConfig, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
use xlog_cuda::{CudaDevice, DeviceSpec, Result, XlogError};

/// The resource of a stack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StackKind {
    /// One raw driver allocation per block; tracks no uses.
    Direct,
    /// Stream-ordered allocation by the driver.
    Async,
    /// Memory sub-allocated from segments.
    Pool,
}

impl StackKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Async, Self::Pool];

    /// Returns its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Async => "async",
            Self::Pool => "pool",
        }
    }
}

impl fmt::Display for StackKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StackKind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("there is no resource {text:?}; expected direct, async or pool"))
    }
}

/// The physical bytes of a resource, and their peak.
#[derive(Debug, Default)]
struct Reserved {
    now: AtomicUsize,
    peak: AtomicUsize,
    /// The ledger that is also charged.
    ledger: Option<LedgerMeter>,
}

impl PhysicalMeter for Reserved {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        if let Some(ledger) = &self.ledger {
            ledger.charge(bytes)?;
        }
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        Ok(())
    }

    fn release(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(ledger) = &self.ledger {
            ledger.release(bytes);
        }
    }
}

/// The parts of a stack, from the resource up.
#[derive(Clone)]
pub struct StackOptions {
    /// The resource.
    pub kind: StackKind,
    /// The guard of the blocks.
    pub guard: GuardSetting,
    /// The sink for every operation, including uses.
    pub log: Option<Arc<dyn LoggingSink>>,
    /// Which allocations are logged with the caller's stack.
    pub stacks: Backtraces,
    /// The maximum bytes of blocks.
    pub budget: Option<u64>,
    /// The maximum number of leased streams.
    pub streams: usize,
    /// The ledger that the physical bytes are charged to.
    pub ledger: LedgerSetting,
}

impl StackOptions {
    /// Returns options for a bare resource with one stream.
    #[must_use]
    pub fn new(kind: StackKind) -> Self {
        let (guard, ledger) = (GuardSetting::Off, LedgerSetting::Off);
        Self { kind, guard, log: None, stacks: Backtraces::Off, budget: None, streams: 1, ledger }
    }
}

impl fmt::Debug for StackOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackOptions")
            .field("kind", &self.kind)
            .field("guard", &self.guard)
            .field("log", &self.log.is_some())
            .field("stacks", &self.stacks)
            .field("budget", &self.budget)
            .field("streams", &self.streams)
            .field("ledger", &self.ledger)
            .finish()
    }
}

/// A device with one resource on it.
pub struct Stack {
    resource: Arc<dyn DeviceMemoryResource + Send + Sync>,
    pool: Option<Arc<PoolResource>>,
    stream_ordered: Option<Arc<AsyncCudaResource>>,
    metered: Option<Arc<Reserved>>,
    streams: Arc<StreamPool>,
    device: Arc<CudaDevice>,
}

impl Stack {
    /// Opens the device and builds a stack with `streams` streams and, optionally, at most `budget` bytes of blocks.
    pub fn open(
        spec: DeviceSpec,
        kind: StackKind,
        budget: Option<u64>,
        streams: usize,
    ) -> Result<Self> {
        Self::build(spec, StackOptions { budget, streams, ..StackOptions::new(kind) })
    }

    /// Opens the device and builds the stack that the options describe.
    pub fn build(spec: DeviceSpec, options: StackOptions) -> Result<Self> {
        let StackOptions { kind, guard, log, stacks, budget, streams, ledger } = options;
        let device = Arc::new(CudaDevice::open_spec(spec)?);
        let ledger = join(&device, ledger)?.map(LedgerMeter::new);
        let ordinal = device.ordinal();
        let streams = Arc::new(StreamPool::new(Arc::clone(&device), streams.max(1)));
        let (mut pool, mut stream_ordered) = (None, None);
        let mut resource: Arc<dyn DeviceMemoryResource + Send + Sync> = match kind {
            StackKind::Direct => Arc::new(DirectCudaResource::new(Arc::clone(&device), ordinal)),
            StackKind::Async => {
                let streams = Arc::clone(&streams);
                let made = AsyncCudaResource::new(Arc::clone(&device), ordinal, streams);
                let made = Arc::new(made);
                stream_ordered = Some(Arc::clone(&made));
                made
            }
            StackKind::Pool => {
                let (streams, config) = (Arc::clone(&streams), PoolConfig::default());
                let made = PoolResource::new(Arc::clone(&device), ordinal, streams, config)?;
                let made = Arc::new(made);
                pool = Some(Arc::clone(&made));
                made
            }
        };
        // The driver pool is not metered: that would query it at every request, and it keeps its own peak.
        let metered = match kind {
            StackKind::Async => {
                if let Some(ledger) = ledger {
                    resource.meter_physical(Arc::new(ledger))?;
                }
                None
            }
            StackKind::Direct | StackKind::Pool => {
                let meter = Arc::new(Reserved { ledger, ..Reserved::default() });
                resource.meter_physical(Arc::clone(&meter) as Arc<dyn PhysicalMeter>)?;
                Some(meter)
            }
        };
        if let Some(config) = guard.config() {
            let guarded = DebugGuardResource::new(Box::new(resource), config.clone());
            resource = Arc::new(guarded);
        }
        if let Some(limit) = budget {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            resource = Arc::new(GlobalDeviceBudget::over(resource, limit));
        }
        // Above the budget, so that refusals of the budget are logged.
        if let Some(sink) = log {
            resource = Arc::new(
                LoggingResource::new(Box::new(resource), sink)
                    .with_use_logging(true)
                    .with_segment_logging(true)
                    .with_stacks(stacks),
            );
        }
        Ok(Self { resource, pool, stream_ordered, metered, streams, device })
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Returns the stream pool.
    pub fn streams(&self) -> &Arc<StreamPool> {
        &self.streams
    }

    /// Returns the top of the stack.
    pub fn resource(&self) -> &(dyn DeviceMemoryResource + Send + Sync) {
        &*self.resource
    }

    /// Creates a runtime of these parts.
    pub fn runtime(&self) -> Arc<XlogDeviceRuntime> {
        Arc::new(XlogDeviceRuntime::with_resource(
            Arc::clone(&self.device),
            self.device.ordinal(),
            Arc::clone(&self.streams),
            Box::new(Arc::clone(&self.resource)),
        ))
    }

    /// Returns the state of the pool, if the stack has one.
    pub fn snapshot(&self) -> Option<PoolSnapshot> {
        self.pool.as_ref().map(|pool| pool.snapshot())
    }

    /// Returns the reserved bytes; `None` if the driver does not report them.
    pub fn reserved(&self) -> Option<u64> {
        if let Some(metered) = &self.metered {
            return Some(metered.now.load(Ordering::Relaxed) as u64);
        }
        let usage = self.stream_ordered.as_ref()?.driver_pool_usage().ok()?;
        Some(usage.reserved)
    }

    /// Returns the peak of reserved bytes; `None` if the driver does not report it.
    pub fn peak_reserved(&self) -> Option<u64> {
        if let Some(metered) = &self.metered {
            return Some(metered.peak.load(Ordering::Relaxed) as u64);
        }
        let usage = self.stream_ordered.as_ref()?.driver_pool_usage().ok()?;
        Some(usage.reserved_peak)
    }

    /// Waits for all work and reaps pending frees.
    pub fn drain(&self) -> Result<()> {
        self.device.synchronize()?;
        self.resource.reap_pending()?;
        Ok(())
    }
}

/// Joins the ledger of a device like a runtime with this setting.
fn join(device: &CudaDevice, setting: LedgerSetting) -> Result<Option<Arc<Ledger>>> {
    let config = RuntimeConfig::default().with_ledger(setting);
    let (path, limit) = match XlogDeviceRuntime::preview_limits(device, &config)?.ledger {
        LedgerPreview::Absent { path, limit } => (path, limit),
        LedgerPreview::Present(snapshot) => (snapshot.path, snapshot.limit),
        LedgerPreview::Refused { reason } => return Err(XlogError::Kernel(reason)),
        _ => return Ok(None),
    };
    let key = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let opened = DeviceKey::new(key).and_then(|key| {
        let directory = path.parent().map(ToOwned::to_owned).unwrap_or_default();
        Ledger::open(LedgerConfig::new(key).with_directory(directory).with_limit(limit))
    });
    let ledger = Arc::new(opened.map_err(|error| XlogError::Kernel(error.to_string()))?);
    ledger.leave_at_exit();
    Ok(Some(ledger))
}

/// Runs `body` on `count` threads, each with its number. Under a seed they are logical threads that the device schedules.
pub fn run_threads(device: &CudaDevice, count: u32, body: impl Fn(u32) + Sync) {
    let body = &body;
    match device.sim() {
        Some(sim) => {
            let thread =
                |number| -> Box<dyn FnOnce() + Send + '_> { Box::new(move || body(number)) };
            sim.run_threads((0..count).map(thread).collect());
        }
        None => std::thread::scope(|scope| {
            for number in 0..count {
                scope.spawn(move || body(number));
            }
        }),
    }
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack")
            .field("device", &self.device.spec())
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_cuda::StreamId;
    use xlog_cuda::device_runtime::{AllocTag, ResourceError};

    #[test]
    fn every_stack_knows_what_the_device_gave_and_keeps_its_budget() {
        for kind in StackKind::ALL {
            let stack = Stack::open(DeviceSpec::Sim, kind, Some(1 << 20), 2).unwrap();
            let resource = stack.resource();
            let block =
                resource.allocate(600 << 10, StreamId::DEFAULT, AllocTag::UNTAGGED).unwrap();
            let refused = resource.allocate(600 << 10, StreamId::DEFAULT, AllocTag::UNTAGGED);
            assert!(matches!(refused, Err(ResourceError::OutOfBudget { .. })), "{kind}");
            resource.deallocate(block).unwrap();
            stack.drain().unwrap();
            assert_eq!(resource.bytes_outstanding(), 0);
            assert!(stack.peak_reserved().unwrap() >= 600 << 10, "{kind}");
            assert!(stack.reserved() <= stack.peak_reserved(), "{kind}");
            assert_eq!(stack.snapshot().is_some(), kind == StackKind::Pool);
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("fast".parse::<StackKind>().unwrap_err().contains("\"fast\""));
    }
}
