//! The performance tier: memory is sub-allocated, and handing it out again costs no driver call.
//!
//! Every stream has an arena: free memory in the order of that stream, and a magazine of blocks ready to hand out. Allocating and
//! freeing on a stream touches its arena and nothing else. Only when that has nothing left, memory of other streams is looked at, in
//! the order of `reuse`: what the asking stream already follows, what has completed, then the device, then what must be waited
//! for. Order between streams is kept by the clocks of `ordering`, as in every tracking resource.
//!
//! | file | what it is |
//! |---|---|
//! | `index` | free memory by size and by address |
//! | `arena` | the memory of one stream |
//! | `reuse` | what to do when that has nothing left |
//! | `segments`, `source` | where memory comes from and goes back to |
//! | `config`, `snapshot` | how a pool behaves, and how it stands |

mod arena;
mod config;
mod index;
mod reuse;
mod segments;
mod snapshot;
mod source;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use xlog_driver::sync::Mutex;
use xlog_sim::SimDevice;

use self::arena::{Arena, MOST_CACHED, NO_PLACE, Path, Piece, UNIT};
use self::index::Index;
use self::segments::Segments;
use super::direct::{alignment_of, too_many_blocks};
use super::ordering::EdgePolicy;
use super::ordering::gate::Attempt;
use super::ordering::primitive::Lock;
use super::ordering::put_by::PutBy;
use super::ordering::record::{Record, tag_of};
use super::ordering::slab::Slab;
use super::ordering::tracker::{Retired, Tracker, Tracks};
use super::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, FreeSpace,
    Generation, PhysicalMeter, ResourceError, ResourceResult, ResourceStatistics, StreamId,
};
use super::stream_pool::StreamPool;
use crate::CudaDevice;
use crate::stream::RawStream;

pub use config::{PoolConfig, PoolReuse, PoolSegments};
pub use snapshot::{PoolPaths, PoolSnapshot};

/// Streams a pool can serve.
const MAX_STREAMS: u32 = 1 << 14;
/// The largest alignment a request may ask for.
const MAX_ALIGN: usize = 2 << 20;
/// No request can be larger: nothing has so many addresses.
const MAX_BYTES: usize = 1 << 47;

/// An arena on cache lines of its own: each stream has mostly another thread.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ArenaPlace(Lock<Arena>, AtomicBool);

impl ArenaPlace {
    /// True once the stream of this place has asked for memory.
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
    /// One by one: a stream that comes for the first time pays for its own.
    arenas: Slab<ArenaPlace, 1>,
    /// Blocks may go the shortest way: nobody is told of them, and their own stream needs no events.
    quick: bool,
    /// The simulated device, whose detector is told of every block.
    sim: Option<Arc<SimDevice>>,
    magazine: u64,
    device: Arc<CudaDevice>,
    ordinal: u32,
    config: PoolConfig,
    segments: Box<dyn Segments>,
    /// Memory that belongs to no stream, and on which nothing is pending.
    spare: Mutex<Index>,
    put_by: PutBy,
    /// Held while memory is moved between the pool and the device, so that two do not take what one needs.
    growing: Mutex<Instant>,
}

impl PoolResource {
    /// A pool of `device`, which is number `ordinal`, for the streams of `streams`.
    pub fn new(
        device: Arc<CudaDevice>,
        ordinal: u32,
        streams: Arc<StreamPool>,
        config: PoolConfig,
    ) -> ResourceResult<Self> {
        config.check()?;
        let segments = source::of_device(&device, &config)?;
        Self::build(device, ordinal, streams, config, segments)
    }

    /// A pool that takes its memory from another resource.
    ///
    /// The device and its number are those of `inner` and `streams`.
    pub fn over(
        inner: Box<dyn DeviceMemoryResource + Send + Sync>,
        streams: Arc<StreamPool>,
        config: PoolConfig,
    ) -> ResourceResult<Self> {
        config.check()?;
        let (device, ordinal) = (Arc::clone(streams.device()), inner.device_ordinal());
        let segments = source::of_inner(inner, &config)?;
        Self::build(device, ordinal, streams, config, segments)
    }

    fn build(
        device: Arc<CudaDevice>,
        ordinal: u32,
        streams: Arc<StreamPool>,
        config: PoolConfig,
        segments: Box<dyn Segments>,
    ) -> ResourceResult<Self> {
        let mut tracker = Tracker::new(&device, ordinal, streams);
        tracker.check_parts()?;
        tracker.policy = config.edges;
        let pool = Self {
            tracker,
            arenas: Slab::new(MAX_STREAMS),
            quick: device.sim().is_none() && config.edges != EdgePolicy::Exact,
            sim: device.sim().cloned(),
            magazine: config.magazine_bytes as u64,
            device,
            ordinal,
            segments,
            spare: Mutex::default(),
            put_by: PutBy::default(),
            growing: Mutex::new(Instant::now()),
            config,
        };
        pool.take_initial()?;
        Ok(pool)
    }

    /// The arena of the stream at a place.
    #[inline]
    fn arena(&self, place: u32) -> ResourceResult<&Lock<Arena>> {
        if let Some(place) = self.arenas.get(place)
            && place.is_used()
        {
            return Ok(&place.0);
        }
        self.first_arena(place)
    }

    #[cold]
    fn first_arena(&self, place: u32) -> ResourceResult<&Lock<Arena>> {
        match self.arenas.make(place) {
            Some(place) => {
                place.1.store(true, Ordering::Release);
                Ok(&place.0)
            }
            None => Err(ResourceError::StreamMisuse(format!(
                "a pool serves the first {MAX_STREAMS} streams of its stream pool"
            ))),
        }
    }

    /// A block of a stream whose memory this thread mostly uses: the shortest way there is.
    #[inline(always)]
    fn serve_at_once(&self, bytes: usize, stream: StreamId, tag: AllocTag) -> Option<DeviceBlock> {
        let size = (bytes as u64).wrapping_add(UNIT - 1) & !(UNIT - 1);
        if bytes.wrapping_sub(1) >= MAX_BYTES || !self.quick {
            return None;
        }
        let (home, cell) = self.tracker.streams.near(stream)?;
        if cell.is_exposed() {
            return None;
        }
        let piece = {
            let mut arena = self.arenas.get(home)?.0.enter()?;
            let ready = if size <= MOST_CACHED { arena.pop(size, UNIT) } else { None };
            match ready {
                Some(piece) => piece,
                None => arena.take_free(size, UNIT, Path::Own)?,
            }
        };
        let place = match piece.place {
            NO_PLACE => self.place_for(piece, home)?,
            place => place,
        };
        let block = (piece.ptr, piece.bytes as usize, piece.node);
        // Every place that a piece has is one of the table's.
        let generation = self.tracker.table.begin_near(place, block, (stream, home, cell.now()))?;
        Some(DeviceBlock {
            ptr: piece.ptr,
            device_ordinal: self.ordinal,
            alloc_stream: stream,
            bytes: piece.bytes as usize,
            align: alignment_of(piece.ptr),
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    /// A record for a piece that has none; without one, the piece goes back.
    #[cold]
    fn place_for(&self, piece: Piece, home: u32) -> Option<u32> {
        let place = self.tracker.table.take_place();
        if place.is_none()
            && let (Ok(arena), Some(stream)) = (self.arena(home), self.tracker.streams.at(home))
        {
            arena.with(|arena| arena.undo(piece, stream.clock().now()));
        }
        place
    }

    /// Puts a retired block back to a stream whose memory this thread mostly uses.
    #[inline(always)]
    fn put_at_once(&self, generation: Generation, record: &Record) -> bool {
        if !self.quick {
            return false;
        }
        let home = record.home();
        let piece = Piece {
            ptr: record.ptr(),
            bytes: record.bytes() as u64,
            node: record.node(),
            place: generation.slot(),
        };
        let Some(cell) = self.tracker.near_cell(home).filter(|cell| !cell.is_exposed()) else {
            return false;
        };
        let Some(mut arena) = self.arenas.get(home).and_then(|place| place.0.enter()) else {
            return false;
        };
        // Nobody gets at the memory before this thread has left the arena, so the block may end before or after that.
        record.end();
        arena.counts.deallocations += 1;
        if arena.push(piece, self.magazine) {
            return true;
        }
        let place = arena.put(piece, cell.now(), self.magazine);
        drop(arena);
        if let Some(place) = place {
            self.tracker.table.give_places([place]);
        }
        true
    }

    fn serve(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let home = self.tracker.stream(stream)?;
        let size = size_of(bytes)?;
        home.check_not_capturing("pool allocate")?;
        let arena = self.arena(home.clock().key())?;
        let piece = match arena.with(|arena| arena.take(size, align as u64)) {
            Some(piece) => piece,
            None => self.serve_from_elsewhere(stream, home, arena, (size, align as u64))?,
        };
        self.hand_out(piece, home, stream, tag)
    }

    /// Makes a live block of a piece that was taken for it.
    fn hand_out(
        &self,
        piece: Piece,
        home: &RawStream,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if let Some(sim) = &self.sim {
            // Only tells the detector; the block is the same without it. Queued before the block gets its stamp, as an
            // allocation by the driver would be.
            let _ = sim.begin_range(piece.ptr, piece.bytes as usize, home.handle(), tag.0);
        }
        let table = &self.tracker.table;
        let place = if piece.place == NO_PLACE { table.take_place() } else { Some(piece.place) };
        let begun = place.and_then(|place| {
            let block = (piece.ptr, piece.bytes as usize, piece.node);
            table.begin_at(place, block, (self.tracker.quick_id(stream), home))
        });
        let Some(generation) = begun else { return Err(self.hand_back(piece, home)) };
        Ok(DeviceBlock {
            ptr: piece.ptr,
            device_ordinal: self.ordinal,
            alloc_stream: stream,
            bytes: piece.bytes as usize,
            align: alignment_of(piece.ptr),
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    #[cold]
    fn hand_back(&self, piece: Piece, home: &RawStream) -> ResourceError {
        if let Ok(arena) = self.arena(home.clock().key()) {
            arena.with(|arena| arena.undo(piece, home.clock().now()));
        }
        too_many_blocks()
    }

    /// Puts the memory of a retired block, which its own stream now follows all uses of, back into its arena.
    fn put(&self, generation: Generation, record: &Record, returned: bool) -> ResourceResult<()> {
        let home = self.tracker.home(record)?;
        if let Err(error) = home.check_not_capturing("pool free") {
            if returned {
                self.count_return(record)?;
            }
            self.put_by.keep(generation);
            return Err(error.into());
        }
        let (ptr, bytes) = (record.ptr(), record.bytes());
        let piece =
            Piece { ptr, bytes: bytes as u64, node: record.node(), place: generation.slot() };
        if let Some(sim) = &self.sim {
            let _ = sim.end_range(ptr, bytes, home.handle());
        }
        let arena = self.arena(home.clock().key())?;
        record.end();
        let place = arena.with(|arena| {
            arena.counts.deallocations += u64::from(returned);
            // Read inside: blocks that others put here meanwhile may leave the magazine with this stamp.
            arena.put(piece, home.clock().now(), self.magazine)
        });
        if let Some(place) = place {
            self.tracker.table.give_places([place]);
        }
        Ok(())
    }

    /// Puts the memory back after waits for everything outstanding on it. A failure leaves it to a reap.
    fn put_in_order(&self, generation: Generation, record: &Record) -> ResourceResult<()> {
        let home = self.tracker.home(record)?;
        let outstanding = record.with_uses(|uses| uses.take_outstanding(&self.tracker.streams));
        if let Err(error) = self.tracker.follow_all(home, &outstanding) {
            record.with_uses(|uses| uses.put_back(outstanding));
            self.put_by.keep(generation);
            return Err(error);
        }
        self.put(generation, record, false)
    }

    fn put_all(&self, generations: Vec<Generation>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for generation in generations {
            if let Some(record) = self.tracker.table.at(generation) {
                let this = self.put_in_order(generation, record);
                outcome = outcome.and(this);
            }
        }
        outcome
    }

    /// Puts back up to `count` of the blocks put by whose uses have completed.
    fn put_completed(&self, count: usize) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for generation in self.put_by.take_put_by(count) {
            let Some(record) = self.tracker.table.at(generation) else { continue };
            if self.tracker.is_complete(record) || !self.put_by.put_by(generation) {
                let this = self.put_in_order(generation, record);
                outcome = outcome.and(this);
            }
        }
        outcome
    }

    /// Puts back all blocks put by, with the waits that takes.
    fn put_by_with_waits(&self) -> ResourceResult<()> {
        self.put_all(self.put_by.take_put_by(usize::MAX))
    }

    /// A free that is not the common one.
    #[inline(never)]
    fn give_back(&self, block: &DeviceBlock) -> ResourceResult<()> {
        let generation = block.generation;
        let record = self.tracker.table.find_block(block)?;
        match self.tracker.retire(record, generation)? {
            Retired::Quiet => self.put(generation, record, true),
            Retired::Used => {
                self.count_return(record)?;
                self.free(generation, record)
            }
            Retired::Open => self.count_return(record),
        }
    }

    fn count_return(&self, record: &Record) -> ResourceResult<()> {
        let arena = self.arena(record.home())?;
        arena.with(|arena| arena.counts.deallocations += 1);
        Ok(())
    }

    /// Runs `body` while nobody else gets at the memory of a stream, to show in tests that other streams go on.
    #[doc(hidden)]
    pub fn hold_stream_memory<R>(
        &self,
        stream: StreamId,
        body: impl FnOnce() -> R,
    ) -> ResourceResult<R> {
        let home = self.tracker.stream(stream)?;
        Ok(self.arena(home.clock().key())?.with(|_| body()))
    }
}

/// What a request takes: whole units.
#[inline]
fn size_of(bytes: usize) -> ResourceResult<u64> {
    if bytes == 0 {
        return Err(ResourceError::zero_bytes());
    }
    if bytes > MAX_BYTES {
        return Err(ResourceError::OutOfMemory {
            requested: bytes,
            detail: "no device has so many addresses".to_owned(),
        });
    }
    Ok((bytes as u64).next_multiple_of(UNIT))
}

impl Tracks for PoolResource {
    #[inline]
    fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// At once where its stream already follows all its uses; otherwise put by until they complete, so that the stream does not
    /// wait for another one.
    fn free(&self, generation: Generation, record: &Record) -> ResourceResult<()> {
        let home = self.tracker.home(record)?;
        let streams = &self.tracker.streams;
        let at_once = record.with_uses(|uses| uses.is_followed_by(streams, home));
        if at_once || !self.put_by.put_by(generation) {
            return self.put_in_order(generation, record);
        }
        Ok(())
    }
}

impl DeviceMemoryResource for PoolResource {
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        match self.serve_at_once(bytes, stream, tag) {
            Some(block) => Ok(block),
            None => self.serve(bytes, UNIT as usize, stream, tag),
        }
    }

    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(ResourceError::InvalidRequest {
                value: format!("alignment {align}"),
                accepted: format!("a power of two up to {MAX_ALIGN}"),
            });
        }
        self.serve(bytes, align.max(UNIT as usize), stream, tag)
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let generation = block.generation;
        if let Some(record) = self.tracker.table.look(BlockId::from_block(&block))
            && record.gate.retire_quiet(tag_of(generation)) == Attempt::Done
        {
            if self.put_at_once(generation, record) {
                return Ok(());
            }
            return self.put(generation, record, true);
        }
        self.give_back(&block)
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        self.counts().outstanding as usize
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let turn = self.put_by.turn();
        let mut outcome = self.put_all(self.put_by.take_kept());
        let waited = self.put_by_with_waits();
        outcome = outcome.and(waited);
        drop(turn);
        let settled = self.settle_streams();
        outcome.and(settled)
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let turn = self.put_by.turn();
        let mut outcome = self.put_all(self.put_by.take_kept());
        let completed = self.put_completed(usize::MAX);
        outcome = outcome.and(completed);
        drop(turn);
        let decayed = self.decay();
        outcome.and(decayed)
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        self.record_use(BlockId::from_block(block), use_stream)
    }

    fn supports_block_use_tracking(&self) -> bool {
        true
    }

    #[inline]
    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.prepare(block, use_stream, access)
    }

    #[inline]
    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.finish(block, use_stream, access)
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.finish_all(uses, use_stream)
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        self.tracker.table.state(block)
    }

    fn charge_for(&self, bytes: usize) -> usize {
        size_of(bytes).map_or(bytes, |size| size as usize)
    }

    fn statistics(&self) -> ResourceStatistics {
        let counts = self.counts();
        let order = self.tracker.tally.sum();
        ResourceStatistics {
            bytes_outstanding: counts.outstanding as usize,
            live_blocks: counts.allocations.saturating_sub(counts.deallocations) as usize,
            retired_blocks: counts.deallocations.saturating_sub(counts.freed) as usize,
            allocations: counts.allocations,
            deallocations: counts.deallocations,
            events_recorded: order.recorded,
            waits_inserted: order.inserted,
            waits_elided: order.elided,
        }
    }

    fn places_blocks(&self) -> bool {
        true
    }

    fn free_space(&self) -> Option<FreeSpace> {
        let snapshot = self.snapshot();
        Some(FreeSpace { bytes: snapshot.free_bytes(), largest: snapshot.largest_free })
    }

    fn trim(&self) -> ResourceResult<usize> {
        self.trim_to(0)
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.segments.meter_physical(meter)
    }
}

impl Drop for PoolResource {
    /// Memory goes back to the device once the host has seen its last work complete, so this waits for the streams that used it.
    /// What live blocks hold stays taken.
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
