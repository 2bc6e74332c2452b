//! Reservations: bytes of a limit that only their holder can allocate.
//!
//! An operator that needs three buffers or none reserves their sum first. What it allocates from the reservation cannot be
//! refused by the manager's limit any more, nor by the runtime's budget as long as blocks are charged what was asked for; what a
//! block is charged beyond is taken from the budget like any other. The device may still be full. What is left goes back with the
//! reservation.

use super::manager::bytes_for;
use super::{DeviceRepr, GpuMemoryManager, RawBlock, TrackedCudaSlice};
use crate::Result;
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{AllocTag, MIN_ALIGN, ResourceError, ResourceResult};

/// Bytes of a manager's limit, set aside until they are allocated or this is dropped.
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
    /// As many bytes of the runtime's budget, where it has one.
    budget: Option<BudgetReservation>,
}

impl Reservation {
    /// `bytes` are charged to the manager already.
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

    /// A buffer of `len` elements out of the reservation, on the stream of the manager that made it.
    ///
    /// More than is left is [`ResourceError::OutOfBudget`]. After an error nothing has changed.
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

    /// `bytes` bytes without a type out of the reservation.
    #[track_caller]
    pub fn alloc_raw(&mut self, bytes: usize) -> Result<RawBlock> {
        self.spend(bytes, 1, AllocTag::UNTAGGED)
    }

    /// A reservation of `bytes` bytes out of this one.
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
                // The block has its own charge; what was set aside for it goes back.
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
