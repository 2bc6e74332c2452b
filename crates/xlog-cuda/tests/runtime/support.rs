//! Runtimes for the tests, and a resource that fails and counts as it is told.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DeviceBlock, DeviceMemoryResource,
    DirectCudaResource, ResourceError, ResourceResult, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager};

/// A runtime over the stream-ordered resource.
pub(crate) fn runtime(device: &Arc<CudaDevice>) -> Arc<XlogDeviceRuntime> {
    scripted(device).0
}

/// A manager of a runtime over the stream-ordered resource.
pub(crate) fn manager(device: &Arc<CudaDevice>) -> GpuMemoryManager {
    GpuMemoryManager::with_runtime(runtime(device))
}

/// A runtime over the resource that tracks no uses.
pub(crate) fn direct(device: &Arc<CudaDevice>) -> Arc<XlogDeviceRuntime> {
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let resource = DirectCudaResource::new(device.clone(), device.ordinal());
    Arc::new(XlogDeviceRuntime::with_resource(
        device.clone(),
        device.ordinal(),
        pool,
        Box::new(resource),
    ))
}

/// A runtime over the stream-ordered resource, and the script it follows.
pub(crate) fn scripted(device: &Arc<CudaDevice>) -> (Arc<XlogDeviceRuntime>, Arc<Script>) {
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
    let script = Arc::new(Script::default());
    let resource = Scripted { inner, script: script.clone() };
    let ordinal = device.ordinal();
    let runtime =
        XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool, Box::new(resource));
    (Arc::new(runtime), script)
}

/// What a scripted resource is to do wrong, and what it saw. A failure hits the call after that many others.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) fail_allocate_after: Mutex<Option<usize>>,
    pub(crate) fail_prepare_after: Mutex<Option<usize>>,
    pub(crate) fail_deallocate: Mutex<Option<Failure>>,
    pub(crate) prepares: AtomicUsize,
    pub(crate) finishes: Mutex<Vec<Vec<(BlockId, Access)>>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Failure {
    Error,
    Panic,
}

impl Script {
    /// How many uses were opened and not closed.
    pub(crate) fn open_uses(&self) -> usize {
        let closed: usize = self.finishes.lock().unwrap().iter().map(Vec::len).sum();
        self.prepares.load(Ordering::SeqCst) - closed
    }

    fn due(countdown: &Mutex<Option<usize>>) -> bool {
        let mut countdown = countdown.lock().unwrap();
        match *countdown {
            Some(0) => {
                *countdown = None;
                true
            }
            Some(more) => {
                *countdown = Some(more - 1);
                false
            }
            None => false,
        }
    }
}

struct Scripted {
    inner: AsyncCudaResource,
    script: Arc<Script>,
}

fn injected(call: &str) -> ResourceError {
    ResourceError::Driver(format!("{call} failed by the script"))
}

impl DeviceMemoryResource for Scripted {
    xlog_testing::decorates!(inner);
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if Script::due(&self.script.fail_allocate_after) {
            return Err(injected("allocate"));
        }
        self.inner.allocate(bytes, stream, tag)
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let failure = self.script.fail_deallocate.lock().unwrap().take();
        self.inner.deallocate(block)?;
        match failure {
            None => Ok(()),
            Some(Failure::Error) => Err(injected("deallocate")),
            Some(Failure::Panic) => panic!("deallocate panicked by the script"),
        }
    }
    fn prepare_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if Script::due(&self.script.fail_prepare_after) {
            return Err(injected("prepare"));
        }
        self.inner.prepare_block_use(block, stream, access)?;
        self.script.prepares.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn finish_block_use(
        &self,
        block: BlockId,
        stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.finish_block_uses(&[(block, access)], stream)
    }
    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        stream: StreamId,
    ) -> ResourceResult<()> {
        self.script.finishes.lock().unwrap().push(uses.to_vec());
        self.inner.finish_block_uses(uses, stream)
    }
}
