//! Reservations: bytes of a budget that only their holder can allocate.
//!
//! Invariant: reserved bytes stay charged until the reservation is dropped, or the block that was allocated from it is freed. A
//! reservation allocates no memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::core::BudgetCore;
use super::quota::Charge;
use super::scope::BudgetScope;
use super::tags;
use super::tree::{DEVICE, ScopeIndex};
use crate::device_runtime::resource::{
    AllocRequest, AllocTag, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult,
    StreamId,
};

/// The tag of reserved bytes until they become a block.
pub(crate) const RESERVED: AllocTag = AllocTag("(reserved)");

/// Bytes of a budget, reserved until they are allocated or this is dropped.
///
/// The budget does not check a block out of them again. The device may still be full.
///
/// ```
/// # use std::sync::Arc;
/// # use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, StreamId,
/// };
///
/// # let device = Arc::new(CudaDevice::open("sim")?);
/// let budget = GlobalDeviceBudget::new(Box::new(DirectCudaResource::new(device, 0)), 1000);
/// let mut three = budget.reserve(900)?;
/// assert!(budget.allocate(101, StreamId::DEFAULT, AllocTag("other")).is_err());
/// let keys = three.allocate(&budget, 400, StreamId::DEFAULT, AllocTag("keys"))?;
/// assert_eq!((three.bytes(), budget.reserved_bytes()), (500, 900));
/// drop(three);
/// assert_eq!(budget.remaining(), 600);
/// # budget.deallocate(keys)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping the reservation gives its bytes back at once"]
pub struct BudgetReservation {
    pub(super) core: Arc<BudgetCore>,
    pub(super) bytes: usize,
    /// Keeps the scope open, so that its index is not reused.
    pub(super) scope: Option<BudgetScope>,
    /// The reservation of these bytes in a budget below.
    pub(super) below: Option<Box<BudgetReservation>>,
}

impl BudgetReservation {
    /// Bytes that are left.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Allocates a block out of the reservation. `resource` is the budget that it came from, or a decorator above that.
    ///
    /// A request above what is left is [`ResourceError::OutOfBudget`]. An error changes nothing.
    pub fn allocate(
        &mut self,
        resource: &dyn DeviceMemoryResource,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        resource.allocate_request(AllocRequest::new(bytes, stream, tag), Some(self))
    }

    /// Splits off a reservation of `bytes` bytes.
    pub fn split(&mut self, bytes: usize) -> ResourceResult<Self> {
        self.covers(bytes)?;
        let below = match &mut self.below {
            Some(below) => Some(Box::new(below.split(bytes)?)),
            None => None,
        };
        self.bytes -= bytes;
        Ok(Self { core: self.core.clone(), bytes, scope: self.scope.clone(), below })
    }

    /// Adds the bytes of another reservation of the same budget and scope.
    pub fn merge(&mut self, mut other: Self) -> ResourceResult<()> {
        if !Arc::ptr_eq(&self.core, &other.core) || self.scope_index() != other.scope_index() {
            return Err(ResourceError::invalid(
                "a reservation of another budget or scope",
                "one of the same budget and scope",
            ));
        }
        if let (Some(mine), Some(theirs)) = (&mut self.below, other.below.take()) {
            mine.merge(*theirs)?;
        }
        self.bytes += std::mem::take(&mut other.bytes);
        Ok(())
    }

    pub(super) fn covers(&self, bytes: usize) -> ResourceResult<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        Err(ResourceError::OutOfBudget { requested: bytes, remaining: self.bytes })
    }

    pub(super) fn scope_index(&self) -> ScopeIndex {
        self.scope.as_ref().map_or(DEVICE, BudgetScope::index)
    }
}

impl Drop for BudgetReservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        self.core.reserved.fetch_sub(self.bytes, Ordering::AcqRel);
        self.core.quotas.begin(self.bytes);
        let tag = tags::index_of(RESERVED);
        self.core.release(&Charge { bytes: self.bytes, tag, scope: self.scope_index() });
    }
}
