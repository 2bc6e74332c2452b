//! Pool: sub-allocates device memory in stream order; reuse costs no driver call.
//!
//! Every stream has an arena: a magazine of blocks ready to hand out, and a TLSF of free ranges. Allocating and freeing
//! touch the arena of their stream and nothing else. If the arena has nothing left, `slow_path` takes memory from other
//! streams or from the device. The clocks of `ordering` decide which memory of another stream may be reused, and with
//! which wait.
//!
//! | part | content |
//! |---|---|
//! | `Tlsf`, `Magazine`, `CoalesceQueue` | free ranges by size and address; free blocks by class; freed blocks before coalescing |
//! | `Arena` | memory of one stream, free in the order of that stream |
//! | `Arenas` | the arenas of all streams, and the shared capacity of their magazines |
//! | `Reserve` | memory of no stream and without pending work; growth and return of segments |
//! | `Segments` | memory that the pool takes from the device, or from another resource |
//! | `SlowPath` | one request that its arena cannot serve: which memory it may take (`steal`, `remap`), and with which wait |
//! | `Sanitizer` | blocks of a pool under a memory checker |
//!
//! `PoolResource` combines them: `fast_path`, `free` and `trim` are its operations, `resource` implements the trait.

mod arena;
mod coalesce_queue;
mod config;
mod decay;
mod fast_path;
mod free;
mod inherit;
mod magazine;
mod pending;
mod prefetch;
mod remap;
mod reserve;
mod resource;
mod sanitizer;
mod segments;
mod slow_path;
mod snapshot;
mod steal;
#[cfg(test)]
mod tests;
pub(crate) mod tlsf;
mod trim;

use std::cell::Cell;
use std::sync::Arc;

use xlog_base::debug_fields;
use xlog_driver::Driver;
use xlog_driver::sync::Mutex;

use self::arena::Arenas;
use self::arena::{Arena, NO_SLOT, Suballocation, UNIT};
use self::decay::Demand;
use self::fast_path::RequestStream;
use self::inherit::{Dependency, Inherited};
use self::reserve::Reserve;
use self::resource::block_bytes;
use self::sanitizer::Sanitizer;
use self::segments::{InnerSegments, MappedSegments, PlainSegments, Segments};
use self::slow_path::{ScanCredits, SkippedStreams, SlowPath};
use super::direct::too_many_blocks;
use super::ordering::{
    BlockMemory, BlockOwner, DeferredFrees, EventPolicy, Lock, Tracker, generation_bits, inflate,
};
use super::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, Generation, GrowthHook, ResourceError,
    ResourceResult, StreamId,
};
use super::stream_pool::StreamPool;
use crate::CudaDevice;
use crate::stream::RawStream;

pub use config::{PoolConfig, PoolReuse, PoolSanitizer, PoolSegments};
pub use sanitizer::SanitizerSnapshot;
pub use snapshot::{PoolPaths, PoolSnapshot};

/// Sub-allocates device memory in stream order.
///
/// ```
/// use std::sync::{Arc, OnceLock};
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
    arenas: Arenas,
    /// Whether blocks may take the fast path: no observer, no exact events, no memory checker.
    fast_path: bool,
    /// The driver of a simulated device, whose race detector observes every block.
    observer: Option<Arc<dyn Driver>>,
    device: Arc<CudaDevice>,
    ordinal: u32,
    config: PoolConfig,
    reserve: Reserve,
    scan_credits: ScanCredits,
    deferred_frees: DeferredFrees,
    demand: Mutex<Demand>,
    /// Called when the pool has taken memory from the device.
    on_growth: Mutex<Vec<GrowthHook>>,
    /// Set under a memory checker.
    sanitizer: Option<Sanitizer>,
}

impl PoolResource {
    /// Creates a pool of `device`, which has the number `ordinal`, for the streams of `streams`.
    pub fn new(
        device: Arc<CudaDevice>,
        ordinal: u32,
        streams: Arc<StreamPool>,
        config: PoolConfig,
    ) -> ResourceResult<Self> {
        config.check()?;
        let sanitizer = Sanitizer::of(&device, &config, false)?;
        let segments = segments_of(&device, &config, sanitizer.as_ref())?;
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
        if let Some(mismatch) = inner.home().and_then(|home| home.mismatch(&device, &streams)) {
            return Err(ResourceError::Driver(format!(
                "the parts of this pool do not belong together: {mismatch}"
            )));
        }
        let sanitizer = Sanitizer::of(&device, &config, true)?;
        let segments = Box::new(InnerSegments::new(inner, config.maximum_bytes as u64));
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
            arenas: Arenas::new(),
            fast_path: device.observer().is_none()
                && config.event_policy != EventPolicy::Exact
                && sanitizer.is_none(),
            observer: device.observer().cloned(),
            device,
            ordinal,
            reserve: Reserve::new(segments, &config),
            scan_credits: ScanCredits::new(),
            deferred_frees: DeferredFrees::default(),
            demand: Mutex::new(Demand::new()),
            on_growth: Mutex::default(),
            sanitizer,
            config,
        };
        pool.grow_initial()?;
        Ok(pool)
    }

    /// Takes the initial memory, and waits for it if an inner resource allocates in stream order.
    fn grow_initial(&self) -> ResourceResult<()> {
        self.reserve.grow_initial(self.config.initial_bytes as u64)?;
        if self.config.initial_bytes > 0 && self.reserve.segments.is_stream_ordered() {
            self.tracker.stream(StreamId::DEFAULT)?.synchronize(&self.tracker.counters)?;
        }
        Ok(())
    }

    /// Returns the arena of a stream, and creates it at the first request.
    #[inline]
    fn arena(&self, slot: u32) -> ResourceResult<&Lock<Arena>> {
        if let Some(arena) = self.arenas.used(slot) {
            return Ok(arena);
        }
        let arena = self.arenas.make(slot)?;
        self.rebalance_magazines();
        Ok(arena)
    }

    /// Bytes that blocks have beyond the requested ones, under a memory checker.
    fn slack(&self) -> u64 {
        self.sanitizer.as_ref().map_or(0, Sanitizer::slack)
    }

    /// Allocates by the slow path, and calls the growth hook if the pool grew.
    #[cold]
    #[inline(never)]
    fn allocate_slow(
        &self,
        stream: StreamId,
        owner: &RawStream,
        arena: &Lock<Arena>,
        size: u64,
        align: u64,
        is_tracked: bool,
    ) -> ResourceResult<(Suballocation, Option<Inherited>)> {
        let mut path = SlowPath {
            pool: self,
            stream,
            owner,
            arena,
            size,
            align,
            skipped: SkippedStreams::default(),
            is_tracked,
            inherited: None,
            has_declined_remap: Cell::new(false),
            has_grown: Cell::new(false),
        };
        let taken = path.allocate();
        let has_grown = path.has_grown.get();
        let taken = taken.map(|suballocation| (suballocation, path.inherited));
        if has_grown && let Some(interval) = self.decay_interval() {
            self.on_growth.lock().retain(|hook| hook(interval));
        }
        taken
    }

    #[inline(never)]
    fn allocate_general(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
        is_tracked: bool,
    ) -> ResourceResult<DeviceBlock> {
        let owner = self.tracker.stream(stream)?;
        let size = block_bytes(bytes)?;
        owner.check_not_capturing("pool allocate")?;
        let arena = self.arena(owner.clock().slot())?;
        if self.sanitizer.is_some()
            && let Some(_reaper) = self.deferred_frees.try_reaper_lock()
        {
            // A failed free keeps its block; a reap retries and reports it.
            let _ = self.release_completed(sanitizer::WAITING_PER_REQUEST);
        }
        let (clock, table) = (owner.clock(), &self.tracker.table);
        // The fast path declined although its arena may have room, only because the driver had to be asked.
        if self.fast_path && align <= UNIT as usize && owner.handle_escaped() {
            let begun = arena.with(|arena| {
                let slot = clock.slot();
                let request = RequestStream { id: stream, slot, header: clock.header() };
                arena.begin_block(bytes, request, table)
            });
            if let Some(begun) = begun {
                return Ok(begun.live(self.ordinal, stream, tag));
            }
        }
        let ready = arena.with(|arena| arena.allocate(size, align as u64, table));
        let (suballocation, inherited) = match ready {
            Some(suballocation) => (suballocation, None),
            None => self.allocate_slow(stream, owner, arena, size, align as u64, is_tracked)?,
        };
        match inherited {
            None => self.begin_block(suballocation, bytes, owner, stream, tag),
            Some(inherited) => self.begin_inheriting(suballocation, inherited, owner, stream, tag),
        }
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
        let Some(slot) = self.slot_for(&suballocation) else {
            return Err(self.undo_allocation(suballocation, owner));
        };
        if let Some(observer) = &self.observer {
            // A failure changes nothing: the call only informs the race detector. It precedes the block's stamp, as an allocation
            // by the driver would.
            let _ = observer.begin_range(
                suballocation.ptr,
                suballocation.bytes as usize,
                owner.handle(),
                tag.0,
            );
        }
        let memory = suballocation.memory();
        let Some(generation) = self.begin_meta(slot, memory, owner, stream) else {
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

    /// Begins a live block whose first use waits for the inherited dependencies.
    fn begin_inheriting(
        &self,
        suballocation: Suballocation,
        inherited: Inherited,
        owner: &RawStream,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let Inherited { mut dependencies, begins_on } = inherited;
        let begins_on = begins_on.and_then(|slot| self.tracker.streams.at(slot));
        if let (Some(observer), Some(before)) = (&self.observer, begins_on) {
            let (ptr, bytes) = (suballocation.ptr, suballocation.bytes as usize);
            let _ = observer.begin_range(ptr, bytes, before.handle(), tag.0);
            // For the detector the block begins here, so the first use must follow this point too.
            let stamp = before.clock().now();
            dependencies.iter_mut().for_each(|dependency| dependency.stamp = stamp);
        }
        let memory = suballocation.memory();
        let slot = self.slot_for(&suballocation);
        let begun = slot.and_then(|slot| self.begin_meta(slot, memory, owner, stream));
        let meta = begun.and_then(|generation| self.tracker.table.at(generation));
        let (Some(generation), Some(meta)) = (begun, meta) else {
            // The memory goes to the arena of `owner`, so that stream must follow the pending work.
            for Dependency { slot, stamp } in dependencies {
                if let Some(before) = self.tracker.streams.at(slot) {
                    owner.wait_on_clock(before, stamp, &self.tracker.counters)?;
                }
            }
            return Err(self.undo_allocation(suballocation, owner));
        };
        meta.with_uses(|uses| {
            inflate(meta, uses, generation_bits(generation));
            for Dependency { slot, stamp } in dependencies {
                if slot != owner.clock().slot() {
                    uses.inherit(slot, stamp);
                }
            }
        });
        Ok(DeviceBlock::live(memory.ptr, memory.bytes, self.ordinal, stream, tag, generation))
    }

    /// Returns the block slot of a suballocation, or a new one; `None` if there are too many blocks.
    fn slot_for(&self, suballocation: &Suballocation) -> Option<u32> {
        match suballocation.slot {
            NO_SLOT => self.tracker.table.allocate_slot(),
            slot => Some(slot),
        }
    }

    /// Begins the metadata of a block that `owner` owns from now on.
    fn begin_meta(
        &self,
        slot: u32,
        memory: BlockMemory,
        owner: &RawStream,
        stream: StreamId,
    ) -> Option<Generation> {
        let id = self.tracker.fast_path_id(stream);
        let (slot_of_owner, stamp) = (owner.clock().slot(), owner.clock().now());
        self.tracker.table.begin_at(slot, memory, BlockOwner { id, slot: slot_of_owner, stamp })
    }

    #[cold]
    fn undo_allocation(&self, suballocation: Suballocation, owner: &RawStream) -> ResourceError {
        if let Ok(arena) = self.arena(owner.clock().slot()) {
            arena.with(|arena| arena.undo(suballocation, owner.stamp_free()));
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

/// Chooses the segments for a configuration.
fn segments_of(
    device: &Arc<CudaDevice>,
    config: &PoolConfig,
    sanitizer: Option<&Sanitizer>,
) -> ResourceResult<Box<dyn Segments>> {
    let (device, maximum) = (Arc::clone(device), config.maximum_bytes as u64);
    if let Some(sanitizer) = sanitizer {
        // Memory checkers accept only driver allocations as heaps.
        let segments = PlainSegments::new(device, maximum);
        return Ok(Box::new(segments.with_heaps(sanitizer.heaps.clone())));
    }
    Ok(match config.segments {
        PoolSegments::Automatic if device.driver().virtual_memory().is_none() => {
            Box::new(PlainSegments::new(device, maximum))
        }
        PoolSegments::Plain => Box::new(PlainSegments::new(device, maximum)),
        PoolSegments::Automatic | PoolSegments::Mapped => {
            Box::new(MappedSegments::new(device, maximum)?)
        }
    })
}

debug_fields!(self: PoolResource { device: self.device.spec(), snapshot: self.snapshot(), .. });
