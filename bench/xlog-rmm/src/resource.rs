//! The resource: block records over RMM's addresses.
//!
//! A record owns the state of a block. It holds the block's stream, so that a free can be ordered on it after all other leases of
//! the stream have ended. A record is removed when RMM has the address again, since RMM may reuse the memory in stream order.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xlog_base::{Mutex, MutexGuard};
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, BudgetReservation, CudaDevice, DeviceBlock,
    DeviceMemoryResource, DeviceStream, Generation, ResourceError, ResourceResult,
    ResourceStatistics, StreamId, StreamPool,
};

use crate::bridge::{Allocator, Bridge, BridgeError, RmmKind};

/// RMM aligns every block to this.
const ALIGN: usize = 256;
/// The maximum supported alignment.
const MOST_ALIGN: usize = 2 << 20;
/// The number of locks of the record table, which reduces contention between threads.
const SHARDS: usize = 64;

struct Record {
    generation: Generation,
    bytes: usize,
    stream: Arc<DeviceStream>,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Live,
    /// A free is in progress. Once RMM has the address, another thread may get it and replace this record.
    Returning,
    /// RMM refused the free; a reap tries again.
    Retired,
}

/// An RMM resource. The use hooks refuse: it tracks no uses.
pub struct RmmResource {
    /// Declared first, so that it is dropped before the streams that RMM remembers.
    allocator: Allocator,
    device: Arc<CudaDevice>,
    ordinal: u32,
    streams: Arc<StreamPool>,
    kind: RmmKind,
    shards: Vec<Mutex<HashMap<u64, Record>>>,
    outstanding: AtomicUsize,
    allocations: AtomicU64,
    deallocations: AtomicU64,
}

impl RmmResource {
    /// Opens RMM's resource of a kind on a device, for the streams of `streams`. A pool starts with `initial` bytes; an arena never grows.
    pub fn new(
        bridge: &Bridge,
        kind: RmmKind,
        device: Arc<CudaDevice>,
        streams: Arc<StreamPool>,
        initial: usize,
    ) -> Result<Self, BridgeError> {
        let ordinal = device.ordinal();
        let allocator = bridge.open(kind, ordinal, initial)?;
        Ok(Self {
            allocator,
            device,
            ordinal,
            streams,
            kind,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            outstanding: AtomicUsize::new(0),
            allocations: AtomicU64::new(0),
            deallocations: AtomicU64::new(0),
        })
    }

    /// Locks the records of the shard that contains `ptr`.
    fn shard(&self, ptr: u64) -> MutexGuard<'_, HashMap<u64, Record>> {
        let at = (ptr / ALIGN as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        // The index is a remainder of the length.
        self.shards[at as usize % SHARDS].lock()
    }

    /// Returns a block at this stage to RMM. No lock is held during the call, which may wait.
    fn give_back(&self, ptr: u64, generation: Generation, stage: Stage) -> ResourceResult<()> {
        let (bytes, stream) = match self.shard(ptr).get_mut(&ptr) {
            Some(record) if record.generation == generation && record.stage == stage => {
                record.stage = Stage::Returning;
                (record.bytes, record.stream.clone())
            }
            _ => return Err(ResourceError::UseAfterFree { generation }),
        };
        // SAFETY: the record shows that the address is allocated with this size, and its stage excludes another free; the stream is held
        // here. The caller of `deallocate` orders its work before the free on that stream, since this resource tracks no uses.
        let returned = unsafe { self.allocator.deallocate(ptr, bytes, raw(&stream)) };
        let mut shard = self.shard(ptr);
        let is_own = |record: &&mut Record| record.generation == generation;
        match &returned {
            Ok(()) => {
                if shard.get_mut(&ptr).filter(is_own).is_some() {
                    shard.remove(&ptr);
                }
                self.outstanding.fetch_sub(bytes, Ordering::AcqRel);
            }
            Err(_) => {
                if let Some(record) = shard.get_mut(&ptr).filter(is_own) {
                    record.stage = Stage::Retired;
                }
            }
        }
        returned
    }
}

/// Returns the driver's handle of a stream; on a simulated device, its number.
fn raw(stream: &DeviceStream) -> *mut c_void {
    stream.cu_stream().unwrap_or(stream.handle().number() as *mut c_void)
}

fn alignment_of(ptr: u64) -> usize {
    1 << (ptr | MOST_ALIGN as u64).trailing_zeros()
}

impl DeviceMemoryResource for RmmResource {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if !Arc::ptr_eq(&self.device, self.streams.device()) {
            let (own, other) = (self.device.spec(), self.streams.device().spec());
            return Err(ResourceError::Driver(format!(
                "the resource is of {own}, its streams are of another device, {other}"
            )));
        }
        if bytes == 0 {
            return Err(ResourceError::InvalidRequest {
                value: "an allocation of 0 bytes".to_owned(),
                accepted: "at least one byte".to_owned(),
            });
        }
        let held = self.streams.resolve(stream).ok_or_else(|| {
            ResourceError::StreamMisuse(format!("{stream} is not a stream of this resource's pool"))
        })?;
        // SAFETY: the stream is live while it is held here.
        let ptr = unsafe { self.allocator.allocate(bytes, raw(&held))? };
        let align = alignment_of(ptr);
        if align < ALIGN {
            // SAFETY: the address was just allocated and is not shared.
            unsafe { self.allocator.deallocate(ptr, bytes, raw(&held))? };
            return Err(ResourceError::Driver(format!(
                "RMM gave the address {ptr:#x}, which is not aligned to {ALIGN}"
            )));
        }
        let generation = Generation::next();
        let record = Record { generation, bytes, stream: held, stage: Stage::Live };
        self.outstanding.fetch_add(bytes, Ordering::AcqRel);
        self.shard(ptr).insert(ptr, record);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(DeviceBlock {
            ptr,
            device_ordinal: self.ordinal,
            alloc_stream: stream,
            bytes,
            align,
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        if block.device_ordinal != self.ordinal {
            return Err(ResourceError::Driver(format!(
                "a block of device {} was given to a resource of device {}",
                block.device_ordinal, self.ordinal
            )));
        }
        let freed = self.give_back(block.ptr, block.generation, Stage::Live);
        if !matches!(freed, Err(ResourceError::UseAfterFree { .. })) {
            self.deallocations.fetch_add(1, Ordering::Relaxed);
        }
        freed
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let mut retired = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let kept = shard.iter().filter(|(_, record)| record.stage == Stage::Retired);
            retired.extend(kept.map(|(ptr, record)| (*ptr, record.generation)));
        }
        let mut outcome = Ok(());
        for (ptr, generation) in retired {
            match self.give_back(ptr, generation, Stage::Retired) {
                // A concurrent reap was faster.
                Err(ResourceError::UseAfterFree { .. }) => {}
                this => outcome = outcome.and(this),
            }
        }
        outcome
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        let shard = self.shard(block.ptr);
        match shard.get(&block.ptr).filter(|record| {
            record.generation == block.generation && block.device_ordinal == self.ordinal
        }) {
            Some(record) if record.stage == Stage::Live => BlockState::Live,
            Some(_) => BlockState::Retired,
            None => BlockState::Freed,
        }
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    fn statistics(&self) -> ResourceStatistics {
        let mut counted = ResourceStatistics::default();
        for shard in &self.shards {
            for record in shard.lock().values() {
                match record.stage {
                    Stage::Live => counted.live_blocks += 1,
                    Stage::Returning | Stage::Retired => counted.retired_blocks += 1,
                }
            }
        }
        counted.bytes_outstanding = self.bytes_outstanding();
        counted.allocations = self.allocations.load(Ordering::Relaxed);
        counted.deallocations = self.deallocations.load(Ordering::Relaxed);
        counted
    }
}

impl fmt::Debug for RmmResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RmmResource")
            .field("kind", &self.kind)
            .field("device", &self.device.spec())
            .field("bytes_outstanding", &self.bytes_outstanding())
            .finish_non_exhaustive()
    }
}
