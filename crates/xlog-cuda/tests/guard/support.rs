//! What the tests of the guard share.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DeviceStream, GuardConfig, GuardOutput, ResourceError, ResourceResult,
    StreamId, StreamPool,
};
use xlog_cuda::{CudaDevice, DeviceSpec};

pub const ROWS: AllocTag = AllocTag("rows");

/// The default settings, with nothing written to standard error.
pub fn quiet() -> GuardConfig {
    GuardConfig::default().with_output(GuardOutput::Silent)
}

/// A guard over the async resource.
pub struct Rig {
    pub device: Arc<CudaDevice>,
    pub pool: Arc<StreamPool>,
    pub guard: DebugGuardResource<AsyncCudaResource>,
}

impl Rig {
    pub fn new(device: &Arc<CudaDevice>, config: GuardConfig) -> Self {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        Self { device: device.clone(), pool, guard: DebugGuardResource::on_home(inner, config) }
    }

    pub fn allocate(&self, bytes: usize, stream: &DeviceStream) -> DeviceBlock {
        self.guard.allocate(bytes, stream.id(), ROWS).unwrap()
    }

    /// An announced fill.
    pub fn write(
        &self,
        block: BlockId,
        stream: &DeviceStream,
        offset: i64,
        value: u8,
        bytes: usize,
    ) {
        self.guard.prepare_block_use(block, stream.id(), Access::Write).unwrap();
        poke(stream, block.ptr, offset, value, bytes);
        self.guard.finish_block_use(block, stream.id(), Access::Write).unwrap();
    }
}

/// A fill that nobody is told of, counted from a block's first byte.
pub fn poke(stream: &DeviceStream, ptr: u64, offset: i64, value: u8, bytes: usize) {
    let at = ptr.wrapping_add_signed(offset);
    // SAFETY: the tests stay inside memory that the guard holds: a block, its canaries, or its quarantine.
    unsafe { stream.memset(at, value, bytes) }.unwrap();
}

pub fn twin(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}

/// A guard whose quarantine is emptied after every free: what the suite says of frees holds for such a one.
///
/// Blocks of a gibibyte are refused: filling one tells nothing new.
pub struct Emptied<R: DeviceMemoryResource>(pub DebugGuardResource<R>);

impl<R: DeviceMemoryResource> DeviceMemoryResource for Emptied<R> {
    xlog_testing::decorates!(0);
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes == 1 << 30 {
            let detail = "the tests have no room for it".to_owned();
            return Err(ResourceError::OutOfMemory { requested: bytes, detail });
        }
        self.0.allocate(bytes, stream, tag)
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let freed = self.0.deallocate(block);
        freed.and(self.0.flush_quarantine())
    }
    fn reap_pending(&self) -> ResourceResult<()> {
        // A free that failed half way is held back only by the reap that goes on with it.
        let reaped = self.0.reap_pending();
        if self.0.quarantine().1 == 0 {
            return reaped;
        }
        reaped.and(self.0.flush_quarantine()).and(self.0.reap_pending())
    }
    fn finish_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        // A finish that fails may have freed the block all the same.
        let finished = self.0.finish_block_use(block, stream, access);
        finished.and(self.0.flush_quarantine())
    }
}

pub use xlog_base::Random;

/// The random programs of a test: few on a GPU, as many as `XLOG_GUARD_SEEDS` says, or the one that `XLOG_GUARD_SEED` names.
pub fn seeds(many: u64, on_gpu: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    if let Some(seed) = number("XLOG_GUARD_SEED") {
        return vec![seed];
    }
    let usual = if gpu().is_some() { on_gpu } else { many };
    (0..number("XLOG_GUARD_SEEDS").unwrap_or(usual)).collect()
}

/// The GPU that the tests were told to run on.
pub fn gpu() -> Option<String> {
    let spec = std::env::var(xlog_testing::TEST_DEVICE_VARIABLE).ok()?;
    let is_gpu = spec.parse::<DeviceSpec>().is_ok_and(|spec| !spec.is_simulated());
    is_gpu.then_some(spec)
}

/// Says how to run a failed program again.
pub struct Replay(pub u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {0}; run it again with XLOG_GUARD_SEED={0}", self.0);
        }
    }
}

/// True where blocks are looked at by the device itself, in stream order; behind a plain seam they are copied back.
pub fn looks_on_the_device(device: &CudaDevice) -> bool {
    device.sim().is_some() || device.spec().parse::<DeviceSpec>().is_ok()
}
