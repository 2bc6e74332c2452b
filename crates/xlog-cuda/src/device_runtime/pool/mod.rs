//! Pool: sub-allocates device memory in stream order; reuse costs no driver call.
//!
//! Every stream has an arena: a magazine of blocks ready to hand out, and a TLSF of free ranges. Allocating and freeing
//! touch the arena of their stream and nothing else. If the arena has nothing left, `slow_path` takes memory from other
//! streams or from the device. The clocks of `ordering` decide which memory of another stream may be reused, and with
//! which wait.
//!
//! | file | content |
//! |---|---|
//! | `fast_path`, `batch`, `free`, `slow_path` | allocation and free: by the owning thread, in batches, in general, and with an empty arena |
//! | `arena`, `magazine`, `coalesce_queue`, `tlsf` | free memory of one stream: cached by class, waiting to be coalesced, by size and address |
//! | `trim` | free memory of all streams: coalesced, returned to the device, shared out to the magazines |
//! | `segments`, `source` | memory that the pool takes from the device, or from another resource |
//! | `resource`, `config`, `snapshot` | the trait, the configuration, and the figures of a pool |
//! | `sanitizer` | a pool under a memory checker |

mod arena;
mod batch;
mod coalesce_queue;
mod config;
mod fast_path;
mod free;
mod magazine;
mod prefetch;
mod resource;
mod sanitizer;
mod segments;
mod slow_path;
mod snapshot;
mod source;
#[cfg(test)]
mod tests;
pub(crate) mod tlsf;
mod trim;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use xlog_driver::Driver;
use xlog_driver::sync::Mutex;

use self::arena::{Arena, NO_SLOT, Suballocation};
use self::resource::size_of;
use self::sanitizer::Sanitizer;
use self::segments::Segments;
use self::tlsf::Tlsf;
use super::direct::too_many_blocks;
use super::ordering::EventPolicy;
use super::ordering::block_meta::BlockOwner;
use super::ordering::deferred_frees::DeferredFrees;
use super::ordering::primitive::Lock;
use super::ordering::slab::Slab;
use super::ordering::tracker::Tracker;
use super::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult, StreamId,
};
use super::stream_pool::StreamPool;
use crate::CudaDevice;
use crate::stream::RawStream;

pub use config::{PoolConfig, PoolReuse, PoolSanitizer, PoolSegments};
pub use sanitizer::SanitizerSnapshot;
pub use snapshot::{PoolPaths, PoolSnapshot};

/// The number of streams that a pool can serve.
const MAX_STREAMS: u32 = 1 << 14;

/// An arena on cache lines of its own: mostly each stream is used by another thread.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ArenaShard(Lock<Arena>, AtomicBool);

impl ArenaShard {
    /// Whether the stream of this slot has asked for memory.
    fn is_used(&self) -> bool {
        self.1.load(Ordering::Acquire)
    }
}

/// Sub-allocates device memory in stream order.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, PoolConfig, PoolResource, StreamId, StreamPool,
/// };
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
/// let pool = PoolResource::new(device, 0, streams, PoolConfig::default())?;
///
/// let first = pool.allocate(1000, StreamId::DEFAULT, AllocTag("rows"))?;
/// let ptr = first.ptr;
/// pool.deallocate(first)?;
/// let again = pool.allocate(1000, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert_eq!(again.ptr, ptr, "the same stream gets it back at once");
/// pool.deallocate(again)?;
///
/// pool.reap_pending()?;
/// pool.trim()?;
/// assert_eq!(pool.snapshot().reserved_bytes, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PoolResource {
    tracker: Tracker,
    /// Made one by one: only a stream's first request pays for its arena.
    arenas: Slab<ArenaShard, 1>,
    /// The bytes that the magazine of each stream may hold.
    magazine_capacity: AtomicU64,
    /// Whether blocks may take the fast path: no observer must be told of them, and their own stream records no events.
    fast_path: bool,
    /// The driver of a simulated device, whose race detector learns of every block.
    observer: Option<Arc<dyn Driver>>,
    device: Arc<CudaDevice>,
    ordinal: u32,
    config: PoolConfig,
    segments: Box<dyn Segments>,
    slow_path: SlowPathState,
    deferred_frees: DeferredFrees,
    /// Set under a memory checker.
    sanitizer: Option<Sanitizer>,
}

/// State of the slow path, away from the cache lines that all streams read.
#[repr(align(128))]
struct SlowPathState {
    /// Memory that belongs to no stream, and on which no work is pending.
    shared_free: Mutex<Tlsf>,
    /// Held while memory moves between the pool and the device, so that two requests do not both grow for one need.
    growing: Mutex<Growth>,
    /// Credits that requests have earned for scans of other arenas.
    scan_credits: AtomicU32,
}

/// How the pool has grown.
#[derive(Debug)]
struct Growth {
    /// When the pool last took memory from the device.
    last: Instant,
    /// The bytes that all magazines together may hold, and the number of streams that share them.
    shared: (u64, u32),
}

impl PoolResource {
    /// Creates a pool of `device`, which is number `ordinal`, for the streams of `streams`.
    pub fn new(
        device: Arc<CudaDevice>,
        ordinal: u32,
        streams: Arc<StreamPool>,
        config: PoolConfig,
    ) -> ResourceResult<Self> {
        config.check()?;
        let sanitizer = Sanitizer::of(&device, &config, false)?;
        let segments = source::of_device(&device, &config, sanitizer.as_ref())?;
        Self::build(device, ordinal, streams, config, segments, sanitizer)
    }

    /// Creates a pool that takes its memory from another resource.
    ///
    /// The device and its number are those of `inner` and `streams`. A resource on another open device or another
    /// stream pool is refused with a [`ResourceError::Driver`] that names both.
    pub fn over(
        inner: Box<dyn DeviceMemoryResource + Send + Sync>,
        streams: Arc<StreamPool>,
        config: PoolConfig,
    ) -> ResourceResult<Self> {
        config.check()?;
        let (device, ordinal) = (Arc::clone(streams.device()), inner.device_ordinal());
        if let Some(misfit) = inner.home().and_then(|home| home.misfit(&device, &streams)) {
            return Err(ResourceError::Driver(format!(
                "the parts of this pool do not belong together: {misfit}"
            )));
        }
        let sanitizer = Sanitizer::of(&device, &config, true)?;
        let segments = source::of_inner(inner, &config)?;
        Self::build(device, ordinal, streams, config, segments, sanitizer)
    }

    fn build(
        device: Arc<CudaDevice>,
        ordinal: u32,
        streams: Arc<StreamPool>,
        config: PoolConfig,
        segments: Box<dyn Segments>,
        sanitizer: Option<Sanitizer>,
    ) -> ResourceResult<Self> {
        let mut tracker = Tracker::new(&device, ordinal, streams);
        tracker.check_parts()?;
        tracker.policy = config.event_policy;
        let pool = Self {
            tracker,
            arenas: Slab::new(MAX_STREAMS),
            magazine_capacity: AtomicU64::new(0),
            fast_path: device.observer().is_none()
                && config.event_policy != EventPolicy::Exact
                && sanitizer.is_none(),
            observer: device.observer().cloned(),
            device,
            ordinal,
            segments,
            slow_path: SlowPathState {
                shared_free: Mutex::default(),
                growing: Mutex::new(Growth { last: Instant::now(), shared: (0, 0) }),
                scan_credits: AtomicU32::new(slow_path::MAX_SCAN_CREDITS),
            },
            deferred_frees: DeferredFrees::default(),
            sanitizer,
            config,
        };
        pool.grow_initial()?;
        Ok(pool)
    }

    /// The arenas, if blocks may take the fast path.
    #[inline(always)]
    fn fast_path_arenas(&self) -> Option<&Slab<ArenaShard, 1>> {
        self.fast_path.then_some(&self.arenas)
    }

    #[inline(always)]
    fn magazine_capacity(&self) -> u64 {
        self.magazine_capacity.load(Ordering::Relaxed)
    }

    /// The arena of a stream.
    #[inline]
    fn arena(&self, slot: u32) -> ResourceResult<&Lock<Arena>> {
        if let Some(shard) = self.arenas.get(slot)
            && shard.is_used()
        {
            return Ok(&shard.0);
        }
        self.first_arena(slot)
    }

    #[cold]
    fn first_arena(&self, slot: u32) -> ResourceResult<&Lock<Arena>> {
        match self.arenas.get_or_make(slot) {
            Some(shard) => {
                shard.1.store(true, Ordering::Release);
                self.rebalance_magazines(&mut self.slow_path.growing.lock());
                Ok(&shard.0)
            }
            None => Err(ResourceError::StreamMisuse(format!(
                "a pool serves the first {MAX_STREAMS} streams of its stream pool"
            ))),
        }
    }

    #[inline(never)]
    fn allocate_general(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let owner = self.tracker.stream(stream)?;
        let size = size_of(bytes)?;
        owner.check_not_capturing("pool allocate")?;
        let arena = self.arena(owner.clock().slot())?;
        if self.sanitizer.is_some()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            // A failed free stays with its block, and a reap reports it.
            let _ = self.release_completed(sanitizer::WAITING_PER_REQUEST);
        }
        let suballocation =
            match arena.with(|arena| arena.allocate(size, align as u64, &self.tracker.table)) {
                Some(suballocation) => suballocation,
                None => self.allocate_slow(stream, owner, arena, size, align as u64)?,
            };
        self.begin_block(suballocation, bytes, owner, stream, tag)
    }

    /// Begins a live block on memory that was allocated for it.
    fn begin_block(
        &self,
        suballocation: Suballocation,
        requested: usize,
        owner: &RawStream,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let table = &self.tracker.table;
        let slot = if suballocation.slot == NO_SLOT {
            table.allocate_slot()
        } else {
            Some(suballocation.slot)
        };
        let Some(slot) = slot else { return Err(self.undo_allocation(suballocation, owner)) };
        if let Some(observer) = &self.observer {
            // Only informs the race detector, so a failure changes nothing. It comes before the block gets its stamp,
            // as an allocation by the driver would.
            let _ = observer.begin_range(
                suballocation.ptr,
                suballocation.bytes as usize,
                owner.handle(),
                tag.0,
            );
        }
        let memory = suballocation.memory();
        let id = self.tracker.fast_path_id(stream);
        let (slot_of_owner, stamp) = (owner.clock().slot(), owner.clock().now());
        let begun = table.begin_at(slot, memory, BlockOwner { id, slot: slot_of_owner, stamp });
        let Some(generation) = begun else {
            return Err(self.undo_allocation(suballocation, owner));
        };
        let bytes = match &self.sanitizer {
            None => memory.bytes,
            Some(sanitizer) => {
                sanitizer.begin_block(memory.ptr, memory.bytes, requested, tag);
                requested
            }
        };
        Ok(DeviceBlock::live(memory.ptr, bytes, self.ordinal, stream, tag, generation))
    }

    #[cold]
    fn undo_allocation(&self, suballocation: Suballocation, owner: &RawStream) -> ResourceError {
        if let Ok(arena) = self.arena(owner.clock().slot()) {
            arena.with(|arena| arena.undo(suballocation, owner.clock().now()));
        }
        too_many_blocks()
    }
}

impl Drop for PoolResource {
    /// Waits for the streams that used the pool's memory, and returns that memory to the device. Memory of live blocks
    /// stays allocated.
    fn drop(&mut self) {
        let _ = self.reap_pending();
        let _ = self.trim_to(0);
    }
}

impl fmt::Debug for PoolResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolResource")
            .field("device", &self.device.spec())
            .field("snapshot", &self.snapshot())
            .finish_non_exhaustive()
    }
}
