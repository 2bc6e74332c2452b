//! Page-locked host memory from a pool.
//!
//! The driver pins page by page, which is slow, so the resource takes chunks and hands out parts of them. A block has
//! two addresses of the same bytes: `block.ptr` for work on the device, [`PinnedHostResource::host_ptr`] for the host.
//!
//! Invariants:
//! - A returned block is reused only after the host has seen all its work complete: the announced uses of every stream, and
//!   the work that its own stream had queued when it was freed. Stream order is not enough, because the next owner may write
//!   the bytes from the host at once. Memory in the free list therefore has no pending work and belongs to no stream.
//! - A free waits for nothing. A request polls returned blocks, grows if no memory is free, and waits only at the maximum.
//! - Chunks count against the resource's own maximum and never against a ledger: they are not memory of the device.
//!
//! It does not keep the host from accessing a block while the device uses it: [`PinnedBuffer`] does.

#[allow(unsafe_code)]
mod buffer;
mod chunks;
mod slow_path;

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Once};

use xlog_driver::sync::Mutex;

pub use self::buffer::PinnedBuffer;
use self::chunks::Chunks;
use super::budget::BudgetReservation;
use super::direct::too_many_blocks;
use super::ordering::block::block_meta::{BlockMemory, BlockMeta, BlockOwner};
use super::ordering::tracking::completed_frees::CompletedFrees;
use super::ordering::tracking::tracker::{Retired, Tracker};
use super::ordering::tracking::use_tracking::{UseTracking, tracked_hooks};
use super::pool::tlsf::TlsfAllocation;
use super::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    FreeSpace, Generation, MIN_ALIGN, ResourceError, ResourceHome, ResourceResult,
    ResourceStatistics, Seal, StreamId,
};
use super::runtime::{LeakReport, report_leak};
use super::stream_pool::StreamPool;
use crate::CudaDevice;

/// The alignment of chunks, and the largest alignment of a block.
const PAGE: usize = 4096;
/// The largest request: no host has more addresses.
const MAX_BYTES: usize = 1 << 47;
/// The default size of a chunk, which the driver pins in about 11 ms.
const CHUNK_BYTES: usize = 16 << 20;

/// Page-locked host memory, reused once the device has finished with it.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, PinnedHostResource, ResourceError, StreamId, StreamPool,
/// };
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
/// let pinned = PinnedHostResource::new(device, 0, streams).with_maximum(1 << 20);
///
/// let block = pinned.allocate(4096, StreamId::DEFAULT, AllocTag("staging"))?;
/// let host = pinned.host_ptr(&block)?;
/// // SAFETY: the block is live, and no work on the device uses it yet.
/// unsafe { host.write_bytes(7, 4096) };
/// let refused = pinned.allocate(1 << 20, StreamId::DEFAULT, AllocTag("staging"));
/// let remaining = (1 << 20) - 4096;
/// assert_eq!(refused, Err(ResourceError::OutOfBudget { requested: 1 << 20, remaining }));
/// pinned.deallocate(block)?;
/// pinned.reap_pending()?;
/// assert_eq!(pinned.trim()?, 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PinnedHostResource {
    tracker: Tracker,
    device: Arc<CudaDevice>,
    ordinal: u32,
    chunk_bytes: usize,
    maximum_bytes: usize,
    /// No driver call is made under this lock.
    chunks: Mutex<Chunks>,
    retired: CompletedFrees,
    /// Held while returned blocks are polled and chunks are taken, so that two requests do not both grow for one need.
    slow_path: Mutex<()>,
    /// Held while chunks are freed, so that a request which needs their bytes waits for it.
    trimming: Mutex<()>,
    /// Done once a typed buffer may keep the resource until the process ends.
    watched: Once,
}

impl PinnedHostResource {
    /// Creates a resource of `device`, which has the number `ordinal`, for the streams of `streams`. It takes no memory yet.
    ///
    /// If the parts belong to different devices, the first call returns a driver error.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>, ordinal: u32, streams: Arc<StreamPool>) -> Self {
        Self {
            tracker: Tracker::new(&device, ordinal, streams),
            device,
            ordinal,
            chunk_bytes: CHUNK_BYTES,
            maximum_bytes: usize::MAX / MIN_ALIGN * MIN_ALIGN,
            chunks: Mutex::default(),
            retired: CompletedFrees::default(),
            slow_path: Mutex::default(),
            trimming: Mutex::default(),
            watched: Once::new(),
        }
    }

    xlog_base::setters! {
        /// Sets the size of chunks for smaller requests; 16 MiB by default.
        with_chunk(bytes: usize) { chunk_bytes: bytes.min(MAX_BYTES) }
        /// Sets the maximum of bytes that the resource holds, in use or not, rounded down to whole units of 256. No limit by default.
        with_maximum(bytes: usize) { maximum_bytes: bytes / MIN_ALIGN * MIN_ALIGN }
    }

    /// Takes chunks until the resource holds at least `bytes`, so that later requests need not wait for the driver.
    pub fn reserve(&self, bytes: usize) -> ResourceResult<()> {
        self.tracker.check_parts()?;
        let _slow_path = self.slow_path.lock();
        let remaining = self.maximum_bytes - self.bytes_held();
        if bytes > self.maximum_bytes {
            return Err(ResourceError::OutOfBudget { requested: bytes, remaining });
        }
        while let missing @ 1.. = bytes.saturating_sub(self.bytes_held()) {
            let chunk = self.take_chunk(missing.min(self.chunk_bytes), self.chunk_bytes)?;
            self.chunks.lock().insert(chunk);
        }
        Ok(())
    }

    /// Returns the bytes of page-locked memory that the resource holds, in use or not.
    pub fn bytes_held(&self) -> usize {
        self.chunks.lock().held
    }

    /// Returns the host's address of a live block.
    ///
    /// The host may access the bytes while no work on the device uses them: before such work is queued, and after the host
    /// has seen it complete.
    pub fn host_ptr(&self, block: &DeviceBlock) -> ResourceResult<NonNull<u8>> {
        let ptr = self.tracker.table.find_block(block)?.ptr();
        let is_live = self.block_state(BlockId::from_block(block)) == BlockState::Live;
        let host = self.chunks.lock().host_ptr(ptr).filter(|_| is_live);
        host.ok_or(ResourceError::UseAfterFree { generation: block.generation })
    }

    /// Reports the blocks that are live at the end of the resource or of the process, whose memory is never freed.
    pub(super) fn report_live_blocks(&self, at_exit: bool) {
        let ResourceStatistics { live_blocks, bytes_outstanding: bytes, .. } = self.statistics();
        if live_blocks > 0 {
            report_leak(&LeakReport {
                device: self.device.spec().to_owned(),
                device_ordinal: self.ordinal,
                at_exit,
                is_page_locked: true,
                live_blocks,
                bytes,
                holders: None,
            });
        }
    }
}

impl UseTracking for PinnedHostResource {
    fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Records events behind the block's work. The memory of a typed buffer stays until the buffer is dropped.
    fn free(&self, generation: Generation, meta: &BlockMeta) -> ResourceResult<()> {
        if let Some(is_returned) = self.chunks.lock().buffers.get_mut(&generation) {
            *is_returned = true;
            return Ok(());
        }
        self.retired.push(&self.tracker, generation, meta)
    }
}

impl Drop for PinnedHostResource {
    /// Waits for the streams of returned blocks, and frees the memory. Reports live blocks, whose chunks stay.
    fn drop(&mut self) {
        let _ = self.reap_pending();
        let _ = self.release_chunks();
        self.report_live_blocks(false);
    }
}

impl DeviceMemoryResource for PinnedHostResource {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.allocate_request(AllocRequest::new(bytes, stream, tag), None)
    }

    fn allocate_request(
        &self,
        AllocRequest { bytes, align, stream, tag, .. }: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        if reservation.is_some() {
            return Err(ResourceError::no_budget());
        }
        let owner = self.tracker.stream(stream)?;
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        if !align.is_power_of_two() || align > PAGE {
            let (value, accepted) = (format!("alignment {align}"), "a power of two up to 4096");
            return Err(ResourceError::invalid(value, accepted));
        }
        if bytes > MAX_BYTES {
            let detail = "more than any host can address".to_owned();
            return Err(ResourceError::OutOfMemory { requested: bytes, detail });
        }
        owner.check_not_capturing("pinned allocate")?;
        let TlsfAllocation { node, ptr, bytes, .. } =
            self.find(self.charge_for(bytes, align), align)?;
        let bytes = bytes as usize;
        if let Some(observer) = self.device.observer() {
            // A failure changes nothing: the call only informs the race detector.
            let _ = observer.begin_range(ptr, bytes, owner.handle(), tag.0);
        }
        let table = &self.tracker.table;
        let (slot, stamp) = (owner.clock().slot(), owner.clock().now());
        let owner = BlockOwner { id: self.tracker.fast_path_id(stream), slot, stamp };
        let memory = BlockMemory { ptr, bytes, node };
        let Some(generation) =
            table.allocate_slot().and_then(|slot| table.begin_at(slot, memory, owner))
        else {
            self.chunks.lock().free.free(node, 0);
            return Err(too_many_blocks());
        };
        self.tracker.counters.count(|counts| {
            counts.allocations += 1;
            counts.outstanding = counts.outstanding.wrapping_add(bytes);
        });
        Ok(DeviceBlock::live(ptr, bytes, self.ordinal, stream, tag, generation))
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.tracker.check_parts()?;
        let meta = self.tracker.table.find_block(&block)?;
        let retired = self.tracker.retire(meta, block.generation)?;
        self.tracker.counters.count(|counts| counts.deallocations += 1);
        match retired {
            Retired::Open => Ok(()),
            Retired::OwnStreamOnly | Retired::Used => self.free(block.generation, meta),
        }
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        self.tracker.counters.sum().outstanding
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let (mut outcome, streams) = {
            let _slow_path = self.slow_path.lock();
            // Also records events that could not be recorded earlier.
            (self.release_completed(usize::MAX), self.retired.streams(&self.tracker))
        };
        for stream in streams {
            let waited = stream.synchronize_freed(&self.tracker.counters);
            outcome = outcome.and(waited.map_err(Into::into));
        }
        let released = self.reap_completed();
        outcome.and(released)
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let _slow_path = self.slow_path.lock();
        self.release_completed(usize::MAX)
    }

    tracked_hooks!();

    fn trim(&self) -> ResourceResult<usize> {
        let polled = self.reap_completed();
        let released = self.release_chunks();
        polled.and(released)
    }

    fn charge_for(&self, bytes: usize, _align: usize) -> usize {
        bytes.checked_next_multiple_of(MIN_ALIGN).unwrap_or(bytes)
    }

    fn free_space(&self) -> Option<FreeSpace> {
        let chunks = self.chunks.lock();
        let (bytes, largest) = (chunks.free.free_bytes(), chunks.free.largest_free());
        Some(FreeSpace { bytes: bytes as usize, largest: largest as usize })
    }

    fn is_trusted(&self, _seal: Seal) -> bool {
        true
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    fn statistics(&self) -> ResourceStatistics {
        self.tracker.statistics()
    }
}

impl fmt::Debug for PinnedHostResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedHostResource")
            .field("device", &self.device.spec())
            .field("bytes_held", &self.bytes_held())
            .field("maximum_bytes", &self.maximum_bytes)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}
