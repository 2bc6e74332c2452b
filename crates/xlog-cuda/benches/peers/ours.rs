//! Ours: the resources by themselves, and the stacks that are made of them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, GuardConfig, LedgerSetting,
    LoggingResource, NullSink, PoolConfig, PoolResource, ResourceError, ResourceKind,
    ResourceResult, RuntimeConfig, StreamId, StreamLease, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::sim::{SimConfig, SimDevice};
use xlog_cuda::{CudaDevice, DeviceStream};
use xlog_kernels::exercise::Exercise;

use crate::workloads::{Maker, Peer};

/// The variants, as a request names them.
pub const VARIANTS: [&str; 10] = [
    "direct",
    "async",
    "pool",
    "thrifty",
    "budget",
    "null-log",
    "stack",
    "stack-log",
    "stack-csv",
    "guard",
];

const TAG: AllocTag = AllocTag("bench");
/// The most that a row leases is 64, beside the default one.
const STREAMS: usize = 72;
/// What a pool starts with where it may: memory that no stream has used.
const INITIAL: usize = 32 << 20;

type Resource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// What requests go to: a resource behind its trait object, or a runtime as programs hold it.
enum Front {
    Resource(Resource),
    Runtime(Box<XlogDeviceRuntime>),
}

/// One allocator with its streams.
pub struct Ours {
    front: Front,
    streams: Arc<StreamPool>,
    leases: Mutex<Vec<StreamLease>>,
    kernels: Result<Exercise, String>,
    /// Declared last: the writer ends before the file goes.
    _log: Option<LogFile>,
}

impl Ours {
    fn resource(&self) -> &dyn DeviceMemoryResource {
        match &self.front {
            Front::Resource(resource) => &**resource,
            Front::Runtime(runtime) => runtime.resource(),
        }
    }

    fn resolve(&self, stream: StreamId) -> Result<Arc<DeviceStream>, String> {
        self.streams.resolve(stream).ok_or_else(|| format!("{stream} is gone"))
    }
}

impl Peer for Ours {
    type Stream = StreamId;
    type Block = DeviceBlock;
    type Failure = ResourceError;

    fn stream(&self) -> Result<StreamId, String> {
        let lease = self.streams.lease().map_err(|error| error.to_string())?;
        let id = lease.id();
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).push(lease);
        Ok(id)
    }

    #[inline]
    fn allocate(&self, bytes: usize, stream: &StreamId) -> ResourceResult<DeviceBlock> {
        match &self.front {
            Front::Resource(resource) => resource.allocate(bytes, *stream, TAG),
            Front::Runtime(runtime) => runtime.allocate(bytes, *stream, TAG),
        }
    }

    #[inline]
    fn free(&self, block: DeviceBlock) {
        match &self.front {
            Front::Resource(resource) => resource.deallocate(block).unwrap(),
            Front::Runtime(runtime) => runtime.deallocate(block).unwrap(),
        }
    }

    fn free_elsewhere(
        &self,
        block: DeviceBlock,
        allocated: &StreamId,
        used: &StreamId,
    ) -> Result<(), String> {
        let resource = self.resource();
        if resource.supports_block_use_tracking() {
            let id = BlockId::from_block(&block);
            resource
                .prepare_block_use(id, *used, Access::Read)
                .and_then(|()| resource.finish_block_use(id, *used, Access::Read))
                .map_err(|error| error.to_string())?;
        } else {
            let (first, then) = (self.resolve(*allocated)?, self.resolve(*used)?);
            then.wait_for(&first).map_err(|error| error.to_string())?;
        }
        self.free(block);
        Ok(())
    }

    fn spin(&self, stream: &StreamId, block: &DeviceBlock, ticks: u64) -> Result<(), String> {
        let stream = self.resolve(*stream)?;
        let kernels = self.kernels.as_ref().map_err(String::clone)?;
        // SAFETY: the block is live, longer than a word, and this is its own stream.
        unsafe { kernels.spin(&stream, ticks, block.ptr, 1) }.map_err(|error| error.to_string())
    }

    fn synchronize(&self) {
        self.streams.device().synchronize().unwrap();
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // What a driver pool keeps would be counted for the next row.
        let _ = self.resource().reap_pending();
        let _ = self.resource().trim();
    }
}

/// A log that is gone when nobody writes it any more.
struct LogFile(PathBuf);

impl Drop for LogFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Makes one variant.
pub struct OursMaker {
    device: Arc<CudaDevice>,
    /// Or why there are none on this device.
    kernels: Result<Exercise, String>,
    variant: &'static str,
}

impl OursMaker {
    pub fn find(device: &Arc<CudaDevice>, variant: &str) -> Result<Self, String> {
        let known = VARIANTS.into_iter().find(|known| *known == variant);
        let variant = known.ok_or_else(|| format!("there is no variant '{variant}'"))?;
        let kernels = Exercise::load(device).map_err(|error| error.to_string());
        Ok(Self { device: device.clone(), kernels, variant })
    }

    fn pool(&self, streams: &Arc<StreamPool>, grows: bool) -> Result<PoolResource, String> {
        let mut config = PoolConfig::default().with_initial(if grows { 0 } else { INITIAL });
        if self.variant == "thrifty" {
            config = config.with_eager_growth(0);
        }
        PoolResource::new(self.device.clone(), self.device.ordinal(), streams.clone(), config)
            .map_err(|error| error.to_string())
    }

    /// The stack that a program gets by configuration.
    fn runtime(&self, log: Option<&PathBuf>) -> Result<XlogDeviceRuntime, String> {
        let mut config = RuntimeConfig::default()
            .with_resource(ResourceKind::Pool)
            .with_max_streams(STREAMS)
            .with_ledger(LedgerSetting::Automatic);
        if let Some(log) = log {
            config = config.with_log(log);
        }
        XlogDeviceRuntime::with_config(self.device.clone(), &config)
            .map_err(|error| error.to_string())
    }
}

impl Maker for OursMaker {
    type Peer = Ours;

    fn make(&self, grows: bool) -> Result<Ours, String> {
        let device = &self.device;
        let streams = Arc::new(StreamPool::new(device.clone(), STREAMS));
        let log = |ending| {
            let name = format!("xlog-peers-{}.{ending}", std::process::id());
            Some(std::env::temp_dir().join(name))
        };
        let log = match self.variant {
            "stack-log" => log("xtrace"),
            "stack-csv" => log("csv"),
            _ => None,
        };
        let front = match self.variant {
            "direct" => {
                let resource = DirectCudaResource::new(device.clone(), device.ordinal());
                Front::Resource(Box::new(resource))
            }
            "async" => Front::Resource(Box::new(AsyncCudaResource::new(
                device.clone(),
                device.ordinal(),
                streams.clone(),
            ))),
            "pool" | "thrifty" => Front::Resource(Box::new(self.pool(&streams, grows)?)),
            "budget" => {
                let pool = Box::new(self.pool(&streams, grows)?);
                Front::Resource(Box::new(GlobalDeviceBudget::new(pool, 1 << 36)))
            }
            "null-log" => {
                let pool = Box::new(self.pool(&streams, grows)?);
                let sink = Arc::new(NullSink::new());
                Front::Resource(Box::new(LoggingResource::new(pool, sink)))
            }
            "guard" => {
                let pool = Box::new(self.pool(&streams, grows)?);
                Front::Resource(Box::new(DebugGuardResource::new(pool, GuardConfig::default())))
            }
            _ => Front::Runtime(Box::new(self.runtime(log.as_ref())?)),
        };
        let streams = match &front {
            Front::Runtime(runtime) => runtime.stream_pool().clone(),
            Front::Resource(_) => streams,
        };
        let kernels = self.kernels.clone();
        Ok(Ours { front, streams, leases: Mutex::default(), kernels, _log: log.map(LogFile) })
    }

    fn taken_and_total(&self) -> Option<(u64, u64)> {
        let info = self.device.memory_info().ok()?;
        Some((info.total - info.free, info.total))
    }
}

/// The device to measure on. `sim` is the simulated one behind the plain driver seam, so that what is measured is not the detector.
pub fn open(spec: &str) -> Result<Arc<CudaDevice>, String> {
    if spec == "sim" {
        let config = SimConfig::default().with_capacity(80 << 30);
        let sim = SimDevice::open(config).map_err(|error| error.to_string())?;
        return Ok(Arc::new(CudaDevice::from_driver(sim)));
    }
    CudaDevice::open(spec).map(Arc::new).map_err(|error| error.to_string())
}
