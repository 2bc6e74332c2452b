//! Allocation under a budget: charge first, call the resource below, then confirm, correct or release the charge.
//!
//! Invariants: a charge in flight is counted as used until its call returns, and a panic below releases it. No lock is held while
//! the resource below is called.
//!
//! It does not decide what fits: see `quota`. It does not free memory for a request: see `reclaim`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::GlobalDeviceBudget;
use super::charge::Charge;
use super::core::{BudgetCore, ChargeRequest};
use super::in_flight::ShardId;
use super::policy::OomPolicy;
use super::reclaim::{ReclaimState, call_below};
use super::shard_id::current_shard;
use super::tag_counts::TagIndex;
use super::tree::{DEVICE, ScopeIndex};
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult,
};
use crate::device_wait;

/// Attempts to allocate a block that comes back larger than announced.
const MAX_ATTEMPTS: u32 = 4;

/// The size of a requested block, and what it is charged.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    pub(super) bytes: usize,
    pub(super) charge: usize,
}

/// A charge whose inner call is in progress. A panic below drops it, which releases the charge.
struct ChargeInFlight<'a> {
    core: &'a BudgetCore,
    shard_id: ShardId,
    charge: usize,
    scope: ScopeIndex,
    tag: TagIndex,
    blocks: u32,
}

impl Drop for ChargeInFlight<'_> {
    fn drop(&mut self) {
        self.core.release(self.shard_id, self.charge, self.scope, self.tag, self.blocks);
    }
}

/// The outcome of an inner call.
pub(super) enum Outcome<B> {
    Allocated(B),
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

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Allocates one block. On the fast path the charge comes out of this thread's own credit.
    #[inline(always)]
    pub(super) fn allocate_charged(
        &self,
        size: BlockSize,
        tag: AllocTag,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let BlockSize { bytes, charge } = size;
        let shard_id = current_shard();
        if bytes == 0 || super::scope::current(&self.core) != DEVICE {
            return self.allocate_charged_slow(size, tag, None, call);
        }
        let Some(index) = self.core.try_charge_own(shard_id, charge, tag) else {
            return self.allocate_charged_slow(size, tag, None, call);
        };
        let in_flight = ChargeInFlight {
            core: &self.core,
            shard_id,
            charge,
            scope: DEVICE,
            tag: index,
            blocks: 1,
        };
        // A wait for the device is deferred: the call fails instead, and the slow path repeats it under a deadline.
        let deferred = device_wait::defer();
        match call() {
            Ok(block) if block.bytes <= charge => {
                drop(deferred);
                std::mem::forget(in_flight);
                let entry = Charge { bytes: charge, tag: index, scope: DEVICE };
                self.core.charges.insert(block.generation, entry.to_words());
                self.core.confirm(shard_id, charge);
                Ok(block)
            }
            Ok(block) => {
                drop(deferred);
                let outcome = self.record_charges(in_flight, block, |_| charge);
                self.allocate_charged_slow(size, tag, Some(outcome), call)
            }
            Err(error) => {
                let failed = Outcome::Failed(error, deferred.end());
                drop(in_flight);
                self.allocate_charged_slow(size, tag, Some(failed), call)
            }
        }
    }

    /// Slow path: charges from the balance, or reclaims first. `failed` is the outcome of the fast path, if it got that far.
    #[cold]
    #[inline(never)]
    fn allocate_charged_slow(
        &self,
        size: BlockSize,
        tag: AllocTag,
        failed: Option<Outcome<DeviceBlock>>,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let request = self.charge_request(size, tag)?;
        self.allocate_with_reclaim(&request, None, failed, call, |_| request.charge)
    }

    /// Charges and calls the resource below, and reclaims between attempts until a step is left.
    pub(super) fn allocate_with_reclaim<B: Blocks>(
        &self,
        request: &ChargeRequest,
        policy: Option<&OomPolicy>,
        failed: Option<Outcome<B>>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> ResourceResult<B> {
        let shard_id = current_shard();
        let mut request = *request;
        // The caller's policy, or else the budget's own, which is read only if it is needed.
        let policy = || policy.cloned().unwrap_or_else(|| self.core.policy());
        let mut reclaim: Option<ReclaimState> = None;
        let mut failed = failed;
        let mut larger = 0;
        loop {
            match failed {
                None => {}
                Some(Outcome::Allocated(given)) => return Ok(given),
                Some(Outcome::Failed(error, spent)) => {
                    if !self.is_shortage(&error) {
                        return Err(error);
                    }
                    let reclaim = reclaim.get_or_insert_with(|| ReclaimState::new(policy(), spent));
                    if !self.reclaim_step(&request, reclaim) {
                        self.report_below(&request, &error);
                        return Err(error);
                    }
                }
                Some(Outcome::Larger(charge)) => {
                    request.charge = charge;
                    larger += 1;
                    if larger > MAX_ATTEMPTS {
                        let snapshot = self.core.snapshot(charge, request.scope);
                        return Err(self.refuse(&request, snapshot));
                    }
                }
            }
            let tag = match self.core.try_charge(shard_id, &request) {
                Some(tag) => tag,
                None => {
                    let reclaim =
                        reclaim.get_or_insert_with(|| ReclaimState::new(policy(), Duration::ZERO));
                    self.charge_with_reclaim(shard_id, &request, reclaim)?
                }
            };
            let ChargeRequest { charge, scope, blocks, .. } = request;
            let in_flight =
                ChargeInFlight { core: &self.core, shard_id, charge, scope, tag, blocks };
            failed = Some(match call_below(reclaim.as_ref(), &call) {
                (Ok(given), _) => self.record_charges(in_flight, given, &announced),
                (Err(error), spent) => Outcome::Failed(error, spent),
            });
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

    /// Stores the charges of allocated blocks. Charges what exceeds the announced size; if that does not fit, frees the blocks.
    #[cold]
    fn record_charges<B: Blocks>(
        &self,
        in_flight: ChargeInFlight<'_>,
        given: B,
        announced: impl Fn(usize) -> usize,
    ) -> Outcome<B> {
        let ChargeInFlight { shard_id, charge, scope, tag, .. } = in_flight;
        let charges: Vec<usize> = given
            .blocks()
            .iter()
            .enumerate()
            .map(|(n, block)| announced(n).max(block.bytes))
            .collect();
        let real = charges.iter().fold(0, |sum: usize, charge| sum.saturating_add(*charge));
        let extra = real.saturating_sub(charge);
        if extra > 0 {
            let name = self.core.names.name(tag as usize);
            let request = ChargeRequest { charge: extra, scope, tag: name, blocks: 0 };
            if self.core.charge_audited(shard_id, &request).is_err() {
                // Stored, so that the free releases the charge whenever it completes.
                std::mem::forget(in_flight);
                let mut left = charge;
                let count = charges.len();
                for (n, block) in given.blocks().iter().enumerate() {
                    let share = if n + 1 == count { left } else { announced(n).min(left) };
                    left -= share;
                    let entry = Charge { bytes: share, tag, scope };
                    self.core.charges.insert(block.generation, entry.to_words());
                }
                self.core.confirm(shard_id, charge);
                let _ = self.deallocate_batch(given.into_vec());
                return Outcome::Larger(real);
            }
            self.core.confirm(shard_id, extra);
        }
        std::mem::forget(in_flight);
        for (block, charge) in given.blocks().iter().zip(&charges) {
            let entry = Charge { bytes: *charge, tag, scope };
            self.core.charges.insert(block.generation, entry.to_words());
        }
        if charge > real {
            // The request was repeated with the size of a larger block than it got.
            self.core.confirm(shard_id, real);
            self.core.release(shard_id, charge - real, scope, tag, 0);
        } else {
            self.core.confirm(shard_id, charge);
        }
        Outcome::Allocated(given)
    }
}
