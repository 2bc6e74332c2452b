//! Allocation for one user of a runtime: a stream, a limit, counters.
//!
//! A manager is a cheap handle. Clones share the limit and the counters, whatever stream each allocates on; two managers of
//! one runtime share only the runtime. The limit holds the bytes that were asked for, in buffers and in reservations; a
//! dropped buffer leaves it at once, though its memory may still wait for work to complete.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::account::Account;
use super::{DeviceRepr, RawBlock, Reservation, TrackedCudaSlice};
use crate::Result;
use crate::device_runtime::budget::{BudgetReservation, RESERVED};
use crate::device_runtime::resource::{
    AllocRequest, AllocTag, DeviceBlock, MIN_ALIGN, ResourceError, StreamId, check_memory,
};
use crate::device_runtime::runtime::{Asked, XlogDeviceRuntime};

/// Allocates typed buffers on one stream of a runtime, within a limit, and counts them.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let manager = GpuMemoryManager::with_runtime(runtime).with_limit(1 << 20);
/// let rows = manager.alloc::<u64>(1000)?;
/// assert_eq!(manager.allocated_bytes(), 8000);
/// assert!(manager.alloc::<u8>(1 << 20).is_err());
/// drop(rows);
/// assert_eq!((manager.live_allocations(), manager.peak_bytes()), (0, 8000));
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone)]
pub struct GpuMemoryManager {
    runtime: Arc<XlogDeviceRuntime>,
    account: Arc<Account>,
    stream: StreamId,
    is_tracked_only: bool,
}

impl GpuMemoryManager {
    /// A manager without a limit, on the default stream.
    #[must_use]
    pub fn with_runtime(runtime: Arc<XlogDeviceRuntime>) -> Self {
        Self {
            runtime,
            account: Arc::new(Account::new()),
            stream: StreamId::DEFAULT,
            is_tracked_only: false,
        }
    }

    /// Sets the limit of this manager and its clones. `usize::MAX` is none.
    ///
    /// A limit below what is held takes nothing away; it refuses until enough has gone.
    #[must_use]
    pub fn with_limit(self, bytes: usize) -> Self {
        self.account.set_limit(bytes);
        self
    }

    /// This manager on another stream of its runtime: limit and counters are the same.
    #[must_use]
    pub fn on_stream(&self, stream: StreamId) -> Self {
        Self { stream, ..self.clone() }
    }

    /// This manager for buffers whose every use is recorded: by a [`LaunchRecorder`](crate::LaunchRecorder), or by the copies of
    /// the buffer. Limit and counters are the same.
    ///
    /// Such a buffer may get memory that a stream still works on. No stream waits at the allocation. The first use waits for that
    /// work, and mostly its stream is ordered after it already. So the host may run ahead of its streams, and a pool does not grow
    /// for it. The buffer shows its address ([`TrackedCudaSlice::ptr`]) once a preflight has prepared a use of it. The address in
    /// [`TrackedCudaSlice::id`] is an identity, and not for work.
    ///
    /// ```
    /// use xlog_cuda::prelude::*;
    ///
    /// let runtime = XlogDeviceRuntime::open("sim")?;
    /// let memory = GpuMemoryManager::with_runtime(runtime.clone()).tracked_only();
    /// let buffer = memory.alloc::<u8>(64)?;
    /// assert_eq!(buffer.ptr(), 0);
    /// let mut recorder = LaunchRecorder::new_strict(buffer.stream());
    /// recorder.write(&buffer);
    /// // SAFETY: the buffer is live, and the recorder orders the fill.
    /// recorder.run(&runtime, |stream| unsafe { stream.memset(buffer.ptr(), 7, 64) })?;
    /// assert_eq!(buffer.to_vec()?, [7; 64]);
    /// # Ok::<(), xlog_cuda::XlogError>(())
    /// ```
    #[must_use]
    pub fn tracked_only(&self) -> Self {
        // Without hooks the first use would wait for nothing.
        let is_tracked_only = self.runtime.supports_block_use_tracking();
        Self { is_tracked_only, ..self.clone() }
    }

    /// The runtime.
    pub fn runtime(&self) -> &Arc<XlogDeviceRuntime> {
        &self.runtime
    }

    /// The stream that allocations are ordered on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// A buffer of `len` elements, usable on this manager's stream at once. Its contents are unspecified.
    ///
    /// Beyond the limit it is [`ResourceError::OutOfBudget`]; a length whose bytes cannot be counted is
    /// [`ResourceError::InvalidRequest`].
    #[track_caller]
    pub fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<TrackedCudaSlice<T>> {
        self.alloc_tagged(len, AllocTag::UNTAGGED)
    }

    /// [`GpuMemoryManager::alloc`] with a label for logs and statistics.
    #[track_caller]
    pub fn alloc_tagged<T: DeviceRepr>(
        &self,
        len: usize,
        tag: AllocTag,
    ) -> Result<TrackedCudaSlice<T>> {
        let bytes = bytes_for::<T>(len)?;
        Ok(TrackedCudaSlice::over(self.alloc_charging(bytes, align_of::<T>(), tag)?, len))
    }

    /// A buffer with a copy of `elements`, queued on this manager's stream. The slice may be reused when this returns.
    #[track_caller]
    pub fn alloc_from<T: DeviceRepr>(&self, elements: &[T]) -> Result<TrackedCudaSlice<T>> {
        let mut buffer = self.alloc(elements.len())?;
        buffer.copy_from_slice(elements)?;
        Ok(buffer)
    }

    /// A buffer of `len` elements whose bytes are zero.
    #[track_caller]
    pub fn alloc_zeroed<T: DeviceRepr>(&self, len: usize) -> Result<TrackedCudaSlice<T>> {
        let mut buffer = self.alloc(len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// `bytes` bytes without a type, aligned to at least 256.
    #[track_caller]
    pub fn alloc_raw(&self, bytes: usize) -> Result<RawBlock> {
        self.alloc_charging(bytes, 1, AllocTag::UNTAGGED)
    }

    /// Sets bytes of the limit aside for allocations to come, and as many of the runtime's budget where it has one. No memory is
    /// taken for them yet.
    #[track_caller]
    pub fn reserve_bytes(&self, bytes: usize) -> Result<Reservation> {
        let asked = self.asked(bytes, RESERVED);
        self.charge(asked)?;
        let reserved =
            self.runtime.allocate_at(asked.site, |resource| resource.reserve_budget(bytes));
        let budget = reserved.inspect_err(|error| {
            self.account.discharge(bytes);
            self.runtime.complete_report(error, asked);
        })?;
        Ok(Reservation::charged(self.clone(), bytes, budget))
    }

    /// The request of the caller.
    #[track_caller]
    pub(super) fn asked(&self, bytes: usize, tag: AllocTag) -> Asked {
        Asked { bytes, stream: self.stream, tag, site: Location::caller() }
    }

    fn charge(&self, asked: Asked) -> Result<()> {
        self.account.charge(asked.bytes).map_err(|error| {
            let limit = self.account.limit().unwrap_or(usize::MAX);
            let held = limit.saturating_sub(self.account.remaining());
            self.runtime.report_manager(&error, asked, limit, held);
            error.into()
        })
    }

    #[track_caller]
    fn alloc_charging(&self, bytes: usize, align: usize, tag: AllocTag) -> Result<RawBlock> {
        self.charge(self.asked(bytes, tag))?;
        self.alloc_charged(bytes, align, tag, None).inspect_err(|_| self.account.discharge(bytes))
    }

    /// Allocates bytes that are charged already; after an error they still are. `budget` is what the runtime's budget has set aside for
    /// them.
    #[track_caller]
    pub(super) fn alloc_charged(
        &self,
        bytes: usize,
        align: usize,
        tag: AllocTag,
        budget: Option<&mut BudgetReservation>,
    ) -> Result<RawBlock> {
        if bytes == 0 {
            return Ok(RawBlock::empty(align.max(MIN_ALIGN), self.stream));
        }
        let is_tracked = self.is_tracked_only && budget.is_none();
        let request = AllocRequest::new(bytes, self.stream, tag).aligned(align.max(MIN_ALIGN));
        let request = AllocRequest { is_tracked, ..request };
        let block = self
            .runtime
            .allocate_at(Location::caller(), |resource| resource.allocate_request(request, budget));
        if let Err(error) = &block {
            self.runtime.complete_report(error, self.asked(bytes, tag));
        }
        let block = self.runtime.checked_block(block?, bytes)?;
        let raw = RawBlock::owning(block, bytes, &self.runtime, &self.account);
        Ok(if is_tracked { raw.hidden() } else { raw })
    }

    /// A buffer over foreign memory, ordered by a block of its own on this manager's stream.
    #[track_caller]
    pub(crate) fn alloc_adopted<T: DeviceRepr>(
        &self,
        ptr: u64,
        len: usize,
    ) -> Result<TrackedCudaSlice<T>> {
        let bytes = bytes_for::<T>(len)?;
        let refuse = |accepted: &str| {
            ResourceError::invalid(format!("foreign memory of {bytes} bytes at {ptr:#x}"), accepted)
        };
        if !ptr.is_multiple_of(align_of::<T>() as u64) {
            return Err(refuse("an address that is aligned for its elements").into());
        }
        if bytes == 0 {
            return self.alloc(len);
        }
        let asked = self.asked(bytes, AllocTag("adopted"));
        self.charge(asked)?;
        let stand_in = || -> Result<DeviceBlock> {
            let block = self.runtime.allocate_at(asked.site, |resource| {
                resource.allocate(1, asked.stream, asked.tag)
            })?;
            let block = self.runtime.checked_block(block, 1)?;
            let theirs = DeviceBlock { ptr, bytes, ..block };
            if check_memory(self.runtime.device(), &theirs, bytes).is_ok() {
                return Ok(block);
            }
            self.runtime.deallocate(block)?;
            Err(refuse("memory that the driver knows as this device's").into())
        };
        let block = stand_in().inspect_err(|_| self.account.discharge(bytes))?;
        let raw = RawBlock::owning(block, bytes, &self.runtime, &self.account).standing_for(ptr);
        Ok(TrackedCudaSlice::over(raw, len))
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    /// The limit; `None` without one.
    pub fn limit(&self) -> Option<usize> {
        self.account.limit()
    }

    /// Bytes that could be asked for within the limit now.
    pub fn remaining_bytes(&self) -> usize {
        self.account.remaining()
    }

    /// Bytes of the buffers that are alive.
    pub fn allocated_bytes(&self) -> usize {
        self.account.allocated.load(Relaxed)
    }

    /// Bytes set aside and not yet allocated.
    pub fn reserved_bytes(&self) -> usize {
        self.account.reserved.load(Relaxed)
    }

    /// The peak of [`GpuMemoryManager::allocated_bytes`].
    pub fn peak_bytes(&self) -> usize {
        self.account.peak.load(Relaxed)
    }

    /// Buffers that are alive, empty ones not counted.
    pub fn live_allocations(&self) -> usize {
        self.account.live.load(Relaxed)
    }

    /// Buffers that were ever made, empty ones not counted.
    pub fn total_allocations(&self) -> u64 {
        self.account.total.load(Relaxed)
    }

    /// Buffers that were dropped and that the runtime failed to free.
    pub fn failed_frees(&self) -> u64 {
        self.account.failed_frees.load(Relaxed)
    }
}

/// The bytes of `len` elements.
pub(super) fn bytes_for<T>(len: usize) -> Result<usize, ResourceError> {
    let most = isize::MAX as usize;
    len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= most).ok_or_else(|| {
        ResourceError::invalid(
            format!("a buffer of {len} elements of {} bytes", size_of::<T>()),
            format!("at most {most} bytes in all"),
        )
    })
}

impl fmt::Debug for GpuMemoryManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMemoryManager")
            .field("device", &self.runtime.device().spec())
            .field("stream", &self.stream)
            .field("account", &self.account)
            .finish()
    }
}
