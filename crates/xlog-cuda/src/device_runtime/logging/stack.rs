//! Sampling of the stacks of allocations.

use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(feature = "trace")]
pub use xlog_trace::StackId;

use crate::device_runtime::statistics::Backtraces;

/// The number of a sampled stack. A build without log files has none.
#[cfg(not(feature = "trace"))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StackId {}

/// Samples stacks: one in a number of allocations of a resource, over all threads.
#[derive(Debug, Default)]
pub(super) struct StackSampler {
    /// 0 if none is sampled.
    every: u32,
    allocations: AtomicU32,
}

impl StackSampler {
    /// Loads the program's debug information now, so that the writer thread does not do it while rings fill.
    pub(super) fn new(stacks: Backtraces) -> Self {
        let every = match stacks {
            Backtraces::Off => 0,
            Backtraces::Sampled(every) => every.get(),
            Backtraces::All => 1,
        };
        #[cfg(feature = "trace")]
        if every > 0 {
            xlog_trace::capture_stack();
            xlog_trace::resolve_stacks();
        }
        Self { every, allocations: AtomicU32::new(0) }
    }

    /// Captures the stack of this allocation if it is sampled.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<StackId> {
        if self.every == 0 { None } else { self.sample() }
    }

    #[cold]
    #[inline(never)]
    fn sample(&self) -> Option<StackId> {
        let number = self.allocations.fetch_add(1, Ordering::Relaxed);
        if !number.is_multiple_of(self.every) {
            return None;
        }
        #[cfg(feature = "trace")]
        return Some(xlog_trace::capture_stack());
        #[cfg(not(feature = "trace"))]
        None
    }
}
