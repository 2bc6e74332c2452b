//! The settings of a guard.

use std::num::NonZeroU64;
use std::path::PathBuf;

/// The blocks that are guarded, and the method.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardMode {
    /// Every block has canaries around it and poison in it, which are checked at its free and when it leaves the quarantine.
    #[default]
    Canaries,
    /// Every block lies between unmapped addresses, so that a stray access faults.
    Pages,
    /// About one block in this number is guarded as by [`GuardMode::Pages`], independent of the call site.
    Sampled(NonZeroU64),
}

/// The placement of a block between its guard pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PagePlacement {
    /// At the end, so that an access after the block faults.
    #[default]
    End,
    /// At the start, so that an access before the block faults.
    Start,
}

/// The output for reports, besides the list of reports.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardOutput {
    /// Standard error.
    #[default]
    StandardError,
    /// This file; reports are appended, and it is created if it is missing.
    File(PathBuf),
    /// No output.
    Silent,
}

/// Settings of a [`DebugGuardResource`](super::DebugGuardResource). Every value is accepted.
///
/// ```
/// use xlog_cuda::device_runtime::GuardConfig;
///
/// let config = GuardConfig::default().with_canary_bytes(64).with_quarantine(1 << 20, 100);
/// assert_eq!((config.canary_bytes, config.quarantine_blocks), (64, 100));
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct GuardConfig {
    /// The blocks that are guarded, and the method.
    pub mode: GuardMode,
    /// Whether a free waits for its own check, and returns the damage.
    pub synchronous: bool,
    /// The size of the canary after a block, and the minimum size of the one before it, which is rounded up to the alignment; 0 for none.
    pub canary_bytes: usize,
    /// Whether blocks are filled when they are allocated and when they are freed.
    pub poison: bool,
    /// The maximum bytes in the quarantine, canaries included.
    pub quarantine_bytes: usize,
    /// The maximum number of blocks in the quarantine; 0 for none.
    pub quarantine_blocks: usize,
    /// Whether reports have the backtraces of the allocation and the free. Walking the stack takes microseconds.
    pub backtraces: bool,
    /// The placement of a block between its guard pages.
    pub placement: PagePlacement,
    /// The maximum physical memory of blocks between guard pages. `None` is 64 MiB if blocks are sampled, otherwise no limit. A
    /// sampled block beyond it is not guarded.
    pub page_bytes: Option<usize>,
    /// The output for reports.
    pub output: GuardOutput,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            mode: GuardMode::default(),
            synchronous: false,
            canary_bytes: 256,
            poison: true,
            quarantine_bytes: 64 << 20,
            quarantine_blocks: 1024,
            backtraces: false,
            placement: PagePlacement::default(),
            page_bytes: None,
            output: GuardOutput::default(),
        }
    }
}

impl GuardConfig {
    xlog_base::setters! {
        /// Sets the mode.
        with_mode(mode: GuardMode) { mode: mode }
        /// Sets whether a free waits for its check.
        with_synchronous(synchronous: bool) { synchronous: synchronous }
        /// Sets the size of the canaries.
        with_canary_bytes(bytes: usize) { canary_bytes: bytes }
        /// Sets whether blocks are filled.
        with_poison(poison: bool) { poison: poison }
        /// Sets whether reports have backtraces.
        with_backtraces(backtraces: bool) { backtraces: backtraces }
        /// Sets the placement of a block between its guard pages.
        with_placement(placement: PagePlacement) { placement: placement }
        /// Sets the maximum physical memory of blocks between guard pages.
        with_page_bytes(bytes: usize) { page_bytes: Some(bytes) }
        /// Sets the output for reports.
        with_output(output: GuardOutput) { output: output }
    }

    /// Sets the limits of the quarantine.
    #[must_use]
    pub fn with_quarantine(mut self, bytes: usize, blocks: usize) -> Self {
        (self.quarantine_bytes, self.quarantine_blocks) = (bytes, blocks);
        self
    }

    pub(super) fn max_page_bytes(&self) -> usize {
        match (self.page_bytes, self.mode) {
            (Some(bytes), _) => bytes,
            (None, GuardMode::Sampled(_)) => 64 << 20,
            (None, _) => usize::MAX,
        }
    }
}
