//! Typed allocation on one stream of a runtime, with a limit and counters.
//!
//! A manager is a cheap handle. Its clones share the limit and the counters, even on different streams; two separate managers of a
//! runtime share only the runtime. The limit counts the requested bytes of buffers and reservations. A dropped buffer is uncharged at
//! once, though its memory may still wait for work.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use xlog_base::debug_fields;

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
    /// Creates a manager without a limit, on the default stream.
    #[must_use]
    pub fn with_runtime(runtime: Arc<XlogDeviceRuntime>) -> Self {
        Self {
            runtime,
            account: Arc::new(Account::new()),
            stream: StreamId::DEFAULT,
            is_tracked_only: false,
        }
    }

    /// Sets the limit of this manager and its clones; `usize::MAX` is no limit.
    ///
    /// A limit below what is charged frees nothing: requests are refused until enough is released.
    #[must_use]
    pub fn with_limit(self, bytes: usize) -> Self {
        self.account.set_limit(bytes);
        self
    }

    /// Returns this manager on another stream of its runtime. It shares the limit and the counters.
    #[must_use]
    pub fn on_stream(&self, stream: StreamId) -> Self {
        Self { stream, ..self.clone() }
    }

    /// Returns this manager for buffers whose every use is recorded: by a [`LaunchRecorder`](crate::LaunchRecorder), or by the copies of
    /// the buffer. It shares the limit and the counters.
    ///
    /// Such a buffer may get memory that a stream still uses. The allocation queues no wait; the first use waits for that work, unless its
    /// stream is ordered after it already. So the host may run ahead of its streams without growing the pool.
    ///
    /// [`TrackedCudaSlice::ptr`] is 0 until a preflight has prepared a use. The address in [`TrackedCudaSlice::id`] is an identity only:
    /// do not queue work on it.
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
        // Without tracking the first use would not wait.
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

    /// Allocates a buffer of `len` elements, usable on this manager's stream at once. Its contents are unspecified.
    ///
    /// A request beyond the limit is [`ResourceError::OutOfBudget`]; one above `isize::MAX` bytes is [`ResourceError::InvalidRequest`].
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

    /// Allocates a buffer and queues a copy of `elements` to it on this manager's stream. The slice may be reused when this returns.
    #[track_caller]
    pub fn alloc_from<T: DeviceRepr>(&self, elements: &[T]) -> Result<TrackedCudaSlice<T>> {
        let mut buffer = self.alloc(elements.len())?;
        buffer.copy_from_slice(elements)?;
        Ok(buffer)
    }

    /// Allocates a buffer of `len` elements whose bytes are zero.
    #[track_caller]
    pub fn alloc_zeroed<T: DeviceRepr>(&self, len: usize) -> Result<TrackedCudaSlice<T>> {
        let mut buffer = self.alloc(len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// Allocates `bytes` bytes without a type, aligned to at least 256.
    #[track_caller]
    pub fn alloc_raw(&self, bytes: usize) -> Result<RawBlock> {
        self.alloc_charging(bytes, 1, AllocTag::UNTAGGED)
    }

    /// Reserves bytes of the limit for later allocations, and as many of the runtime's budget if it has one. It allocates no memory.
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

    #[track_caller]
    pub(super) fn asked(&self, bytes: usize, tag: AllocTag) -> Asked {
        Asked { bytes, stream: self.stream, tag, site: Location::caller() }
    }

    fn charge(&self, asked: Asked) -> Result<()> {
        self.account.charge(asked.bytes).map_err(|error| {
            let limit = self.account.limit().unwrap_or(usize::MAX);
            let held = limit.saturating_sub(self.account.remaining());
            self.runtime.report_manager(&error, asked, limit, held);
            let request = AllocRequest::new(asked.bytes, asked.stream, asked.tag);
            let _ = self.runtime.allocate_at(asked.site, |resource| {
                resource.log_refusal(request, &error);
                Ok(())
            });
            error.into()
        })
    }

    #[track_caller]
    fn alloc_charging(&self, bytes: usize, align: usize, tag: AllocTag) -> Result<RawBlock> {
        self.charge(self.asked(bytes, tag))?;
        self.alloc_charged(bytes, align, tag, None).inspect_err(|_| self.account.discharge(bytes))
    }

    /// Allocates bytes that are charged already, and that stay charged after an error. `budget` is the reservation of the runtime's budget
    /// for them.
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

    /// Wraps foreign memory in a buffer. A block of one byte on this manager's stream stands in for it and orders its uses.
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

    /// Returns the limit; `None` if there is none.
    pub fn limit(&self) -> Option<usize> {
        self.account.limit()
    }

    /// Bytes that are left of the limit.
    pub fn remaining_bytes(&self) -> usize {
        self.account.remaining()
    }

    /// Bytes of live buffers.
    pub fn allocated_bytes(&self) -> usize {
        self.account.allocated.load(Relaxed)
    }

    /// Bytes that are reserved and not yet allocated.
    pub fn reserved_bytes(&self) -> usize {
        self.account.reserved.load(Relaxed)
    }

    /// The peak of [`GpuMemoryManager::allocated_bytes`].
    pub fn peak_bytes(&self) -> usize {
        self.account.peak.load(Relaxed)
    }

    /// The number of live buffers; empty ones are not counted.
    pub fn live_allocations(&self) -> usize {
        self.account.live.load(Relaxed)
    }

    /// The number of buffers allocated so far; empty ones are not counted.
    pub fn total_allocations(&self) -> u64 {
        self.account.total.load(Relaxed)
    }

    /// The number of dropped buffers that the runtime failed to free.
    pub fn failed_frees(&self) -> u64 {
        self.account.failed_frees.load(Relaxed)
    }
}

/// Returns the bytes of `len` elements.
pub(super) fn bytes_for<T>(len: usize) -> Result<usize, ResourceError> {
    let most = isize::MAX as usize;
    len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= most).ok_or_else(|| {
        ResourceError::invalid(
            format!("a buffer of {len} elements of {} bytes", size_of::<T>()),
            format!("at most {most} bytes in all"),
        )
    })
}

debug_fields!(self: GpuMemoryManager {
    device: self.runtime.device().spec(), stream: self.stream, account: self.account,
});
