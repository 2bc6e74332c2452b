//! Charges around the calls that allocate: taken before, set right or given back after.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::GlobalDeviceBudget;
use super::core::{Claim, Core};
use super::flights::Seat;
use super::policy::OomPolicy;
use super::reclaim::{Reclaim, call_below};
use super::records::Record;
use super::seats::seat;
use super::tally::TagIndex;
use super::tree::{DEVICE, ScopeIndex};
use crate::device_runtime::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, ResourceError, ResourceResult,
};
use crate::device_wait;

/// How often a block that is larger than was announced is asked for again.
const TRIES: u32 = 4;

/// A charge whose inner call is under way. Dropped by a panic below, it gives the charge back.
struct Flight<'a> {
    core: &'a Core,
    seat: Seat,
    charge: usize,
    scope: ScopeIndex,
    tag: TagIndex,
    blocks: u32,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.core.release(self.seat, self.charge, self.scope, self.tag, self.blocks);
    }
}

/// How an inner call went.
pub(super) enum Outcome<B> {
    Given(B),
    /// With what budgets below have waited before there was a deadline.
    Failed(ResourceError, Duration),
    /// The block was larger than announced and did not fit: it would have been this.
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
    /// One block of `bytes`, charged `charge`. The usual way takes the charge out of this thread's own credit.
    #[inline(always)]
    pub(super) fn obtain(
        &self,
        (bytes, charge): (usize, usize),
        tag: AllocTag,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let seat = seat();
        if bytes == 0 || super::scope::current(&self.core) != DEVICE {
            return self.obtain_slow((bytes, charge), tag, None, call);
        }
        let Some(index) = self.core.take_own(seat, charge, tag) else {
            return self.obtain_slow((bytes, charge), tag, None, call);
        };
        let flight =
            Flight { core: &self.core, seat, charge, scope: DEVICE, tag: index, blocks: 1 };
        // What would wait for the device comes back here as a failure, and has a deadline then.
        let deferred = device_wait::defer();
        match call() {
            Ok(block) if block.bytes <= charge => {
                drop(deferred);
                std::mem::forget(flight);
                let record = Record { charge, tag: index, scope: DEVICE };
                self.core.records.put(block.ptr, block.generation, record);
                self.core.keep(seat, charge);
                Ok(block)
            }
            Ok(block) => {
                drop(deferred);
                let outcome = self.settle(flight, block, |_| charge);
                self.obtain_slow((bytes, charge), tag, Some(outcome), call)
            }
            Err(error) => {
                let failed = Outcome::Failed(error, deferred.end());
                drop(flight);
                self.obtain_slow((bytes, charge), tag, Some(failed), call)
            }
        }
    }

    /// From the balance, or after reclaiming, and after what has failed.
    #[cold]
    #[inline(never)]
    fn obtain_slow(
        &self,
        (bytes, charge): (usize, usize),
        tag: AllocTag,
        failed: Option<Outcome<DeviceBlock>>,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let claim = self.claim(bytes, charge, tag)?;
        self.climb(&claim, None, failed, call, |_| claim.charge)
    }

    /// Takes, calls, and makes room below while there is a way to.
    pub(super) fn climb<B: Blocks>(
        &self,
        claim: &Claim,
        policy: Option<&OomPolicy>,
        failed: Option<Outcome<B>>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> ResourceResult<B> {
        let seat = seat();
        let mut claim = *claim;
        // The budget's own policy, unless the caller has one; asked for when it is needed.
        let policy = || policy.cloned().unwrap_or_else(|| self.core.policy());
        let mut reclaim: Option<Reclaim> = None;
        let mut failed = failed;
        let mut larger = 0;
        loop {
            match failed {
                None => {}
                Some(Outcome::Given(given)) => return Ok(given),
                Some(Outcome::Failed(error, spent)) => {
                    if !self.is_shortage(&error) {
                        return Err(error);
                    }
                    let reclaim = reclaim.get_or_insert_with(|| Reclaim::new(policy(), spent));
                    if !self.make_room_below(&claim, reclaim) {
                        self.report_below(&claim, &error);
                        return Err(error);
                    }
                }
                Some(Outcome::Larger(charge)) => {
                    claim.charge = charge;
                    larger += 1;
                    if larger > TRIES {
                        let sight = self.core.sight(charge, claim.scope);
                        return Err(self.refuse(&claim, sight));
                    }
                }
            }
            let tag = match self.core.take(seat, &claim) {
                Some(tag) => tag,
                None => {
                    let reclaim =
                        reclaim.get_or_insert_with(|| Reclaim::new(policy(), Duration::ZERO));
                    self.charge_with_reclaim(seat, &claim, reclaim)?
                }
            };
            let Claim { charge, scope, blocks, .. } = claim;
            let flight = Flight { core: &self.core, seat, charge, scope, tag, blocks };
            failed = Some(match call_below(reclaim.as_ref(), &call) {
                (Ok(given), _) => self.settle(flight, given, &announced),
                (Err(error), spent) => Outcome::Failed(error, spent),
            });
        }
    }

    /// True for what reaping, trimming and pressure may help against.
    pub(super) fn is_shortage(&self, error: &ResourceError) -> bool {
        match error {
            ResourceError::OutOfMemory { .. } => true,
            ResourceError::OutOfBudget { .. } => self.metered.load(Ordering::Acquire),
            _ => false,
        }
    }

    /// Records what was given; takes what it is larger than announced, or returns it.
    #[cold]
    fn settle<B: Blocks>(
        &self,
        flight: Flight<'_>,
        given: B,
        announced: impl Fn(usize) -> usize,
    ) -> Outcome<B> {
        let Flight { seat, charge, scope, tag, .. } = flight;
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
            let claim = Claim { charge: extra, scope, tag: name, blocks: 0 };
            if self.core.gather(seat, &claim).is_err() {
                // Recorded, so that the free releases what was charged, whenever it completes.
                std::mem::forget(flight);
                let mut left = charge;
                let count = charges.len();
                for (n, block) in given.blocks().iter().enumerate() {
                    let share = if n + 1 == count { left } else { announced(n).min(left) };
                    left -= share;
                    let record = Record { charge: share, tag, scope };
                    self.core.records.put(block.ptr, block.generation, record);
                }
                self.core.keep(seat, charge);
                let _ = self.deallocate_batch(given.into_vec());
                return Outcome::Larger(real);
            }
            self.core.keep(seat, extra);
        }
        std::mem::forget(flight);
        for (block, charge) in given.blocks().iter().zip(&charges) {
            let record = Record { charge: *charge, tag, scope };
            self.core.records.put(block.ptr, block.generation, record);
        }
        if charge > real {
            // It was asked for again with the size of a larger block.
            self.core.keep(seat, real);
            self.core.release(seat, charge - real, scope, tag, 0);
        } else {
            self.core.keep(seat, charge);
        }
        Outcome::Given(given)
    }
}
