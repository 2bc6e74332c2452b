//! Reservations: bytes of a limit that only their holder can allocate.
//!
//! An operator that needs several buffers or none reserves their sum first. The manager's limit cannot refuse allocations out of the
//! reservation, nor can the runtime's budget if a block is charged no more than the reservation has. Otherwise the block is charged to
//! the budget like any other. The device may still be full. The drop releases the remaining bytes.

use super::manager::bytes_for;
use super::{DeviceRepr, GpuMemoryManager, RawBlock, TrackedCudaSlice};
use crate::Result;
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{AllocTag, MIN_ALIGN, ResourceError, ResourceResult};

/// Bytes of a manager's limit, reserved until they are allocated or this is dropped.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let manager = GpuMemoryManager::with_runtime(runtime).with_limit(1000);
/// let mut reservation = manager.reserve_bytes(900)?;
/// assert!(manager.alloc::<u8>(101).is_err());
/// let keys = reservation.alloc::<u32>(100)?;
/// assert_eq!((reservation.bytes(), manager.allocated_bytes()), (500, 400));
/// drop(reservation);
/// assert_eq!(manager.remaining_bytes(), 600);
/// # drop(keys);
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping the reservation gives its bytes back at once"]
pub struct Reservation {
    manager: GpuMemoryManager,
    bytes: usize,
    /// The reservation of these bytes in the runtime's budget, if it has one.
    budget: Option<BudgetReservation>,
}

impl Reservation {
    /// Makes a reservation of `bytes` that are charged to the manager already.
    pub(super) fn charged(
        manager: GpuMemoryManager,
        bytes: usize,
        budget: Option<BudgetReservation>,
    ) -> Self {
        manager.account().set_aside(bytes);
        Self { manager, bytes, budget }
    }

    /// Bytes that are left.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Allocates a buffer of `len` elements out of the reservation, on the stream of its manager.
    ///
    /// A request above what is left is [`ResourceError::OutOfBudget`]. An error changes nothing.
    #[track_caller]
    pub fn alloc<T: DeviceRepr>(&mut self, len: usize) -> Result<TrackedCudaSlice<T>> {
        self.alloc_tagged(len, AllocTag::UNTAGGED)
    }

    /// [`Reservation::alloc`] with a label for logs and statistics.
    #[track_caller]
    pub fn alloc_tagged<T: DeviceRepr>(
        &mut self,
        len: usize,
        tag: AllocTag,
    ) -> Result<TrackedCudaSlice<T>> {
        let raw = self.spend(bytes_for::<T>(len)?, align_of::<T>(), tag)?;
        Ok(TrackedCudaSlice::over(raw, len))
    }

    /// Allocates `bytes` bytes without a type out of the reservation.
    #[track_caller]
    pub fn alloc_raw(&mut self, bytes: usize) -> Result<RawBlock> {
        self.spend(bytes, 1, AllocTag::UNTAGGED)
    }

    /// Splits off a reservation of `bytes` bytes.
    pub fn split(&mut self, bytes: usize) -> Result<Self> {
        self.covers(bytes)?;
        let budget = match &mut self.budget {
            Some(budget) => Some(budget.split(bytes.min(budget.bytes()))?),
            None => None,
        };
        self.bytes -= bytes;
        Ok(Self { manager: self.manager.clone(), bytes, budget })
    }

    fn covers(&self, bytes: usize) -> ResourceResult<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        Err(ResourceError::OutOfBudget { requested: bytes, remaining: self.bytes })
    }

    #[track_caller]
    fn spend(&mut self, bytes: usize, align: usize, tag: AllocTag) -> Result<RawBlock> {
        self.covers(bytes)?;
        let charge = self.manager.runtime().resource().charge_for(bytes, align.max(MIN_ALIGN));
        let raw = match &mut self.budget {
            Some(budget) if bytes > 0 && charge <= budget.bytes() => {
                self.manager.alloc_charged(bytes, align, tag, Some(budget))?
            }
            Some(budget) => {
                let raw = self.manager.alloc_charged(bytes, align, tag, None)?;
                // The block has its own charge; the budget's reservation for it is released.
                drop(budget.split(bytes.min(budget.bytes()))?);
                raw
            }
            None => self.manager.alloc_charged(bytes, align, tag, None)?,
        };
        self.bytes -= bytes;
        self.manager.account().unset_aside(bytes);
        Ok(raw)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.manager.account().unset_aside(self.bytes);
        self.manager.account().discharge(self.bytes);
    }
}
