//! The byte limit of a device.
//!
//! [`GlobalDeviceBudget`] wraps any resource and charges its blocks. Invariants:
//! - All threads together never exceed the limit; a request for exactly what is left succeeds.
//! - A refusal is never spurious: at some instant during the call the request did not fit.
//! - A charge ends when the resource below reports the block as free. The block's identity alone determines its charge.
//!
//! The limit also caps the physical memory of the resource below, cached memory included, rounded up to whole granules
//! ([`PhysicalCap`]). A request that does not fit for fragmentation or granules is [`ResourceError::OutOfMemory`];
//! [`ResourceError::OutOfBudget`] concerns charged bytes alone.
//!
//! It does not count memory that bypasses it, and does not join the ledger that processes share.
//!
//! ```
//! use std::sync::Arc;
//! use xlog_cuda::CudaDevice;
//! use xlog_cuda::device_runtime::{
//!     AllocTag, AsyncCudaResource, DeviceMemoryResource, GlobalDeviceBudget, ResourceError, StreamId, StreamPool,
//! };
//!
//! let device = Arc::new(CudaDevice::open("sim")?);
//! let pool = Arc::new(StreamPool::with_defaults(device.clone()));
//! let budget = GlobalDeviceBudget::new(Box::new(AsyncCudaResource::new(device, 0, pool)), 4096);
//!
//! let rows = budget.allocate(3000, StreamId::DEFAULT, AllocTag("rows"))?;
//! let refused = budget.allocate(1097, StreamId::DEFAULT, AllocTag("keys"));
//! assert_eq!(refused, Err(ResourceError::OutOfBudget { requested: 1097, remaining: 1096 }));
//! println!("{}", budget.last_oom().expect("it was refused")); // names 'rows'
//!
//! budget.deallocate(rows)?;
//! let all = budget.allocate(4096, StreamId::DEFAULT, AllocTag("all"))?; // what was returned is reaped first
//! # budget.deallocate(all)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod callbacks;
mod core;
mod handle;
mod limit;
mod pending;
mod policy;
mod primitive;
mod quota;
mod reclaim;
mod refusal;
mod report;
mod report_text;
mod reservation;
mod resource;
mod scope;
mod tags;
mod tree;
mod waiting;

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::core::BudgetCore;
use self::quota::Charge;
use super::resource::{
    AllocRequest, AllocTag, DeviceBlock, DeviceMemoryResource, PhysicalCap, PhysicalMeter,
    ResourceError, ResourceResult, StreamId,
};

pub use callbacks::Registration;
pub use handle::BudgetHandle;
pub use limit::{EffectiveLimit, LimitSource};
pub use policy::{OomPolicy, Pressure, WaitPolicy};
pub use report::{
    OomCause, OomReport, OtherProcess, OtherUse, RefusedBy, RefusedCall, ScopeUsage, TagUsage,
};
pub use reservation::BudgetReservation;
pub use scope::{BudgetScope, EnteredScope};

pub(crate) use refusal::free_of;
pub(crate) use report::NAMED;
pub(crate) use report_text::Line;
pub(crate) use reservation::RESERVED;

/// A byte limit over a resource. See the [module](self).
///
/// It derefs to its [`BudgetHandle`], which has the calls that need no resource.
pub struct GlobalDeviceBudget<R = Box<dyn DeviceMemoryResource + Send + Sync>> {
    inner: R,
    handle: BudgetHandle,
    /// Whether `OutOfBudget` from below comes from a meter of physical bytes; otherwise it comes from a budget that has already
    /// reclaimed.
    metered: AtomicBool,
    /// That meter.
    meter: OnceLock<Arc<dyn PhysicalMeter>>,
    /// Handles do not keep the cap, so it ends with the budget.
    _cap: Arc<PhysicalCap>,
}

impl GlobalDeviceBudget {
    /// Limits `inner` to `limit` bytes.
    #[must_use]
    pub fn new(inner: Box<dyn DeviceMemoryResource + Send + Sync>, limit: usize) -> Self {
        Self::over(inner, limit)
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// [`GlobalDeviceBudget::new`] over a resource of a known type, which costs no indirect call.
    #[must_use]
    pub fn over(inner: R, limit: usize) -> Self {
        let cap = Arc::new(PhysicalCap::new(limit));
        let core = Arc::new(BudgetCore::new(limit, inner.places_blocks(), Arc::downgrade(&cap)));
        // A resource that takes no device memory itself, or does not support caps, is limited by the charges of its blocks.
        let _ = inner.cap_physical(cap.clone());
        let handle = BudgetHandle { core };
        let (metered, meter) = (AtomicBool::new(false), OnceLock::new());
        Self { handle, inner, metered, meter, _cap: cap }
    }

    /// Sets the policy for requests that do not fit at once.
    #[must_use]
    pub fn with_policy(self, policy: OomPolicy) -> Self {
        self.set_policy(policy);
        self
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// A handle that stays usable after the budget has become part of a runtime.
    pub fn handle(&self) -> BudgetHandle {
        self.handle.clone()
    }

    /// [`DeviceMemoryResource::allocate`] by another policy than the budget's.
    pub fn allocate_with(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
        policy: &OomPolicy,
    ) -> ResourceResult<DeviceBlock> {
        let request = AllocRequest::new(bytes, stream, tag);
        self.allocate_charged(request, Some(policy), || self.inner.allocate(bytes, stream, tag))
    }

    /// Reserves bytes for later blocks, all or none. They are charged to this thread's scope.
    pub fn reserve(&self, bytes: usize) -> ResourceResult<BudgetReservation> {
        let scope = scope::current_scope(&self.core);
        let index = scope.as_ref().map_or(tree::DEVICE, BudgetScope::index);
        let tag = tags::index_of(reservation::RESERVED);
        let charge = Charge { bytes, tag, scope: index };
        if !self.core.quotas.charge(&charge) {
            let reclaim = reclaim::ReclaimState::new(self.core.policy(), Duration::ZERO);
            self.charge_with_reclaim(&charge, &reclaim)?;
        }
        self.core.reserved.fetch_add(bytes, Ordering::AcqRel);
        self.core.quotas.end(bytes);
        let mut reservation =
            BudgetReservation { core: self.core.clone(), bytes, scope, below: None };
        reservation.below = match self.inner.reserve_budget(bytes) {
            // A resource that does not support reservations has no budget below it.
            Err(ResourceError::Unsupported { .. }) => None,
            reserved => reserved?.map(Box::new),
        };
        Ok(reservation)
    }
}

impl<R> Deref for GlobalDeviceBudget<R> {
    type Target = BudgetHandle;

    fn deref(&self) -> &BudgetHandle {
        &self.handle
    }
}

impl<R: fmt::Debug> fmt::Debug for GlobalDeviceBudget<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GlobalDeviceBudget")
            .field("core", &self.handle)
            .field("inner", &self.inner)
            .finish()
    }
}
