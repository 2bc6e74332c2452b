//! Allocation under a budget: charge first, call the resource below, then confirm, correct or release the charge.
//!
//! Invariants: a charge in flight is counted as used until its call returns, and a panic below releases it. No lock is held while
//! the resource below is called.
//!
//! It does not decide what fits: see `quota`. It does not free memory for a request: see `reclaim`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::GlobalDeviceBudget;
use super::core::BudgetCore;
use super::policy::OomPolicy;
use super::quota::Charge;
use super::reclaim::ReclaimState;
use super::{scope, tags};
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult,
};
use crate::device_wait::{self, DeviceWait};

/// Attempts to allocate a block that comes back larger than announced.
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

/// The outcome of an inner call that gave no block.
enum Outcome {
    /// The error, and the time that budgets below waited before this call had a deadline.
    Failed(ResourceError, Duration),
    /// The block was larger than announced and did not fit; this is its charge.
    Larger(usize),
}

/// One block or several.
pub(super) trait Blocks: Sized {
    fn blocks(&self) -> &[DeviceBlock];
    fn into_vec(self) -> Vec<DeviceBlock>;
}

impl Blocks for DeviceBlock {
    fn blocks(&self) -> &[DeviceBlock] {
        std::slice::from_ref(self)
    }
    fn into_vec(self) -> Vec<DeviceBlock> {
        vec![self]
    }
}

impl Blocks for Vec<DeviceBlock> {
    fn blocks(&self) -> &[DeviceBlock] {
        self
    }
    fn into_vec(self) -> Vec<DeviceBlock> {
        self
    }
}

/// Calls the resource below, which waits for the device only if an earlier call without waits has failed.
/// An error has the time that budgets below waited before there was a deadline.
#[inline(always)]
pub(super) fn call_below<T>(
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
    /// The charge of a block of `bytes` bytes, which is charged `charge`, to this thread's scope.
    #[inline(always)]
    pub(super) fn charge_for_block(
        &self,
        bytes: usize,
        charge: usize,
        tag: AllocTag,
    ) -> ResourceResult<Charge> {
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let (tag, scope) = (tags::index_of(tag), scope::current(&self.core));
        Ok(Charge { bytes: charge, tag, scope })
    }

    /// Charges and calls the resource below. If either fails, reclaims and tries again until no step is left.
    ///
    /// `announced` is the charge of each block of the request. Without a `policy` the budget's own rules.
    #[inline(always)]
    pub(super) fn allocate_charged<B: Blocks>(
        &self,
        charge: Charge,
        policy: Option<&OomPolicy>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> ResourceResult<B> {
        if !self.core.quotas.charge(&charge) {
            return self.allocate_with_reclaim(charge, policy, None, call, announced);
        }
        match self.attempt(charge, None, &call, &announced) {
            Ok(given) => Ok(given),
            Err(failed) => {
                self.allocate_with_reclaim(charge, policy, Some(failed), call, announced)
            }
        }
    }

    /// Calls the resource below once, after it was charged.
    #[inline(always)]
    fn attempt<B: Blocks>(
        &self,
        charge: Charge,
        reclaim: Option<&ReclaimState>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> Result<B, Outcome> {
        let in_flight = ChargeInFlight { core: &self.core, charge };
        match call_below(reclaim, call) {
            Ok(given) => self.record_charges(in_flight, given, announced).map_err(Outcome::Larger),
            Err((error, spent)) => Err(Outcome::Failed(error, spent)),
        }
    }

    /// Slow path: goes on after the first attempt, whose outcome is `failed` if it was charged.
    #[cold]
    #[inline(never)]
    fn allocate_with_reclaim<B: Blocks>(
        &self,
        mut charge: Charge,
        policy: Option<&OomPolicy>,
        mut failed: Option<Outcome>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> ResourceResult<B> {
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
                    if !self.reclaim_step(&charge, reclaim) {
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
            failed = match self.attempt(charge, reclaim.as_ref(), &call, &announced) {
                Ok(given) => return Ok(given),
                Err(outcome) => Some(outcome),
            };
        }
    }

    /// Returns whether reaping, trimming or pressure functions may help against an error.
    pub(super) fn is_shortage(&self, error: &ResourceError) -> bool {
        match error {
            ResourceError::OutOfMemory { .. } => true,
            ResourceError::OutOfBudget { .. } => self.metered.load(Ordering::Acquire),
            _ => false,
        }
    }

    /// Stores the charges of allocated blocks. An error is what blocks that are larger than announced would have been charged: they
    /// did not fit, and are freed again.
    #[inline(always)]
    fn record_charges<B: Blocks>(
        &self,
        in_flight: ChargeInFlight<'_>,
        given: B,
        announced: impl Fn(usize) -> usize,
    ) -> Result<B, usize> {
        let charge = in_flight.charge;
        let mut real = 0_usize;
        for (n, block) in given.blocks().iter().enumerate() {
            let bytes = announced(n).max(block.bytes);
            real = real.saturating_add(bytes);
            self.core.record(block.generation, &Charge { bytes, ..charge });
        }
        std::mem::forget(in_flight);
        if real != charge.bytes {
            return self.correct_charge(charge, real, given, announced);
        }
        self.core.quotas.end(charge.bytes);
        Ok(given)
    }

    /// Corrects the charge of blocks that are charged `real` bytes. If that does not fit, frees the blocks.
    #[cold]
    #[inline(never)]
    fn correct_charge<B: Blocks>(
        &self,
        charge: Charge,
        real: usize,
        given: B,
        announced: impl Fn(usize) -> usize,
    ) -> Result<B, usize> {
        if real < charge.bytes {
            // The request was repeated with the size of a larger block than it got.
            self.core.quotas.end(real);
            self.core.release(&Charge { bytes: charge.bytes - real, ..charge });
            return Ok(given);
        }
        let excess = Charge { bytes: real - charge.bytes, ..charge };
        if self.core.charge_audited(&excess).is_ok() {
            self.core.quotas.end(real);
            return Ok(given);
        }
        // Recorded with what was charged, so that the free releases it whenever it completes.
        let mut left = charge.bytes;
        let count = given.blocks().len();
        for (n, block) in given.blocks().iter().enumerate() {
            let bytes = if n + 1 == count { left } else { announced(n).min(left) };
            left -= bytes;
            self.core.record(block.generation, &Charge { bytes, ..charge });
        }
        self.core.quotas.end(charge.bytes);
        let _ = self.deallocate_batch(given.into_vec());
        Err(real)
    }
}
