//! The policy for requests that do not fit at once, and the argument of pressure callbacks.

use std::time::Duration;

/// The waits of a request before it is refused.
///
/// ```
/// use std::time::Duration;
/// use xlog_cuda::device_runtime::{OomPolicy, WaitPolicy};
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let wait = WaitPolicy::up_to(Duration::from_secs(5)).with_priority(1);
/// let policy = OomPolicy::default().with_deadline(Duration::from_millis(100)).with_wait(wait);
/// runtime.budget().expect("a configured runtime has a budget").set_policy(policy);
/// # Ok::<(), XlogError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OomPolicy {
    /// The maximum time that the whole call waits for the device, in the budget and in the resources below. A driver call that blocks is
    /// not interrupted.
    pub deadline: Duration,
    /// Whether to wait for blocks that are still live, if the budget has too little. By default a request does not. If the resource below
    /// or the ledger refuses, no request waits for live blocks.
    pub wait: Option<WaitPolicy>,
}

impl Default for OomPolicy {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(1), wait: None }
    }
}

impl OomPolicy {
    /// Returns a policy that does not wait.
    #[must_use]
    pub fn impatient() -> Self {
        Self { deadline: Duration::ZERO, wait: None }
    }

    xlog_base::setters! {
        /// Sets the deadline.
        with_deadline(deadline: Duration) { deadline: deadline }
        /// Sets how to wait for live blocks.
        with_wait(wait: WaitPolicy) { wait: Some(wait) }
    }
}

/// Waits for memory instead of being refused.
///
/// Waiters are served by priority, then in the order of arrival: smaller requests do not overtake a large one. Requests without this
/// policy do not queue.
///
/// A request above the limit is refused at once, even if the limit is lowered while it waits. Any other waiter is refused after its
/// deadline, so a thread that waits for memory that only it could free does not deadlock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WaitPolicy {
    /// The maximum time.
    pub deadline: Duration,
    /// A higher priority is served earlier.
    pub priority: u8,
}

impl WaitPolicy {
    /// Waits up to `deadline`, with priority 0.
    #[must_use]
    pub fn up_to(deadline: Duration) -> Self {
        Self { deadline, priority: 0 }
    }

    xlog_base::setters! {
        /// Sets the priority.
        with_priority(priority: u8) { priority: priority }
    }
}

/// The argument of a pressure callback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes that should be freed.
    pub needed: usize,
    /// The bytes of the request; `None` if the limit was lowered below what is charged.
    pub requested: Option<usize>,
}
