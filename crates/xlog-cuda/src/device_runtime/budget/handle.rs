//! The calls on a budget that need no resource: limits, usage, scopes, callbacks.

use std::fmt;
use std::sync::Arc;

use super::callbacks::{self, Registration};
use super::core::BudgetCore;
use super::policy::{OomPolicy, Pressure};
use super::report::{OomReport, OtherProcess, OtherUse, ScopeUsage, TagUsage};
use super::scope::BudgetScope;
use super::tree::DEVICE;
use crate::device_runtime::resource::ResourceResult;

/// A handle on a budget's state. Cheap to clone; it does not keep the resource alive.
#[derive(Clone)]
pub struct BudgetHandle {
    pub(super) core: Arc<BudgetCore>,
}

impl BudgetHandle {
    /// The limit.
    pub fn limit(&self) -> usize {
        self.core.limit()
    }

    /// Sets the limit. A limit below what is charged frees nothing: requests are refused until enough is released, and pressure
    /// callbacks are called.
    pub fn set_limit(&self, bytes: usize) {
        self.call_pressure_callbacks(self.change_limit(bytes));
    }

    /// [`BudgetHandle::set_limit`] without pressure callbacks. Returns the bytes above the limit, for [`BudgetHandle::call_pressure_callbacks`].
    pub(crate) fn change_limit(&self, bytes: usize) -> usize {
        self.core.set_limit(bytes)
    }

    /// Calls the pressure callbacks if `over` bytes are above the limit.
    pub(crate) fn call_pressure_callbacks(&self, over: usize) {
        if over == 0 {
            return;
        }
        let pressure = Pressure { needed: over, requested: None };
        for callback in self.core.pressure.outermost() {
            callbacks::inside(|| callback(&pressure));
        }
    }

    /// Charged bytes: blocks until they are free, reservations, and operations in flight.
    pub fn reserved_bytes(&self) -> usize {
        self.core.quotas.snapshot(0, DEVICE).charged
    }

    /// The limit less what is charged; 0 if more is charged than the limit.
    pub fn remaining(&self) -> usize {
        self.core.quotas.snapshot(0, DEVICE).free()
    }

    /// Bytes of freed blocks that the resource below had not freed at the last query.
    pub fn pending_bytes(&self) -> usize {
        self.core.quotas.snapshot(0, DEVICE).pending
    }

    /// The number of requests that wait for memory by their [`WaitPolicy`](super::WaitPolicy).
    pub fn waiting_requests(&self) -> usize {
        self.core.queue.len()
    }

    /// The policy that requests follow before they are refused.
    pub fn policy(&self) -> OomPolicy {
        self.core.policy()
    }

    /// Sets the policy, from the next request on.
    pub fn set_policy(&self, policy: OomPolicy) {
        *self.core.policy.lock() = policy;
    }

    /// Opens a scope of this budget, with `soft` bytes guaranteed and at most `hard` bytes.
    pub fn scope(&self, name: &str, soft: usize, hard: usize) -> ResourceResult<BudgetScope> {
        BudgetScope::open(&self.core, None, name, soft, hard)
    }

    /// Returns the usage by tag, the largest first.
    pub fn usage_by_tag(&self) -> Vec<TagUsage> {
        self.core.tags()
    }

    /// Returns the usage by scope, the largest first.
    pub fn usage_by_scope(&self) -> Vec<ScopeUsage> {
        self.core.scopes()
    }

    /// Calls `callback` before a request is refused for a lack of memory, and when the limit is lowered below what is charged.
    ///
    /// It runs on the thread that needs the memory, without locks: it may allocate and free. Its own requests call no callbacks. The
    /// request is retried after each callback.
    pub fn on_pressure(
        &self,
        callback: impl Fn(&Pressure) + Send + Sync + 'static,
    ) -> Registration {
        self.core.pressure.register(Arc::new(callback))
    }

    /// Calls `callback` with the report of each refusal, on the thread that was refused, without locks.
    pub fn on_oom(&self, callback: impl Fn(&OomReport) + Send + Sync + 'static) -> Registration {
        self.core.refusals.register(Arc::new(callback))
    }

    /// The report of the budget's last refusal, on any thread; see also [`OomReport::last_of_thread`].
    pub fn last_oom(&self) -> Option<Arc<OomReport>> {
        self.core.last_oom.lock().clone()
    }

    /// Sets the hook that returns what other processes hold, for reports.
    pub fn set_other_use(&self, hook: impl Fn() -> Option<OtherUse> + Send + Sync + 'static) {
        self.set_other_processes(move || Some((hook()?, Vec::new())));
    }

    /// [`BudgetHandle::set_other_use`] with the largest of these processes.
    pub(crate) fn set_other_processes(
        &self,
        hook: impl Fn() -> Option<(OtherUse, Vec<OtherProcess>)> + Send + Sync + 'static,
    ) {
        *self.core.other_use.lock() = Some(Arc::new(hook));
    }
}

impl fmt::Debug for BudgetHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::CudaDevice;
    use crate::device_runtime::{
        AllocTag, DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, StreamId,
    };

    const MIB: usize = 1 << 20;

    /// Of two concurrent changes, limit and cap end with the values of the same one.
    #[test]
    fn a_limit_and_its_cap_change_at_the_same_instant() {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let budget = GlobalDeviceBudget::over(DirectCudaResource::new(device, 0), 64 * MIB);
        let below = budget.inner();
        let take = || below.allocate(32 * MIB, StreamId::DEFAULT, AllocTag("rows"));
        let (begin, begun) = mpsc::channel();
        std::thread::scope(|scope| {
            // The limit cannot change while everything is audited.
            budget.core.quotas.audit(|_, _| {
                scope.spawn(|| {
                    begin.send(()).unwrap();
                    budget.set_limit(8 * MIB);
                });
                begun.recv().unwrap();
                let until = Instant::now() + Duration::from_millis(50);
                while Instant::now() < until {
                    assert_eq!(budget.limit(), 64 * MIB);
                    below.deallocate(take().unwrap()).unwrap();
                }
            });
        });
        assert_eq!(budget.limit(), 8 * MIB);
        assert!(take().is_err());
    }
}
