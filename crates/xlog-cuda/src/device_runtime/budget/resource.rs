//! The budget as a resource. An allocation is charged before the call of the resource below; then its charge is confirmed, corrected or
//! released. A free releases the charge once the block is free. All other calls are forwarded.
//!
//! Invariants: a charge in flight counts as used until its call returns, and a panic below releases it. No lock is held while the
//! resource below is called.
//!
//! `quota` decides what fits; `reclaim` frees memory for a request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::GlobalDeviceBudget;
use super::core::{BudgetCore, TakenCharge};
use super::pending::Pending;
use super::policy::OomPolicy;
use super::quota::Charge;
use super::reclaim::ReclaimState;
use super::reservation::BudgetReservation;
use super::{scope, tags};
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    MemoryUse, PhysicalMeter, ResourceError, ResourceResult, StreamId, forward_plain,
};
use crate::device_wait::{self, DeviceWait};

/// The maximum number of attempts for a block that is larger than announced.
const MAX_ATTEMPTS: u32 = 4;

/// A charge whose inner call is in progress. A panic below drops it, which releases the charge.
struct ChargeInFlight<'a> {
    core: &'a BudgetCore,
    charge: Charge,
}

impl Drop for ChargeInFlight<'_> {
    fn drop(&mut self) {
        self.core.release(&self.charge);
    }
}

/// The outcome of an inner call that returned no block.
enum Outcome {
    /// The error, and the time that budgets below waited before this call had a deadline.
    Failed(ResourceError, Duration),
    /// The block was larger than announced and did not fit; this is its charge.
    Larger(usize),
}

/// Calls the resource below. It may wait for the device only once a call without waits has failed. An error has the time that budgets
/// below waited before there was a deadline.
fn call_below<T>(
    reclaim: Option<&ReclaimState>,
    call: impl FnOnce() -> ResourceResult<T>,
) -> Result<T, (ResourceError, Duration)> {
    match reclaim.and_then(|reclaim| reclaim.kept_below) {
        Some(kept) => {
            let left = device_wait::left().unwrap_or_default();
            let _deadline = DeviceWait::begin(left.saturating_sub(kept));
            call().map_err(|error| (error, Duration::ZERO))
        }
        None => {
            let deferred = device_wait::defer();
            call().map_err(|error| (error, deferred.end()))
        }
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Charges and calls the resource below. If either fails, reclaims and retries until no step is left. The default of `policy` is the
    /// budget's.
    #[inline(always)]
    pub(super) fn allocate_charged(
        &self,
        request: AllocRequest,
        policy: Option<&OomPolicy>,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        if request.bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let charge = Charge {
            bytes: self.inner.charge_for(request.bytes, request.align),
            tag: tags::index_of(request.tag),
            scope: scope::current(&self.core),
        };
        if !self.core.quotas.charge(&charge) {
            return self.allocate_with_reclaim(charge, policy, None, call);
        }
        let in_flight = ChargeInFlight { core: &self.core, charge };
        let deferred = device_wait::defer();
        // Returned without a move, which would copy the block.
        let result = call();
        if let Ok(block) = &result
            && block.bytes <= charge.bytes
        {
            self.core.record(block.generation, &charge);
            std::mem::forget(in_flight);
            self.core.quotas.end(charge.bytes);
            return result;
        }
        let spent = deferred.end();
        let result = result.map_err(|error| (error, spent));
        match self.finish_attempt(in_flight, result, charge.bytes) {
            Ok(block) => Ok(block),
            Err(failed) => self.allocate_with_reclaim(charge, policy, Some(failed), call),
        }
    }

    /// Ends a call of the resource below: confirms, corrects or releases the charge.
    #[cold]
    #[inline(never)]
    fn finish_attempt(
        &self,
        in_flight: ChargeInFlight<'_>,
        result: Result<DeviceBlock, (ResourceError, Duration)>,
        announced: usize,
    ) -> Result<DeviceBlock, Outcome> {
        let charge = in_flight.charge;
        let block = match result {
            Ok(block) => block,
            Err((error, spent)) => return Err(Outcome::Failed(error, spent)),
        };
        let real = announced.max(block.bytes);
        self.core.record(block.generation, &Charge { bytes: real, ..charge });
        std::mem::forget(in_flight);
        if real != charge.bytes {
            return self.correct_charge(charge, real, block);
        }
        self.core.quotas.end(charge.bytes);
        Ok(block)
    }

    /// Slow path: continues after the first attempt, whose outcome is `failed` if it was charged.
    #[cold]
    #[inline(never)]
    fn allocate_with_reclaim(
        &self,
        mut charge: Charge,
        policy: Option<&OomPolicy>,
        mut failed: Option<Outcome>,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let announced = charge.bytes;
        let policy = || policy.cloned().unwrap_or_else(|| self.core.policy());
        let mut reclaim: Option<ReclaimState> = None;
        let mut larger = 0;
        loop {
            match failed {
                None => {}
                Some(Outcome::Failed(error, spent)) => {
                    if !self.is_shortage(&error) {
                        return Err(error);
                    }
                    let reclaim = reclaim.get_or_insert_with(|| ReclaimState::new(policy(), spent));
                    if !self.reclaim_step(&charge, &error, reclaim) {
                        self.report_below(&charge, &error);
                        return Err(error);
                    }
                }
                Some(Outcome::Larger(bytes)) => {
                    charge.bytes = bytes;
                    larger += 1;
                    if larger > MAX_ATTEMPTS {
                        let snapshot = self.core.quotas.snapshot(bytes, charge.scope);
                        return Err(self.refuse(&charge, snapshot));
                    }
                }
            }
            if !self.core.quotas.charge(&charge) {
                let reclaim =
                    reclaim.get_or_insert_with(|| ReclaimState::new(policy(), Duration::ZERO));
                self.charge_with_reclaim(&charge, reclaim)?;
            }
            let in_flight = ChargeInFlight { core: &self.core, charge };
            let result = call_below(reclaim.as_ref(), &call);
            failed = match self.finish_attempt(in_flight, result, announced) {
                Ok(block) => return Ok(block),
                Err(outcome) => Some(outcome),
            };
        }
    }

    /// Returns whether reaping, trimming or pressure callbacks may help against an error.
    pub(super) fn is_shortage(&self, error: &ResourceError) -> bool {
        match error {
            ResourceError::OutOfMemory { .. } => true,
            ResourceError::OutOfBudget { .. } => self.metered.load(Ordering::Acquire),
            _ => false,
        }
    }

    /// Corrects the charge of a block to `real` bytes. If they do not fit, frees the block.
    fn correct_charge(
        &self,
        charge: Charge,
        real: usize,
        block: DeviceBlock,
    ) -> Result<DeviceBlock, Outcome> {
        if real < charge.bytes {
            // A retry was charged for a larger block than it got.
            self.core.quotas.end(real);
            self.core.release(&Charge { bytes: charge.bytes - real, ..charge });
            return Ok(block);
        }
        let excess = Charge { bytes: real - charge.bytes, ..charge };
        if self.core.charge_audited(&excess).is_ok() {
            self.core.quotas.end(real);
            return Ok(block);
        }
        // The recorded charge is released when the free completes.
        self.core.record(block.generation, &charge);
        self.core.quotas.end(charge.bytes);
        let _ = self.deallocate(block);
        Err(Outcome::Larger(real))
    }
}

/// A free in progress. A panic below drops it, which leaves the block charged.
struct FreeInFlight<'a> {
    core: &'a BudgetCore,
    bytes: usize,
}

impl Drop for FreeInFlight<'_> {
    fn drop(&mut self) {
        self.core.quotas.end(self.bytes);
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Allocates out of a reservation, whose bytes are charged already.
    fn allocate_reserved(
        &self,
        request: AllocRequest,
        reservation: &mut BudgetReservation,
    ) -> ResourceResult<DeviceBlock> {
        if !Arc::ptr_eq(&self.core, &reservation.core) {
            return Err(ResourceError::invalid(
                "a reservation of another budget",
                "one that this budget gave",
            ));
        }
        if request.bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let bytes = self.inner.charge_for(request.bytes, request.align);
        reservation.covers(bytes)?;
        let (tag, scope) = (tags::index_of(request.tag), reservation.scope_index());
        let mut charge = Charge { bytes, tag, scope };
        let mut reclaim: Option<ReclaimState> = None;
        let block = loop {
            let given = call_below(reclaim.as_ref(), || {
                self.inner.allocate_request(request, reservation.below.as_deref_mut())
            });
            match given {
                Ok(block) => break block,
                Err((error, spent)) if self.is_shortage(&error) => {
                    let reclaim =
                        reclaim.get_or_insert_with(|| ReclaimState::new(self.core.policy(), spent));
                    if !self.reclaim_step(&charge, &error, reclaim) {
                        self.report_below(&charge, &error);
                        return Err(error);
                    }
                }
                Err((error, _)) => return Err(error),
            }
        };
        charge.bytes = charge.bytes.max(block.bytes);
        if charge.bytes > reservation.bytes {
            let remaining = reservation.bytes;
            self.inner.deallocate(block)?;
            return Err(ResourceError::OutOfBudget { requested: charge.bytes, remaining });
        }
        reservation.bytes -= charge.bytes;
        self.core.reserved.fetch_sub(charge.bytes, Ordering::AcqRel);
        self.core.record(block.generation, &charge);
        Ok(block)
    }

    /// Handles a free that failed below, or whose block is not free yet.
    #[cold]
    #[inline(never)]
    fn record_unfinished_free(
        &self,
        id: BlockId,
        charge: Charge,
        taken: TakenCharge<'_>,
        error: Option<&ResourceError>,
    ) {
        if error.is_some_and(|error| error.is_refused_free(id, &self.inner)) {
            return self.core.quotas.end(charge.bytes);
        }
        taken.discard();
        self.add_pending(Pending { block: id, charge });
        if error.is_some() && self.inner.block_state(id) == BlockState::Freed {
            self.scan_pending();
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for GlobalDeviceBudget<R> {
    forward_plain!(self, self.inner);

    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let request = AllocRequest::new(bytes, stream, tag);
        self.allocate_charged(request, None, || self.inner.allocate(bytes, stream, tag))
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        let Some((charge, taken)) = self.core.take_charge(id.generation)? else {
            return self.inner.deallocate(block);
        };
        self.core.quotas.begin(charge.bytes);
        let in_flight = FreeInFlight { core: &self.core, bytes: charge.bytes };
        let result = self.inner.deallocate_with_state(&block);
        std::mem::forget(in_flight);
        match result {
            Ok(BlockState::Freed) => {
                taken.discard();
                self.core.release(&charge);
                Ok(())
            }
            Ok(_) => {
                self.record_unfinished_free(id, charge, taken, None);
                Ok(())
            }
            Err(error) => {
                self.record_unfinished_free(id, charge, taken, Some(&error));
                Err(error)
            }
        }
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_pending();
        self.scan_pending();
        reaped
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_completed();
        self.scan_pending();
        reaped
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.inner.finish_block_uses(uses, use_stream)
    }

    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        match reservation {
            Some(reservation) => self.allocate_reserved(request, reservation),
            None => {
                self.allocate_charged(request, None, || self.inner.allocate_request(request, None))
            }
        }
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let below = self.inner.memory_use()?;
        // A pool counts freed blocks that other streams use as pending itself; other resources do not.
        let pending = below.pending.max(self.pending_bytes());
        Some(MemoryUse::of_physical(below.physical(), below.cached, pending))
    }

    fn trim(&self) -> ResourceResult<usize> {
        let trimmed = self.inner.trim();
        self.scan_pending();
        trimmed
    }

    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        let trimmed = self.inner.trim_under_pressure();
        self.scan_pending();
        trimmed
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.inner.meter_physical(meter.clone())?;
        let below = self.inner.reserve_budget(0);
        let is_lowest = matches!(below, Ok(None) | Err(ResourceError::Unsupported { .. }));
        if is_lowest {
            let _ = self.meter.set(meter);
        }
        self.metered.store(is_lowest, Ordering::Release);
        Ok(())
    }

    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        self.reserve(bytes).map(Some)
    }
}
