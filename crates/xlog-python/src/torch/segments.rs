//! Segments for a `torch.cuda.MemPool`: `xlogmem.torch.pool()`.
//!
//! PyTorch sub-allocates the segments and keeps its own statistics. Each segment is one driver allocation of a runtime with its
//! own limit and log. It is usable on every stream at once, even during a capture, and by CUDA's interprocess calls. A free waits
//! for the device, as PyTorch's own does.

use std::collections::HashMap;
use std::sync::Arc;

use xlog_base::Mutex;
use xlog_cuda::device_runtime::{DeviceBlock, RuntimeConfig, XlogDeviceRuntime};
use xlog_cuda::{DeviceSpec, Result, StreamId};

use super::allocator::torch_tag;
use super::counters::Counters;

pub(super) struct Segments {
    pub(super) runtime: Arc<XlogDeviceRuntime>,
    blocks: Mutex<HashMap<u64, DeviceBlock>>,
    counters: Mutex<Counters>,
}

impl Segments {
    pub(super) fn open(config: &RuntimeConfig, device: usize) -> Result<Self> {
        let spec = config.device.unwrap_or(DeviceSpec::Cuda(device));
        let runtime = config.clone().with_device(spec).open()?;
        Ok(Self { runtime, blocks: Mutex::default(), counters: Mutex::default() })
    }

    /// Calls `work` with the counters.
    pub(super) fn with_counters<T>(&self, work: impl FnOnce(&mut Counters) -> T) -> T {
        work(&mut self.counters.lock())
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<u64> {
        let block = self.runtime.allocate(bytes, StreamId::DEFAULT, torch_tag());
        let block = block.inspect_err(|_| self.counters.lock().refusals += 1)?;
        let ptr = block.ptr;
        self.with_counters(|counters| {
            counters.add(block.bytes, block.bytes);
            counters.reserve_allocated();
        });
        self.blocks.lock().insert(ptr, block);
        Ok(ptr)
    }

    /// Frees a segment; returns false for an address of another device.
    pub(super) fn free(&self, ptr: u64) -> bool {
        let Some(block) = self.blocks.lock().remove(&ptr) else { return false };
        self.with_counters(|counters| {
            counters.remove(block.bytes, block.bytes);
            counters.reserve_allocated();
        });
        // The runtime keeps a block whose free failed, and a later reap frees it.
        let _ = self.runtime.deallocate(block);
        true
    }
}
