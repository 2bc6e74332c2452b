//! What is done before a request is refused.
//!
//! What can never fit is refused at once. Else, rung by rung, with a new attempt after each: credit is gathered from all shards;
//! completed frees are counted; a quarantine below is emptied; pending frees are waited for; pressure functions are called; and
//! the caller waits in the queue, if the policy says so. The last rung decides, and its refusal is true.
//!
//! No lock is held while the resource below or a function is called, except that the last rung asks it for the state of blocks.

use std::time::Duration;

use super::GlobalDeviceBudget;
use super::callbacks;
use super::core::Claim;
use super::credit::Sight;
use super::flights::Seat;
use super::policy::{OomPolicy, Pressure};
use super::primitive::pause;
use super::tally::{Pending, TagIndex, Tally};
use super::tree::DEVICE;
use super::waiting::Ticket;
use crate::device_runtime::resource::{BlockState, DeviceMemoryResource, ResourceError};

/// The first and the longest pause between two looks at pending frees.
const PAUSES: (Duration, Duration) = (Duration::from_micros(2), Duration::from_micros(100));
/// Returned blocks that a shard lets come together before it looks through them.
const LOOK_AT: usize = 64;

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Takes a charge by way of the ladder.
    #[cold]
    pub(super) fn take_slow(
        &self,
        seat: Seat,
        claim: &Claim,
        policy: &OomPolicy,
    ) -> Result<TagIndex, ResourceError> {
        let core = &*self.core;
        if self.never_fits(claim) {
            return Err(self.refuse(claim, core.sight(claim.charge, claim.scope)));
        }
        if policy.wait.is_some() && !core.queue.is_empty() {
            return self.wait(seat, claim, policy);
        }
        let mut sight = match core.gather(seat, claim) {
            Ok(tag) => return Ok(tag),
            Err(sight) => sight,
        };
        if sight.room >= claim.charge {
            // It fits; but somebody else's refusal is being decided, and nobody may begin.
            match core.decide(seat, claim, || self.look_through_all(seat)) {
                Ok(tag) => return Ok(tag),
                Err(now) => sight = now,
            }
        }
        let functions = core.pressure.outermost();
        if sight.is_final(claim.charge) && functions.is_empty() && policy.wait.is_none() {
            return Err(self.refuse(claim, sight));
        }
        if let Some(tag) = self.try_patiently(seat, claim, policy, &mut sight) {
            return Ok(tag);
        }
        for function in functions {
            let needed = claim.charge.saturating_sub(sight.room);
            let pressure = Pressure { needed, requested: Some(claim.charge) };
            callbacks::inside(|| function(&pressure));
            if let Some(tag) = self.try_patiently(seat, claim, policy, &mut sight) {
                return Ok(tag);
            }
        }
        if policy.wait.is_some() {
            return self.wait(seat, claim, policy);
        }
        Err(self.refuse(claim, sight))
    }

    /// Reaps and decides, until it is granted, or refused for more than what is pending. What is left in `sight` is true.
    fn try_patiently(
        &self,
        seat: Seat,
        claim: &Claim,
        policy: &OomPolicy,
        sight: &mut Sight,
    ) -> Option<TagIndex> {
        let mut paused = Duration::ZERO;
        loop {
            if let Some(tag) = self.reap(seat, claim, policy, sight, &mut paused) {
                return Some(tag);
            }
            match self.core.decide(seat, claim, || self.look_through_all(seat)) {
                Ok(tag) => return Some(tag),
                Err(now) => *sight = now,
            }
            // A free that was in flight may have left its block pending.
            let is_pending = sight.pending > 0 && !sight.is_final(claim.charge);
            if !is_pending || paused >= policy.patience {
                return None;
            }
            // However often that happens, patience ends.
            paused += PAUSES.1;
        }
    }

    fn decide(&self, seat: Seat, claim: &Claim) -> Result<TagIndex, ResourceError> {
        let ask = || self.look_through_all(seat);
        self.core.decide(seat, claim, ask).map_err(|sight| self.refuse(claim, sight))
    }

    pub(super) fn never_fits(&self, claim: &Claim) -> bool {
        let hard = || self.core.credits.with_scopes(|tree| tree.hard_limit(claim.scope));
        claim.charge > self.core.limit() || (claim.scope != DEVICE && claim.charge > hard())
    }

    /// Counts what has completed and tries again.
    fn retry(&self, seat: Seat, claim: &Claim, sight: &mut Sight) -> Option<TagIndex> {
        if sight.pending > 0 {
            // Its failure stays with the blocks, and comes back to whoever reaps.
            let _ = self.inner.reap_completed();
        }
        self.look_through_all(seat);
        match self.core.gather(seat, claim) {
            Ok(tag) => return Some(tag),
            Err(now) => *sight = now,
        }
        None
    }

    /// The rungs about blocks that were returned.
    fn reap(
        &self,
        seat: Seat,
        claim: &Claim,
        policy: &OomPolicy,
        sight: &mut Sight,
        paused: &mut Duration,
    ) -> Option<TagIndex> {
        if sight.pending == 0 {
            return None;
        }
        if let Some(tag) = self.retry(seat, claim, sight) {
            return Some(tag);
        }
        let (mut step, longest) = PAUSES;
        loop {
            if self.look_through_all(seat) > 0 {
                // Some are held back by a guard: a trim lets go of them.
                let _ = self.inner.trim();
                if let Some(tag) = self.retry(seat, claim, sight) {
                    return Some(tag);
                }
            }
            if sight.pending == 0 || sight.is_final(claim.charge) || *paused >= policy.patience {
                return None;
            }
            std::thread::sleep(step);
            pause(0);
            *paused += step;
            step = (2 * step).min(longest);
            if let Some(tag) = self.retry(seat, claim, sight) {
                return Some(tag);
            }
        }
    }

    /// Waits in the queue.
    fn wait(
        &self,
        seat: Seat,
        claim: &Claim,
        policy: &OomPolicy,
    ) -> Result<TagIndex, ResourceError> {
        let Some(wait) = policy.wait else { return self.decide(seat, claim) };
        let ticket = Ticket::new(&self.core, wait.priority, wait.deadline);
        let mut sight = self.core.sight(claim.charge, claim.scope);
        loop {
            if ticket.is_first()
                && let Some(tag) = self.retry(seat, claim, &mut sight)
            {
                return Ok(tag);
            }
            if self.never_fits(claim) || !ticket.sleep() {
                break;
            }
        }
        if ticket.is_first() {
            return self.decide(seat, claim);
        }
        Err(self.refuse(claim, self.core.sight(claim.charge, claim.scope)))
    }

    /// Makes room below, one step further than the last time; false when there are no steps left.
    #[cold]
    pub(super) fn relieve(&self, seat: Seat, claim: &Claim, relief: &mut Relief) -> bool {
        match relief.step {
            0 => self.reap_below(seat),
            1 => {
                let _ = self.inner.trim();
            }
            _ if relief.paused < relief.policy.patience
                && self.core.sight(0, DEVICE).pending > 0 =>
            {
                std::thread::sleep(relief.pause);
                pause(0);
                relief.paused += relief.pause;
                relief.pause = (2 * relief.pause).min(PAUSES.1);
                self.reap_below(seat);
            }
            _ => {
                let functions = self.core.pressure.outermost();
                let Some(function) = functions.get(relief.called) else { return false };
                relief.called += 1;
                let pressure = Pressure { needed: claim.charge, requested: Some(claim.charge) };
                callbacks::inside(|| function(&pressure));
                // What it freed may have to be waited for, too.
                relief.paused = Duration::ZERO;
                self.reap_below(seat);
                let _ = self.inner.trim();
            }
        }
        relief.step = relief.step.saturating_add(1);
        true
    }

    fn reap_below(&self, seat: Seat) {
        // Its failure stays with the blocks, and comes back to whoever reaps.
        let _ = self.inner.reap_completed();
        self.look_through_all(seat);
    }

    /// A block was returned and is not free yet.
    pub(super) fn keep_pending(&self, seat: Seat, pending: Pending) {
        let many = self.core.credits.set_pending(seat, pending.charge, |tally: &mut Tally| {
            tally.pending.push(pending);
            tally.pending.len() >= tally.look_at.max(LOOK_AT)
        });
        if many {
            let take = |tally: &mut Tally| std::mem::take(&mut tally.pending);
            let taken = self.core.credits.take_own_pending(seat, take);
            self.look_through(seat, taken);
        }
    }

    /// Releases the pending blocks that are free by now. Returns the bytes that a guard holds back.
    pub(super) fn look_through_all(&self, seat: Seat) -> usize {
        let taken = self.core.credits.take_pending(seat, |shards| {
            let mut taken = Vec::new();
            shards.iter_mut().for_each(|shard| taken.append(&mut shard.extra.pending));
            taken
        });
        self.look_through(seat, taken)
    }

    /// The blocks are in flight in `shard`.
    fn look_through(&self, seat: Seat, taken: Vec<Pending>) -> usize {
        let mut quarantined = 0;
        let mut kept = 0;
        for pending in taken {
            match self.inner.block_state(pending.block) {
                BlockState::Freed => {
                    let Pending { charge, tag, scope, .. } = pending;
                    let note = |tally: &mut Tally| tally.remove(tag, charge, 1);
                    if self.core.credits.release_pending(seat, charge, scope, note) {
                        self.core.queue.wake();
                    }
                    continue;
                }
                BlockState::Quarantined => quarantined += pending.charge,
                BlockState::Retired | BlockState::Live => {}
            }
            kept += 1;
            self.core.credits.put_back_pending(seat, pending.charge, |tally: &mut Tally| {
                tally.pending.push(pending);
                tally.look_at = 2 * kept;
            });
        }
        quarantined
    }
}

/// How far [`GlobalDeviceBudget::relieve`] has come.
#[derive(Debug)]
pub(super) struct Relief {
    policy: OomPolicy,
    step: u32,
    called: usize,
    paused: Duration,
    pause: Duration,
}

impl Relief {
    pub(super) fn new(policy: OomPolicy) -> Self {
        Self { policy, step: 0, called: 0, paused: Duration::ZERO, pause: PAUSES.0 }
    }
}
