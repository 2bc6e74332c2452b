//! The steps before a request is refused.
//!
//! A request that can never fit is refused at once. Else, in this order, with a new attempt after each step:
//! 1. the unused credit of all shards;
//! 2. completed frees of the resource below, and a trim where a guard holds freed blocks back;
//! 3. polls of pending frees and of operations in flight, until the deadline of the call;
//! 4. pressure functions;
//! 5. the queue, if the policy says so.
//!
//! No lock is held while the resource below or a function is called. All waiting for the device in one call spends one deadline
//! ([`DeviceWait`]), of which half is kept for what pressure functions free.

use std::sync::Arc;
use std::time::Duration;

use super::GlobalDeviceBudget;
use super::callbacks;
use super::core::ChargeRequest;
use super::in_flight::ShardId;
use super::policy::{OomPolicy, Pressure};
use super::quota::AuditSnapshot;
use super::tag_counts::{Freed, Pending, TagCounts, TagIndex};
use super::tree::DEVICE;
use super::waiting::Ticket;
use crate::device_runtime::resource::{BlockState, DeviceMemoryResource, ResourceError};
use crate::device_wait::{self, Backoff, DeviceWait};

/// Pending blocks that a shard collects before its thread queries their states.
const QUERY_AT: usize = 64;
/// Attempts in a row without a pause, while each finds freed blocks that other threads then take.
const MAX_ROUNDS: u32 = 64;

type PressureFunction = Arc<dyn Fn(&Pressure) + Send + Sync>;

/// The progress of a request through the steps, and its deadline. Made when the request first fails.
#[derive(Debug)]
pub(super) struct ReclaimState {
    policy: OomPolicy,
    step: u32,
    called: usize,
    backoff: Backoff,
    /// The part of the deadline that waits below must leave for pressure functions; `None` before the resource may wait at all.
    kept_below: Option<Duration>,
    _deadline: DeviceWait,
}

impl ReclaimState {
    /// Starts the deadline, less the time that budgets below have already waited in this call.
    pub(super) fn new(policy: OomPolicy, spent: Duration) -> Self {
        let _deadline = DeviceWait::begin(policy.deadline.saturating_sub(spent));
        let backoff = Backoff::default();
        Self { policy, step: 0, called: 0, backoff, kept_below: None, _deadline }
    }
}

/// The part of the deadline that is kept for pressure functions which have not been called.
fn kept_for(functions: &[PressureFunction]) -> Duration {
    if functions.is_empty() {
        return Duration::ZERO;
    }
    device_wait::left().unwrap_or_default() / 2
}

/// Calls the resource below, which waits for the device only if an earlier call without waits has failed.
/// Also returns the time that budgets below waited before there was a deadline.
pub(super) fn call_below<T>(
    reclaim: Option<&ReclaimState>,
    call: impl FnOnce() -> T,
) -> (T, Duration) {
    match reclaim.and_then(|reclaim| reclaim.kept_below) {
        Some(kept) => {
            let left = device_wait::left().unwrap_or_default();
            let _deadline = DeviceWait::begin(left.saturating_sub(kept));
            (call(), Duration::ZERO)
        }
        None => {
            let deferred = device_wait::defer();
            let result = call();
            (result, deferred.end())
        }
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Charges what neither this thread's credit nor the balance covers.
    #[cold]
    pub(super) fn charge_with_reclaim(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
        reclaim: &ReclaimState,
    ) -> Result<TagIndex, ResourceError> {
        crate::spans::slow_path!("out_of_memory_ladder", bytes = request.charge);
        let core = &*self.core;
        if self.never_fits(request) {
            return Err(self.refuse(request, core.snapshot(request.charge, request.scope)));
        }
        if reclaim.policy.wait.is_some() && !core.queue.is_empty() {
            return self.wait(shard_id, request, &reclaim.policy);
        }
        let functions = core.pressure.outermost();
        let mut snapshot = match self.charge_after_frees(shard_id, request, kept_for(&functions)) {
            Ok(tag) => return Ok(tag),
            Err(snapshot) => snapshot,
        };
        for (n, function) in functions.iter().enumerate() {
            let needed = request.charge.saturating_sub(snapshot.room);
            let pressure = Pressure { needed, requested: Some(request.charge) };
            callbacks::inside(|| function(&pressure));
            snapshot =
                match self.charge_after_frees(shard_id, request, kept_for(&functions[n + 1..])) {
                    Ok(tag) => return Ok(tag),
                    Err(snapshot) => snapshot,
                };
        }
        if reclaim.policy.wait.is_some() {
            return self.wait(shard_id, request, &reclaim.policy);
        }
        Err(self.refuse(request, snapshot))
    }

    /// Charges, and polls pending frees and operations in flight until only `kept` is left of the deadline.
    ///
    /// An error has the sums of an audit. The pending blocks of that audit are queried after it, and none was free: at its instant
    /// their bytes were in use below, like those of live blocks. Operations in flight count as used.
    fn charge_after_frees(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
        kept: Duration,
    ) -> Result<TagIndex, AuditSnapshot> {
        let mut backoff = Backoff::default();
        let mut freed = Freed::default();
        let mut rounds = 0;
        loop {
            let (snapshot, pending) =
                match self.core.charge_after_release(shard_id, request, &freed) {
                    Ok(tag) => return Ok(tag),
                    Err(deficit) => deficit,
                };
            if !snapshot.may_fit {
                return Err(snapshot);
            }
            freed = self.reap_and_query(&pending);
            if !freed.is_empty() && rounds < MAX_ROUNDS {
                rounds += 1;
                continue;
            }
            let is_over = device_wait::left().is_some_and(|left| left <= kept);
            if is_over || !backoff.pause() {
                return Err(snapshot);
            }
        }
    }

    /// Completes frees below without waiting for the device. Returns which of these blocks are then free.
    fn reap_and_query(&self, pending: &[Pending]) -> Freed {
        if pending.is_empty() {
            return Freed::default();
        }
        // Its failure stays with the blocks, and is returned by the next reap.
        let _ = self.inner.reap_completed();
        let (freed, quarantined) = self.query_states(pending);
        if !freed.is_empty() || !quarantined {
            return freed;
        }
        // Some are in a guard's quarantine: a trim releases them.
        let _ = self.inner.trim();
        let _ = self.inner.reap_completed();
        self.query_states(pending).0
    }

    /// Returns which of these blocks are freed, and whether some are in a quarantine.
    fn query_states(&self, pending: &[Pending]) -> (Freed, bool) {
        let mut freed = Freed::default();
        let mut quarantined = false;
        for pending in pending {
            match self.inner.block_state(pending.block) {
                BlockState::Freed => freed.insert(pending),
                BlockState::Quarantined => quarantined = true,
                BlockState::Retired | BlockState::Live => {}
            }
        }
        (freed, quarantined)
    }

    /// Releases the pending blocks that are free by now.
    pub(super) fn scan_pending(&self) {
        let pending = self.core.pending();
        let (freed, _) = self.query_states(&pending);
        if !freed.is_empty() {
            self.core.release_freed(&freed);
        }
    }

    /// Adds a freed block whose memory is not free yet.
    pub(super) fn add_pending(&self, shard_id: ShardId, pending: Pending) {
        let queried =
            self.core.quotas.set_pending(shard_id, pending.charge, |tag_counts: &mut TagCounts| {
                tag_counts.pending.push(pending);
                let many = tag_counts.pending.len() >= tag_counts.query_at.max(QUERY_AT);
                many.then(|| tag_counts.pending.clone())
            });
        if let Some(queried) = queried {
            let (freed, _) = self.query_states(&queried);
            self.core.release_own_freed(shard_id, &freed);
        }
    }

    pub(super) fn never_fits(&self, request: &ChargeRequest) -> bool {
        let hard = || self.core.quotas.with_scopes(|tree| tree.hard_limit(request.scope));
        request.charge > self.core.limit() || (request.scope != DEVICE && request.charge > hard())
    }

    /// Waits in the queue for memory.
    fn wait(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
        policy: &OomPolicy,
    ) -> Result<TagIndex, ResourceError> {
        let Some(wait) = policy.wait else {
            return Err(self.refuse(request, self.core.snapshot(request.charge, request.scope)));
        };
        let ticket = Ticket::new(&self.core, wait.priority, wait.deadline);
        let mut freed = Freed::default();
        loop {
            if ticket.is_first() {
                match self.core.charge_after_release(shard_id, request, &freed) {
                    Ok(tag) => return Ok(tag),
                    Err((_, pending)) => freed = self.reap_and_query(&pending),
                }
                if !freed.is_empty() {
                    continue;
                }
            }
            if self.never_fits(request) || !ticket.sleep() {
                break;
            }
        }
        if ticket.is_first() {
            return self
                .core
                .charge_audited(shard_id, request)
                .map_err(|snapshot| self.refuse(request, snapshot));
        }
        Err(self.refuse(request, self.core.snapshot(request.charge, request.scope)))
    }

    /// Takes the next step to make room below. Returns false if no step is left.
    #[cold]
    pub(super) fn reclaim_step(&self, request: &ChargeRequest, reclaim: &mut ReclaimState) -> bool {
        let functions = self.core.pressure.outermost();
        let next = functions.get(reclaim.called..).unwrap_or_default();
        let step = reclaim.step;
        reclaim.step = step.saturating_add(1);
        match step {
            0 => self.reap_below(),
            1 => {
                let _ = self.inner.trim();
            }
            // From here on the resource may wait.
            2 => reclaim.kept_below = Some(kept_for(next)),
            _ if self.pauses_for_frees(reclaim) => self.reap_below(),
            _ => {
                let Some(function) = next.first() else { return false };
                reclaim.called += 1;
                let pressure = Pressure { needed: request.charge, requested: Some(request.charge) };
                callbacks::inside(|| function(&pressure));
                (reclaim.backoff, reclaim.kept_below) =
                    (Backoff::default(), Some(kept_for(&next[1..])));
                self.reap_below();
                let _ = self.inner.trim();
            }
        }
        true
    }

    fn pauses_for_frees(&self, reclaim: &mut ReclaimState) -> bool {
        let kept = reclaim.kept_below.unwrap_or_default();
        device_wait::left().is_none_or(|left| left > kept)
            && self.core.snapshot(0, DEVICE).pending > 0
            && reclaim.backoff.pause()
    }

    fn reap_below(&self) {
        // Its failure stays with the blocks, and is returned by the next reap.
        let _ = self.inner.reap_completed();
        self.scan_pending();
    }
}
