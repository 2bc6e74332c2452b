//! The steps before a request is refused, in the order of docs/budget.md, "Before a refusal": `charge_with_reclaim` if the budget or a
//! scope has too few bytes left, `reclaim_step` if the resource below returned an error.
//!
//! A request that can never fit is refused at once. Otherwise a new attempt follows each step.
//!
//! No lock is held while the resource below or a callback is called. All waits of one call for the device spend one deadline
//! ([`DeviceWait`]); half of it is kept for memory that pressure callbacks free.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::GlobalDeviceBudget;
use super::callbacks;
use super::core::Deficit;
use super::pending::{Freed, Pending};
use super::policy::{OomPolicy, Pressure};
use super::quota::{AuditSnapshot, Charge};
use super::tree::DEVICE;
use super::waiting::Ticket;
use crate::device_runtime::resource::{BlockState, DeviceMemoryResource, ResourceError};
use crate::device_wait::{self, Backoff, DeviceWait};

/// The maximum number of attempts without a pause, while each finds freed blocks whose bytes other threads then charge.
const MAX_ROUNDS: u32 = 64;

/// The maximum number of asks without a wait in one request: a third process may take the memory each time.
const MAX_FUTILE_ASKS: u32 = 32;
const WORTHWHILE_WAIT: Duration = Duration::from_millis(1);
/// The maximum wait for other processes before this process queries its own pending frees again.
const LONGEST_ASK: Duration = Duration::from_millis(50);

type PressureCallback = Arc<dyn Fn(&Pressure) + Send + Sync>;

/// The next step against an error of the resource below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReclaimStep {
    /// Complete frees below.
    Reap,
    /// Trim the resource below.
    Trim,
    /// Let the resource below wait.
    AllowWaits,
    /// Poll pending frees until the deadline; then call the next pressure callback.
    PollOrCallback,
}

/// The progress of a request through the steps, and its deadline. Made when the request first fails.
#[derive(Debug)]
pub(super) struct ReclaimState {
    policy: OomPolicy,
    step: ReclaimStep,
    called: usize,
    /// The number of asks that returned without a wait.
    futile_asks: u32,
    backoff: Backoff,
    /// The part of the deadline that waits below leave for pressure callbacks; `None` until the resource below may wait.
    pub(super) kept_below: Option<Duration>,
    _deadline: DeviceWait,
}

impl ReclaimState {
    /// Starts the deadline, less the time that budgets below have waited in this call.
    pub(super) fn new(policy: OomPolicy, spent: Duration) -> Self {
        let _deadline = DeviceWait::begin(policy.deadline.saturating_sub(spent));
        let backoff = Backoff::default();
        Self {
            policy,
            step: ReclaimStep::Reap,
            called: 0,
            futile_asks: 0,
            backoff,
            kept_below: None,
            _deadline,
        }
    }
}

/// Returns the part of the deadline to keep for pressure callbacks that have not been called.
fn kept_for(uncalled: &[PressureCallback]) -> Duration {
    if uncalled.is_empty() {
        return Duration::ZERO;
    }
    device_wait::left().unwrap_or_default() / 2
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Charges a request that neither this thread's credit nor the balance covers.
    #[cold]
    pub(super) fn charge_with_reclaim(
        &self,
        charge: &Charge,
        reclaim: &ReclaimState,
    ) -> Result<(), ResourceError> {
        crate::spans::slow_path!("reclaim", bytes = charge.bytes);
        let core = &*self.core;
        if self.never_fits(charge) {
            return Err(self.refuse(charge, core.quotas.snapshot(charge.bytes, charge.scope)));
        }
        if reclaim.policy.wait.is_some() && !core.queue.is_empty() {
            return self.wait(charge, &reclaim.policy);
        }
        let registered = core.pressure.outermost();
        let mut snapshot = match self.charge_after_frees(charge, kept_for(&registered)) {
            Ok(()) => return Ok(()),
            Err(snapshot) => snapshot,
        };
        for (n, callback) in registered.iter().enumerate() {
            let needed = charge.bytes.saturating_sub(snapshot.room);
            let pressure = Pressure { needed, requested: Some(charge.bytes) };
            callbacks::inside(|| callback(&pressure));
            snapshot = match self.charge_after_frees(charge, kept_for(&registered[n + 1..])) {
                Ok(()) => return Ok(()),
                Err(snapshot) => snapshot,
            };
        }
        if reclaim.policy.wait.is_some() {
            return self.wait(charge, &reclaim.policy);
        }
        Err(self.refuse(charge, snapshot))
    }

    /// Charges, and polls pending frees and operations in flight until only `kept` is left of the deadline.
    ///
    /// An error has the sums of an audit whose pending blocks were queried afterwards and not free. So at the instant of the audit their
    /// bytes were in use below. Operations in flight count as used.
    fn charge_after_frees(&self, charge: &Charge, kept: Duration) -> Result<(), AuditSnapshot> {
        let mut backoff = Backoff::default();
        let mut freed = Freed::default();
        let mut rounds = 0;
        loop {
            let Deficit { snapshot, pending } = match self.core.charge_after_release(charge, &freed)
            {
                Ok(()) => return Ok(()),
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
        // The next reap retries a failed free and returns its error.
        let _ = self.inner.reap_completed();
        let (freed, quarantined) = self.query_states(pending);
        if !freed.is_empty() || !quarantined {
            return freed;
        }
        // Some are in a guard's quarantine: a trim evicts them.
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
                BlockState::Freed => {
                    freed.insert(pending.block.generation);
                }
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
    pub(super) fn add_pending(&self, pending: Pending) {
        let quotas = &self.core.quotas;
        let queried = quotas.set_pending(pending.charge.bytes, |list| list.push(pending));
        if let Some(queried) = queried {
            let (freed, _) = self.query_states(&queried);
            if quotas.release_own_pending(|list| list.remove(&freed)) {
                self.core.queue.wake();
            }
        }
    }

    pub(super) fn never_fits(&self, charge: &Charge) -> bool {
        let hard = || self.core.quotas.with_scopes(|tree| tree.hard_limit(charge.scope));
        charge.bytes > self.core.limit() || (charge.scope != DEVICE && charge.bytes > hard())
    }

    /// Waits in the queue for memory.
    fn wait(&self, charge: &Charge, policy: &OomPolicy) -> Result<(), ResourceError> {
        let Some(wait) = policy.wait else {
            return Err(self.refuse(charge, self.core.quotas.snapshot(charge.bytes, charge.scope)));
        };
        let ticket = Ticket::new(&self.core, wait.priority, wait.deadline);
        let mut freed = Freed::default();
        loop {
            if ticket.is_first() {
                match self.core.charge_after_release(charge, &freed) {
                    Ok(()) => return Ok(()),
                    Err(deficit) => freed = self.reap_and_query(&deficit.pending),
                }
                if !freed.is_empty() {
                    continue;
                }
            }
            if self.never_fits(charge) || !ticket.sleep() {
                break;
            }
        }
        if ticket.is_first() {
            return self
                .core
                .charge_audited(charge)
                .map_err(|snapshot| self.refuse(charge, snapshot));
        }
        Err(self.refuse(charge, self.core.quotas.snapshot(charge.bytes, charge.scope)))
    }

    /// Takes the next step to make room below. Returns false if no step is left.
    #[cold]
    pub(super) fn reclaim_step(
        &self,
        charge: &Charge,
        error: &ResourceError,
        reclaim: &mut ReclaimState,
    ) -> bool {
        let registered = self.core.pressure.outermost();
        let next = registered.get(reclaim.called..).unwrap_or_default();
        let step = reclaim.step;
        match step {
            ReclaimStep::Reap => {
                self.reap_below();
                reclaim.step = ReclaimStep::Trim;
            }
            ReclaimStep::Trim => {
                let _ = self.inner.trim();
                reclaim.step = ReclaimStep::AllowWaits;
            }
            _ if self.wait_for_other_processes(error, reclaim, kept_for(next)) => {}
            ReclaimStep::AllowWaits => {
                reclaim.kept_below = Some(kept_for(next));
                reclaim.step = ReclaimStep::PollOrCallback;
            }
            ReclaimStep::PollOrCallback if self.sleep_before_poll(reclaim) => self.reap_below(),
            ReclaimStep::PollOrCallback => {
                let Some(callback) = next.first() else { return false };
                reclaim.called += 1;
                let pressure = Pressure { needed: charge.bytes, requested: Some(charge.bytes) };
                callbacks::inside(|| callback(&pressure));
                reclaim.backoff = Backoff::default();
                reclaim.kept_below = Some(kept_for(&next[1..]));
                self.reap_below();
                let _ = self.inner.trim();
            }
        }
        true
    }

    /// Asks other processes of the ledger for cached memory, and waits for their answers. Returns whether to retry: the request
    /// may fit, or a process may answer later.
    fn wait_for_other_processes(
        &self,
        error: &ResourceError,
        reclaim: &mut ReclaimState,
        kept: Duration,
    ) -> bool {
        let Some(meter) = self.meter.get() else { return false };
        let limit = device_wait::left().unwrap_or_default().saturating_sub(kept);
        if limit.is_zero() || reclaim.futile_asks >= MAX_FUTILE_ASKS {
            return false;
        }
        let began = Instant::now();
        let may_fit = meter.request_cached(error, limit.min(LONGEST_ASK));
        let waited = began.elapsed();
        device_wait::spend(waited);
        reclaim.futile_asks += u32::from(waited < WORTHWHILE_WAIT);
        // A process that has not answered yet may do so later.
        let more_to_come = waited >= LONGEST_ASK;
        if !may_fit && more_to_come {
            self.reap_below();
        }
        may_fit || more_to_come
    }

    /// Sleeps if pending frees may help and the deadline allows it. Returns whether to poll them.
    fn sleep_before_poll(&self, reclaim: &mut ReclaimState) -> bool {
        let kept = reclaim.kept_below.unwrap_or_default();
        device_wait::left().is_none_or(|left| left > kept)
            && self.core.quotas.snapshot(0, DEVICE).pending > 0
            && reclaim.backoff.pause()
    }

    fn reap_below(&self) {
        // The next reap retries a failed free and returns its error.
        let _ = self.inner.reap_completed();
        self.scan_pending();
    }
}
