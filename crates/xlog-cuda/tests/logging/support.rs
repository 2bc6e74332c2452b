//! What the tests of logging and statistics share.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, DirectCudaResource,
    Generation, ResourceError, ResourceResult, StreamId,
};

pub const STREAM: StreamId = StreamId::DEFAULT;
pub const ROWS: AllocTag = AllocTag("rows");
pub const KEYS: AllocTag = AllocTag("keys");

pub fn direct() -> DirectCudaResource {
    DirectCudaResource::new(Arc::new(CudaDevice::open("sim").unwrap()), 0)
}

pub use xlog_base::Random;

/// Seeds to try: `XLOG_LOGGING_SEED` alone, or the first few.
pub fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("XLOG_LOGGING_SEED") {
        Ok(text) => vec![text.parse().unwrap()],
        Err(_) => (0..count).collect(),
    }
}

/// Says how to run a failed seed again.
pub struct Replay(pub u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {0}; run it again with XLOG_LOGGING_SEED={0}", self.0);
        }
    }
}

/// A directory that is gone when this is.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("xlog-logging-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Host-side memory that is handed out again at once, so that addresses come back often, and from other threads.
///
/// Sizes are rounded up to 64 bytes. With `slots`, generations say where their record is; else they leave that part 0, as a
/// stranger's may.
#[derive(Default)]
pub struct Recycler {
    free: Mutex<Vec<(u64, usize)>>,
    live: Mutex<std::collections::HashMap<u64, (u64, usize)>>,
    next: AtomicU64,
    outstanding: AtomicUsize,
    pub fails: std::sync::atomic::AtomicBool,
    /// What a free answers although it has taken the block.
    pub half_fails: std::sync::atomic::AtomicBool,
}

impl DeviceMemoryResource for Recycler {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(ResourceError::OutOfBudget { requested: bytes, remaining: 1 });
        }
        let size = bytes.next_multiple_of(64);
        let mut free = self.free.lock().unwrap();
        let ptr = match free.iter().rposition(|(_, room)| *room == size) {
            Some(at) => free.swap_remove(at).0,
            None => 0x10_0000 + self.next.fetch_add(size as u64, Ordering::Relaxed),
        };
        let generation = Generation::next();
        self.live.lock().unwrap().insert(generation.0, (ptr, size));
        drop(free);
        self.outstanding.fetch_add(size, Ordering::Relaxed);
        Ok(DeviceBlock {
            ptr,
            device_ordinal: 3,
            alloc_stream: stream,
            bytes: size,
            align: 256,
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let generation = block.generation;
        let taken = self.live.lock().unwrap().remove(&generation.0);
        let Some((ptr, size)) = taken else {
            return Err(ResourceError::UseAfterFree { generation });
        };
        self.outstanding.fetch_sub(size, Ordering::Relaxed);
        self.free.lock().unwrap().push((ptr, size));
        if self.half_fails.load(Ordering::Relaxed) {
            return Err(ResourceError::Driver("the driver failed half way".to_owned()));
        }
        Ok(())
    }

    fn device_ordinal(&self) -> u32 {
        3
    }

    fn bytes_outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Relaxed)
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        match self.live.lock().unwrap().contains_key(&block.generation.0) {
            true => BlockState::Live,
            false if self.half_fails.load(Ordering::Relaxed) => BlockState::Retired,
            false => BlockState::Freed,
        }
    }
}

/// A second claim to the same block.
pub fn twin(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}
