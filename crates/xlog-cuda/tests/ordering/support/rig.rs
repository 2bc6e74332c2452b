//! A resource, its streams, and work on its blocks.

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    DeviceStream, PoolConfig, PoolResource, StreamLease, StreamPool,
};
use xlog_cuda::sim::SimKernel;
use xlog_cuda::{CudaDevice, Result};

pub const TAG: AllocTag = AllocTag("test");

/// An asynchronous resource on a device. What it queues is right only as far as the hooks are; that is what is tested.
pub struct Rig {
    pub device: Arc<CudaDevice>,
    pub pool: Arc<StreamPool>,
    pub resource: Arc<dyn DeviceMemoryResource + Send + Sync>,
}

/// A second claim to the same block.
pub fn twin(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}

/// Queues a fill without any hook.
pub fn fill(stream: &DeviceStream, ptr: u64, value: u8, bytes: usize) {
    // SAFETY: the callers keep the block alive until a free that the resource under test orders after this work.
    unsafe { stream.memset(ptr, value, bytes) }.unwrap();
}

/// Queues a copy without any hook.
pub fn copy(stream: &DeviceStream, to: u64, from: u64, bytes: usize) {
    // SAFETY: as in `fill`, for both blocks.
    unsafe { stream.copy_dtod(to, from, bytes) }.unwrap();
}

/// Reads without any hook, waiting for the stream.
pub fn read(stream: &DeviceStream, ptr: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut back = vec![0; bytes];
    // SAFETY: as in `fill`; the call returns when the copy is done.
    unsafe { stream.copy_dtoh(&mut back, ptr)? };
    Ok(back)
}

pub fn sub_allocating(
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
    config: PoolConfig,
) -> PoolResource {
    let (device, streams) = (device.clone(), streams.clone());
    if config.growth_bytes >= 2 << 20 {
        let ordinal = device.ordinal();
        return PoolResource::new(device, ordinal, streams, config).unwrap();
    }
    let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), streams.clone());
    PoolResource::over(Box::new(inner), streams, config).unwrap()
}

impl Rig {
    pub fn new(device: &Arc<CudaDevice>) -> Self {
        Self::with_streams(device, 16)
    }

    pub fn with_streams(device: &Arc<CudaDevice>, max: usize) -> Self {
        let pool = Arc::new(StreamPool::new(device.clone(), max));
        let resource = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        Self::over(pool, Arc::new(resource))
    }

    /// The same over a pool that sub-allocates; one that grows by little takes its memory from another resource.
    pub fn pooled(device: &Arc<CudaDevice>, config: PoolConfig) -> Self {
        Self::pooled_with_streams(device, config, 16)
    }

    pub fn pooled_with_streams(device: &Arc<CudaDevice>, config: PoolConfig, max: usize) -> Self {
        let pool = Arc::new(StreamPool::new(device.clone(), max));
        Self::over(pool.clone(), Arc::new(sub_allocating(device, &pool, config)))
    }

    pub fn over(
        pool: Arc<StreamPool>,
        resource: Arc<dyn DeviceMemoryResource + Send + Sync>,
    ) -> Self {
        Self { device: pool.device().clone(), pool, resource }
    }

    pub fn leases<const N: usize>(&self) -> [StreamLease; N] {
        std::array::from_fn(|_| self.pool.lease().unwrap())
    }

    pub fn allocate(&self, bytes: usize, stream: &DeviceStream) -> DeviceBlock {
        self.resource.allocate(bytes, stream.id(), TAG).unwrap()
    }

    pub fn free(&self, block: DeviceBlock) {
        self.resource.deallocate(block).unwrap();
    }

    pub fn prepare(&self, block: BlockId, stream: &DeviceStream, access: Access) {
        self.resource.prepare_block_use(block, stream.id(), access).unwrap();
    }

    pub fn finish(&self, block: BlockId, stream: &DeviceStream, access: Access) {
        self.resource.finish_block_use(block, stream.id(), access).unwrap();
    }

    /// A hooked fill.
    pub fn write(&self, block: BlockId, stream: &DeviceStream, value: u8, bytes: usize) {
        self.prepare(block, stream, Access::Write);
        fill(stream, block.ptr, value, bytes);
        self.finish(block, stream, Access::Write);
    }

    /// A hooked copy to `to`, a block that only `stream` uses.
    pub fn copy_to(&self, to: BlockId, block: BlockId, stream: &DeviceStream, bytes: usize) {
        self.prepare(block, stream, Access::Read);
        copy(stream, to.ptr, block.ptr, bytes);
        self.finish(block, stream, Access::Read);
    }

    /// A hooked read that waits, and must find `value` everywhere.
    pub fn expect(&self, block: BlockId, stream: &DeviceStream, value: u8, bytes: usize) {
        self.prepare(block, stream, Access::Read);
        let back = read(stream, block.ptr, bytes);
        self.finish(block, stream, Access::Read);
        assert_all(&back.unwrap(), value);
    }

    pub fn state(&self, block: BlockId) -> BlockState {
        self.resource.block_state(block)
    }

    /// Nothing is left.
    pub fn settle(&self) {
        self.resource.reap_pending().unwrap();
        self.assert_empty();
    }

    pub fn assert_empty(&self) {
        let counted = self.resource.statistics();
        assert_eq!(self.resource.bytes_outstanding(), 0, "{counted:?}");
        assert_eq!((counted.live_blocks, counted.retired_blocks), (0, 0), "{counted:?}");
    }
}

pub fn assert_all(bytes: &[u8], value: u8) {
    let wrong = bytes.iter().position(|byte| *byte != value);
    assert!(wrong.is_none(), "byte {wrong:?} is {:#04x}, not {value:#04x}", bytes[wrong.unwrap()]);
}

/// A kernel that only looks: tells `problem` when the bytes are not these.
pub fn looking(
    name: String,
    ptr: u64,
    due: Vec<u8>,
    problem: impl FnOnce(String) + Send + 'static,
) -> SimKernel {
    let (label, bytes) = (name.clone(), due.len());
    SimKernel::new(name, move |args| {
        if args.bytes(0) != due {
            problem(format!("{label} saw {:x?}, {due:x?} was due", args.bytes(0)));
        }
    })
    .arg(ptr, bytes, Access::Read)
}
