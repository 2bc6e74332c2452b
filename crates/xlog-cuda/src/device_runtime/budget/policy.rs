//! How far a request goes before it is refused, and what pressure functions are told.

use std::time::Duration;

/// How far a request goes before it is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OomPolicy {
    /// How long the whole call waits for the device at most: in the budget, for returned blocks whose work has not completed, and in
    /// the resources below it. A driver call that blocks is not interrupted.
    pub deadline: Duration,
    /// Whether to wait for blocks that nobody has returned yet. By default nobody does.
    pub wait: Option<WaitPolicy>,
}

impl Default for OomPolicy {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(1), wait: None }
    }
}

impl OomPolicy {
    /// Does not wait for the device.
    #[must_use]
    pub fn impatient() -> Self {
        Self { deadline: Duration::ZERO, wait: None }
    }

    /// With another deadline.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// With waiting.
    #[must_use]
    pub fn with_wait(mut self, wait: WaitPolicy) -> Self {
        self.wait = Some(wait);
        self
    }
}

/// Waits for memory instead of being refused.
///
/// Waiters are served by priority, then in the order they came; a large one at the front is not overtaken by small ones behind it.
/// Requests that do not wait do not queue. What exceeds the limit is refused at once, also when the limit is lowered meanwhile;
/// everybody else is refused after the deadline, so a thread that waits for what only itself could free does not wait for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WaitPolicy {
    /// How long at most.
    pub deadline: Duration,
    /// Higher is served earlier.
    pub priority: u8,
}

impl WaitPolicy {
    /// Waits up to `deadline`, with priority 0.
    #[must_use]
    pub fn up_to(deadline: Duration) -> Self {
        Self { deadline, priority: 0 }
    }

    /// With another priority.
    #[must_use]
    pub fn with_priority(mut self, priority: u8) -> Self {
        self.priority = priority;
        self
    }
}

/// What a pressure function is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes that should be freed.
    pub needed: usize,
    /// The request, if there is one; otherwise the limit was lowered below what is used.
    pub requested: Option<usize>,
}
